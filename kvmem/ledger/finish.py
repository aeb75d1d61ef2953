"""The end of a step: count its tokens and publish (commit), or put everything back (abort)."""

from __future__ import annotations

from .decide import PLANNED
from .jit import compiled, prefetch
from .publish import publish
from .residency import leave_residency, settle
from .sequence import cut_lost, end_sequence, entry, path_end, release_tail
from .state import FREED, GROUP, LOST, WAITING, Rows, State
from .trie import hash_row, home, parent_hash

AT_ONCE = 16  # rows whose cache misses overlap


@compiled
def release_copy_source(state: State, row_at: Rows, epoch: int) -> None:
    """Let go of the block that a row copied on write. O(1)."""
    b = int(row_at[0].copy_source)
    if b:
        state.blocks[b].ref_count -= 1
        leave_residency(state, b, epoch)
        settle(state, b)


@compiled
def fill_counts(state: State, s: int, first: int, end: int) -> None:
    """Note how many slots of a sequence's blocks `first`..`end` (tokens) are valid. O(blocks)."""
    block_size = state.ledger[0].block_size
    for i in range(first // block_size, (end + block_size - 1) // block_size):
        block = state.blocks[entry(state, s, i)]
        block.num_tokens = max(int(block.num_tokens), min(block_size, end - i * block_size))


@compiled
def leave_step(state: State, row_at: Rows) -> None:
    """Let a sequence out of its step. One freed inside it goes now; one whose blocks a failed copy
    took is cut now. O(1), or O(blocks)."""
    sequence = state.sequences[row_at[0].sequence]
    sequence.step = 0
    if sequence.at_end & FREED:
        end_sequence(state, int(row_at[0].sequence))
    elif sequence.at_end & LOST:
        sequence.at_end = 0
        cut_lost(state, int(row_at[0].sequence))


@compiled
def commit_row(state: State, row_at: Rows, epoch: int) -> None:
    """Count a row's tokens as computed and publish its full blocks (R5). O(its tokens)."""
    ledger, row = state.ledger[0], row_at[0]
    s = int(row.sequence)
    sequence = state.sequences[s]
    ledger.hit_tokens += row.num_found * ledger.block_size
    if row.old_queried == 0:
        ledger.query_tokens += sequence.num_tokens - sequence.num_drafts
    sequence.num_computed += row.num_tokens
    if sequence.num_computed > sequence.num_stored:
        fill_counts(state, s, int(sequence.num_stored), int(sequence.num_computed))
        sequence.num_stored = sequence.num_computed
    sequence.fresh = 0
    release_copy_source(state, row_at, epoch)
    publish(state, s)
    leave_step(state, row_at)


@compiled
def fills_block(state: State, row_at: Rows) -> bool:
    """True when a row that decode.py planned completes a block, so that it is published. O(1)."""
    row, sequence = row_at[0], state.sequences[row_at[0].sequence]
    block_size = state.node_keys.shape[1]
    return bool(row.tail and (sequence.num_published + 1) * block_size == sequence.num_stored + 1)


@compiled
def ask_for_nodes(state: State, rows: Rows) -> None:
    """Prefetch what publishing the blocks of these few rows will read, so that the cache misses of
    one row overlap with those of others (as in trie.find_path). O(rows)."""
    block_size = state.node_keys.shape[1]
    count = 0
    for i in range(rows.shape[0]):
        if fills_block(state, rows[i : i + 1]):
            count += 1
            sequence = state.sequences[rows[i].sequence]
            if sequence.num_published:
                b = entry(state, int(rows[i].sequence), int(sequence.num_published) - 1)
                prefetch(state.nodes, state.blocks[b].node)
            prefetch(state.frames, state.blocks[rows[i].tail].device_frame)
    if count < 2:
        return  # nothing to overlap with: the usual case
    n = int(state.ledger[0].node_free)
    for i in range(rows.shape[0]):
        if fills_block(state, rows[i : i + 1]):
            s = int(rows[i].sequence)
            sequence = state.sequences[s]
            start = int(sequence.keys_start + sequence.num_published * block_size)
            chained = parent_hash(state, path_end(state, s))
            prefetch(state.index, home(state, hash_row(state, chained, start)))
            prefetch(state.node_keys, n)
            prefetch(state.node_blocks, n)
            n = int(state.nodes[n].parent)


@compiled
def commit_decode(state: State, row_at: Rows) -> None:
    """`commit_row` of a row that decode.py planned: one token, into its block `tail`. O(1), or
    O(block_size) when that is full."""
    row = row_at[0]
    sequence, block = state.sequences[row.sequence], state.blocks[row.tail]
    if row.old_queried == 0:
        state.ledger[0].query_tokens += sequence.num_tokens - sequence.num_drafts
    block_size = state.node_keys.shape[1]
    stored = sequence.num_stored + 1
    block.num_tokens += 1
    sequence.num_computed = sequence.num_stored = stored
    sequence.fresh = 0
    if (sequence.num_published + 1) * block_size <= stored:
        publish(state, int(row.sequence))
    leave_step(state, row_at)


@compiled
def restore_copy(state: State, row_at: Rows) -> None:
    """Give a row its shared block back and drop the copy. O(1)."""
    row = row_at[0]
    if row.copy_source == 0:
        return
    at = state.tables[row.sequence, GROUP].start + row.copy_index
    b = int(state.table[at])
    state.table[at] = row.copy_source
    state.frame_table[at] = state.blocks[row.copy_source].device_frame
    state.sequences[row.sequence].table_changed = state.ledger[0].clock
    state.blocks[b].ref_count = 0
    leave_residency(state, b, state.sequences[row.sequence].last_step)
    settle(state, b)


@compiled
def abort_row(state: State, row_at: Rows) -> None:
    """Put a row back as it was before its step; a SWAPPED one stays RESIDENT. O(blocks taken)."""
    row = row_at[0]
    s = int(row.sequence)
    sequence = state.sequences[s]
    restore_copy(state, row_at)
    release_tail(state, s, int(row.old_blocks))
    sequence.num_computed = row.old_computed
    sequence.num_stored = row.old_stored
    sequence.num_published = row.old_published
    sequence.num_cached = row.old_cached
    sequence.queried = row.old_queried
    if row.old_state == WAITING:
        sequence.state = WAITING
        sequence.fresh = 0
    leave_step(state, row_at)


@compiled
def finish(state: State, rows: Rows, epoch: int, commit: bool) -> None:
    """End a step. Rows are put back in reverse, so that the LRU keeps its order. O(tokens)."""
    if commit:
        for i in range(rows.shape[0]):
            if i % AT_ONCE == 0:
                ask_for_nodes(state, rows[i : i + AT_ONCE])
            if rows[i].reason != PLANNED:
                continue
            if rows[i].tail:
                commit_decode(state, rows[i : i + 1])
            else:
                commit_row(state, rows[i : i + 1], epoch)
    else:
        for i in range(rows.shape[0] - 1, -1, -1):
            if rows[i].reason == PLANNED:
                abort_row(state, rows[i : i + 1])
