"""The free frames of one pool, linked through FRAME.previous / next (R1). Last in, first out.

In quarantine (``debug=True``) the first in is the first out: a frame that was given back keeps its
poison for as long as there is another, so that who still uses it is found out. Which frames are
free, and so what there is room for, is the same either way (R7).

`tier` is also the pool's index, since there is one layer group.
"""

from __future__ import annotations

from .frames import unlink
from .jit import compiled
from .state import State


@compiled
def take_free(state: State, tier: int) -> int:
    """Take a frame off the free list, 0 when there is none. O(1)."""
    f = int(state.pools[tier].free_head)
    if f:
        take(state, tier, f)
    return f


@compiled
def take_free_beside(state: State, tier: int, wanted: int) -> int:
    """Take frame `wanted` if it is free, else any; 0 when there is none. 0 wants none. O(1)."""
    pool = state.pools[tier]
    if wanted > 0 and wanted <= pool.num_frames and not pool.quarantine:
        frame = state.frames[pool.first + wanted]
        if frame.block == 0 and (frame.previous != 0 or pool.free_head == wanted):
            take(state, tier, wanted)
            return wanted
    return take_free(state, tier)


@compiled
def take(state: State, tier: int, f: int) -> None:
    """Take a frame off the free list, wherever it stands. O(1)."""
    pool = state.pools[tier]
    before, behind = unlink(state, tier, f)
    if not before:
        pool.free_head = behind
    if not behind:
        pool.free_tail = before
    pool.num_free -= 1
    if pool.num_frames - pool.num_free > pool.peak:
        pool.peak = pool.num_frames - pool.num_free


@compiled
def give_free(state: State, tier: int, f: int) -> None:
    """Put a vacated frame back on the free list. O(1)."""
    pool = state.pools[tier]
    before = pool.free_tail if pool.quarantine else 0
    behind = 0 if pool.quarantine else pool.free_head
    state.frames[pool.first + f].previous = before
    state.frames[pool.first + f].next = behind
    if before:
        state.frames[pool.first + before].next = f
    else:
        pool.free_head = f
    if behind:
        state.frames[pool.first + behind].previous = f
    else:
        pool.free_tail = f
    pool.num_free += 1
