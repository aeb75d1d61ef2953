"""The simulated device: the interface of a device over a seeded scheduler and its checker.

Nothing happens in the background: streams go on inside the calls of the host, as far as the mode
and the seed say. So a run is repeatable, and any order that a real device might choose can be
had. A call that has to wait runs the streams until what it waits for has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvmem.errors import ConfigError, CorruptEntry, DeviceUnavailable, ManagerClosed, RaceError
from kvmem.fork import ForkGuard
from kvmem.sim_options import SimOptions
from kvmem.store.arena import Arena
from kvmem.store.device import Access, Device, Fence, FrameIds, Memory, Moved, Named, Stream, Ticket
from kvmem.store.sim.clocks import HOST, Clocks, Touch
from kvmem.store.sim.faults import Faults
from kvmem.store.sim.log import Log
from kvmem.store.sim.ops import Copy, Op, SimFence, call_site
from kvmem.store.sim.scheduler import CopyHook, Scheduler, SimDeadlock

#: Seconds that one turn stands for where a caller gives a timeout.
TURN_SECONDS = 1e-6
MAX_TURNS = 100_000_000
#: Seconds of the wall clock that a blocked thread gives the others to bring it on.
BLOCKED_SECONDS = 10.0


class SimDevice(Device):
    """A device whose three streams run when a seeded scheduler says so. Thread-safe.

    For tests: ``hold(stream)`` stops a stream, in the middle of a copy too, ``release`` lets it go,
    ``run(stream, turns)`` moves one by hand, ``drain()`` runs everything. ``log``, ``faults`` and
    ``clocks`` tell what happened.
    """

    name = "sim"
    simulated = True

    def __init__(self, options: SimOptions | None = None) -> None:
        super().__init__()
        self.options = options if options is not None else SimOptions()
        self.log = Log()
        self.faults = Faults(self.options, self.log)
        self.clocks = Clocks()
        self.scheduler = Scheduler(self.options, self.clocks, self.faults, self.log, self.failed)
        self._changed = threading.Condition(threading.RLock())
        self._num_ops = 0
        self._stopping = False
        self._fork = ForkGuard()
        self._host_arenas: set[str] = set()

    # --- the interface of a device --------------------------------------------------------------

    def new_arena(self, name: str, num_frames: int, frame_bytes: int, *, host: bool) -> Arena:
        """Plain memory, unless a fault refuses it (ConfigError)."""
        if self.faults.strikes("host_alloc" if host else "device_alloc", name):
            raise ConfigError(
                f"{name} arena: {num_frames * frame_bytes} bytes were refused (injected fault); "
                "ask for fewer blocks"
            )
        if host:
            self._host_arenas.add(name)
        return Arena(name, num_frames, frame_bytes)

    def new_fence(self, label: str) -> SimFence:
        """A fence that is not reached."""
        return SimFence(label)

    def record(self, stream: Stream, fence: Fence) -> None:
        """Queue the fence. A no-op on COMPUTE after a failure, so that a step can end."""
        own = _own(fence)
        with self._changed:
            if stream is Stream.COMPUTE and (self.error is not None or self._stopping):
                return
            self._check(fence.label)
            own.stream = stream
            self._put(Op(0, stream, "record", self.clocks.host, (), fence=own))

    def wait(self, stream: Stream, fence: Fence) -> None:
        """Queue the wait; the host never waits here, on COMPUTE neither."""
        with self._changed:
            self._check(fence.label)
            self._put(Op(0, stream, "wait", self.clocks.host, (), fence=_own(fence)))

    def query(self, fence: Fence) -> bool:
        """Whether the fence is reached, or a "not yet" that is not true any more. What the host
        has seen, or waited for later on that stream, is always told."""
        own = _own(fence)
        with self._changed:
            if self.error is not None or self._stopping:
                return False
            self.scheduler.query(own)
            self._changed.notify_all()
            if self.error is not None or not own.reached:
                return False
            if not self._host_has_seen(own):
                if self.scheduler.says_not_yet():
                    return False
                self.clocks.host_knows(own.clock)
            return True

    def synchronize(self, fence: Fence, timeout: float | None = None) -> bool:
        """Run the streams until the fence is reached. A second of ``timeout`` is 10^6 turns.

        Where nothing can run that would reach it (a stream is held, a step was never ended):
        False with a timeout, else SimDeadlock; where the process has other threads, after they
        had some time to bring it on.
        """
        own = _own(fence)
        with self._changed:
            reached = self._reach(lambda: own.reached, own, timeout, own.label)
            if reached:
                self.clocks.host_knows(own.clock)
            return reached

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
        """Queue a copy that runs in fragments, each reading its source when it runs."""
        with self._changed:
            self._check(stream.name.lower())
            self._put(
                Op(
                    0,
                    stream,
                    "copy",
                    self.clocks.tick_host(),
                    call_site(),
                    reads=((source, source_ids),),
                    writes=((target, target_ids),),
                    moved=moved or Moved.whole(target, target_ids, source_ids),
                    copy=Copy(target, target_ids, source, source_ids),
                    ticket=ticket,
                )
            )

    def launch(
        self,
        stream: Stream,
        function: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        moved: Moved | None = None,
    ) -> None:
        """Queue a kernel. What it raises when it runs fails the device."""
        with self._changed:
            self._check(stream.name.lower())
            now, site = self.clocks.tick_host(), call_site()
            op = Op(0, stream, "launch", now, site, reads, writes, moved, run=function)
            self._put(op)

    def settle(self, stream: Stream) -> None:
        """Run what the stream was given up to now. The host learns no order from it (R6)."""
        with self._changed:
            last = self._num_ops
            queue = self.scheduler.queues[stream]

            def done() -> bool:
                return not queue or queue[0].number > last

            self._check(stream.name.lower())
            self._reach(done, stream, None, f"{stream.name.lower()} to settle")

    def read_back(self, arena: Named, frames: FrameIds) -> None:
        """The host reads frames now: device frames in the order of COMPUTE, as ``Tensor.cpu()``
        does, host frames at once. Raises RaceError when a copy may still be under way."""
        if self.error is not None or self._stopping:
            return
        if arena.name in self._host_arenas:
            self.host_access(arena, frames)
            return
        self.launch(Stream.COMPUTE, _nothing, reads=((arena, frames),))
        self.settle(Stream.COMPUTE)
        with self._changed:
            self._check("read")
            self.clocks.host_knows(self.clocks.streams[Stream.COMPUTE])

    def moved(self, stream: Stream) -> Moved:
        """Counted when the work had ended."""
        with self._changed:
            return self.scheduler.moved[stream]

    @property
    def error(self) -> BaseException | None:
        """The first exception of a stream."""
        return self.scheduler.error

    def close(self) -> None:
        """Abandon what is queued; who waits gets ManagerClosed."""
        if self._fork.in_child:
            return  # the lock may be held for ever in a forked child
        with self._changed:
            self._stopping = True
            for queue in self.scheduler.queues.values():
                queue.clear()
            self._changed.notify_all()

    # --- for tests ------------------------------------------------------------------------------

    @property
    def hook(self) -> CopyHook | None:
        """Called before the first fragment of each copy with (stream, target ids, source ids)."""
        return self.scheduler.hook

    @hook.setter
    def hook(self, hook: CopyHook | None) -> None:
        self.scheduler.hook = hook

    def hold(self, stream: Stream) -> None:
        """Stop a stream where it is."""
        with self._changed:
            self.scheduler.held.add(stream)
            self.log.add(f"hold {stream.name}")

    def release(self, stream: Stream) -> None:
        """Let a held stream go on, when it is its turn."""
        with self._changed:
            self.scheduler.held.discard(stream)
            self.log.add(f"release {stream.name}")
            self._changed.notify_all()

    def run(self, stream: Stream, turns: int = MAX_TURNS) -> int:
        """Give one stream, held or not, so many turns, or until its head waits; how many it had."""
        with self._changed:
            for count in range(turns):
                if not self.scheduler.ready(stream):
                    return count
                self.scheduler.turn(stream)
            self._changed.notify_all()
            return turns

    def drain(self) -> None:
        """Run everything that is queued; SimDeadlock when something never can."""
        for stream in Stream:
            self.settle(stream)

    def host_access(self, arena: Named, frames: FrameIds, *, write: bool = False) -> None:
        """Note that the host reads or writes frames or a buffer now. Raises RaceError."""
        with self._changed:
            now = self.clocks.tick_host()
            touch = Touch(HOST, now[HOST], f"host access to {arena.name}", call_site())
            access = ((arena, np.asarray(frames, np.int32)),)
            reads, writes = ((), access) if write else (access, ())
            for queue in self.scheduler.queues.values():  # not even begun: told now, not later
                for op in queue:
                    self.clocks.check_queued(touch, op, reads, writes)
            self.clocks.check(touch, now, reads, writes)

    # --- inside ---------------------------------------------------------------------------------

    def _put(self, op: Op) -> None:
        self._num_ops += 1
        op.number = self._num_ops
        self.scheduler.put(op)
        self._changed.notify_all()

    def _host_has_seen(self, fence: SimFence) -> bool:
        """Whether the host knows of the fence's stream at least as much as the fence does."""
        assert fence.stream is not None
        at = fence.stream + 1
        return fence.clock[at] <= self.clocks.host[at]

    def _reach(
        self,
        done: Callable[[], bool],
        what: SimFence | Stream,
        timeout: float | None,
        label: str,
    ) -> bool:
        """Run until ``done``. Raises as ``synchronize``; the lock is held by the caller."""
        turns = MAX_TURNS if timeout is None else min(MAX_TURNS, int(timeout / TURN_SECONDS) + 1)
        while True:
            if done():
                return True
            self._check(label)
            stream = what.stream if isinstance(what, SimFence) else what
            before = self.scheduler.num_turns
            reached = self.scheduler.reach(done, stream, turns)
            self._check(label)  # a failure empties the queues
            if reached:
                self._changed.notify_all()
                return True
            turns -= self.scheduler.num_turns - before
            if turns <= 0 and timeout is not None:
                return False
            alone = threading.active_count() == 1
            seconds = BLOCKED_SECONDS if timeout is None else min(timeout, BLOCKED_SECONDS)
            if not alone and self._changed.wait(seconds):
                continue
            if timeout is not None:
                return False
            raise SimDeadlock(
                f"nothing can run that reaches {label}: {self.scheduler.describe()}"[:300]
            )

    def _check(self, what: str) -> None:
        """Raise when nothing can be given to the device any more."""
        error = self.scheduler.error
        if isinstance(error, RaceError):
            raise error.again() from error
        if error is not None:
            kind = CorruptEntry if isinstance(error, CorruptEntry) else DeviceUnavailable
            raise kind(f"device sim failed ({what[:60]}): {str(error)[:200]}") from error
        if self._stopping or self._fork.in_child:
            raise ManagerClosed(
                f"device sim is closed ({what[:60]}), or this is a forked child; make a new Manager"
            )


def _own(fence: Fence) -> SimFence:
    if not isinstance(fence, SimFence):
        raise TypeError(f"fence {fence.label} is of another device; a SimFence is needed")
    return fence


def _nothing() -> None:
    """The kernel of a read by the host."""
