"""Pass 2 of a plan: carry out what decide.py decided. There is room, so nothing here can fail.

First every planned row takes hold of what it keeps (hits, its own cached blocks), then frames are
taken for what is missing: so no row's eviction can take what another row counted on (R7).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .decide import PLANNED, clear_marks, computed_after, stored_after, writes_shared
from .frames import device_at
from .issue import allow_for_rounds
from .jit import compiled
from .residency import (
    arrive,
    enter_residency,
    give_device_frame,
    list_fill,
    release_busy,
    take_block,
    take_device_frame,
)
from .sequence import entry, make_resident, num_blocks_for, trim_tail
from .spans import ensure_table
from .state import GROUP, RESIDENT, Rows, State
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


@compiled
def remember_row(state: State, row_at: Rows) -> None:
    """Note what an exception in the step's body has to restore. O(1)."""
    row = row_at[0]
    sequence = state.sequences[row.sequence]
    row.old_state = sequence.state
    row.old_blocks = state.tables[row.sequence, GROUP].num_blocks
    row.old_computed = sequence.num_computed
    row.old_stored = sequence.num_stored
    row.old_published = sequence.num_published
    row.old_cached = sequence.num_cached
    row.old_queried = sequence.queried
    row.copy_index = -1
    row.copy_source = 0


@compiled
def take_hold(state: State, row_at: Rows, found: NDArray[np.int32], epoch: int) -> None:
    """Make a row RESIDENT with its hits, before any frame is taken. O(blocks if not RESIDENT)."""
    row = row_at[0]
    s = row.sequence
    sequence = state.sequences[s]
    table = state.tables[s, GROUP]
    remember_row(state, row_at)
    computed, stored = computed_after(state, row_at), stored_after(state, row_at)
    end = max(stored, computed + int(row.num_tokens))
    ensure_table(state, s, GROUP, num_blocks_for(state, end))
    make_resident(state, s)
    for j in range(row.num_found):
        b = int(found[row.found_start + j])
        state.table[table.start + table.num_blocks] = b
        table.num_blocks += 1
        state.blocks[b].ref_count += 1
        enter_residency(state, b)
    sequence.num_published += row.num_found
    sequence.num_stored = stored
    sequence.num_computed = computed
    if sequence.queried == 0:
        sequence.queried = 1
        sequence.num_cached = 0
    sequence.num_cached += row.num_found * state.ledger[0].block_size
    sequence.step = epoch
    sequence.last_step = epoch


@compiled
def note_waits(state: State, f: int) -> None:
    """Let the step wait for the copies that still use a frame it writes (R3). O(1)."""
    ledger = state.ledger[0]
    frame = state.frames[device_at(state, f)]
    ledger.step_after_in = max(ledger.step_after_in, frame.fence_in)
    ledger.step_after_out = max(ledger.step_after_out, frame.fence_out)


@compiled
def new_block(state: State, namespace: int) -> int:
    """A fresh block on the device, named by one RESIDENT table entry to come. O(1)."""
    f = take_device_frame(state, 0)  # first: an eviction may have to free the id that `b` gets
    b = take_block(state)
    former = state.frames[device_at(state, f)].namespace
    if state.ledger[0].clears and former != 0 and former != namespace:
        list_fill(state, f)  # its slots are written one by one; a copy in would cover it whole
    give_device_frame(state, b, f, namespace)
    state.blocks[b].ref_count = 1
    state.blocks[b].num_resident = 1
    note_waits(state, f)
    return b


@compiled
def copy_on_write(state: State, row_at: Rows) -> None:
    """Replace a row's shared partial block by a copy of its filled slots (R3). O(1).

    The source stays referenced by the step until it ends, so that an exception can restore it.
    """
    row, ledger = row_at[0], state.ledger[0]
    s = row.sequence
    sequence = state.sequences[s]
    row.copy_index = sequence.num_stored // ledger.block_size
    row.copy_source = entry(state, s, int(row.copy_index))
    b = new_block(state, int(sequence.namespace))
    state.blocks[b].num_tokens = sequence.num_stored % ledger.block_size
    at = state.tables[s, GROUP].start + row.copy_index
    state.table[at] = b
    state.frame_table[at] = state.blocks[b].device_frame
    sequence.table_changed = ledger.clock
    i = ledger.num_copies
    source = state.frames[device_at(state, state.blocks[row.copy_source].device_frame)]
    target = state.frames[device_at(state, state.blocks[b].device_frame)]
    target.fence_in = max(target.fence_in, source.fence_in)  # its content came by that copy too
    state.copy_list[i, 0] = state.blocks[row.copy_source].device_frame
    state.copy_list[i, 1] = state.blocks[b].device_frame
    state.copy_list[i, 2] = state.blocks[b].num_tokens
    ledger.num_copies += 1
    ledger.copied_on_write += 1


