"""The CUDA device: three streams, events as fences, copies by the runtime.

    COMPUTE   torch's current stream of the calling thread, behind what COMPUTE was given before
    OUT, IN   a stream of its own each, preferred over compute where both could run

Nothing here waits on the host but `synchronize` and `close`. A `launch` calls its function at once:
the function queues its work on the stream. Who reads a frame on the host has waited for what wrote
it; who reads one by torch is ordered by the stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvmem.errors import DeviceUnavailable, ManagerClosed
from kvmem.fork import ForkGuard
from kvmem.store.arena import ArenaBase
from kvmem.store.cuda.api import Cuda
from kvmem.store.cuda.arena import CudaArena, keep_for_good
from kvmem.store.cuda.copies import Copies
from kvmem.store.cuda.cost_model import CostModel
from kvmem.store.cuda.events import LAST_LOOK, CudaFence, EventPool, look_until
from kvmem.store.cuda.failing import Guard
from kvmem.store.cuda.host_arena import HostArena
from kvmem.store.cuda.pinning import Progress
from kvmem.store.cuda.timing import measured_model
from kvmem.store.cuda.uploads import Uploads
from kvmem.store.device import (
    NOTHING_MOVED,
    Access,
    Device,
    Fence,
    FrameIds,
    Memory,
    Moved,
    Named,
    Stream,
    Ticket,
    is_survivable,
)

LOG = logging.getLogger("kvmem")

#: Seconds that ``close`` gives the streams to end what they were given.
CLOSE_SECONDS = 5.0


class CudaDevice(Device):
    """One GPU. ``sync=True``: a transfer has ended when its fence is recorded. Thread-safe."""

    name = "cuda"

    def __init__(
        self,
        cuda: Cuda,
        *,
        sync: bool = False,
        numa_node: int | str | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self._numa_node, self._progress = numa_node, progress
        self.cuda = cuda
        self._sync = sync
        self._lock = threading.Lock()
        with cuda.here():
            self._streams = {stream: cuda.new_stream() for stream in (Stream.OUT, Stream.IN)}
        self.events, self._timers = EventPool(cuda), EventPool(cuda, timing=True)
        self.uploads = Uploads(cuda)
        self.copies = Copies(cuda, self.uploads)
        self._arenas: list[CudaArena | HostArena] = []
        self._last_compute: Any = None  # the torch stream that COMPUTE was last
        self._moved = dict.fromkeys(Stream, NOTHING_MOVED)
        self._unfenced = dict.fromkeys(Stream, NOTHING_MOVED)  # behind the last fence
        self._counting: dict[Stream, deque[tuple[CudaFence, Moved]]] = {s: deque() for s in Stream}
        self._timings: deque[tuple[Any, Any, Callable[[float], None]]] = deque()
        self._parked: deque[tuple[Any, deque[Any]]] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._fork = ForkGuard()

    # --- memory ---------------------------------------------------------------------------------

    def new_arena(self, name: str, num_frames: int, frame_bytes: int, *, host: bool) -> ArenaBase:
        """Memory of the GPU, or page-locked host memory, for whose transfers the ways are measured.
        Raises ``ConfigError``, ``DeviceUnavailable``."""
        if not host:
            made = CudaArena(self.cuda, name, num_frames, frame_bytes)
            self._arenas.append(made)
            return made
        self.copies.model = self.measure()
        arena = HostArena(
            self.cuda, name, num_frames, frame_bytes,
            numa_node=self._numa_node, progress=self._progress,
        )  # fmt: skip
        self._arenas.append(arena)
        self.copies.serve(arena.pinned, arena.address)
        return arena

    def measure(self) -> CostModel:
        """What each way of a transfer costs here; half a second unless it is known."""
        return measured_model(self.cuda, self.copies, self._streams)

    # --- streams --------------------------------------------------------------------------------

    def stream(self, stream: Stream) -> Any:
        """The torch stream. COMPUTE is the caller's current one, made to follow what COMPUTE was
        given on another; not while a graph is captured, whose work is ordered when it runs."""
        if stream is not Stream.COMPUTE:
            return self._streams[stream]
        now = self.cuda.current_stream()
        with self._lock:
            last = self._last_compute
            if last is None or last.cuda_stream == now.cuda_stream:
                self._last_compute = now
            elif not self.cuda.is_capturing():
                event = self.events.take()
                event.record(last)
                now.wait_event(event)
                self.events.give(event)
                self._last_compute = now
        return now

    def handle(self, stream: Stream) -> int:
        """The handle of the torch stream, for kernels and the runtime."""
        return int(self.stream(stream).cuda_stream)

    def new_fence(self, label: str) -> CudaFence:
        """A fence that is not reached until it is recorded."""
        return CudaFence(label, self.events)

    def record(self, stream: Stream, fence: Fence) -> None:
        """Make ``fence`` the end of all that ``stream`` was given. On COMPUTE a no-op after a
        failure, so that a step can end."""
        own = _own(fence)
        if stream is Stream.COMPUTE and (self._error is not None or self._closed):
            return
        self.check(own.label)
        with self._guarded(own.label):
            queue = self.stream(stream)
            event = self.events.take()
            event.record(queue)
            own.event = event  # not before: its last record would count as this one's
            if self._sync and stream is not Stream.COMPUTE:
                queue.synchronize()
        with self._lock:
            moved, self._unfenced[stream] = self._unfenced[stream], NOTHING_MOVED
            if moved is not NOTHING_MOVED:
                self._counting[stream].append((own, moved))
                self._count_reached(stream)  # or fences pile up where nobody asks

    def wait(self, stream: Stream, fence: Fence) -> None:
        """What ``stream`` is given from now on runs after ``fence``; the host goes on.

        A fence that was not recorded can't be waited for by a stream of CUDA: that is a mistake of
        the caller's (the ledger names no frame of an open step), and RuntimeError.
        """
        own = _own(fence)
        self.check(own.label)
        if own.event is None:
            raise RuntimeError(f"{own.label} is not recorded yet; a CUDA stream can't wait for it")
        with self._guarded(own.label):
            self.stream(stream).wait_event(own.event)

    def query(self, fence: Fence) -> bool:
        """Whether ``fence`` is reached; never waits. False for ever after a failure."""
        own = _own(fence)
        if self._error is not None or self._closed or self._fork.in_child or own.event is None:
            return False
        if not own.reached:
            try:
                own.reached = bool(own.event.query())
            except Exception as error:
                self._fail(error)
                return False
        return own.reached

    def synchronize(self, fence: Fence, timeout: float | None = None) -> bool:
        """Wait on the host for ``fence``. Raises ``DeviceUnavailable``, ``ManagerClosed``."""
        return look_until(lambda: self.query(fence), lambda: self.check(fence.label), timeout)

    # --- work -----------------------------------------------------------------------------------

    def copy_async(
        self,
        stream: Stream,
        target: Memory,
        target_ids: FrameIds,
        source: Memory,
        source_ids: FrameIds,
        ticket: Ticket | None = None,
        moved: Moved | None = None,
    ) -> None:
        """Queue a copy in as few pieces as its frames allow (`Copies`). A call that CUDA refuses,
        and that leaves the stream alive, is told in the ticket."""
        self.check(stream.name.lower())
        queue = self.stream(stream)
        try:
            with self.cuda.here():
                self.copies.copy(stream, queue, target, target_ids, source, source_ids)
        except Exception as error:
            lasting = not is_survivable(error) or self.cuda.is_lost(queue.cuda_stream)
            if ticket is None or lasting:
                self._fail(error)
                self.check(stream.name.lower())
                raise  # never comes here: the check has raised
            ticket.fail(error, self.failed)
            return
        self._count(stream, moved or Moved.whole(target, target_ids, source_ids))

    def launch(
        self,
        stream: Stream,
        function: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        moved: Moved | None = None,
    ) -> None:
        """Call ``function``, which queues on ``stream``. What it raises fails the device: nobody
        knows what of it was queued."""
        self.check(stream.name.lower())
        try:
            with self.cuda.here():
                function()
        except Exception as error:
            self._fail(error)
            self.check(stream.name.lower())
        if moved is not None:
            self._count(stream, moved)

    def timed(
        self, stream: Stream, queue: Callable[[], None], told: Callable[[float], None]
    ) -> None:
        """Two events around the work; ``told`` is called by the poll that finds it ended."""
        self.check(stream.name.lower())
        with self._guarded(stream.name.lower()):
            begin, end = self._timers.take(), self._timers.take()
            torch_stream = self.stream(stream)
            begin.record(torch_stream)
            queue()
            end.record(torch_stream)
        with self._lock:
            self._timings.append((begin, end, told))

    def settle(self, stream: Stream) -> None:
        """The caller's current stream follows COMPUTE, for what it is about to read by torch."""
        if self._error is None and not self._closed and not self._fork.in_child:
            with self._guarded(stream.name.lower()):
                self.stream(stream)

    def read_back(self, arena: Named, frames: FrameIds) -> None:
        """As `settle`: frames of the device are read in the order of COMPUTE."""
        self.settle(Stream.COMPUTE)

    def moved(self, stream: Stream) -> Moved:
        """Counted when a fence behind the work was reached."""
        with self._lock:
            self._count_reached(stream)
            ended = []
            while self._timings and self._has_passed(self._timings[0][1]):
                ended.append(self._timings.popleft())
        for begin, end, told in ended:
            seconds = begin.elapsed_time(end) / 1000
            self._timers.give(begin)
            self._timers.give(end)
            told(seconds)
        return self._moved[stream]

    def park(self, memory: Any, ring: deque[Any]) -> None:
        """Keep memory that nobody holds any more until each ``event`` of the ring is reached:
        copies between them may be under way. From a finalizer too, so without a lock."""
        self._parked.append((memory, ring))
        for _ in range(len(self._parked)):
            first = self._parked.popleft()
            if not self._closed and not all(one.event.query() for one in first[1]):
                self._parked.append(first)

    def transfer_counts(self) -> dict[str, int]:
        """Transfers by the way they went, and what of the host arena is page-locked."""
        chosen = self.copies.num_chosen
        return {
            "transfers_copied": chosen["copies"],
            "transfers_batched": chosen["batch"],
            "transfers_staged": chosen["staged"],
            "host_locked_bytes": self.copies.locked_bytes,
        }

    @property
    def error(self) -> BaseException | None:
        """What made the device fail, or None."""
        return self._error

    def close(self) -> None:
        """Wait up to 5 s for what the streams were given: the GPU can't be told to drop it, and its
        memory must not go before. What is not over by then keeps its memory, for as long as the
        process lives, and a warning says so. A second call: no-op."""
        if self._closed or self._fork.in_child:
            return
        self._closed = True
        last = filter(None, [*self._streams.values(), self._last_compute])
        end = time.monotonic() + CLOSE_SECONDS
        for stream in last:
            while not self._is_idle(stream):  # of a failed device too: its copies may be under way
                if time.monotonic() >= end:
                    self._abandon()
                    break
                time.sleep(LAST_LOOK)
        self._parked.clear()
        self.copies.close()
        self.uploads.close()

    # --- inside ---------------------------------------------------------------------------------

    def _is_idle(self, stream: Any) -> bool:
        try:
            return bool(stream.query())
        except Exception as error:
            self._fail(error)
            return True

    def _abandon(self) -> None:
        """Give up all memory without giving it back."""
        LOG.warning(
            "the GPU was not done %g s after a Manager was closed; the memory of that Manager "
            "stays taken until the process ends",
            CLOSE_SECONDS,
        )
        for kept in (self.copies, self.uploads, *self._arenas):
            kept.abandon()
        keep_for_good(*self._parked)

    def _count_reached(self, stream: Stream) -> None:
        """Count what lies before a fence that is reached; under the lock."""
        counting = self._counting[stream]
        while counting and self.query(counting[0][0]):
            self._moved[stream] += counting.popleft()[1]

    def _has_passed(self, event: Any) -> bool:
        if self._error is not None or self._closed or self._fork.in_child:
            return False
        try:
            return bool(event.query())
        except Exception as error:
            self._fail(error)
            return False

    def _count(self, stream: Stream, moved: Moved) -> None:
        with self._lock:
            self._unfenced[stream] += moved

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error

    def _guarded(self, what: str) -> Guard:
        return Guard(self, what)

    def working(self, what: str) -> Guard:
        """A guard of work whose caller hears of what is refused once: only an error that lasts
        fails the device."""
        return Guard(self, what, survivable=True)

    def is_lost(self) -> bool:
        """Whether the GPU's context is gone."""
        return self.cuda.is_lost(self._streams[Stream.OUT].cuda_stream)

    def check(self, what: str) -> None:
        """Raise when nothing can be given to the device any more."""
        if self._error is not None:
            raise DeviceUnavailable(
                f"device cuda failed ({what[:60]}): {str(self._error)[:200]}"
            ) from self._error
        if self._closed or self._fork.in_child:
            raise ManagerClosed(
                f"device cuda is closed ({what[:60]}), or this is a forked child; make a new "
                "Manager"
            )


def _own(fence: Fence) -> CudaFence:
    if not isinstance(fence, CudaFence):
        raise TypeError(f"fence {fence.label} is of another device; a CudaFence is needed")
    return fence
