"""Streams of the double: FIFOs whose work runs late, in an order drawn from a seed.

Vector clocks, written for this double (a second opinion on those of the simulator): one for the
host and one for each stream. An access that doesn't know of a conflicting one is a race, told
whichever of the two runs first.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Clock = dict[int, int]
#: An access: address and bytes.
Span = tuple[int, int]
HOST = -1
#: A record on a stream whose work ran at once is "not yet" reached for so many queries.
QUERIES = 12


def locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method under the streams' lock."""

    @functools.wraps(method)
    def call(self: Streams, *arguments: Any) -> Any:
        with self.changed:
            return method(self, *arguments)

    return call


Touch = tuple[int, int, str]


class Race(AssertionError):
    """Two accesses that nothing orders."""


class Mark:
    """One record of an event."""

    __slots__ = ("clock", "ended", "queries", "reached", "stream")

    def __init__(self, stream: int) -> None:
        self.stream, self.reached, self.queries = stream, False, 0
        self.clock: Clock = {}
        self.ended = 0.0


@dataclass(slots=True)
class Work:
    """One entry of a stream."""

    what: str
    host: Clock
    site: str
    run: Callable[[], None] | None = None
    #: What it reads and writes, asked when it starts: tables on the device are known only then.
    spans: Callable[[], tuple[list[Span], list[Span]]] | None = None
    record: Mark | None = None
    wait: Mark | None = None


@dataclass(slots=True)
class Cell:
    writer: Touch | None = None
    readers: dict[int, Touch] = field(default_factory=dict)


