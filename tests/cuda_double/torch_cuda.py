"""The double of the module torch.cuda: what kvmem asks of it, no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.cuda_double.faults import Faults
from tests.cuda_double.memory import Memory
from tests.cuda_double.streams import Launched, Mark, Streams


class Stream:
    """A stream, by its handle."""

    def __init__(self, torch_cuda: TorchCuda, priority: int) -> None:
        self._torch, self._streams, self.priority = torch_cuda, torch_cuda._streams, priority
        self.cuda_stream = self._streams.new()
        if priority == 0:
            self._streams.prompt.add(self.cuda_stream)

    def wait_event(self, event: Event) -> None:
        self._torch.begin("Stream.wait_event", self)
        if event.mark is None:
            self._streams.found.append("a wait for an event never recorded: CUDA does not wait")
        self._streams.wait(self.cuda_stream, event.mark)

    def query(self) -> bool:
        self._torch.begin("Stream.query")
        self._streams.advance(self.cuda_stream, 4)
        return not self._streams.queues[self.cuda_stream]

    def synchronize(self) -> None:
        self._torch.begin("Stream.synchronize")
        self._streams.synchronize(self.cuda_stream)


class Event:
    """An event: its last record counts."""

    def __init__(self, torch_cuda: TorchCuda, enable_timing: bool) -> None:
        self._torch, self._streams, self._timing = torch_cuda, torch_cuda._streams, enable_timing
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        self._torch.begin("Event.record", stream)
        self.mark = self._streams.record(stream.cuda_stream)

    def query(self) -> bool:
        self._torch.begin("Event.query")
        return self._streams.query(self.mark)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the double's time."""
        assert self._timing and end._timing and self.mark and end.mark
        return (end.mark.ended - self.mark.ended) * 1000


class Graph:
    """Kernels launched while it was captured; a replay gives them to the current stream, where they
    find what the memory holds by then."""

    def __init__(self, torch_cuda: TorchCuda, streams: Streams) -> None:
        self._torch, self._streams = torch_cuda, streams
        self.launched: list[Launched] = []

    def replay(self) -> None:
        handle = self._torch.current_stream(self._torch.ordinal).cuda_stream
        for what, run, spans in self.launched:
            self._streams.work(handle, what, run, spans)


class TorchCuda:
    """Streams and events of one GPU, number ``ordinal``; another one is current at first."""

    def __init__(self, streams: Streams, memory: Memory, ordinal: int, faults: Faults) -> None:
        self._streams, self._memory, self.ordinal = streams, memory, ordinal
        self._faults = faults
        self._local = threading.local()
        self._default = Stream(self, 0)
        self.capturing = False
        self.num_events = 0

    def begin(self, name: str, stream: Stream | None = None) -> None:
        """A call that may fail, and that a capture may not see (``stream``: on this one only)."""
        if stream is None or stream is self.current_stream(self.ordinal):
            self.not_captured(name)
        try:
            self._faults.begin_torch(name)
        except RuntimeError:
            if self._faults.lost:
                self._streams.die()
            raise

    def not_captured(self, what: str) -> None:
        """Raise while a graph is captured: the call would be refused, or be part of the graph."""
        if self.capturing:
            self._streams.found.append(f"{what} in a capture")
            raise AssertionError(f"{what} in a capture")

    def Stream(self, *, device: int, priority: int = 0) -> Stream:
        assert device == self.ordinal
        self.begin("Stream")
        return Stream(self, priority)

    def Event(self, *, enable_timing: bool = False) -> Event:
        self.num_events += 1
        return Event(self, enable_timing)

    def current_stream(self, device: int) -> Stream:
        assert device == self.ordinal
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(self.ordinal)
        self._local.stream = stream
        try:
            with self.device(self.ordinal):
                yield
        finally:
            self._local.stream = before

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    @contextmanager
    def device(self, ordinal: int) -> Iterator[None]:
        before = self.current_device()
        self._local.device = ordinal
        try:
            yield
        finally:
            self._local.device = before

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def CUDAGraph(self) -> Graph:
        return Graph(self, self._streams)

    @contextmanager
    def graph(self, graph: Graph) -> Iterator[None]:
        """Capture on a stream of its own, as torch does."""
        assert self._streams.captured is None
        stream = Stream(self, 0)
        self._streams.synchronize(self.current_stream(self.ordinal).cuda_stream)
        with self.stream(stream):
            self.capturing, self._streams.captured = True, (stream.cuda_stream, graph.launched)
            try:
                yield
            finally:
                self.capturing, self._streams.captured = False, None

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return self._memory.capacity - self._memory.used, self._memory.capacity

    def get_device_properties(self, device: int) -> Any:
        assert device == self.ordinal
        return SimpleNamespace(name="double", uuid="GPU-0")

    class MemPool:
        """A pool; the double's allocator has no others."""

    @contextmanager
    def use_mem_pool(self, pool: Any, device: int) -> Iterator[None]:
        assert isinstance(pool, self.MemPool) and self.current_device() == device
        yield
