"""The CPU device: one worker thread a copy stream; the compute stream is the calling thread.

Each copy stream is a queue that its worker takes from in order. The head of a queue is either work,
a fence to reach, or a fence to wait for; a wait for a fence that is not reached leaves the worker
asleep, so no thread of the engine ever waits for a copy it did not ask for (R6).

Workers hold the shared state, never the device: a device that is dropped without ``close`` is
collected, and its finalizer ends them. The same finalizer runs when the interpreter exits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvmem.errors import CorruptEntry, DeviceUnavailable, ManagerClosed
from kvmem.fork import ForkGuard
from kvmem.store.arena import Arena
from kvmem.store.device import (
    NOTHING_MOVED,
    Access,
    Device,
    Fence,
    FrameIds,
    Memory,
    Moved,
    Stream,
    Ticket,
    is_survivable,
)

#: Seconds that ``close`` and interpreter exit give the workers; daemon threads are left after it.
JOIN_SECONDS = 3.0
#: Bytes of one kernel call: between calls a worker sees that it was told to stop.
CHUNK_BYTES = 64 << 20

CopyHook = Callable[[Stream, FrameIds, FrameIds], None]


class CpuFence(Fence):
    """Reached or not; changed under the device's condition."""

    __slots__ = ("reached",)

    def __init__(self, label: str) -> None:
        self.label = label
        self.reached = False


@dataclass(slots=True)
class _Work:
    """One entry of a stream: exactly one of the three is set."""

    wait: CpuFence | None = None
    record: CpuFence | None = None
    run: Callable[[], None] | None = None
    moved: Moved | None = None
    ticket: Ticket | None = None  # of a copy that may fail alone


@dataclass(slots=True)
class _State:
    """What the device and its workers share; every field is guarded by ``changed``."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    queues: dict[Stream, deque[_Work]] = field(default_factory=dict)
    held: set[Stream] = field(default_factory=set)
    moved: dict[Stream, Moved] = field(default_factory=dict)
    error: BaseException | None = None
    stopping: bool = False
    num_waiting: int = 0  # threads in `synchronize`
    failed: list[Ticket] = field(default_factory=list)  # shared with the device
    hook: CopyHook | None = None
    fork: ForkGuard = field(default_factory=ForkGuard)

    def count(self, stream: Stream, moved: Moved | None) -> None:
        """Add finished work to the counters of a stream (case 35: never before it is done)."""
        if moved is not None:
            self.moved[stream] = self.moved.get(stream, NOTHING_MOVED) + moved

    def fail(self, error: BaseException) -> None:
        """Enter the failed state: drop what is queued and wake everyone who waits (R8)."""
        if self.error is None:
            self.error = error
        for queue in self.queues.values():
            queue.clear()
        self.changed.notify_all()

    def reach(self, fence: CpuFence) -> None:
        """Mark a fence as reached, and wake the others if one could be waiting for it: waking idle
        workers costs an engine's thread 20 us and more. Without the lock: who waits has said so
        (`num_waiting`, a queue) before it looked at the fence."""
        fence.reached = True
        if self.num_waiting or any(self.queues.values()):
            with self.changed:
                self.changed.notify_all()

    def is_ready(self, stream: Stream) -> bool:
        """Whether the head of a stream can be taken now."""
        queue = self.queues[stream]
        if not queue or stream in self.held:
            return False
        fence = queue[0].wait
        return fence is None or fence.reached


class CpuDevice(Device):
    """Streams of a plain CPU. ``sync=True``: no threads, each call runs its work before it returns.

    For tests: ``hold(stream)`` keeps a copy stream from starting its next entry until
    ``release(stream)``; ``hook`` is called before each copy and may sleep or raise.
    """

    name = "cpu"

    def __init__(self, *, sync: bool = False, hook: CopyHook | None = None) -> None:
        super().__init__()
        self.sync = sync
        streams = () if sync else (Stream.OUT, Stream.IN)
        self._state = _State(
            queues={stream: deque() for stream in streams}, hook=hook, failed=self.failed
        )
        self._threads = tuple(
            threading.Thread(
                target=_serve, args=(self._state, s), name=f"kvmem-{s.name.lower()}", daemon=True
            )
            for s in streams
        )
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._state, self._threads)

    def new_arena(self, name: str, num_frames: int, frame_bytes: int, *, host: bool) -> Arena:
        """Both tiers of a CPU are plain memory."""
        return Arena(name, num_frames, frame_bytes)

    def new_fence(self, label: str) -> CpuFence:
        """A fence that is not reached."""
        return CpuFence(label)

    def record(self, stream: Stream, fence: Fence) -> None:
        """COMPUTE (and every stream when ``sync``): all before it has run, so it is reached."""
        own = _own(fence)
        if self._is_queued(stream):
            self._put(stream, _Work(record=own))
            return
        if self._state.error is None:
            self._state.reach(own)

    def wait(self, stream: Stream, fence: Fence) -> None:
        """On COMPUTE the calling thread waits here; on a copy stream its worker will."""
        own = _own(fence)
        if self._is_queued(stream):
            self._put(stream, _Work(wait=own))
        elif not own.reached:
            if self.sync and self._state.error is None:
                raise RuntimeError(
                    f"{fence.label} is not reached: with sync=True the {stream.name.lower()} "
                    "stream runs at once and cannot wait; end that step first"
                )
            self.synchronize(own)

    def query(self, fence: Fence) -> bool:
        """One attribute: the worker sets it after the bytes are there."""
        return _own(fence).reached

    def synchronize(self, fence: Fence, timeout: float | None = None) -> bool:
        """Wait outside every lock but the condition's own, which waiting gives up."""
        own, state = _own(fence), self._state
        if own.reached:
            return True
        with state.changed:
            state.num_waiting += 1
            try:
                state.changed.wait_for(
                    lambda: own.reached or state.error is not None or state.stopping, timeout
                )
            finally:
                state.num_waiting -= 1
            if own.reached:
                return True
            self._check(fence.label)
            return False

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
        """Queue the copy; the worker releases the GIL while bytes move."""
        run = partial(_copy, self._state, stream, target, target_ids, source, source_ids)
        if moved is None:
            moved = Moved.whole(target, target_ids, source_ids)
        self._submit(stream, _Work(run=run, moved=moved, ticket=ticket))

    def launch(
        self,
        stream: Stream,
        function: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        moved: Moved | None = None,
    ) -> None:
        """Run at once on COMPUTE (an exception there goes to the caller), else queue."""
        if stream is Stream.COMPUTE:
            self._check(stream.name.lower())
            function()
            with self._state.changed:
                self._state.count(stream, moved)
            return
        self._submit(stream, _Work(run=function, moved=moved))

    def moved(self, stream: Stream) -> Moved:
        """Counted when the work had ended."""
        with self._state.changed:
            return self._state.moved.get(stream, NOTHING_MOVED)

    @property
    def error(self) -> BaseException | None:
        """The first exception of a worker."""
        return self._state.error

    @property
    def hook(self) -> CopyHook | None:
        """Called before each copy with (stream, target ids, source ids), on the worker."""
        return self._state.hook

    @hook.setter
    def hook(self, hook: CopyHook | None) -> None:
        self._state.hook = hook

    def hold(self, stream: Stream) -> None:
        """Keep a copy stream from starting its next entry. A no-op on one that runs at once."""
        with self._state.changed:
            self._state.held.add(stream)

    def release(self, stream: Stream) -> None:
        """Let a held stream go on."""
        with self._state.changed:
            self._state.held.discard(stream)
            self._state.changed.notify_all()

    def close(self) -> None:
        """Abandon what is queued and end the workers; returns within ``JOIN_SECONDS``.

        A copy that runs goes to its end (or the end of its chunk). Waiters get ``ManagerClosed``.
        """
        self._finalizer()

    def _is_queued(self, stream: Stream) -> bool:
        return stream in self._state.queues

    def _put(self, stream: Stream, work: _Work) -> None:
        with self._state.changed:
            self._check(stream.name.lower())
            self._state.queues[stream].append(work)
            self._state.changed.notify_all()

    def _submit(self, stream: Stream, work: _Work) -> None:
        if self._is_queued(stream):
            self._put(stream, work)
            return
        self._check(stream.name.lower())
        _run(self._state, stream, work)

    def _check(self, what: str) -> None:
        """Raise when nothing can be given to the device any more."""
        state = self._state
        if state.error is not None:
            kind = CorruptEntry if isinstance(state.error, CorruptEntry) else DeviceUnavailable
            raise kind(f"device cpu failed ({what}): {_short(state.error)}") from state.error
        if state.stopping or state.fork.in_child:
            raise ManagerClosed(
                f"device cpu is closed ({what}), or this is a forked child; make a new Manager"
            )


