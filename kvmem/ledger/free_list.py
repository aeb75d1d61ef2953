"""The free frames of one pool, linked through FRAME.next (R1). Last in, first out.

`tier` is also the pool's index, since there is one layer group.
"""

from __future__ import annotations

from .jit import compiled
from .state import State


@compiled
def take_free(state: State, tier: int) -> int:
    """Take a frame off the free list, 0 when there is none. O(1)."""
    pool = state.pools[tier]
    f = int(pool.free_head)
    if f:
        pool.free_head = state.frames[pool.first + f].next
        state.frames[pool.first + f].next = 0
        pool.num_free -= 1
        if pool.num_frames - pool.num_free > pool.peak:
            pool.peak = pool.num_frames - pool.num_free
    return f


@compiled
def give_free(state: State, tier: int, f: int) -> None:
    """Put a vacated frame back on the free list. O(1)."""
    pool = state.pools[tier]
    state.frames[pool.first + f].next = pool.free_head
    pool.free_head = f
    pool.num_free += 1
