"""Cleaning: copying blocks to the host tier before they are evicted, so that eviction is free.

The evictable blocks of the device are *swept* from the oldest on: a dirty one is copied, a clean
one passed. What is swept is a run at the oldest end of the device LRU, ended by
`LEDGER.newest_swept`; a block that leaves the list leaves the run, one that comes back is at the
newest end, outside. So nothing is looked at twice while it stays.

    write_back      sweeps when free + swept frames fall below clean_low, up to clean_high
    write_through   sweeps all, and copies what running sequences publish (queued when published)

Under write_through the host LRU follows use: a swept block's host copy becomes the newest there,
and stays where it is when the device frame is evicted. As the sweep goes from deeper blocks to the
blocks they stand on, the host list keeps that order (R4).
"""

from __future__ import annotations

from . import lru
from .copies import host_frame_beside, plan_copy_out
from .frames import device_at, host_at
from .free_list import take_free_beside
from .jit import compiled
from .residency import evict_host, give_host_frame, is_clean, settle_lists
from .state import (
    DEVICE,
    HOST,
    IN_DEVICE_LRU,
    IN_HOST_LRU,
    QUEUED,
    SWEPT,
    WRITE_BACK,
    WRITE_THROUGH,
    State,
)

MAX_PASSED = 16  # blocks looked at for each that may be copied


@compiled
def wants_cleaning(state: State) -> bool:
    """True when `clean` would find something to look at. O(1)."""
    ledger, pool = state.ledger[0], state.pools[DEVICE]
    unswept = ledger.num_swept < pool.num_evictable
    if ledger.tier_policy == WRITE_THROUGH:
        return bool(unswept or ledger.num_queued > 0)
    if ledger.tier_policy == WRITE_BACK:
        return bool(unswept and pool.num_free + ledger.num_swept < ledger.clean_low)
    return False


@compiled
def host_frame_for(state: State, b: int) -> int:
    """The host frame that a dirty block is copied to: its own, a free one, or that of the oldest
    cached copy. 0: none that is older than what it would save. O(1)."""
    h = int(state.blocks[b].host_frame)
    if h:
        return h
    h = take_free_beside(state, HOST, host_frame_beside(state, int(state.blocks[b].device_frame)))
    if h == 0:
        h = int(state.pools[HOST].oldest)
        if h == 0 or state.frames[host_at(state, h)].fence_out > state.ledger[0].last_out:
            return 0  # the oldest was copied by this very plan
        evict_host(state)
    give_host_frame(state, b, h)
    return h


@compiled
def copy_ahead(state: State, b: int) -> bool:
    """List the copy of a published block to the host tier if a frame can be had there. O(1)."""
    if host_frame_for(state, b) == 0:
        return False
    plan_copy_out(state, b)
    settle_lists(state, b)
    state.ledger[0].blocks_cleaned += 1
    return True


@compiled
def sweep(state: State, max_blocks: int) -> int:
    """Sweep evictable blocks, oldest first, until `max_blocks` copies are listed; return how many.
    O(max_blocks)."""
    ledger, pool = state.ledger[0], state.pools[DEVICE]
    count = 0
    for _ in range(max_blocks * MAX_PASSED):
        enough = pool.num_free + ledger.num_swept >= ledger.clean_high
        if count == max_blocks or (enough and ledger.tier_policy == WRITE_BACK):
            break
        f = int(pool.oldest)
        if ledger.newest_swept:
            f = int(state.frames[device_at(state, ledger.newest_swept)].next)
        if f == 0:
            break
        b = int(state.frames[device_at(state, f)].block)
        if state.blocks[b].node and not is_clean(state, b):
            if copy_ahead(state, b):
                count += 1
            elif state.pools[HOST].oldest:
                break  # this plan copied the oldest, a child perhaps: it has to be issued first
        if ledger.tier_policy == WRITE_THROUGH and state.blocks[b].bits & IN_HOST_LRU:
            lru.remove(state, HOST, state.blocks[b].host_frame)
            lru.append_newest(state, HOST, state.blocks[b].host_frame)
        state.blocks[b].bits |= SWEPT
        ledger.newest_swept = f
        ledger.num_swept += 1
    return count


@compiled
def copy_queued(state: State, max_blocks: int) -> int:
    """Copy blocks that running sequences published, in that order; return how many.
    O(max_blocks)."""
    ledger = state.ledger[0]
    length = state.to_clean.shape[0]
    count = 0
    for _ in range(max_blocks * MAX_PASSED):
        if count == max_blocks or ledger.num_queued == 0:
            break
        b = int(state.to_clean[ledger.queue_begin])
        ledger.queue_begin = (ledger.queue_begin + 1) % length
        ledger.num_queued -= 1
        block = state.blocks[b]
        block.bits &= ~QUEUED
        held = block.device_frame != 0 and not block.bits & IN_DEVICE_LRU
        if held and block.node and not is_clean(state, b) and copy_ahead(state, b):
            count += 1
    return count


@compiled
def queue_block(state: State, b: int) -> None:
    """Note a block that a running sequence published. An id is queued
    once, also when another block has got it meanwhile, so the ring can't overflow. O(1)."""
    ledger, block = state.ledger[0], state.blocks[b]
    if block.bits & QUEUED:
        return
    block.bits |= QUEUED
    state.to_clean[(ledger.queue_begin + ledger.num_queued) % state.to_clean.shape[0]] = b
    ledger.num_queued += 1
