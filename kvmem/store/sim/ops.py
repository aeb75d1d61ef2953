"""What a simulated stream is given: one entry for each copy, launch, record and wait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from kvmem.store.device import Access, Fence, FrameIds, Memory, Moved, Stream, Ticket

#: Frames of the Python stack that an entry keeps of the call that queued it.
SITE_DEPTH = 12

CallSite = tuple[tuple[CodeType, int], ...]
#: What one clock knows: a number each for the host and the three streams.
Clock = tuple[int, int, int, int]
NEVER: Clock = (0, 0, 0, 0)


class SimFence(Fence):
    """A fence, and what is known once it is reached."""

    __slots__ = ("clock", "queries", "reached", "stream")

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.reached = False
        self.stream: Stream | None = None  # where it was recorded
        self.clock: Clock = NEVER  # of its stream at that point
        self.queries = 0  # asked for since it was recorded


class Copy(NamedTuple):
    """Whole frames from one arena to another."""

    target: Memory
    target_ids: FrameIds
    source: Memory
    source_ids: FrameIds


@dataclass(slots=True)
class Op:
    """One entry of a stream. ``kind`` says which of the last four is set."""

    number: int
    stream: Stream
    kind: str  # "copy", "launch", "record", "wait"
    host: Clock  # what the host knew when it was queued
    site: CallSite
    reads: Sequence[Access] = ()
    writes: Sequence[Access] = ()
    moved: Moved | None = None
    tick: int = 0  # its number on its stream's clock, 0 before it started
    fence: SimFence | None = None
    run: Callable[[], None] | None = None
    copy: Copy | None = None
    ticket: Ticket | None = None  # of a copy that may fail alone
    num_fragments: int = 1
    done: int = 0  # fragments that were copied
    fails_after: int = -1  # fragments after which the copy fails, -1 never
    stall: int = 0  # turns that it takes before its first fragment

    def __str__(self) -> str:
        text = f"{self.stream.name} {self.number} {self.kind}"
        if self.fence is not None:
            return f"{text} {self.fence.label}"
        if self.copy is not None:
            copy = self.copy
            return (
                f"{text} {copy.source.name}{copy.source_ids.tolist()} -> "
                f"{copy.target.name}{copy.target_ids.tolist()} in {self.num_fragments}"
            )
        parts = [f"reads {a.name}{ids.tolist()}" for a, ids in self.reads]
        parts += [f"writes {a.name}{ids.tolist()}" for a, ids in self.writes]
        return f"{text} {', '.join(parts)}"


def call_site() -> CallSite:
    """The calls that lead here, innermost first, those of the simulated device left out. ~1 us."""
    frame = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    at = frame
    while at is not None and len(found) < SITE_DEPTH:
        if at.f_globals.get("__package__") != __package__:
            found.append((at.f_code, at.f_lineno))
        at = at.f_back  # type: ignore[assignment]
    return tuple(found)


def told(site: CallSite) -> str:
    """A call site in words, innermost first: file:line function < its caller < ..."""
    return " < ".join(
        f"{'/'.join(code.co_filename.split('/')[-2:])}:{line} {code.co_name}" for code, line in site
    )
