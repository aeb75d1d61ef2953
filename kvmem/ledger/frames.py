"""Where the record of a frame lies in `state.frames`, and how it leaves the list it stands in."""

from __future__ import annotations

from .jit import compiled
from .state import DEVICE, HOST, State


@compiled
def device_at(state: State, f: int) -> int:
    """The index in `state.frames` of a device frame. O(1)."""
    return int(state.pools[DEVICE].first + f)


@compiled
def host_at(state: State, h: int) -> int:
    """The index in `state.frames` of a host frame. O(1)."""
    return int(state.pools[HOST].first + h)


@compiled
def unlink(state: State, tier: int, f: int) -> tuple[int, int]:
    """Join the neighbours of a frame in its list, the free one or the LRU; return them, 0 at an
    end, which the caller moves. O(1)."""
    first = state.pools[tier].first
    frame = state.frames[first + f]
    before, behind = int(frame.previous), int(frame.next)
    if before:
        state.frames[first + before].next = behind
    if behind:
        state.frames[first + behind].previous = before
    frame.previous = 0
    frame.next = 0
    return before, behind
