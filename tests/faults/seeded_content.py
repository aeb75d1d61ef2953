"""Faults of the trie, of publishing, of counts and lists, see plant.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmem.ledger import residency, trie
from kvmem.ledger.state import GROUP, HOST
from tests.faults.plant import Function, fault

# --- the trie ------------------------------------------------------------------------------------


@fault("has_row", 0, 1, weak_hash=True)
def skip_the_token_compare(original: Function, hit: Callable[[], None]) -> Function:
    def has_row(state: Any, n: int, start: int) -> bool:
        if not original(state, n, start):
            hit()
        return True

    return has_row


@fault("find_child", 0, 1, weak_hash=True)
def serve_another_prefix(original: Function, hit: Callable[[], None]) -> Function:
    """The parent, and so the namespace, is not compared."""

    def find_child(state: Any, parent: int, row_hash: int, start: int) -> int:
        i = trie.home(state, row_hash)
        while state.index[i]:
            n = trie.node_in(state, int(state.index[i]))
            if state.nodes[n].hash == row_hash and trie.has_row(state, n, start):
                if state.nodes[n].parent != parent:
                    hit()
                return n
            i = trie.after(state, i)
        return 0

    return find_child


@fault("close_gap", 0, 1, weak_hash=True)
def leave_a_hole_in_the_index(original: Function, hit: Callable[[], None]) -> Function:
    return lambda state, gap: hit()


@fault("count_child", 0, 1)
def forget_children(original: Function, hit: Callable[[], None]) -> Function:
    def count_child(state: Any, parent: int, change: int) -> None:
        if parent < 0:
            return original(state, parent, change)
        return hit()

    return count_child


@fault("remove_node", 0, 1)
def keep_the_node_of_a_reused_block(original: Function, hit: Callable[[], None]) -> Function:
    return lambda state, n: hit()


@fault("insert_node", 0, 1)
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


@fault("publish", 1, 9)
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


@fault("merge", 0, 4)
def merge_without_a_reference(original: Function, hit: Callable[[], None]) -> Function:
    def merge(state: Any, s: int, i: int, published: int) -> None:
        hit()
        original(state, s, i, published)
        state.blocks[published].ref_count -= 1

    return merge


@fault("adopt_frame", 4, 18)
def adopt_without_telling_the_frame(original: Function, hit: Callable[[], None]) -> Function:
    def adopt_frame(state: Any, b: int, published: int) -> None:
        hit()
        original(state, b, published)
        f = state.blocks[published].device_frame
        state.frames[residency.device_at(state, f)].block = b

    return adopt_frame


@fault("reset", 3, 4)
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


@fault("settle", 0, 1)
def forget_the_lru_on_free(original: Function, hit: Callable[[], None]) -> Function:
    """A block that lost its last reference is not made evictable."""

    def settle(state: Any, b: int) -> None:
        block = state.blocks[b]
        if block.ref_count == 0 and block.node and block.device_frame:
            return hit()
        return original(state, b)

    return settle


@fault("settle", 1, 2)
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


@fault("settle_lists", 0, 1)
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


@fault("release_copy_source", 0, 3)
def free_a_held_block(original: Function, hit: Callable[[], None]) -> Function:
    """The source of a copy on write is let go twice."""

    def release_copy_source(state: Any, row_at: Any, epoch: int) -> None:
        original(state, row_at, epoch)
        b = int(row_at[0].copy_source)
        if b and state.blocks[b].ref_count > 0:
            hit()
            original(state, row_at, epoch)

    return release_copy_source


@fault("enter_residency", 0, 1)
def count_a_resident_twice(original: Function, hit: Callable[[], None]) -> Function:
    def enter_residency(state: Any, b: int) -> None:
        hit()
        state.blocks[b].num_resident += 1
        original(state, b)

    return enter_residency


@fault("fork_into", 0, 1)
def fork_without_references(original: Function, hit: Callable[[], None]) -> Function:
    def fork_into(state: Any, s: int, child: int) -> None:
        original(state, s, child)
        table = state.tables[child, GROUP]
        for i in range(table.start, table.start + table.num_blocks):
            hit()
            state.blocks[state.table[i]].ref_count -= 1

    return fork_into


@fault("append_newest", 0, 1)
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


@fault("give_free", 0, 1)
def lose_a_freed_frame(original: Function, hit: Callable[[], None]) -> Function:
    def give_free(state: Any, tier: int, f: int) -> None:
        if tier == HOST:
            return hit()
        return original(state, tier, f)

    return give_free


@fault("release_busy", 0, 1)
def leave_the_sources_of_copies_busy(original: Function, hit: Callable[[], None]) -> Function:
    def release_busy(state: Any) -> None:
        if state.ledger[0].num_in:
            hit()

    return release_busy
