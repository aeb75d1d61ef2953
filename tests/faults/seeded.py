"""Mistakes planted in the ledger and the swapper, one function each, and the seeds that find them.

Python patches only reach uncompiled code, so all this runs under NUMBA_DISABLE_JIT=1. A patch
calls `hit()` when it does something else than the original would have: a fault that was never
reached has proved nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvmem.ledger import residency, trie
from kvmem.ledger.state import BUSY, DEVICE, GROUP, HOST, IN_DEVICE_LRU, MARKED, RESIDENT
from tests.faults.driver import Setup

Function = Callable[..., Any]
Patch = Callable[[Function, Callable[[], None]], Function]

ROOMY = Setup(device_blocks=9, host_blocks=12)
TIGHT = Setup(device_blocks=6, host_blocks=4)
POISON = Setup(device_blocks=8, host_blocks=3, debug=True)
NO_WRITE_BACK = Setup(tier_policy="none")
WIDE_BLOCKS = Setup(device_blocks=5, host_blocks=8, block_size=4)
DEFAULT = Setup()


@dataclass(frozen=True)
class Fault:
    """One mistake: which function, what it does instead, and where it is found."""

    target: str  # function of the ledger, or Class.method of the swapper
    patch: Patch
    setup: Setup
    seeds: tuple[int, ...]
    weak_hash: bool = False  # every row hash collides, as only luck or an attacker would have it


FAULTS: dict[str, Fault] = {}


def fault(
    target: str, *seeds: int, setup: Setup = DEFAULT, weak_hash: bool = False
) -> Callable[[Patch], Patch]:
    """Register a patch under its own name."""

    def add(patch: Patch) -> Patch:
        FAULTS[patch.__name__] = Fault(target, patch, setup, seeds, weak_hash)
        return patch

    return add


@contextmanager
def replaced(target: str, make: Callable[[Function], Function]) -> Iterator[None]:
    """Exchange a function wherever a module of kvmem names it, or a method in its class."""
    if "." in target:
        from kvmem import swapper

        owner, name = getattr(swapper, target.split(".")[0]), target.split(".")[1]
        places = [(owner, name)]
    else:
        name = target
        modules = [m for n, m in sys.modules.items() if n.startswith("kvmem.") and m]
        places = [(m, name) for m in modules if callable(getattr(m, name, None))]
    assert places, f"nothing is called {target} any more"
    original = getattr(places[0][0], name)
    assert all(getattr(place, name) is original for place, _ in places), f"two are called {target}"
    replacement = make(original)
    for place, _ in places:
        setattr(place, name, replacement)
    try:
        yield
    finally:
        for place, _ in places:
            setattr(place, name, original)


def weak(hash_row: Function) -> Function:
    """Two bits of the row hash: nearly all rows collide."""
    return lambda *a: hash_row(*a) & 0xC0000000


# --- the trie ------------------------------------------------------------------------------------


@fault("has_row", 1, weak_hash=True)
def skip_the_token_compare(original: Function, hit: Callable[[], None]) -> Function:
    def has_row(state: Any, n: int, start: int) -> bool:
        if not original(state, n, start):
            hit()
        return True

    return has_row


@fault("find_child", 1, weak_hash=True)
def serve_another_prefix(original: Function, hit: Callable[[], None]) -> Function:
    """The parent, and so the namespace, is not compared."""

    def find_child(state: Any, parent: int, row_hash: int, start: int) -> int:
        i = trie.home(state, row_hash)
        while state.index[i]:
            n = int(state.index[i])
            if state.nodes[n].hash == row_hash and trie.has_row(state, n, start):
                if state.nodes[n].parent != parent:
                    hit()
                return n
            i = trie.after(state, i)
        return 0

    return find_child


@fault("close_gap", 1, weak_hash=True)
def leave_a_hole_in_the_index(original: Function, hit: Callable[[], None]) -> Function:
    return lambda state, gap: hit()


@fault("count_child", 1)
def forget_children(original: Function, hit: Callable[[], None]) -> Function:
    def count_child(state: Any, parent: int, change: int) -> None:
        if parent < 0:
            return original(state, parent, change)
        return hit()

    return count_child


@fault("remove_node", 1)
def keep_the_node_of_a_reused_block(original: Function, hit: Callable[[], None]) -> Function:
    return lambda state, n: hit()


@fault("insert_node", 1)
def publish_other_tokens(original: Function, hit: Callable[[], None]) -> Function:
    """The node's key row is that of one token later."""

    def insert_node(state: Any, parent: int, row_hash: int, start: int, b: int) -> int:
        n = original(state, parent, row_hash, start, b)
        row = state.tokens[start + 1 : start + 1 + state.ledger[0].block_size]
        if (state.node_keys[n] != row).any():
            hit()
        state.node_keys[n] = row
        return int(n)

    return insert_node


