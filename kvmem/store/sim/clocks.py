"""Happens-before: proof that every two conflicting accesses to a frame are ordered (R6).

One clock for the host and one for each stream; a clock is four numbers, what its owner knows of
each of the four. Work starts with what its stream and, when it was queued, the host knew; a wait
joins the clock of its fence; the host joins a fence that it has seen reached. An access is ordered
after another when its clock knows the other's number. No lucky timing is needed: of two unordered
accesses the one that runs second is told, whichever it is.

All threads of the host count as one: the store's callers share a lock (``Runtime.lock``), and races
between threads of Python are not what this looks for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvmem.errors import RaceError
from kvmem.store.device import Access, FrameIds, Named, Stream
from kvmem.store.sim.ops import NEVER, CallSite, Clock, Op, told

#: Place of the host in a clock; stream s is at s + 1.
HOST = 0
NAMES = ("host", "compute", "out", "in")


class Touch:
    """One access that a cell remembers: by whom, at which number, called from where."""

    __slots__ = ("site", "tick", "what", "who")

    def __init__(self, who: int, tick: int, what: str, site: CallSite) -> None:
        self.who, self.tick, self.what, self.site = who, tick, what, site


class Cell:
    """The last writer of one frame (or staging buffer, or table row) and who read it since."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer: Touch | None = None
        self.readers: dict[int, Touch] = {}


def joined(one: Clock, other: Clock) -> Clock:
    """What both know together."""
    return (
        max(one[0], other[0]),
        max(one[1], other[1]),
        max(one[2], other[2]),
        max(one[3], other[3]),
    )


class Clocks:
    """The clocks of one device and the cells of its arenas."""

    def __init__(self) -> None:
        self.host: Clock = NEVER
        self.streams: dict[Stream, Clock] = dict.fromkeys(Stream, NEVER)
        self._cells: dict[tuple[str, int], Cell] = {}
        self.num_checked = 0  # accesses

    def tick_host(self) -> Clock:
        """The host does something: what it knows now."""
        self.host = (self.host[0] + 1, *self.host[1:])
        return self.host

    def start(self, op: Op) -> None:
        """An entry of a stream starts: number it and check what it touches. Raises RaceError."""
        clock = list(joined(self.streams[op.stream], op.host))
        clock[op.stream + 1] += 1
        op.tick = clock[op.stream + 1]
        self.streams[op.stream] = now = (clock[0], clock[1], clock[2], clock[3])
        if op.reads or op.writes:
            touch = Touch(op.stream + 1, op.tick, str(op), op.site)
            self.check(touch, now, op.reads, op.writes)

    def after(self, stream: Stream, clock: Clock) -> None:
        """A stream has passed a wait: it knows what the fence knew."""
        self.streams[stream] = joined(self.streams[stream], clock)

    def host_knows(self, clock: Clock) -> None:
        """The host has seen a fence reached."""
        self.host = joined(self.host, clock)

    def check(
        self, touch: Touch, clock: Clock, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        """Check and note one access to several cells. Raises RaceError. O(cells)."""
        for arena, ids in reads:
            for number in cells_of(arena, ids):
                cell = self._cell(arena.name, number)
                _require_order(cell.writer, touch, clock, arena.name, number, "write", "read")
                cell.readers[touch.who] = touch
        for arena, ids in writes:
            for number in cells_of(arena, ids):
                cell = self._cell(arena.name, number)
                _require_order(cell.writer, touch, clock, arena.name, number, "write", "write")
                for reader in cell.readers.values():
                    _require_order(reader, touch, clock, arena.name, number, "read", "write")
                cell.writer = touch
                cell.readers = {}

    def check_queued(
        self, touch: Touch, op: Op, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        """An access of the host against queued work, which it can't have waited for."""
        all_of_it = (*op.reads, *op.writes)
        for mine, others, second in ((reads, op.writes, "read"), (writes, all_of_it, "write")):
            for arena, ids in mine:
                for other, used in others:
                    same = other.name == arena.name
                    both = set(cells_of(arena, ids)) & set(cells_of(other, used)) if same else ()
                    if both:
                        before = Touch(op.stream + 1, sys.maxsize, str(op), op.site)
                        _require_order(
                            before, touch, self.host, arena.name, min(both), "access", second
                        )

    def _cell(self, name: str, number: int) -> Cell:
        self.num_checked += 1
        key = (name, number)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell()
        return cell


def cells_of(arena: Named, ids: FrameIds) -> list[int]:
    """The cells of an access: a frame is as many as the arena says it has pieces, and who touches
    one layer says so by the pieces (`Arena.pieces`)."""
    count = getattr(arena, "num_pieces", 1)
    numbers: list[int] = ids.tolist()
    if count == 1:
        return numbers
    return [number * count + i for number in numbers for i in range(count)]


def _require_order(
    before: Touch | None, now: Touch, clock: Clock, name: str, number: int, first: str, second: str
) -> None:
    """Raise RaceError unless the clock knows of the earlier access. Within one piece of work, such
    as the copies of a batch or the threads of a kernel, there is no order at all."""
    if before is None or (before.tick <= clock[before.who] and before is not now):
        return
    raise RaceError(
        f"frame {number} of the {name} arena: the {second} by {_short(now)} is not ordered after "
        f"the {first} by {_short(before)} (R6)",
        first=f"{before.what}: {told(before.site)}",
        second=f"{now.what}: {told(now.site)}",
    )


def _short(touch: Touch) -> str:
    """Stream and the innermost call."""
    where = told(touch.site[:1])
    number = "queued" if touch.tick == sys.maxsize else f"#{touch.tick}"
    return f"{NAMES[touch.who]} {number} ({where})"
