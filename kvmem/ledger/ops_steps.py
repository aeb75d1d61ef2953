"""Entry points for steps and plans: decide and carry out, end, seal.

One compiled call a Manager call, whatever the batch. Each checks everything first and writes
afterwards (R8); it returns a code of decide.py, with the detail in `LEDGER.error_*`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .address import Addresses
from .carry_out import carry_out, fill_rows
from .cleaning import wants_cleaning
from .decide import OK, PLANNED, clear_marks, decide, look_up
from .decode import offer_decode, plan_decode
from .finish import finish
from .issue import issue_copies
from .jit import compiled, entry_point
from .state import COPIES, GROUP, Rows, State, opened
from .step_arrays import HAS_PLAN, SEALED, WANTS_CLEANING, Batch, opened_batch

Ids = NDArray[np.int32]


@compiled
def ask(batch: Batch, rows: Rows, is_limited: bool) -> None:
    """Begin the rows of a step: `num_tokens[i]` tokens each, or what is pending. O(rows)."""
    for i in range(rows.shape[0]):
        rows[i].sequence = batch.seqs[i]
        rows[i].num_tokens = batch.num_tokens[i] if is_limited else -1
        rows[i].found_start = rows[i].num_found = 0
        rows[i].tail = 0


@entry_point
def plan_step(
    addresses: Addresses,
    batch_addresses: Addresses,
    num_rows: int,
    is_limited: bool,
    found: Ids,
    budget: int,
    reserve: int,
    need_all: bool,
    act: bool,
    hashes: NDArray[np.int64],
    need: NDArray[np.int64],
) -> int:
    """Decide a step and, with `act`, carry it out and fill its arrays; `Batch.report` says how long
    they are. See decode.py and decide.py. O(tokens looked up + blocks), O(rows) for a decode batch.
    """
    state, batch = opened(addresses), opened_batch(batch_addresses)
    rows = batch.rows[:num_rows]
    if act and not is_limited and offer_decode(state, batch, rows, budget, reserve, hashes):
        plan_decode(state, batch, rows)
        seal(state, batch.report)
        return OK
    ask(batch, rows, is_limited)
    code = decide(state, rows, found, budget, reserve, need_all, hashes, need)
    if code != OK or not act:
        clear_marks(state, rows, found)
        return code
    carry_out(state, rows, found)
    fill_rows(state, rows, batch)
    seal(state, batch.report)
    return OK


@entry_point
def fill_step(addresses: Addresses, batch_addresses: Addresses, num_rows: int) -> None:
    """Fill the arrays of a step just planned that were too short. O(tokens)."""
    batch = opened_batch(batch_addresses)
    fill_rows(opened(addresses), batch.rows[:num_rows], batch)


@entry_point
def look_up_cached(addresses: Addresses, batch_addresses: Addresses, s: int, found: Ids) -> int:
    """The cached blocks that continue a sequence's table, into `found`; how many. O(tokens hit)."""
    batch = opened_batch(batch_addresses)
    row_at = batch.rows[:1]
    row_at[0].sequence = s
    look_up(opened(addresses), row_at, found, np.int64(0))
    return int(row_at[0].num_found)


@entry_point
def end_step(
    addresses: Addresses, batch_addresses: Addresses, num_rows: int, epoch: int, commit: bool
) -> int:
    """End a step, see finish.py; 1 when the plan of it, in `Batch.report`, says something.
    O(tokens)."""
    state, batch = opened(addresses), opened_batch(batch_addresses)
    finish(state, batch.rows[:num_rows], epoch, commit)
    seal(state, batch.report)
    return int(batch.report[HAS_PLAN])


@entry_point
def patch_table(addresses: Addresses, batch_addresses: Addresses, num_rows: int) -> None:
    """Bring the dense table of a step in line: each planned row's new blocks, or, when something
    else changed since it was copied, all of them. O(rows + entries copied)."""
    state, batch = opened(addresses), opened_batch(batch_addresses)
    ledger = state.ledger[0]
    block_size = state.node_keys.shape[1]
    ledger.clock += 1
    r = 0
    for i in range(num_rows):
        row = batch.rows[i]
        if row.reason != PLANNED:
            continue
        sequence = state.sequences[row.sequence]
        mark = batch.marks[r]
        length = mark.num_blocks
        if not (length - 1) * block_size < batch.seq_lens[r] <= length * block_size:
            length = (batch.seq_lens[r] + block_size - 1) // block_size
        begin = min(mark.num_blocks, length)
        if mark.sequence != row.sequence or sequence.table_changed >= mark.clock:
            begin = 0
        mark.clock = ledger.clock
        if begin < length or length < mark.num_blocks:
            start = state.tables[row.sequence, GROUP].start
            for j in range(begin, length):
                batch.dense[r, j] = state.frame_table[start + j]
            for j in range(length, mark.num_blocks):
                batch.dense[r, j] = 0
            mark.sequence = row.sequence
            mark.num_blocks = length
        r += 1


@entry_point
def seal_plan(addresses: Addresses, report: NDArray[np.int64]) -> int:
    """`seal` after an operation without a step; 1 when the plan says something."""
    seal(opened(addresses), report)
    return int(report[HAS_PLAN])


@compiled
def seal(state: State, report: NDArray[np.int64]) -> None:
    """Issue the ids of the plan just made, write its numbers to `report` (see sealed.py) and begin
    the next one. Waits for what is known to be done are left out. O(1)."""
    ledger = state.ledger[0]
    if ledger.step_after_in <= ledger.retired_in:
        ledger.step_after_in = 0
    if ledger.step_after_out <= ledger.retired_out:
        ledger.step_after_out = 0
    out = report[SEALED:]
    issue_copies(state, out)
    out[COPIES] = ledger.step_after_in
    out[COPIES + 1] = ledger.step_after_out
    out[COPIES + 2] = ledger.num_copies
    out[COPIES + 3] = ledger.num_rounds
    report[WANTS_CLEANING] = 1 if wants_cleaning(state) else 0
    report[HAS_PLAN] = (
        out[0] | out[4] | out[COPIES] | out[COPIES + 1] | out[COPIES + 2] | out[COPIES + 3]
    )
    ledger.num_out = ledger.num_in = ledger.in_begin = 0
    ledger.num_copies = ledger.num_fills = ledger.num_rounds = 0
    ledger.num_busy = ledger.may_evict = 0
    ledger.step_after_in = ledger.step_after_out = 0
