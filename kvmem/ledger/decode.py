"""Planning a plain decode batch in one pass: every row computes one token and nothing moves in.

What `decide` and `carry_out` do for any batch, `plan_decode` does for this most frequent one, with
the same result, several times faster: no row needs the trie, a copy in, a copy on write or a longer
table. `offer_decode` says when that is so, and fills the arrays meanwhile, so that each row's
records are read once; else the general way is taken, which is right for every batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .carry_out import new_block, note_waits, remember_row
from .decide import NO_HASH, PLANNED, add_hash, has_hash
from .jit import compiled
from .sequence import path_end
from .state import DEVICE, GROUP, RESIDENT, Rows, State
from .step_arrays import (
    EPOCH,
    IS_FILLED,
    MAX_QUERY_LEN,
    MAX_SEQ_LEN,
    NUM_READY,
    NUM_ROWS,
    NUM_TOKENS,
    Batch,
)
from .trie import hash_row, parent_hash

NEW_BLOCK = 0
NOT_PLAIN = -1


@compiled
def offer_row(state: State, batch: Batch, i: int) -> int:
    """Fill the arrays of row `i` if it is plain: RESIDENT, one pending token, whose slot is in a
    block of its own or begins a new one. Returns that block's id, NEW_BLOCK, or NOT_PLAIN. O(1)."""
    s = batch.seqs[i]
    sequence = state.sequences[s]
    stored = sequence.num_stored
    if (
        sequence.state != RESIDENT
        or sequence.step != 0
        or sequence.num_drafts != 0
        or sequence.num_computed != stored
        or sequence.num_tokens != stored + 1
    ):
        return NOT_PLAIN
    batch.tokens[i] = state.tokens[sequence.tokens_start + stored]
    batch.positions[i] = stored
    batch.seq_lens[i] = stored + 1
    batch.num_tokens[i] = 1
    batch.is_ready[i] = True
    batch.query_start[i] = i
    batch.last[i] = i
    table = state.tables[s, GROUP]
    batch.table_start[i] = table.start
    block_size = state.node_keys.shape[1]
    filled = stored - (table.num_blocks - 1) * block_size  # of its last block; no division
    if filled == block_size:
        return NEW_BLOCK if table.num_blocks < table.capacity else NOT_PLAIN
    if filled <= 0 or filled > block_size:
        return NOT_PLAIN
    b = state.table[table.start + table.num_blocks - 1]
    block = state.blocks[b]
    batch.slot_mapping[i] = np.int64(block.device_frame) * block_size + filled
    is_private = block.ref_count == 1 and block.node == 0 and block.num_pins == 0
    if is_private and block.host_frame == 0 and block.num_tokens == filled:
        return int(b)
    return NOT_PLAIN


@compiled
def waits_for_another(state: State, batch: Batch, i: int, hashes: NDArray[np.int64]) -> bool:
    """True when row `i` completes a block that an earlier row completes too: with a budget it waits
    for that one (decide.py). Else its block is noted in `hashes`. O(block_size), mostly O(1)."""
    sequence = state.sequences[batch.seqs[i]]
    block_size = state.node_keys.shape[1]
    begin = sequence.num_published * block_size
    if begin + block_size != batch.seq_lens[i] or sequence.num_unknown:
        return False  # it completes none that is known, or one before it is not published
    parent = path_end(state, int(batch.seqs[i]))
    row_hash = hash_row(state, parent_hash(state, parent), int(sequence.keys_start + begin))
    if has_hash(hashes, row_hash):
        return True
    if sequence.publish:
        add_hash(hashes, row_hash)
    return False


@compiled
def offer_decode(
    state: State, batch: Batch, rows: Rows, budget: int, reserve: int, hashes: NDArray[np.int64]
) -> bool:
    """Fill the arrays of a plain batch; False when it isn't one, or there is no room for it: then
    they hold nothing of worth. Nothing else is written, but `hashes` with a budget (`budget` >= 0).
    O(rows)."""
    block_size = state.node_keys.shape[1]
    num_rows = rows.shape[0]
    has_budget = budget >= 0
    if block_size == 1 or (has_budget and budget < num_rows):
        return False  # a block of one token may be a hit
    if has_budget:
        hashes[:] = NO_HASH
    new_blocks = 0
    longest = 0
    for i in range(num_rows):
        b = offer_row(state, batch, i)
        if b == NOT_PLAIN or (has_budget and waits_for_another(state, batch, i, hashes)):
            return False
        rows[i].tail = b
        if b == NEW_BLOCK:
            new_blocks += 1
        longest = max(longest, batch.seq_lens[i])
    pool = state.pools[DEVICE]
    fits = (longest + block_size - 1) // block_size + reserve <= pool.num_frames
    room = pool.num_free + pool.num_evictable - new_blocks >= reserve
    batch.query_start[num_rows] = num_rows
    report = batch.report
    report[NUM_ROWS] = report[NUM_TOKENS] = report[NUM_READY] = num_rows
    report[MAX_QUERY_LEN] = 1 if num_rows else 0
    report[MAX_SEQ_LEN] = longest
    report[IS_FILLED] = 1
    return bool(fits and room and new_blocks <= state.out_list.shape[0])


@compiled
def begin_block(state: State, s: int, row_at: Rows) -> int:
    """Give a row the new block that its token begins; return the token's slot. O(1)."""
    table = state.tables[s, GROUP]
    b = new_block(state, int(state.sequences[s].namespace))
    f = state.blocks[b].device_frame
    state.table[table.start + table.num_blocks] = b
    state.frame_table[table.start + table.num_blocks] = f
    table.num_blocks += 1
    row_at[0].tail = b
    return int(f) * state.node_keys.shape[1]


@compiled
def plan_decode(state: State, batch: Batch, rows: Rows) -> None:
    """Take hold of the rows that `offer_decode` filled the arrays of. O(rows)."""
    ledger = state.ledger[0]
    ledger.epoch += 1
    batch.report[EPOCH] = ledger.epoch
    in_flight = ledger.last_out > ledger.retired_out or ledger.last_in > ledger.retired_in
    for i in range(rows.shape[0]):
        s = batch.seqs[i]
        row, sequence = rows[i], state.sequences[s]
        row.sequence = s
        row.reason = PLANNED
        row.num_tokens = 1
        row.found_start = row.num_found = 0
        remember_row(state, rows[i : i + 1])
        if sequence.queried == 0:
            sequence.queried = 1
            sequence.num_cached = 0
        sequence.step = ledger.epoch
        sequence.last_step = ledger.epoch
        if row.tail == NEW_BLOCK:
            batch.slot_mapping[i] = begin_block(state, s, rows[i : i + 1])
        elif in_flight:
            note_waits(state, int(state.blocks[row.tail].device_frame))
        if in_flight:
            ledger.step_after_in = max(ledger.step_after_in, sequence.fence_in)
