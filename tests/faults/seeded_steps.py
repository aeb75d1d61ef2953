"""Faults of writing and of aborts, of fences and of the swapper, see plant.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmem.ledger import residency
from kvmem.ledger.state import GROUP, RESIDENT
from tests.faults.plant import HELD_OUT, TIGHT, WIDE_BLOCKS, Function, fault

# --- writing -------------------------------------------------------------------------------------


@fault("writes_shared", 0, 3)
def skip_the_copy_on_write(original: Function, hit: Callable[[], None]) -> Function:
    def writes_shared(state: Any, s: int) -> bool:
        if original(state, s):
            hit()
        return False

    return writes_shared


@fault("copy_on_write", 0, 3)
def copy_no_bytes_on_write(original: Function, hit: Callable[[], None]) -> Function:
    def copy_on_write(state: Any, row_at: Any) -> None:
        original(state, row_at)
        hit()
        state.ledger[0].num_copies -= 1

    return copy_on_write


@fault("fill_rows", 1, 5)
def write_a_full_hit_again(original: Function, hit: Callable[[], None]) -> Function:
    """The last token of a full hit gets a slot in the shared block."""

    def fill_rows(state: Any, rows: Any, batch: Any) -> None:
        stored = [(int(r.sequence), int(state.sequences[r.sequence].num_stored)) for r in rows]
        for s, _ in stored:
            sequence = state.sequences[s]
            if sequence.num_stored > sequence.num_computed:
                hit()
                sequence.num_stored = sequence.num_computed
        original(state, rows, batch)
        for s, count in stored:
            state.sequences[s].num_stored = count

    return fill_rows


@fault("computed_after", 16, 24)
def compute_nothing_on_a_full_hit(original: Function, hit: Callable[[], None]) -> Function:
    """A full hit leaves no token to sample from."""

    def computed_after(state: Any, row_at: Any) -> int:
        row = row_at[0]
        computed = int(original(state, row_at))
        sequence = state.sequences[row.sequence]
        stored = int(sequence.num_stored) + int(row.num_found) * int(state.ledger[0].block_size)
        if row.num_found and stored > computed:
            hit()
            return stored
        return computed

    return computed_after


@fault("trim_tail", 45, 71, setup=WIDE_BLOCKS)
def keep_the_count_of_a_cut_host_copy(original: Function, hit: Callable[[], None]) -> Function:
    """A refilled block then passes for clean."""

    def trim_tail(state: Any, s: int) -> None:
        sequence = state.sequences[s]
        at = int(state.tables[s, GROUP].start + sequence.num_stored // state.ledger[0].block_size)
        inside = sequence.num_stored % state.ledger[0].block_size
        b = int(state.table[at]) if inside else 0
        h = int(state.blocks[b].host_frame)
        frame = state.frames[residency.host_at(state, h)]
        count = int(frame.num_tokens)
        original(state, s)
        if b and h and frame.num_tokens != count:
            hit()
            frame.num_tokens = state.blocks[b].num_tokens = count

    return trim_tail


@fault("fill_counts", 0, 1)
def count_no_filled_slots(original: Function, hit: Callable[[], None]) -> Function:
    """A block that grew keeps its old count, so its host copy passes for clean."""

    def fill_counts(state: Any, s: int, first: int, end: int) -> None:
        if first % state.ledger[0].block_size:
            hit()
            first = -(-first // state.ledger[0].block_size) * state.ledger[0].block_size
        if first < end:
            original(state, s, first, end)

    return fill_counts


# --- aborts --------------------------------------------------------------------------------------


@fault("abort_row", 0, 4)
def restore_no_counts_at_abort(original: Function, hit: Callable[[], None]) -> Function:
    def abort_row(state: Any, row_at: Any) -> None:
        row, s = row_at[0], int(row_at[0].sequence)
        computed = int(state.sequences[s].num_computed)
        freed = state.sequences[s].at_end
        original(state, row_at)
        if not freed and computed != row.old_computed:
            hit()
            state.sequences[s].num_computed = computed

    return abort_row


@fault("restore_copy", 10, 27)
def keep_the_copy_at_abort(original: Function, hit: Callable[[], None]) -> Function:
    def restore_copy(state: Any, row_at: Any) -> None:
        if row_at[0].copy_source:
            hit()

    return restore_copy


@fault("commit_row", 0, 1)
def commit_an_aborted_step(original: Function, hit: Callable[[], None]) -> Function:
    """Counts one token too many."""

    def commit_row(state: Any, row_at: Any, epoch: int) -> None:
        sequence = state.sequences[row_at[0].sequence]
        freed = sequence.at_end
        original(state, row_at, epoch)
        if not freed and sequence.num_computed < sequence.num_tokens:
            hit()
            sequence.num_computed += 1

    return commit_row


# --- fences --------------------------------------------------------------------------------------


@fault("arrive", 0, 4)
def forget_to_wait_for_arrivals(original: Function, hit: Callable[[], None]) -> Function:
    def arrive(state: Any, start: int, num_blocks: int, namespace: int) -> int:
        if original(state, start, num_blocks, namespace) > state.ledger[0].retired_in:
            hit()
        return 0

    return arrive


@fault("note_waits", 1, 4)
def write_a_frame_before_its_copy_out(original: Function, hit: Callable[[], None]) -> Function:
    def note_waits(state: Any, f: int) -> None:
        frame = state.frames[residency.device_at(state, f)]
        if frame.fence_out > state.ledger[0].retired_out:
            hit()

    return note_waits


@fault("plan_copy_in", 0, 2, setup=HELD_OUT)
def copy_in_before_the_copy_out(original: Function, hit: Callable[[], None]) -> Function:
    def plan_copy_in(state: Any, b: int) -> None:
        ledger = state.ledger[0]
        before = int(ledger.in_after_out)
        original(state, b)
        if ledger.in_after_out > max(before, int(ledger.retired_out)):
            hit()
        ledger.in_after_out = before

    return plan_copy_in


@fault("plan_copy_out", 4, 47, setup=TIGHT)
def copy_out_before_the_copy_in(original: Function, hit: Callable[[], None]) -> Function:
    def plan_copy_out(state: Any, b: int) -> None:
        ledger = state.ledger[0]
        before = int(ledger.out_after_in)
        original(state, b)
        if ledger.out_after_in > max(before, int(ledger.retired_in)):
            hit()
        ledger.out_after_in = before

    return plan_copy_out


# --- the swapper ---------------------------------------------------------------------------------


@fault("Swapper._act", 0, 1)
def plan_copies_and_submit_none(original: Function, hit: Callable[[], None]) -> Function:
    def _act(
        self: Any, kind: str, act: Function, records: Any, seqs: Any, by_layer: int = 0
    ) -> Any:
        def cut(ids: Any) -> Any:
            plan = act(ids)
            if len(plan.out_device):
                hit()
                plan.out_device = plan.out_device[:0]
                plan.out_host, plan.out_tokens = plan.out_host[:0], plan.out_tokens[:0]
                plan.out_generation = plan.out_generation[:0]
            return plan

        return original(self, kind, cut, records, seqs, by_layer)

    return _act


@fault("Swapper._worst", 0, 1)
def take_the_best_victim(original: Function, hit: Callable[[], None]) -> Function:
    """The sequence that came first goes first."""

    def _worst(self: Any, todo: Any, *others: Any) -> Any:
        right = original(self, todo, *others)
        state = self._runtime.ledger.state.sequences
        for seq in sorted(self._runtime.handles.values(), key=lambda q: q.id):
            if state["step"][seq._record] == 0 and state["state"][seq._record] == RESIDENT:
                if right is not None and seq is not right:
                    hit()
                    return seq
        return right

    return _worst


@fault("Swapper._worst", 36, 38, setup=TIGHT)
def no_victim_ever(original: Function, hit: Callable[[], None]) -> Function:
    """Both tiers nearly full, nobody gives way: work never ends."""

    def _worst(self: Any, todo: Any, *others: Any) -> Any:
        if original(self, todo, *others) is not None:
            hit()

    return _worst
