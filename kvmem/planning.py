"""From a list of handles to a planned step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmem.step import Step

if TYPE_CHECKING:
    from kvmem.runtime import Ids, Runtime


def plan_step(
    runtime: Runtime,
    records: Ids,
    *,
    num_tokens: Ids | None,
    max_tokens: int | None,
    reserve: int,
    need_all: bool,
) -> Step:
    """Plan a step over the handles whose records were just looked up; the caller holds the lock.
    Raises Refusal."""
    plan, arrays = runtime.ledger.plan_step(
        records, num_tokens=num_tokens, max_tokens=max_tokens, reserve=reserve, need_all=need_all
    )
    runtime.submit(plan)
    if runtime.ledger.wants_cleaning:
        runtime.cleaner.run()
    step = Step(runtime, runtime.last_list, runtime.last_ids, plan, arrays)
    if runtime.sampled:
        try:
            step._patch(runtime.sampled.patches(arrays))
        except BaseException:  # a device that failed: nothing stays planned (R8)
            step.cancel()
            raise
    return step
