"""Entry points for the tiers: swap out and in, give up, evict, pins, reset.

One compiled call a Manager call, whatever the batch. Each checks everything first and writes
afterwards (R8); it returns a code of decide.py, with the detail in `LEDGER.error_*`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .address import Addresses
from .cleaning import copy_queued, sweep, wants_cleaning
from .copies import plan_copy_out, sort_rows
from .decide import IN_STEP, NO_DEVICE_ROOM, NO_HOST_ROOM, OK, count_block
from .frames import device_at, host_at
from .free_list import give_free
from .issue import allow_for_rounds
from .jit import compiled, entry_point
from .residency import (
    arrive,
    evict_device,
    evict_host,
    give_host_frame,
    is_clean,
    release_busy,
    settle,
    take_host_frame,
)
from .sequence import any_in_step, make_resident, make_swapped, make_waiting
from .state import DEVICE, GROUP, HOST, IN_HOST_LRU, MARKED, WAITING, WRITE_THROUGH, State, opened
from .trie import remove_node

Ids = NDArray[np.int32]


@compiled
def count_host_need(state: State, seqs: Ids, need: NDArray[np.int64]) -> None:
    """Count, once a block, the host frames that swapping out these sequences takes and protects;
    leaves MARKED bits. O(blocks)."""
    need[0] = need[1] = 0
    for i in range(seqs.shape[0]):
        table = state.tables[seqs[i], GROUP]
        for j in range(table.start, table.start + table.num_blocks):
            block = state.blocks[state.table[j]]
            if block.bits & MARKED:
                continue
            block.bits |= MARKED
            if block.host_frame == 0:
                need[0] += 1
            elif block.bits & IN_HOST_LRU:
                need[1] += 1


@compiled
def unmark_tables(state: State, seqs: Ids) -> None:
    """Clear the MARKED bits of these sequences' blocks. O(blocks)."""
    for i in range(seqs.shape[0]):
        table = state.tables[seqs[i], GROUP]
        for j in range(table.start, table.start + table.num_blocks):
            state.blocks[state.table[j]].bits &= ~MARKED


@compiled
def save_table(state: State, s: int) -> None:
    """Give each dirty block of a SWAPPED table a host frame and list its copy, in the order of the
    device frames: that makes runs (copies.py). O(blocks log blocks)."""
    ledger, table = state.ledger[0], state.tables[s, GROUP]
    end = begin = int(ledger.num_out)
    for j in range(table.start, table.start + table.num_blocks):
        b = int(state.table[j])
        if not is_clean(state, b):
            state.out_list[end, 0] = state.blocks[b].device_frame  # a row that is filled below
            end += 1
        elif state.frames[host_at(state, state.blocks[b].host_frame)].fence_out <= ledger.last_out:
            ledger.clean_swap_outs += 1  # else it was copied a moment ago, for another owner
    sort_rows(state.out_list, begin, end, 0, False)
    for i in range(begin, end):
        f = int(state.out_list[i, 0])
        b = int(state.frames[device_at(state, f)].block)
        if state.blocks[b].host_frame == 0:
            give_host_frame(state, b, take_host_frame(state, f))
        plan_copy_out(state, b)


@entry_point
def swap_out(addresses: Addresses, seqs: Ids, need: NDArray[np.int64]) -> int:
    """Reserve host frames for the dirty blocks of these RESIDENT sequences, list the copies and
    make them SWAPPED. NO_HOST_ROOM changes nothing. O(blocks)."""
    state = opened(addresses)
    ledger, pool = state.ledger[0], state.pools[HOST]
    if any_in_step(state, seqs):
        return IN_STEP
    count_host_need(state, seqs, need)
    unmark_tables(state, seqs)
    if need[0] + need[1] > pool.num_free + pool.num_evictable:
        ledger.error_needed = need[0]
        ledger.error_available = pool.num_free + pool.num_evictable - need[1]
        return NO_HOST_ROOM
    for i in range(seqs.shape[0]):
        make_swapped(state, int(seqs[i]))  # protects the host copies there are
    for i in range(seqs.shape[0]):
        save_table(state, int(seqs[i]))
    return OK


@entry_point
def give_up(addresses: Addresses, seqs: Ids) -> int:
    """Let sequences keep only their tokens (how="recompute"). O(blocks)."""
    state = opened(addresses)
    if any_in_step(state, seqs):
        return IN_STEP
    for i in range(seqs.shape[0]):
        if state.sequences[seqs[i]].state != WAITING:
            make_waiting(state, int(seqs[i]))
    return OK