@compiled
def take_frames(state: State, row_at: Rows) -> None:
    """Give a held row its missing frames, new blocks and private tail. O(missing + new)."""
    row, ledger = row_at[0], state.ledger[0]
    s = row.sequence
    sequence, table = state.sequences[s], state.tables[s, GROUP]
    kept = int(row.old_blocks) if row.old_state == RESIDENT else 0  # they have their frames
    num_missing = int(table.num_blocks) - kept
    fence = arrive(state, int(table.start) + kept, num_missing, int(sequence.namespace))
    sequence.fence_in = max(sequence.fence_in, fence)
    end = max(int(sequence.num_stored), int(sequence.num_computed) + int(row.num_tokens))
    if end > sequence.num_stored and sequence.num_stored % ledger.block_size:
        if writes_shared(state, s):
            copy_on_write(state, row_at)
        else:
            trim_tail(state, s)
            b = entry(state, s, int(sequence.num_stored) // ledger.block_size)
            note_waits(state, int(state.blocks[b].device_frame))
    for _ in range(num_blocks_for(state, end) - int(table.num_blocks)):
        b = new_block(state, int(sequence.namespace))
        state.table[table.start + table.num_blocks] = b
        state.frame_table[table.start + table.num_blocks] = state.blocks[b].device_frame
        table.num_blocks += 1
    ledger.step_after_in = max(ledger.step_after_in, sequence.fence_in)


@compiled
def carry_out(state: State, rows: Rows, found: NDArray[np.int32]) -> int:
    """Make every planned row RESIDENT with room for its tokens; return the step's epoch.
    O(blocks that become resident + new blocks)."""
    ledger = state.ledger[0]
    clear_marks(state, rows, found)
    ledger.epoch += 1
    for i in range(rows.shape[0]):
        if rows[i].reason == PLANNED:
            take_hold(state, rows[i : i + 1], found, int(ledger.epoch))
    allow_for_rounds(state, int(ledger.num_needed))
    for i in range(rows.shape[0]):
        if rows[i].reason == PLANNED:
            take_frames(state, rows[i : i + 1])
    release_busy(state)
    return int(ledger.epoch)


@compiled
def fill_row(state: State, row_at: Rows, batch: Batch, first_token: int) -> int:
    """Write the tokens, positions and slots of a row; return its context length. O(tokens)."""
    row = row_at[0]
    sequence = state.sequences[row.sequence]
    block_size = state.node_keys.shape[1]
    start = state.tables[row.sequence, GROUP].start
    first = int(sequence.num_computed)
    for k in range(row.num_tokens):
        position = first + k
        at = first_token + k
        batch.tokens[at] = state.tokens[sequence.tokens_start + position]
        batch.positions[at] = position
        if position < sequence.num_stored:
            batch.slot_mapping[at] = -1  # full hit: its K/V is there and shared
        else:
            f = np.int64(state.frame_table[start + position // block_size])
            batch.slot_mapping[at] = f * block_size + position % block_size
    return first + int(row.num_tokens)


@compiled
def fill_rows(state: State, rows: Rows, batch: Batch) -> None:
    """Write the arrays of a step, rows in order, and their lengths; only the latter when the arrays
    are too short. O(tokens)."""
    report = batch.report
    total = 0
    num_rows = 0
    for i in range(rows.shape[0]):
        if rows[i].reason == PLANNED:
            total += rows[i].num_tokens
            num_rows += 1
    report[NUM_ROWS], report[NUM_TOKENS], report[NUM_READY] = num_rows, total, 0
    report[MAX_QUERY_LEN] = report[MAX_SEQ_LEN] = 0
    report[EPOCH] = state.ledger[0].epoch
    report[IS_FILLED] = 1 if total <= batch.tokens.shape[0] else 0
    if report[IS_FILLED] == 0:
        return
    at = np.int64(0)
    r = num_ready = 0
    batch.query_start[0] = 0
    for i in range(rows.shape[0]):
        if rows[i].reason != PLANNED:
            continue
        s, count = rows[i].sequence, rows[i].num_tokens
        end = fill_row(state, rows[i : i + 1], batch, at)
        at += count
        batch.seq_lens[r] = end
        batch.num_tokens[r] = count
        batch.query_start[r + 1] = at
        batch.table_start[r] = state.tables[s, GROUP].start
        batch.is_ready[r] = end == state.sequences[s].num_tokens
        if batch.is_ready[r]:
            batch.last[num_ready] = at - 1
            num_ready += 1
        report[MAX_QUERY_LEN] = max(report[MAX_QUERY_LEN], count)
        report[MAX_SEQ_LEN] = max(report[MAX_SEQ_LEN], end)
        r += 1
    report[NUM_READY] = num_ready
