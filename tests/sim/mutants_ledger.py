"""Mistakes of ordering planted in the ledger: notes, waits and holds that are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmem.ledger import residency
from kvmem.ledger.state import BUSY, DEVICE, FREED, HOST, opened
from tests.sim.mutants import MUTANTS, Function, Hit, Mutant, Patch, mutant


def device_frame(state: Any, b: int) -> Any:
    """The record of a block's device frame."""
    return state.frames[int(state.pools["first"][DEVICE]) + int(state.blocks[b].device_frame)]


def host_frame(state: Any, b: int) -> Any:
    """The record of a block's host frame."""
    return state.frames[int(state.pools["first"][HOST]) + int(state.blocks[b].host_frame)]


def the_ledger(state: Any, b: int) -> Any:
    """The ledger's own record."""
    return state.ledger[0]


def undone(where: Callable[[Any, int], Any], field: str) -> Patch:
    """What the function writes to a field is taken back."""

    def patch(original: Function, hit: Hit) -> Function:
        def changed(state: Any, b: int, *rest: Any) -> Any:
            record = where(state, b)
            old = int(getattr(record, field))
            result = original(state, b, *rest)
            if int(getattr(record, field)) != old:
                hit()
            setattr(record, field, old)
            return result

        return changed

    return patch


def hidden(where: Callable[[Any, int], Any], field: str) -> Patch:
    """The function sees 0 in a field that it only reads."""

    def patch(original: Function, hit: Hit) -> Function:
        def changed(state: Any, b: int, *rest: Any) -> Any:
            record = where(state, b)
            old = int(getattr(record, field))
            if old:
                hit()
            setattr(record, field, 0)
            result = original(state, b, *rest)
            setattr(record, field, old)
            return result

        return changed

    return patch


def _plant(name: str, target: str, patch: Patch, survives: str = "") -> None:
    MUTANTS[name] = Mutant(((None, target),), patch, survives)


_plant("copy_out_notes_no_step", "plan_copy_out", undone(the_ledger, "out_after_step"))
_plant("copy_out_ignores_arrival", "plan_copy_out", hidden(device_frame, "fence_in"))
_plant("copy_out_ignores_host_reader", "plan_copy_out", hidden(host_frame, "fence_in"))
_plant("copy_out_leaves_no_source_fence", "plan_copy_out", undone(device_frame, "fence_out"))
_plant("copy_out_leaves_no_target_fence", "plan_copy_out", undone(host_frame, "fence_out"))
_plant("copy_in_notes_no_step", "plan_copy_in", undone(the_ledger, "in_after_step"))
_plant("copy_in_ignores_its_source", "plan_copy_in", hidden(host_frame, "fence_out"))
_plant("copy_in_ignores_departure", "plan_copy_in", hidden(device_frame, "fence_out"))
_plant("copy_in_leaves_no_source_fence", "plan_copy_in", undone(host_frame, "fence_in"))
_plant("copy_in_leaves_no_target_fence", "plan_copy_in", undone(device_frame, "fence_in"))
_plant("poison_leaves_no_fence", "vacate_device", undone(device_frame, "fence_out"))
_plant("poison_notes_no_step", "vacate_device", undone(the_ledger, "out_after_step"))
_plant("poison_ignores_arrival", "vacate_device", undone(the_ledger, "out_after_in"))
_plant("a_last_use_goes_unnoted", "leave_residency", undone(device_frame, "last_use"))
_plant("a_block_coming_in_is_not_held", "enter_residency", undone(lambda s, b: s.blocks[b], "bits"))


@mutant((None, "note_waits"))
def a_new_block_waits_for_no_departure(original: Function, hit: Hit) -> Function:
    def note_waits(state: Any, f: int) -> None:
        old = int(state.ledger[0].step_after_out)
        original(state, f)
        if state.ledger[0].step_after_out != old:
            hit()
        state.ledger[0].step_after_out = old

    return note_waits


@mutant((None, "note_waits"))
def a_new_block_waits_for_no_arrival(original: Function, hit: Hit) -> Function:
    def note_waits(state: Any, f: int) -> None:
        old = int(state.ledger[0].step_after_in)
        original(state, f)
        if state.ledger[0].step_after_in != old:
            hit()
        state.ledger[0].step_after_in = old

    return note_waits


