"""The `Plan` of a call, from the numbers that `seal` left and the lists that the call filled.

Copies are nine numbers (COPIES): out id (0 none), end of its rows in `out_list`, the step and the
in transfer it waits for; in id, end of its rows in `in_list`, the step and the out transfer it
waits for; end of its rows in `fill_list`. A round's rows begin where those of the one before end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmem.plan import Plan

from .state import COPIES, State
from .step_arrays import SEALED

Ids = NDArray[np.int32]


def plan_of(state: State, report: list[int]) -> Plan:
    """The plan that `seal` issued; the lists are copied, so that they can be used again."""
    step_after_in, step_after_out, num_copies, num_rounds = report[SEALED + COPIES :]
    plan = Plan(step_after_in=step_after_in, step_after_out=step_after_out)
    begin = [0] * COPIES
    if num_rounds:
        rounds = []
        for numbers in state.rounds[:num_rounds].tolist():
            rounds.append(Plan())
            _set_copies(rounds[-1], state, begin, numbers)
            begin = numbers
        plan.earlier = tuple(rounds)
    _set_copies(plan, state, begin, report[SEALED : SEALED + COPIES])
    if num_copies:
        copies = _columns(state.copy_list, 0, num_copies)
        plan.copy_source, plan.copy_target, plan.copy_tokens = copies
    return plan


def _set_copies(plan: Plan, state: State, begin: list[int], numbers: list[int]) -> None:
    """Let a plan say what a round copies; `begin` are the numbers of the round before."""
    out_id, out_end, out_after_step, out_after_in, in_id, in_end, *rest = numbers
    in_after_step, in_after_out, fills_end = rest
    if out_id:
        plan.out_id = out_id
        plan.out_after_step, plan.out_after_in = out_after_step, out_after_in
        columns = _columns(state.out_list, begin[1], out_end)
        plan.out_device, plan.out_host, plan.out_tokens, plan.out_generation = columns
        plan.fill_frames = state.fill_list[begin[8] : fills_end].copy()
    if in_id:
        plan.in_id, plan.in_after_step, plan.in_after_out = in_id, in_after_step, in_after_out
        columns = _columns(state.in_list, begin[5], in_end)
        plan.in_host, plan.in_device, plan.in_tokens, plan.in_generation = columns


def _columns(array: NDArray[np.int32], begin: int, end: int) -> tuple[Ids, ...]:
    return tuple(array[begin:end].T.copy())
