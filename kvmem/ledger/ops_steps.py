"""Entry points for steps and plans: decide and carry out, end, seal.

One compiled call a Manager call, whatever the batch. Each checks everything first and writes
afterwards (R8); it returns a code of decide.py, with the detail in `LEDGER.error_*`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .carry_out import carry_out
from .decide import OK, clear_marks, decide
from .finish import finish
from .jit import entry_point
from .state import Rows, State

Ids = NDArray[np.int32]


@entry_point
def plan_step(
    state: State,
    rows: Rows,
    found: Ids,
    budget: int,
    reserve: int,
    need_all: bool,
    act: bool,
    hashes: NDArray[np.int64],
    need: NDArray[np.int64],
) -> int:
    """Decide a step and, with `act`, carry it out. See decide.py. O(tokens looked up + blocks)."""
    code = decide(state, rows, found, budget, reserve, need_all, hashes, need)
    if code == OK and act:
        carry_out(state, rows, found)
    else:
        clear_marks(state, rows, rows.shape[0], found)
    return code


@entry_point
def end_step(state: State, rows: Rows, epoch: int, commit: bool) -> None:
    """End a step, see finish.py. O(tokens)."""
    finish(state, rows, epoch, commit)


@entry_point
def seal(state: State, out: NDArray[np.int64]) -> None:
    """Issue the ids of the plan just made, write its numbers to `out` (see ledger.py) and begin
    the next one. Waits for what is known to be done are left out. O(1)."""
    ledger = state.ledger[0]
    if ledger.step_after_in <= ledger.retired_in:
        ledger.step_after_in = 0
    if ledger.step_after_out <= ledger.retired_out:
        ledger.step_after_out = 0
    if ledger.out_after_in <= ledger.retired_in:
        ledger.out_after_in = 0
    if ledger.in_after_out <= ledger.retired_out:
        ledger.in_after_out = 0
    out[0] = out[4] = 0
    if ledger.out_opened:
        ledger.last_out += 1
        out[0] = ledger.last_out
    out[1] = ledger.num_out
    out[2] = ledger.out_after_step
    out[3] = ledger.out_after_in
    if ledger.num_in:
        ledger.last_in += 1
        out[4] = ledger.last_in
    out[5] = ledger.num_in
    out[6] = ledger.in_after_step
    out[7] = ledger.in_after_out
    out[8] = ledger.step_after_in
    out[9] = ledger.step_after_out
    out[10] = ledger.num_copies
    out[11] = ledger.num_fills
    ledger.out_opened = ledger.num_out = ledger.num_in = 0
    ledger.num_copies = ledger.num_fills = 0
    ledger.out_after_step = ledger.out_after_in = 0
    ledger.in_after_step = ledger.in_after_out = 0
    ledger.step_after_in = ledger.step_after_out = 0