@mutant((None, "arrive"))
def arrivals_are_not_waited_for(original: Function, hit: Hit) -> Function:
    def arrive(*arguments: Any) -> int:
        if original(*arguments):
            hit()
        return 0

    return arrive


@mutant((None, "take_frames"))
def a_row_forgets_what_it_waits_for(original: Function, hit: Hit) -> Function:
    """A swap in that was planned earlier is not waited for by the step."""

    def take_frames(state: Any, row_at: Any) -> None:
        sequence = state.sequences[row_at[0].sequence]
        if sequence.fence_in:
            hit()
        sequence.fence_in = 0
        original(state, row_at)

    return take_frames


@mutant((None, "fork_into"))
def a_child_forgets_what_its_parent_waits_for(original: Function, hit: Hit) -> Function:
    def fork_into(addresses: Any, s: int, child: int) -> None:
        original(addresses, s, child)
        state = opened(addresses)
        if state.sequences[child].fence_in:
            hit()
        state.sequences[child].fence_in = 0

    return fork_into


@mutant((None, "merge"))
def a_merged_block_is_not_waited_for(original: Function, hit: Hit) -> Function:
    def merge(state: Any, s: int, i: int, published: int) -> None:
        old = int(state.sequences[s].fence_in)
        original(state, s, i, published)
        if state.sequences[s].fence_in != old:
            hit()
        state.sequences[s].fence_in = old

    return merge


@mutant((None, "enter_residency"))
def a_frame_being_read_is_evictable(original: Function, hit: Hit) -> Function:
    """BUSY never is set: a copy out of the same plan may take the host frame."""

    def enter_residency(state: Any, b: int) -> None:
        original(state, b)
        if state.blocks[b].bits & BUSY:
            hit()
            state.blocks[b].bits &= ~BUSY
            residency.settle_lists(state, b)

    return enter_residency


@mutant((None, "free"))
def free_does_not_wait_for_the_step(original: Function, hit: Hit) -> Function:
    def free(addresses: Any, seqs: Any) -> None:
        state = opened(addresses)
        for s in seqs.tolist():
            if state.sequences[s].step:
                hit()
                state.sequences[s].step = 0
        original(addresses, seqs)

    return free


@mutant((None, "leave_step"))
def a_deferred_free_is_forgotten(original: Function, hit: Hit) -> Function:
    def leave_step(state: Any, row_at: Any) -> None:
        sequence = state.sequences[row_at[0].sequence]
        if sequence.at_end & FREED:
            hit()
            sequence.step = 0
            return
        original(state, row_at)

    return leave_step


@mutant((None, "copy_on_write"))
def the_source_of_a_copy_is_let_go(original: Function, hit: Hit) -> Function:
    """The shared block that is copied on write is not held until the step ends."""

    def copy_on_write(state: Any, row_at: Any) -> None:
        original(state, row_at)
        b = int(row_at[0].copy_source)
        hit()
        row_at[0].copy_source = 0
        state.blocks[b].ref_count -= 1
        residency.leave_residency(state, b, 0)
        residency.settle(state, b)

    return copy_on_write


@mutant((None, "restore_copy"))
def an_aborted_copy_goes_unnoted(original: Function, hit: Hit) -> Function:
    """The frame of an aborted copy on write is given on as if nothing had touched it."""

    def restore_copy(state: Any, row_at: Any) -> None:
        row = row_at[0]
        if not row.copy_source:
            return original(state, row_at)
        at = int(state.tables[row.sequence].start[0] + row.copy_index)
        frame = device_frame(state, int(state.table[at]))
        old = int(frame.last_use)
        original(state, row_at)
        hit()
        frame.last_use = old
        return None

    return restore_copy


@mutant((None, "cancel_copy_out"))
def a_copy_into_a_frame_taken_again_stays(original: Function, hit: Hit) -> Function:
    def cancel_copy_out(state: Any, h: int) -> None:
        if (state.out_list[: state.ledger[0].num_out, 1] == h).any():
            hit()

    return cancel_copy_out
