"""Faults of copies between the tiers, see plant.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmem.ledger import residency
from kvmem.ledger.state import MARKED
from tests.faults.plant import TIGHT, Function, fault

# --- tiers ---------------------------------------------------------------------------------------


@fault("is_clean", 0, 1)
def claim_clean_when_stale(original: Function, hit: Callable[[], None]) -> Function:
    """Any host copy counts as complete, whatever was written since."""

    def is_clean(state: Any, b: int) -> bool:
        clean = bool(original(state, b))
        if not clean and state.blocks[b].host_frame:
            hit()
            return True
        return clean

    return is_clean


@fault("plan_copy_in", 0, 4)
def drop_the_clean_mark(original: Function, hit: Callable[[], None]) -> Function:
    """What came back is copied out again next time."""

    def plan_copy_in(state: Any, b: int) -> None:
        hit()
        original(state, b)
        state.frames[residency.host_at(state, state.blocks[b].host_frame)].num_tokens = 0

    return plan_copy_in


@fault("save_to_host", 0, 1)
def evict_without_copying_out(original: Function, hit: Callable[[], None]) -> Function:
    def save_to_host(state: Any, b: int) -> None:
        before = int(state.ledger[0].num_out)
        original(state, b)
        if state.ledger[0].num_out > before:
            hit()
            state.ledger[0].num_out -= 1
            state.ledger[0].blocks_out -= 1

    return save_to_host


@fault("cancel_copy_out", 0, 3, setup=TIGHT)
def copy_into_a_frame_taken_again(original: Function, hit: Callable[[], None]) -> Function:
    def cancel_copy_out(state: Any, h: int) -> None:
        ledger = state.ledger[0]
        if (state.out_list[: ledger.num_out, 1] == h).any():
            hit()

    return cancel_copy_out


@fault("plan_copy_out", 0, 1)
def copy_out_the_wrong_frame(original: Function, hit: Callable[[], None]) -> Function:
    def plan_copy_out(state: Any, b: int) -> None:
        original(state, b)
        i = int(state.ledger[0].num_out) - 1
        if i:
            hit()
            state.out_list[i, 0] = state.out_list[i - 1, 0]

    return plan_copy_out


@fault("count_host_need", 1, 2, setup=TIGHT)
def reserve_cached_copies_twice(original: Function, hit: Callable[[], None]) -> Function:
    """The clean copies that a sequence keeps count as room for its dirty blocks too."""

    def count_host_need(state: Any, seqs: Any, need: Any) -> None:
        original(state, seqs, need)
        if need[1]:
            hit()
        need[1] = 0

    return count_host_need


@fault("count_block", 0, 1)
def count_hits_as_free(original: Function, hit: Callable[[], None]) -> Function:
    """R7: a cached block that a row uses is not there to be taken."""

    def count_block(state: Any, b: int, need: Any) -> None:
        original(state, b, need)
        if need[1]:
            hit()
        need[1] = 0

    return count_block


@fault("clear_marks", 0, 1)
def leave_marks_behind(original: Function, hit: Callable[[], None]) -> Function:
    def clear_marks(state: Any, rows: Any, found: Any) -> None:
        if (state.blocks["bits"] & MARKED).any():
            hit()

    return clear_marks