# --- publishing ----------------------------------------------------------------------------------


@fault("publish", 1)
def publish_drafts(original: Function, hit: Callable[[], None]) -> Function:
    def publish(state: Any, s: int) -> None:
        sequence = state.sequences[s]
        drafts = int(sequence.num_drafts)
        full = int(sequence.num_stored) // state.ledger[0].block_size
        if drafts and full > (sequence.num_tokens - drafts) // state.ledger[0].block_size:
            hit()
        sequence.num_drafts = 0
        original(state, s)
        sequence.num_drafts = drafts

    return publish


@fault("merge", 1)
def merge_without_a_reference(original: Function, hit: Callable[[], None]) -> Function:
    def merge(state: Any, s: int, i: int, published: int) -> None:
        hit()
        original(state, s, i, published)
        state.blocks[published].ref_count -= 1

    return merge


@fault("adopt_frame", 1)
def adopt_without_telling_the_frame(original: Function, hit: Callable[[], None]) -> Function:
    def adopt_frame(state: Any, b: int, published: int) -> None:
        hit()
        original(state, b, published)
        f = state.blocks[published].device_frame
        state.frames[residency.device_at(state, f)].block = b

    return adopt_frame


@fault("reset", 1)
def reset_lets_sequences_publish_on(original: Function, hit: Callable[[], None]) -> Function:
    """Their path is forgotten, yet they think they still stand on it."""

    def reset(state: Any, namespace: int, roots: Any) -> None:
        live = [s for s in range(1, len(state.sequences)) if state.sequences[s].state]
        kept = [(s, int(state.sequences[s].num_published)) for s in live]
        original(state, namespace, roots)
        for s, published in kept:
            if state.sequences[s].num_published != published:
                hit()
                state.sequences[s].num_published = published

    return reset


# --- counts and lists ----------------------------------------------------------------------------


@fault("settle", 1)
def forget_the_lru_on_free(original: Function, hit: Callable[[], None]) -> Function:
    """A block that lost its last reference is not made evictable."""

    def settle(state: Any, b: int) -> None:
        block = state.blocks[b]
        if block.ref_count == 0 and block.node and block.device_frame:
            return hit()
        return original(state, b)

    return settle


@fault("settle", 1)
def free_a_pinned_block(original: Function, hit: Callable[[], None]) -> Function:
    def settle(state: Any, b: int) -> None:
        block = state.blocks[b]
        pins = int(block.num_pins)
        if pins and block.ref_count == 0:
            hit()
            block.num_pins = 0
        original(state, b)
        block.num_pins = pins

    return settle


@fault("settle_lists", 1)
def hand_on_a_pinned_frame(original: Function, hit: Callable[[], None]) -> Function:
    """A pinned block's frame is evictable."""

    def settle_lists(state: Any, b: int) -> None:
        block = state.blocks[b]
        pins = int(block.num_pins)
        if pins and block.num_resident == 0:
            hit()
        block.num_pins = 0
        original(state, b)
        block.num_pins = pins

    return settle_lists


@fault("release_copy_source", 1)
def free_a_held_block(original: Function, hit: Callable[[], None]) -> Function:
    """The source of a copy on write is let go twice."""

    def release_copy_source(state: Any, row_at: Any, epoch: int) -> None:
        original(state, row_at, epoch)
        b = int(row_at[0].copy_source)
        if b and state.blocks[b].ref_count > 0:
            hit()
            original(state, row_at, epoch)

    return release_copy_source


@fault("enter_residency", 1)
def count_a_resident_twice(original: Function, hit: Callable[[], None]) -> Function:
    def enter_residency(state: Any, b: int) -> None:
        hit()
        state.blocks[b].num_resident += 1
        original(state, b)

    return enter_residency


@fault("fork_into", 1)
def fork_without_references(original: Function, hit: Callable[[], None]) -> Function:
    def fork_into(state: Any, s: int, child: int) -> None:
        original(state, s, child)
        table = state.tables[child, GROUP]
        for i in range(table.start, table.start + table.num_blocks):
            hit()
            state.blocks[state.table[i]].ref_count -= 1

    return fork_into


@fault("append_newest", 1)
def evict_the_newest_first(original: Function, hit: Callable[[], None]) -> Function:
    def append_newest(state: Any, tier: int, f: int) -> None:
        pool = state.pools[tier]
        if pool.oldest == 0:
            return original(state, tier, f)
        hit()
        state.frames[pool.first + pool.oldest].previous = f
        state.frames[pool.first + f].previous = 0
        state.frames[pool.first + f].next = pool.oldest
        pool.oldest = f
        pool.num_evictable += 1
        return None

    return append_newest


