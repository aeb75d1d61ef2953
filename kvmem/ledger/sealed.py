"""The `Plan` of a call, from the numbers that `seal` left and the lists that the call filled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmem.plan import Plan

from .state import State
from .step_arrays import SEALED

Ids = NDArray[np.int32]


def plan_of(state: State, report: list[int]) -> Plan:
    """The plan that `seal` issued; the lists are copied, so that they can be used again."""
    out_id, num_out, out_after_step, out_after_in, *rest = report[SEALED:]
    in_id, num_in, in_after_step, in_after_out, *rest = rest
    step_after_in, step_after_out, num_copies, num_fills = rest
    plan = Plan(step_after_in=step_after_in, step_after_out=step_after_out)
    if out_id:
        plan.out_id = out_id
        plan.out_after_step, plan.out_after_in = out_after_step, out_after_in
        columns = _columns(state.out_list, num_out)
        plan.out_device, plan.out_host, plan.out_tokens, plan.out_generation = columns
        plan.fill_frames = state.fill_list[:num_fills].copy()
    if in_id:
        plan.in_id, plan.in_after_step, plan.in_after_out = in_id, in_after_step, in_after_out
        columns = _columns(state.in_list, num_in)
        plan.in_host, plan.in_device, plan.in_tokens, plan.in_generation = columns
    if num_copies:
        copies = _columns(state.copy_list, num_copies)
        plan.copy_source, plan.copy_target, plan.copy_tokens = copies
    return plan


def _columns(array: NDArray[np.int32], count: int) -> tuple[Ids, ...]:
    return tuple(array[:count].T.copy())
