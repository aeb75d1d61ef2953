"""Mistakes planted in the recovery from failed copies: links that are not followed, guards that are
left out. Found only where copies fail."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvmem.ledger.flights import Flights
from kvmem.ledger.ledger import Ledger
from kvmem.ledger.state import UNSAVED
from kvmem.recovery import Losses
from kvmem.runtime import Runtime
from kvmem.store.sim.scheduler import Scheduler
from tests.sim.mutants import Function, Hit, mutant
from tests.sim.mutants_ledger import device_frame


@mutant(
    (None, "can_merge"),
    survives="rare in the programme: tests/sim/test_recovery.py has a script that finds it",
    faults=True,
)
def merged_before_it_has_arrived(original: Function, hit: Hit) -> Function:
    """What was computed over a copy that fails hangs on a sound block (R5)."""

    def can_merge(state: Any, b: int) -> bool:
        frame = device_frame(state, b)
        fence, frame.fence_in = int(frame.fence_in), 0
        if original(state, b) and fence > state.ledger[0].retired_in:
            hit()
            frame.fence_in = fence
            return True
        frame.fence_in = fence
        return bool(original(state, b))

    return can_merge


@mutant((None, "publish"))
def a_published_block_forgets_its_writer(original: Function, hit: Hit) -> Function:
    """Who merges into it and swaps out has not waited for the step that wrote it."""

    def publish(state: Any, s: int) -> None:
        before = state.frames["last_use"].copy()
        original(state, s)
        if (state.frames["last_use"] != before).any():
            hit()
            state.frames["last_use"][:] = before

    return publish


@mutant((Flights, "add"), faults=True)
def copies_on_write_are_not_followed(original: Function, hit: Hit) -> Function:
    def add(self: Any, state: Any, plan: Any, epoch: int) -> None:
        kept = plan.copy_source
        if len(kept) and len(self):
            hit()
        plan.copy_source = kept[:0]
        try:
            original(self, state, plan, epoch)
        finally:
            plan.copy_source = kept

    return add


@mutant((Flights, "failed"), faults=True)
def later_transfers_are_not_followed(original: Function, hit: Hit) -> Function:
    """A block that came back from a copy that never went out counts as sound."""

    def failed(self: Any, state: Any, tier: int, transfer_id: int) -> Any:
        found = original(self, state, tier, transfer_id)
        here = state.blocks["device_frame"][found.lost] > 0
        if tier == 1 and here.any():
            hit()
            found.lost = found.lost[~here]
        return found

    return failed


@mutant((Flights, "failed"), faults=True)
def a_copy_in_that_failed_is_forgotten(original: Function, hit: Hit) -> Function:
    def failed(self: Any, state: Any, tier: int, transfer_id: int) -> Any:
        found = original(self, state, tier, transfer_id)
        if tier == 0 and len(found.lost):
            hit()
            found.lost = np.zeros(0, np.int32)
        return found

    return failed


@mutant((Flights, "failed"), faults=True)
def a_copy_out_that_failed_counts_as_there(original: Function, hit: Hit) -> Function:
    def failed(self: Any, state: Any, tier: int, transfer_id: int) -> Any:
        found = original(self, state, tier, transfer_id)
        if len(found.unsaved):
            hit()
            found.unsaved = np.zeros(0, np.int32)
        return found

    return failed


@mutant((None, "evict_device"), faults=True)
def a_block_that_is_not_saved_may_go(original: Function, hit: Hit) -> Function:
    """The only copy of a SWAPPED sequence's block is dropped with its frame."""

    def evict_device(state: Any) -> int:
        b = int(state.frames[int(state.pools["first"][0]) + int(state.pools[0].oldest)].block)
        block = state.blocks[b]
        if block.bits & UNSAVED:
            hit()
            block.bits &= ~UNSAVED
            policy, state.ledger[0].tier_policy = int(state.ledger[0].tier_policy), 0
            try:
                return int(original(state))
            finally:
                state.ledger[0].tier_policy = policy
        return int(original(state))

    return evict_device


@mutant((Ledger, "end_step"), faults=True)
def a_spoiled_step_counts(original: Function, hit: Hit) -> Function:
    def end_step(self: Any, epoch: int, *, commit: bool) -> Any:
        if epoch in self.spoiled:
            hit()
            self.spoiled.discard(epoch)
            commit = True
        return original(self, epoch, commit=commit)

    return end_step


@mutant((None, "remove_subtrees"), faults=True)
def lost_blocks_stay_findable(original: Function, hit: Hit) -> Function:
    def remove_subtrees(state: Any, is_lost: Any, fate: Any) -> None:
        if (state.blocks["node"][is_lost > 0] > 0).any():
            hit()

    return remove_subtrees


@mutant((None, "cut_lost"), faults=True)
def a_sequence_keeps_what_it_lost(original: Function, hit: Hit) -> Function:
    def cut_lost(state: Any, s: int) -> None:
        hit()
        state.sequences[s].lost = 0

    return cut_lost


@mutant((Runtime, "poll"), faults=True)
def retired_before_it_is_recovered_from(original: Function, hit: Hit) -> Function:
    """Its flight is forgotten, so nobody knows what it carried (R5)."""

    def poll(self: Any) -> None:
        done = self.store.retired()
        self.ledger.retire(*done)
        if self.failed:
            hit()
            self.ledger._flights = Flights()
        original(self)

    return poll


@mutant((Losses, "add"), faults=True)
def nobody_is_told(original: Function, hit: Hit) -> Function:
    def add(self: Any, tier: int, transfer_id: int, error: Any, losses: Any) -> Any:
        if losses:
            hit()
        return original(self, tier, transfer_id, error, [])

    return add


@mutant((Scheduler, "_copy_fragment"), faults=True)
def a_failed_copy_counts_as_moved(original: Function, hit: Hit) -> Function:
    def copy_fragment(self: Any, op: Any) -> bool:
        moved = op.moved
        ended = bool(original(self, op))
        if op.moved is None and moved is not None:
            hit()
            op.moved = moved
        return ended

    return copy_fragment