@compiled
def count_device_need(state: State, seqs: Ids, need: NDArray[np.int64]) -> None:
    """Count, once a block, the device frames that SWAPPED sequences take and reclaim; leaves
    MARKED bits. O(blocks)."""
    need[0] = need[1] = 0
    for i in range(seqs.shape[0]):
        table = state.tables[seqs[i], GROUP]
        for j in range(table.start, table.start + table.num_blocks):
            count_block(state, int(state.table[j]), need)
            state.blocks[state.table[j]].bits |= MARKED


@entry_point
def swap_in(addresses: Addresses, seqs: Ids, need: NDArray[np.int64]) -> int:
    """Make these SWAPPED sequences RESIDENT. NO_DEVICE_ROOM changes nothing. O(blocks)."""
    state = opened(addresses)
    ledger, pool = state.ledger[0], state.pools[DEVICE]
    count_device_need(state, seqs, need)
    unmark_tables(state, seqs)
    if need[0] + need[1] > pool.num_free + pool.num_evictable:
        ledger.error_needed = need[0]
        ledger.error_available = pool.num_free + pool.num_evictable - need[1]
        return NO_DEVICE_ROOM
    for i in range(seqs.shape[0]):
        make_resident(state, int(seqs[i]))
    allow_for_rounds(state, int(need[0]))
    for i in range(seqs.shape[0]):
        sequence, table = state.sequences[seqs[i]], state.tables[seqs[i], GROUP]
        fence = arrive(state, int(table.start), int(table.num_blocks), int(sequence.namespace))
        sequence.fence_in = max(sequence.fence_in, fence)
    release_busy(state)
    return OK


@entry_point
def evict(addresses: Addresses, num_blocks: int, tier: int) -> int:
    """Evict up to `num_blocks` blocks of a tier, oldest first; return how many. O(evicted)."""
    state = opened(addresses)
    count = 0
    while count < num_blocks and state.pools[tier].num_evictable:
        f = evict_device(state) if tier == DEVICE else evict_host(state)
        give_free(state, tier, f)
        count += 1
    return count


@entry_point
def clean(addresses: Addresses, max_blocks: int) -> int:
    """Copy up to `max_blocks` blocks to the host tier ahead of their eviction, see cleaning.py;
    return how many. O(max_blocks)."""
    state = opened(addresses)
    count = 0
    if wants_cleaning(state):
        count = sweep(state, max_blocks)
        if count < max_blocks and state.ledger[0].tier_policy == WRITE_THROUGH:
            count += copy_queued(state, max_blocks - count)
    return count


@entry_point
def change_pins(addresses: Addresses, ids: Ids, change: int) -> None:
    """Add a pin to each block, or take one off; the deepest first. O(blocks)."""
    state = opened(addresses)
    for i in range(ids.shape[0] - 1, -1, -1):
        b = int(ids[i])
        state.blocks[b].num_pins += change
        settle(state, b)


@entry_point
def reset(addresses: Addresses, namespace: int, roots: Ids) -> None:
    """Unpublish everything of a namespace (0: of all) and drop what has no owner; live sequences
    go on but publish no more. No step is open. `roots` is zeroed scratch, one entry a node.
    O(nodes)."""
    state = opened(addresses)
    for n in range(1, state.nodes.shape[0]):
        if state.node_blocks[n, GROUP] == 0:
            continue
        root = n
        while root > 0 and roots[root] == 0:
            root = int(state.nodes[root].parent)
        answer = -root if root < 0 else int(roots[root])
        i = n
        while i > 0 and roots[i] == 0:
            roots[i] = answer
            i = int(state.nodes[i].parent)
    for n in range(1, state.nodes.shape[0]):
        b = int(state.node_blocks[n, GROUP])
        if b and (namespace == 0 or roots[n] == namespace):
            remove_node(state, n)
            state.blocks[b].node = 0
            settle(state, b)
    for s in range(1, state.sequences.shape[0]):
        sequence = state.sequences[s]
        if sequence.state and (namespace == 0 or sequence.namespace == namespace):
            if state.tables[s, GROUP].num_blocks:
                sequence.publish = 0
                sequence.num_published = 0
            else:
                sequence.num_cached = 0