def _own(fence: Fence) -> CpuFence:
    if not isinstance(fence, CpuFence):
        raise TypeError(f"fence {fence.label} is of another device; a CpuFence is needed")
    return fence


def _short(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 200 else text[:197] + "..."


def _copy(
    state: _State,
    stream: Stream,
    target: Memory,
    target_ids: FrameIds,
    source: Memory,
    source_ids: FrameIds,
) -> None:
    """Move frames in chunks, so that a worker told to stop does within one chunk."""
    from cuda_kernels import move_frames  # compiled at the first copy, not at import

    if state.hook is not None:
        state.hook(stream, target_ids, source_ids)
    step = max(1, CHUNK_BYTES // target.frame_bytes)
    for start in range(0, len(target_ids), step):
        if state.stopping:
            raise ManagerClosed("a copy was abandoned: the device was closed")
        part = slice(start, start + step)
        move_frames(target.bytes, target_ids[part], source.bytes, source_ids[part])


def _run(state: _State, stream: Stream, work: _Work) -> None:
    """Run one entry. What a copy with a ticket raises is told there; else it fails the device."""
    assert work.run is not None
    try:
        work.run()
    except BaseException as error:
        if work.ticket is not None and isinstance(error, Exception) and is_survivable(error):
            work.ticket.fail(error, state.failed)
            return
        with state.changed:
            state.fail(error)
        if isinstance(error, KeyboardInterrupt):
            raise
        return
    with state.changed:
        state.count(stream, work.moved)


def _serve(state: _State, stream: Stream) -> None:
    """The life of a worker: take the head of its stream when it is ready, until told to stop."""
    queue = state.queues[stream]
    while True:
        with state.changed:
            while not state.stopping and not state.is_ready(stream):
                state.changed.wait()
            if state.stopping:
                return
            work = queue.popleft()
            if work.record is not None:
                state.reach(work.record)
        if work.run is not None:
            _run(state, stream, work)
        del work  # an arena must not live on in an idle worker


def _stop(state: _State, threads: tuple[threading.Thread, ...]) -> None:
    """Tell the workers to end and wait for them, not longer than ``JOIN_SECONDS`` in all."""
    if state.fork.in_child:
        return  # a forked child owns no workers, and the condition may be held for ever there
    with state.changed:
        state.stopping = True
        for queue in state.queues.values():
            queue.clear()
        state.changed.notify_all()
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
