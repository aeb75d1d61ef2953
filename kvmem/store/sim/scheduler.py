"""When queued work of a simulated device runs: seeded, one small piece at a time.

Each stream is a FIFO. A *turn* takes the head of one stream one piece further: a fragment of a
copy, a kernel, a fence reached, a wait passed. Which stream is next, and how many turns pass before
somebody insists, is the mode's choice (``SimOptions.mode``); any choice is a legal run of a device
with three streams and one or two copy engines.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from kvmem.sim_options import SimOptions
from kvmem.store.device import NOTHING_MOVED, FrameIds, Moved, Stream, Ticket, is_survivable
from kvmem.store.sim.clocks import Clocks
from kvmem.store.sim.faults import Faults
from kvmem.store.sim.log import Log
from kvmem.store.sim.ops import Copy, Op, SimFence

#: Entries that may be queued before the oldest have to run, as the launch queue of a driver.
MAX_QUEUED = 512
#: The n-th query of one fence lets its stream go on, so that a loop of queries ends (R9).
QUERIES_A_TURN = 16
#: Turns that an injected slow copy takes before its first fragment.
STALL_TURNS = 1000
#: Fragments of a copy: torn reads and half-done writes become visible between them.
FRAGMENTS = (2, 8)


CopyHook = Callable[[Stream, FrameIds, FrameIds], None]


class SimDeadlock(RuntimeError):
    """A wait of the host that nothing can ever end; the message names each stream and its head."""


class Scheduler:
    """The queues of the streams and the choice of the next turn. Not thread-safe."""

    def __init__(
        self,
        options: SimOptions,
        clocks: Clocks,
        faults: Faults,
        log: Log,
        failed: list[Ticket],
    ) -> None:
        self._mode = options.mode
        self._engines = options.copy_engines
        self._not_yet = options.not_yet
        self._clocks, self._faults, self._log = clocks, faults, log
        self._failed = failed
        self._random = random.Random(f"{options.seed}:schedule")
        victim = options.starve or self._random.choice(("compute", "out", "in"))
        self._starved = Stream[victim.upper()]
        self.queues: dict[Stream, deque[Op]] = {stream: deque() for stream in Stream}
        self.held: set[Stream] = set()
        self.moved: dict[Stream, Moved] = dict.fromkeys(Stream, NOTHING_MOVED)
        self.error: BaseException | None = None
        self.hook: CopyHook | None = None
        self.num_turns = 0

    # --- what is asked for ----------------------------------------------------------------------

    def put(self, op: Op) -> None:
        """Queue an entry; what runs at once is the mode's choice."""
        if op.copy is not None:
            self._draw_copy(op)
        self.queues[op.stream].append(op)
        self._log.add(f"put {op}")
        if self._mode == "eager":
            self._some_turns(1 << 62)
        elif self._mode in ("random", "starve"):
            self._some_turns(self._random.choice((0, 0, 1, 2, 5)))
        while sum(map(len, self.queues.values())) > MAX_QUEUED:
            ready = self._ready()
            if not ready:
                return
            self.turn(min(ready, key=lambda s: self.queues[s][0].number))

    def query(self, fence: SimFence) -> None:
        """Somebody asks for a fence: time passes."""
        fence.queries += 1
        if self._mode == "random":
            self._some_turns(self._random.choice((0, 1, 2)))
        elif self._mode in ("reverse", "starve"):
            self._some_turns(1)
        if fence.queries % QUERIES_A_TURN == 0 and fence.stream is not None:
            needed = self.needed(fence.stream)
            if needed is not None:
                self.turn(needed)

    def says_not_yet(self) -> bool:
        """Whether a query of a fence that is reached is answered "not yet"."""
        return self._random.random() < self._not_yet

    def reach(self, done: Callable[[], bool], stream: Stream | None, max_turns: int) -> bool:
        """Run until ``done`` says so, which ``stream`` brings about; False when nothing can run
        that would, or after ``max_turns``."""
        for _ in range(max_turns):
            if done() or self.error is not None:
                return done()
            needed = None if stream is None else self.needed(stream)
            if needed is None:
                return False
            chosen = needed if self._mode == "late" else self._choose(self._ready(), patient=False)
            self.turn(needed if chosen is None else chosen)
        return done()

    def needed(self, stream: Stream) -> Stream | None:
        """The stream whose turn brings ``stream`` forward; None when there is none (a held stream,
        an empty one, a fence that was never recorded, a cycle of waits)."""
        for _ in Stream:
            queue = self.queues[stream]
            if not queue or stream in self.held:
                return None
            head = queue[0]
            if head.kind == "wait" and head.fence is not None and not head.fence.reached:
                if head.fence.stream is None:
                    return None
                stream = head.fence.stream
            elif self._engine_is_busy(head):
                stream = Stream.IN if stream is Stream.OUT else Stream.OUT
            else:
                return stream
        return None

    def ready(self, stream: Stream) -> bool:
        """Whether the head of a stream can go on, held or not."""
        queue = self.queues[stream]
        if not queue:
            return False
        head = queue[0]
        if head.kind == "wait":
            return head.fence is not None and head.fence.reached
        return not self._engine_is_busy(head)

    def describe(self) -> str:
        """Each stream with its head, in words."""
        parts = []
        for stream, queue in self.queues.items():
            text = str(queue[0])[:70] if queue else "empty"
            if queue and queue[0].kind == "wait":
                fence = queue[0].fence
                known = fence is not None and fence.stream is not None
                text += "" if known else " (never recorded)"
            held = "held, " if stream in self.held else ""
            parts.append(f"{stream.name}: {held}{text}")
        return "; ".join(parts)

    def fail(self, error: BaseException) -> None:
        """Enter the failed state: drop what is queued (R8)."""
        if self.error is None:
            self.error = error
            self._log.add(f"failed: {type(error).__name__}")
        for queue in self.queues.values():
            queue.clear()

    # --- turns ----------------------------------------------------------------------------------

    def turn(self, stream: Stream) -> None:
        """Take the head of a stream one piece further; what it raises fails the device."""
        op = self.queues[stream][0]
        self.num_turns += 1
        if op.stall and op.tick:
            op.stall -= 1
            return
        self._log.add(f"turn {stream.name} {op.number}.{op.done}")
        try:
            if not op.tick:
                self._clocks.start(op)
                self._faults.raise_at("sticky", str(op))
            ended = self._piece(op)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        if ended:
            self.queues[stream].popleft()
            self._count(op)

    def _piece(self, op: Op) -> bool:
        """Run one piece of an entry; True when it was the last."""
        if op.copy is not None:
            return self._copy_fragment(op)
        if op.run is not None:
            op.run()
        elif op.fence is not None and op.kind == "wait":
            self._clocks.after(op.stream, op.fence.clock)
        elif op.fence is not None:
            self._faults.raise_at("event", str(op))
            op.fence.clock = self._clocks.streams[op.stream]
            op.fence.reached = True
        return True

    def _copy_fragment(self, op: Op) -> bool:
        assert op.copy is not None
        if op.stall:
            return False
        try:
            self._pass_or_fail(op, op.copy)
        except Exception as error:
            if op.ticket is None or not is_survivable(error):
                raise
            self._log.add(f"failed copy {op.stream.name} {op.ticket.transfer_id}")
            op.moved = None
            op.ticket.fail(error, self._failed)
            return True
        target, target_ids, source, source_ids = op.copy
        width = target.frame_bytes
        part = slice(op.done * width // op.num_fragments, (op.done + 1) * width // op.num_fragments)
        target.bytes[target_ids, part] = source.bytes[source_ids, part]
        op.done += 1
        return op.done == op.num_fragments

    def _pass_or_fail(self, op: Op, copy: Copy) -> None:
        """Raise what makes a copy fail at this fragment."""
        if self.hook is not None and not op.done:
            self.hook(op.stream, copy.target_ids, copy.source_ids)
        if op.done == op.fails_after:
            raise self._faults.error("copy_after" if op.done else "copy_before", str(op))

    def _draw_copy(self, op: Op) -> None:
        """In how many fragments a copy runs, and whether it is slow or fails."""
        op.num_fragments = self._random.randint(*FRAGMENTS)
        if self._faults.strikes("slow_copy", str(op)):
            op.stall = STALL_TURNS
        if self._faults.strikes("copy_before", str(op)):
            op.fails_after = 0
        elif self._faults.strikes("copy_after", str(op)):
            op.fails_after = self._faults.draw(1, op.num_fragments - 1)

    def _count(self, op: Op) -> None:
        if op.moved is not None:
            self.moved[op.stream] += op.moved

    # --- choices --------------------------------------------------------------------------------

    def _some_turns(self, count: int) -> None:
        """At most so many turns of the mode's choice, as long as it chooses anything."""
        for _ in range(count):
            stream = self._choose(self._ready(), patient=True)
            if stream is None:
                return
            self.turn(stream)

    def _ready(self) -> list[Stream]:
        return [s for s in self.queues if s not in self.held and self.ready(s)]

    def _choose(self, ready: list[Stream], *, patient: bool) -> Stream | None:
        """The next stream; with ``patient`` a starved one is never it."""
        if self._mode == "starve":
            others = [s for s in ready if s is not self._starved]
            ready = others if others or patient else ready
        if not ready:
            return None
        if self._mode == "eager":
            return ready[0]
        if self._mode == "reverse":
            return max(ready, key=lambda s: self.queues[s][0].number)
        return self._random.choice(ready)

    def _engine_is_busy(self, head: Op) -> bool:
        """With one copy engine: whether a copy of the other direction is under way."""
        if self._engines == 2 or head.copy is None or head.done:
            return False
        other = self.queues[Stream.IN if head.stream is Stream.OUT else Stream.OUT]
        return bool(other and other[0].copy is not None and other[0].done)
