"""Issuing copies: the transfers of a plan get their ids, and waits that are over are left out.

A plan's out copies run before its in copies: what is copied in may take the device frame of what is
copied out. Under `exclusive` the host frames of what is copied in are also the room for what is
copied out, which would wait in a circle. Such a plan is issued in rounds: a round copies out as far
as there is room and then in, which makes room for the next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import compiled
from .state import DEVICE, EXCLUSIVE, HOST, MAX_ROUNDS, State


@compiled
def issue_copies(state: State, out: NDArray[np.int64]) -> None:
    """Issue the copies listed since the last round; write their ids, waits and the ends of their
    lists to `out` (COPIES numbers, see sealed.py). O(1)."""
    ledger = state.ledger[0]
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
    if ledger.num_in > ledger.in_begin:
        ledger.last_in += 1
        out[4] = ledger.last_in
    out[5] = ledger.num_in
    out[6] = ledger.in_after_step
    out[7] = ledger.in_after_out
    out[8] = ledger.num_fills
    ledger.in_begin = ledger.num_in
    ledger.out_opened = 0
    ledger.out_after_step = ledger.out_after_in = 0
    ledger.in_after_step = ledger.in_after_out = 0


@compiled
def allow_for_rounds(state: State, num_needed: int) -> None:
    """Say how many cached host copies a plan may evict before it has to begin another round.

    Of `num_needed` device frames those not copied in hold new content: as much has to leave the
    host tier anyway. A little more is given up for fewer than `MAX_ROUNDS` rounds. O(1).
    """
    ledger = state.ledger[0]
    if ledger.tier_policy != EXCLUSIVE or ledger.num_busy == 0:
        return
    free = state.pools[HOST].num_free
    leaving = num_needed - ledger.num_busy - state.pools[DEVICE].num_free - free
    least = (ledger.num_busy + MAX_ROUNDS - 1) // MAX_ROUNDS - free
    ledger.may_evict = max(0, leaving, least)