@fault("give_free", 1)
def lose_a_freed_frame(original: Function, hit: Callable[[], None]) -> Function:
    def give_free(state: Any, tier: int, f: int) -> None:
        if tier == HOST:
            return hit()
        return original(state, tier, f)

    return give_free


@fault("release_busy", 1)
def leave_the_sources_of_copies_busy(original: Function, hit: Callable[[], None]) -> Function:
    def release_busy(state: Any) -> None:
        if state.ledger[0].num_in:
            hit()

    return release_busy


# --- writing -------------------------------------------------------------------------------------


@fault("writes_shared", 1)
def skip_the_copy_on_write(original: Function, hit: Callable[[], None]) -> Function:
    def writes_shared(state: Any, s: int) -> bool:
        if original(state, s):
            hit()
        return False

    return writes_shared


@fault("copy_on_write", 1)
def copy_no_bytes_on_write(original: Function, hit: Callable[[], None]) -> Function:
    def copy_on_write(state: Any, row_at: Any) -> None:
        original(state, row_at)
        hit()
        state.ledger[0].num_copies -= 1

    return copy_on_write


@fault("fill_rows", 1)
def write_a_full_hit_again(original: Function, hit: Callable[[], None]) -> Function:
    """The last token of a full hit gets a slot in the shared block."""

    def fill_rows(state: Any, rows: Any, *out: Any) -> int:
        stored = [(int(r.sequence), int(state.sequences[r.sequence].num_stored)) for r in rows]
        for s, _ in stored:
            sequence = state.sequences[s]
            if sequence.num_stored > sequence.num_computed:
                hit()
                sequence.num_stored = sequence.num_computed
        ready = int(original(state, rows, *out))
        for s, count in stored:
            state.sequences[s].num_stored = count
        return ready

    return fill_rows


@fault("computed_after", 1)
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


@fault("trim_tail", 1, setup=WIDE_BLOCKS)
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


@fault("fill_counts", 1)
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


@fault("abort_row", 1)
def restore_no_counts_at_abort(original: Function, hit: Callable[[], None]) -> Function:
    def abort_row(state: Any, row_at: Any) -> None:
        row, s = row_at[0], int(row_at[0].sequence)
        computed = int(state.sequences[s].num_computed)
        freed = state.sequences[s].freed
        original(state, row_at)
        if not freed and computed != row.old_computed:
            hit()
            state.sequences[s].num_computed = computed

    return abort_row


@fault("restore_copy", 1)
def keep_the_copy_at_abort(original: Function, hit: Callable[[], None]) -> Function:
    def restore_copy(state: Any, row_at: Any) -> None:
        if row_at[0].copy_source:
            hit()

    return restore_copy


@fault("commit_row", 1)
def commit_an_aborted_step(original: Function, hit: Callable[[], None]) -> Function:
    """Counts one token too many."""

    def commit_row(state: Any, row_at: Any, epoch: int) -> None:
        sequence = state.sequences[row_at[0].sequence]
        freed = sequence.freed
        original(state, row_at, epoch)
        if not freed and sequence.num_computed < sequence.num_tokens:
            hit()
            sequence.num_computed += 1

    return commit_row


# --- tiers ---------------------------------------------------------------------------------------


@fault("is_clean", 1)
def claim_clean_when_stale(original: Function, hit: Callable[[], None]) -> Function:
    """Any host copy counts as complete, whatever was written since."""

    def is_clean(state: Any, b: int) -> bool:
        clean = bool(original(state, b))
        if not clean and state.blocks[b].host_frame:
            hit()
            return True
        return clean

    return is_clean


@fault("plan_copy_in", 1)
def drop_the_clean_mark(original: Function, hit: Callable[[], None]) -> Function:
    """What came back is copied out again next time."""

    def plan_copy_in(state: Any, b: int) -> None:
        hit()
        original(state, b)
        state.frames[residency.host_at(state, state.blocks[b].host_frame)].num_tokens = 0

    return plan_copy_in


@fault("save_to_host", 1)
def evict_without_copying_out(original: Function, hit: Callable[[], None]) -> Function:
    def save_to_host(state: Any, b: int) -> None:
        before = int(state.ledger[0].num_out)
        original(state, b)
        if state.ledger[0].num_out > before:
            hit()
            state.ledger[0].num_out -= 1
            state.ledger[0].blocks_out -= 1

    return save_to_host