class Streams:
    """All streams of one double. ``mode``: "eager", "late" (nothing runs before it has to), or
    "random"."""

    def __init__(self, seed: int, mode: str, cells: Callable[[int, int], Iterable[int]]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.random, self.mode = random.Random(f"{seed}:double"), mode
        self.queues: dict[int, deque[Work]] = {}
        self.clocks: dict[int, Clock] = {}
        self.host: Clock = {HOST: 0}
        self.held: set[int] = set()
        self.dead = False
        self._cells: dict[int, Cell] = {}
        self._cells_of = cells
        self.log: list[str] = []
        #: Streams that torch works on too: torch's work runs at once here, so theirs does as well,
        #: as far as it can.
        self.prompt: set[int] = set()
        #: Who had the memory of a cell before it was handed out, and what is wrong up to now.
        self.origin: Callable[[int], Touch | None] = lambda number: None
        self.bounds: Callable[[int, int, str], None] = lambda address, num_bytes, what: None
        self.found: list[str] = []
        self.num_checked = self.num_host_waits = 0
        self.now = 0.0  # seconds of the double's own time, for events that measure

    @locked
    def hold(self, handle: int) -> None:
        """Keep a stream from starting its next entry."""
        self.held.add(handle)

    @locked
    def let_go(self, handle: int) -> None:
        """Let a held stream go on."""
        self.held.discard(handle)
        self.changed.notify_all()

    @locked
    def die(self) -> None:
        """The context is lost: nothing runs any more, what is queued neither."""
        self.dead = True
        for queue in self.queues.values():
            queue.clear()
        self.changed.notify_all()

    @locked
    def last_owner(self, handle: int) -> Touch:
        """Work on a stream that used some memory, which torch hands out again before it ran."""
        tick = self.clocks[handle].get(handle, 0) + len(self.queues[handle]) + 1
        self.put(handle, Work("last owner", dict(self.host), "", _nothing, _no_spans))
        return handle, tick, "the work of the memory's last owner"

    @locked
    def new(self) -> int:
        """The handle of a new stream."""
        handle = 0x100 + len(self.queues)
        self.queues[handle], self.clocks[handle] = deque(), {}
        return handle

    @locked
    def put(self, handle: int, work: Work) -> None:
        """Queue work; what runs now is the mode's choice."""
        assert handle in self.queues, f"{work.what} on the legacy stream, or no stream"
        self.log.append(f"{handle:#x} {work.what}")
        if self.dead:
            return
        self.queues[handle].append(work)
        if self.mode == "eager":
            self._turns(1 << 30)
        elif self.mode == "random":
            self._turns(self.random.choice((0, 0, 1, 2, 5)))

    @locked
    def work(
        self,
        handle: int,
        what: str,
        run: Callable[[], None],
        spans: Callable[[], tuple[list[Span], list[Span]]],
    ) -> None:
        """Queue a copy, a fill or a kernel."""
        self.host[HOST] += 1
        self.put(handle, Work(what, dict(self.host), _site(), run, spans))
        if handle in self.prompt:
            self.settle(handle)

    @locked
    def record(self, handle: int) -> Mark:
        """Queue the record of an event."""
        mark = Mark(handle)
        self.put(handle, Work("record", dict(self.host), "", record=mark))
        return mark

    @locked
    def wait(self, handle: int, mark: Mark | None) -> None:
        """Queue a wait; for an event that was never recorded it is nothing, as in CUDA."""
        if mark is not None:
            self.put(handle, Work("wait", dict(self.host), "", wait=mark))

    @locked
    def query(self, mark: Mark | None) -> bool:
        """Whether a record is reached; time passes, and "not yet" may be told too long."""
        if mark is None:
            return True
        self._turns(self.random.choice((0, 1, 3)) if self.mode != "eager" else 1 << 30)
        if not mark.reached:
            return False
        if mark.clock[mark.stream] <= self.host.get(mark.stream, 0):
            return True
        mark.queries += 1
        if self.mode != "eager" and mark.queries < QUERIES and mark.stream in self.prompt:
            return False  # its work ran at once, which no GPU's does
        if self.mode == "random" and self.random.random() < 0.2:
            return False
        self._learn(mark.clock)
        return True

    @locked
    def reach(self, done: Callable[[], bool], handle: int) -> None:
        """Run what it takes until ``done``, which the stream brings about."""
        while not done() and not self.dead:
            needed = self._needed(handle)
            if needed is not None:
                self._run(needed)
            elif threading.active_count() > 1:
                assert self.changed.wait(10), f"a wait that nothing ends: {self.describe()}"
            else:
                raise AssertionError(f"a wait that nothing ends: {self.describe()}")

    @locked
    def advance(self, handle: int, count: int) -> None:
        """Time passes: what brings a stream forward runs, no more."""
        for _ in range(count):
            needed = self._needed(handle)
            if needed is not None:
                self._run(needed)

    @locked
    def settle(self, handle: int) -> None:
        """Run all of a stream. The host learns no order from it."""
        self.reach(lambda: not self.queues[handle], handle)

    @locked
    def synchronize(self, handle: int) -> None:
        """The host waits for all of a stream."""
        self.num_host_waits += 1
        self.settle(handle)
        self._learn(self.clocks[handle])

    @locked
    def touch_host(self, what: str, reads: list[Span], writes: list[Span]) -> None:
        """The host reads or writes memory now."""
        self.host[HOST] += 1
        self._check((HOST, self.host[HOST], f"{what} ({_site()})"), self.host, reads, writes)

    @locked
    def pending(self) -> list[Work]:
        """What has not run."""
        return [work for queue in self.queues.values() for work in queue]

    def describe(self) -> str:
        """Each stream and its head."""
        heads = ((h, q[0].what if q else "empty") for h, q in self.queues.items())
        held = {h: " (held)" if h in self.held else "" for h in self.queues}
        return ", ".join(f"{h:#x}{held[h]}: {what}" for h, what in heads)

    # --- inside ---------------------------------------------------------------------------------

    def _learn(self, clock: Clock) -> None:
        for who, tick in clock.items():
            self.host[who] = max(self.host.get(who, 0), tick)

    def _turns(self, count: int) -> None:
        for _ in range(count):
            ready = [h for h in self.queues if h not in self.held and self._is_ready(h)]
            if not ready:
                return
            self._run(self.random.choice(ready))

    def _is_ready(self, handle: int) -> bool:
        queue = self.queues[handle]
        if not queue:
            return False
        wait = queue[0].wait
        return wait is None or wait.reached

    def _needed(self, handle: int) -> int | None:
        """The stream whose turn brings another forward."""
        for _ in range(len(self.queues) + 1):
            if handle in self.held or not self.queues[handle]:
                return None
            wait = self.queues[handle][0].wait
            if wait is None or wait.reached:
                return handle
            handle = wait.stream
        return None

    def _run(self, handle: int) -> None:
        work = self.queues[handle].popleft()
        clock = self.clocks[handle]
        for who, tick in work.host.items():
            clock[who] = max(clock.get(who, 0), tick)
        clock[handle] = clock.get(handle, 0) + 1
        self.now += 1e-6
        if work.wait is not None:
            for who, tick in work.wait.clock.items():
                clock[who] = max(clock.get(who, 0), tick)
        elif work.record is not None:
            work.record.clock, work.record.reached = dict(clock), True
            work.record.ended = self.now
        else:
            assert work.run is not None and work.spans is not None
            touch = (handle, clock[handle], f"{work.what} ({work.site})")
            try:
                reads, writes = work.spans()
                self._check(touch, clock, reads, writes)
                work.run()
            except AssertionError as error:  # whoever is called now may swallow it
                self.found.append(str(error))
                raise

    def _check(self, touch: Touch, clock: Clock, reads: list[Span], writes: list[Span]) -> None:
        for spans, is_write in ((reads, False), (writes, True)):
            for address, num_bytes in spans:
                self.bounds(address, num_bytes, touch[2])
                for number in self._cells_of(address, num_bytes):
                    cell = self._cells.get(number)
                    if cell is None:
                        cell = self._cells[number] = Cell(self.origin(number))
                    self.num_checked += 1
                    self._order(cell.writer, touch, clock)
                    if is_write:
                        for reader in cell.readers.values():
                            self._order(reader, touch, clock)
                        cell.writer, cell.readers = touch, {}
                    else:
                        cell.readers[touch[0]] = touch

    def _order(self, before: Touch | None, now: Touch, clock: Clock) -> None:
        if before is None or before[1] <= clock.get(before[0], 0):
            return
        if now[0] == HOST:
            self.found.append(f"{now[2]} is not ordered after {before[2]}")
        raise Race(f"{now[2]} is not ordered after {before[2]}")

    @locked
    def forget(self, address: int, num_bytes: int) -> None:
        """Memory was handed out anew: nobody's accesses to it count any more."""
        numbers = self._cells_of(address, num_bytes)
        for number in [n for n in numbers if n in self._cells]:
            del self._cells[number]


def _nothing() -> None:
    """The kernel of a last owner."""


def _no_spans() -> tuple[list[Span], list[Span]]:
    return [], []


def _site() -> str:
    """The innermost calls that are not the double's."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < 4:
        name = frame.f_code.co_filename
        if "cuda_double" not in name:
            found.append(f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
