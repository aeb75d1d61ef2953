"""The evictable frames of one pool from oldest to newest, linked through FRAME.previous / next.

A frame is here exactly while its block's IN_DEVICE_LRU or IN_HOST_LRU bit is set (residency.py
keeps the two together). Blocks enter deepest first, so a cached child is always older than its
parent and the oldest frame never holds a parent whose child is cached (R4).
"""

from __future__ import annotations

from .frames import unlink
from .jit import compiled
from .state import DEVICE, State


@compiled
def append_newest(state: State, tier: int, f: int) -> None:
    """Add a frame at the newest end. O(1)."""
    pool = state.pools[tier]
    newest = pool.newest
    state.frames[pool.first + f].previous = newest
    state.frames[pool.first + f].next = 0
    if newest:
        state.frames[pool.first + newest].next = f
    else:
        pool.oldest = f
    pool.newest = f
    pool.num_evictable += 1


@compiled
def remove(state: State, tier: int, f: int) -> None:
    """Take a frame out of the list, wherever it stands. O(1)."""
    pool = state.pools[tier]
    older, newer = unlink(state, tier, f)
    if not older:
        pool.oldest = newer
    if not newer:
        pool.newest = older
    pool.num_evictable -= 1


@compiled
def leave_swept(state: State, f: int) -> None:
    """Take a device frame that is about to leave the list out of its swept run: the frames at the
    oldest end that cleaning has passed (cleaning.py). O(1)."""
    ledger = state.ledger[0]
    ledger.num_swept -= 1
    if ledger.newest_swept == f:
        ledger.newest_swept = state.frames[state.pools[DEVICE].first + f].previous
