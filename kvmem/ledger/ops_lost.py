"""Entry points for what failed copies took: host copies that never came about, and lost K/V.

`flights.py` finds the blocks; these functions let go of them. Nothing here can be refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .address import Addresses
from .frames import host_at
from .free_list import give_free
from .jit import compiled, entry_point
from .residency import settle, settle_lists, vacate_host
from .sequence import cut_lost
from .state import GROUP, HOST, LOST, UNSAVED, State, opened
from .trie import remove_node

Ids = NDArray[np.int32]
Flags = NDArray[np.int8]

UNKNOWN, GONE, KEPT = 0, 1, 2  # of a node


@entry_point
def forget_copies(addresses: Addresses, ids: Ids) -> None:
    """The copies out of these blocks failed; their device frames are intact. One that a SWAPPED
    sequence relies on stays on the device, to be copied when it is evicted. O(blocks)."""
    state = opened(addresses)
    for i in range(ids.shape[0]):
        b = int(ids[i])
        block = state.blocks[b]
        state.frames[host_at(state, block.host_frame)].num_tokens = 0
        if block.ref_count > block.num_resident:
            block.bits |= UNSAVED
        else:
            give_free(state, HOST, vacate_host(state, b))
            settle_lists(state, b)


@compiled
def first_lost(state: State, s: int, is_lost: Flags) -> int:
    """The first table entry of a sequence that names a lost block, -1 none. O(blocks)."""
    table = state.tables[s, GROUP]
    for i in range(table.num_blocks):
        if is_lost[state.table[table.start + i]]:
            return i
    return -1


@compiled
def remove_subtrees(state: State, is_lost: Flags, fate: Flags) -> None:
    """Unpublish each lost block and all below it, which was computed over it or can't be reached
    without it (R4). `fate` is zeroed scratch, one entry a node. O(nodes)."""
    for n in range(1, state.nodes.shape[0]):
        if state.node_blocks[n, GROUP] == 0:
            continue
        m = n
        while m > 0 and fate[m] == UNKNOWN and not is_lost[state.node_blocks[m, GROUP]]:
            m = int(state.nodes[m].parent)
        answer = KEPT
        if m > 0:
            answer = fate[m] if fate[m] else GONE
            fate[m] = answer
        i = n
        while i > 0 and fate[i] == UNKNOWN:
            fate[i] = answer
            i = int(state.nodes[i].parent)
    for n in range(1, state.nodes.shape[0]):
        b = int(state.node_blocks[n, GROUP])
        if b and fate[n] == GONE:
            remove_node(state, n)
            state.blocks[b].node = 0
            settle(state, b)


@entry_point
def lose(addresses: Addresses, is_lost: Flags, fate: Flags, found: NDArray[np.int64]) -> int:
    """Cut each sequence that names a lost block before the first of them, one in an open step when
    that step ends, and unpublish what hangs on them. `found` gets (record, first lost token, open
    step) of each; returns how many. O(table entries + nodes)."""
    state = opened(addresses)
    count = 0
    for s in range(1, state.sequences.shape[0]):
        sequence = state.sequences[s]
        i = first_lost(state, s, is_lost) if sequence.state else -1
        if i < 0:
            continue
        sequence.lost = min(sequence.lost, i + 1) if sequence.lost else i + 1
        sequence.num_published = min(sequence.num_published, i)
        found[count, 0] = s
        found[count, 1] = i * state.ledger[0].block_size
        found[count, 2] = sequence.step
        count += 1
    remove_subtrees(state, is_lost, fate)
    for k in range(count):
        s = int(found[k, 0])
        if state.sequences[s].step:
            state.sequences[s].at_end |= LOST
        else:
            cut_lost(state, s)
    return count
