"""Sequence records and their tables: sharing, letting go, cutting, changing state (R2, R3).

Tables are released from their end to their start, so that deeper blocks are older in the LRU
lists than the blocks they stand on (lru.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .frames import host_at
from .jit import compiled
from .residency import enter_residency, leave_residency, settle, settle_lists
from .spans import TABLE, TOKENS, give_span
from .state import GROUP, RESIDENT, SWAPPED, WAITING, State
from .trie import remove_node


@compiled
def num_blocks_for(state: State, num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens. O(1)."""
    block_size = state.ledger[0].block_size
    return int((num_tokens + block_size - 1) // block_size)


@compiled
def any_in_step(state: State, seqs: NDArray[np.int32]) -> bool:
    """True when one of these is planned in an open step; `error_row` says which. O(sequences)."""
    for i in range(seqs.shape[0]):
        if state.sequences[seqs[i]].step:
            state.ledger[0].error_row = i
            return True
    return False


@compiled
def entry(state: State, s: int, i: int) -> int:
    """The block id at table entry `i`. O(1)."""
    return int(state.table[state.tables[s, GROUP].start + i])


@compiled
def num_known(state: State, s: int) -> int:
    """Leading tokens that are accepted and whose values are here: what can be looked up and
    published (R5). O(1)."""
    sequence = state.sequences[s]
    return int(sequence.num_tokens - sequence.num_drafts - sequence.num_unknown)


@compiled
def path_end(state: State, s: int) -> int:
    """The trie parent of the first block that is not published yet. O(1)."""
    sequence = state.sequences[s]
    if sequence.num_published == 0:
        return int(-sequence.namespace)
    return int(state.blocks[entry(state, s, sequence.num_published - 1)].node)


@compiled
def release_entry(state: State, s: int, b: int) -> None:
    """Take one table entry's reference off a block. O(1)."""
    state.blocks[b].ref_count -= 1
    if state.sequences[s].state == RESIDENT:
        leave_residency(state, b, state.sequences[s].last_step)
    settle(state, b)


@compiled
def release_tail(state: State, s: int, keep: int) -> None:
    """Let go of all table entries from `keep` on, deepest first. O(entries)."""
    table = state.tables[s, GROUP]
    state.sequences[s].table_changed = state.ledger[0].clock
    for i in range(table.num_blocks - 1, keep - 1, -1):
        b = int(state.table[table.start + i])
        state.table[table.start + i] = 0
        state.frame_table[table.start + i] = 0
        table.num_blocks = i
        release_entry(state, s, b)
    if state.sequences[s].num_published > keep:
        state.sequences[s].num_published = keep


@compiled
def trim_tail(state: State, s: int) -> None:
    """Make a sequence's own partial last block say what this sequence has stored. O(probes).

    The block's later slots are void from now on, so neither its count nor that of its host copy
    may cover them (a later fill to the old count would pass for clean). A published block is
    unpublished only when nobody else relies on it (R4); else the next write copies it.
    """
    sequence = state.sequences[s]
    num_tokens = sequence.num_stored % state.ledger[0].block_size
    if num_tokens == 0:
        return
    b = entry(state, s, sequence.num_stored // state.ledger[0].block_size)
    block = state.blocks[b]
    if block.ref_count > 1 or block.num_pins > 0:
        return
    if block.node:
        if state.nodes[block.node].num_children > 0:
            return
        remove_node(state, int(block.node))
        block.node = 0
    block.num_tokens = min(block.num_tokens, num_tokens)
    if block.host_frame:
        frame = state.frames[host_at(state, block.host_frame)]
        frame.num_tokens = min(frame.num_tokens, num_tokens)


@compiled
def cut(state: State, s: int, num_tokens: int) -> None:
    """Drop the tokens of a sequence from `num_tokens` on, and the blocks only they need.
    O(blocks released)."""
    sequence = state.sequences[s]
    block_size = state.ledger[0].block_size
    dropped = sequence.num_tokens - num_tokens
    sequence.num_tokens = num_tokens
    sequence.num_drafts = max(0, sequence.num_drafts - dropped)
    sequence.num_unknown = max(0, sequence.num_unknown - dropped)  # never beside drafts
    sequence.num_computed = min(sequence.num_computed, num_tokens)
    if sequence.num_stored > num_tokens:
        sequence.left_in = sequence.fence_in
        sequence.num_stored = num_tokens
        release_tail(state, s, num_blocks_for(state, num_tokens))
        sequence.num_published = min(sequence.num_published, num_tokens // block_size)
        trim_tail(state, s)
    sequence.num_cached = min(sequence.num_cached, num_tokens)


@compiled
def cut_lost(state: State, s: int) -> None:
    """Let go of the K/V that a failed copy took, and of all after it; the tokens stay, to be
    computed again. O(blocks released)."""
    sequence = state.sequences[s]
    keep = int(sequence.lost) - 1
    sequence.lost = 0
    num_tokens = keep * state.ledger[0].block_size
    if sequence.num_stored <= num_tokens:
        return  # it was about to take the lost blocks from the trie, and has put that back
    release_tail(state, s, keep)
    sequence.num_stored = num_tokens
    sequence.num_computed = min(sequence.num_computed, num_tokens)
    sequence.num_cached = min(sequence.num_cached, num_tokens)
    if keep == 0:
        sequence.state = WAITING
        sequence.left_in = sequence.fence_in
        sequence.fence_in = 0
        sequence.fresh = 0


@compiled
def make_waiting(state: State, s: int) -> None:
    """Give up all blocks of a sequence and keep its tokens (recompute). O(blocks)."""
    sequence = state.sequences[s]
    release_tail(state, s, np.int64(0))
    sequence.state = WAITING
    sequence.num_computed = 0
    sequence.num_stored = 0
    sequence.num_published = 0
    sequence.num_cached = 0
    sequence.left_in = sequence.fence_in
    sequence.fence_in = 0
    sequence.fresh = 0
    state.ledger[0].recomputes += 1


@compiled
def make_swapped(state: State, s: int) -> None:
    """Stop relying on the device frames of a RESIDENT sequence; the caller saw to host frames.
    O(blocks)."""
    sequence = state.sequences[s]
    table = state.tables[s, GROUP]
    sequence.state = SWAPPED
    sequence.num_swaps += 1
    state.ledger[0].swap_outs += 1
    for i in range(table.num_blocks - 1, -1, -1):
        b = int(state.table[table.start + i])
        leave_residency(state, b, sequence.last_step)
        settle_lists(state, b)


@compiled
def make_resident(state: State, s: int) -> None:
    """Count a WAITING or SWAPPED table as RESIDENT; frames are given by `arrive`. O(blocks)."""
    sequence = state.sequences[s]
    if sequence.state == RESIDENT:
        return
    if sequence.state == SWAPPED:
        state.ledger[0].swap_ins += 1
    table = state.tables[s, GROUP]
    for i in range(table.num_blocks):
        enter_residency(state, int(state.table[table.start + i]))
    sequence.state = RESIDENT
    sequence.fresh = 1
    sequence.table_changed = state.ledger[0].clock


@compiled
def end_sequence(state: State, s: int) -> None:
    """Release a sequence's blocks, spans and record. O(blocks)."""
    ledger, sequence, table = state.ledger[0], state.sequences[s], state.tables[s, GROUP]
    release_tail(state, s, np.int64(0))
    if table.capacity:
        give_span(state, TABLE, state.table, int(table.start), int(table.capacity))
        table.capacity = 0
    if sequence.tokens_capacity:
        capacity = int(sequence.tokens_capacity)
        give_span(state, TOKENS, state.tokens, int(sequence.tokens_start), capacity)
        if sequence.keys_start != sequence.tokens_start:
            give_span(state, TOKENS, state.tokens, int(sequence.keys_start), capacity)
        sequence.tokens_capacity = 0
    state.namespaces[sequence.namespace].num_sequences -= 1
    sequence.state = 0
    sequence.at_end = 0
    sequence.lost = 0
    sequence.next_free = ledger.sequence_free
    ledger.sequence_free = s
    ledger.num_sequences -= 1