@fault("cancel_copy_out", 1, setup=TIGHT)
def copy_into_a_frame_taken_again(original: Function, hit: Callable[[], None]) -> Function:
    def cancel_copy_out(state: Any, h: int) -> None:
        ledger = state.ledger[0]
        if (state.out_list[: ledger.num_out, 1] == h).any():
            hit()

    return cancel_copy_out


@fault("plan_copy_out", 1)
def copy_out_the_wrong_frame(original: Function, hit: Callable[[], None]) -> Function:
    def plan_copy_out(state: Any, b: int) -> None:
        original(state, b)
        i = int(state.ledger[0].num_out) - 1
        if i:
            hit()
            state.out_list[i, 0] = state.out_list[i - 1, 0]

    return plan_copy_out


@fault("count_host_need", 1, setup=TIGHT)
def reserve_cached_copies_twice(original: Function, hit: Callable[[], None]) -> Function:
    """The clean copies that a sequence keeps count as room for its dirty blocks too."""

    def count_host_need(state: Any, seqs: Any, need: Any) -> None:
        original(state, seqs, need)
        if need[1]:
            hit()
        need[1] = 0

    return count_host_need


@fault("count_block", 1)
def count_hits_as_free(original: Function, hit: Callable[[], None]) -> Function:
    """R7: a cached block that a row uses is not there to be taken."""

    def count_block(state: Any, b: int, need: Any) -> None:
        original(state, b, need)
        if need[1]:
            hit()
        need[1] = 0

    return count_block


@fault("clear_marks", 1)
def leave_marks_behind(original: Function, hit: Callable[[], None]) -> Function:
    def clear_marks(state: Any, rows: Any, num_rows: int, found: Any) -> None:
        if (state.blocks["bits"] & MARKED).any():
            hit()

    return clear_marks


# --- fences --------------------------------------------------------------------------------------


@fault("arrive", 1)
def forget_to_wait_for_arrivals(original: Function, hit: Callable[[], None]) -> Function:
    def arrive(state: Any, start: int, num_blocks: int) -> int:
        if original(state, start, num_blocks) > state.ledger[0].retired_in:
            hit()
        return 0

    return arrive


@fault("note_waits", 1)
def write_a_frame_before_its_copy_out(original: Function, hit: Callable[[], None]) -> Function:
    def note_waits(state: Any, f: int) -> None:
        frame = state.frames[residency.device_at(state, f)]
        if frame.fence_out > state.ledger[0].retired_out:
            hit()

    return note_waits


@fault("plan_copy_in", 1)
def copy_in_before_the_copy_out(original: Function, hit: Callable[[], None]) -> Function:
    def plan_copy_in(state: Any, b: int) -> None:
        ledger = state.ledger[0]
        before = int(ledger.in_after_out)
        original(state, b)
        if ledger.in_after_out > max(before, int(ledger.retired_out)):
            hit()
        ledger.in_after_out = before

    return plan_copy_in


@fault("plan_copy_out", 1, setup=TIGHT)
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


@fault("Swapper._act", 1)
def plan_copies_and_submit_none(original: Function, hit: Callable[[], None]) -> Function:
    def _act(self: Any, kind: str, act: Function, records: Any, seqs: Any) -> Any:
        def cut(ids: Any) -> Any:
            plan = act(ids)
            if len(plan.out_device):
                hit()
                plan.out_device = plan.out_device[:0]
                plan.out_host, plan.out_tokens = plan.out_host[:0], plan.out_tokens[:0]
            return plan

        return original(self, kind, cut, records, seqs)

    return _act


@fault("Swapper._worst", 1)
def take_the_best_victim(original: Function, hit: Callable[[], None]) -> Function:
    """The sequence that came first goes first."""

    def _worst(self: Any, todo: Any) -> Any:
        right = original(self, todo)
        state = self._runtime.ledger.state.sequences
        for seq in sorted(self._runtime.handles.values(), key=lambda q: q.id):
            if state["step"][seq.record] == 0 and state["state"][seq.record] == RESIDENT:
                if right is not None and seq is not right:
                    hit()
                    return seq
        return right

    return _worst


@fault("Swapper._worst", 1, setup=TIGHT)
def no_victim_ever(original: Function, hit: Callable[[], None]) -> Function:
    """Both tiers nearly full, nobody gives way: work never ends."""

    def _worst(self: Any, todo: Any) -> Any:
        if original(self, todo) is not None:
            hit()

    return _worst


__all__ = ["BUSY", "DEVICE", "FAULTS", "IN_DEVICE_LRU", "Fault", "replaced", "weak"]
