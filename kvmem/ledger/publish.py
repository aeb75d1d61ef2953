"""Publishing: a full, computed, accepted block becomes findable, or merges with its equal (R5).

Only a RESIDENT sequence publishes, when a step ends or drafts are accepted. Blocks are published
in order, so a published block's parent is always published.
"""

from __future__ import annotations

from .cleaning import queue_block
from .frames import device_at
from .jit import compiled
from .residency import enter_residency, settle, settle_lists
from .sequence import entry, num_known, path_end, release_entry
from .state import GROUP, RESIDENT, WRITE_THROUGH, State
from .trie import find_child, hash_row, insert_node, parent_hash


@compiled
def can_merge(state: State, b: int) -> bool:
    """True when nobody else relies on duplicate `b`, and it has arrived. Else another table would
    go on with `b` while its later blocks hang on `published`, which could then leave before its
    child (R4); or what was computed over a copy in that fails would hang on it (R5). O(1)."""
    block = state.blocks[b]
    arrived = state.frames[device_at(state, block.device_frame)].fence_in
    return bool(
        block.ref_count == 1 and block.num_pins == 0 and arrived <= state.ledger[0].retired_in
    )


@compiled
def adopt_frame(state: State, b: int, published: int) -> None:
    """Hand the device frame of duplicate `b` to the equal published block. O(1)."""
    f = state.blocks[b].device_frame
    state.blocks[b].device_frame = 0
    state.blocks[published].device_frame = f
    state.frames[device_at(state, f)].block = published


@compiled
def merge(state: State, s: int, i: int, published: int) -> None:
    """Let table entry `i` name the published block instead of its duplicate. O(1)."""
    sequence = state.sequences[s]
    at = state.tables[s, GROUP].start + i
    b = int(state.table[at])
    adopted = state.blocks[published].device_frame == 0
    if adopted:
        adopt_frame(state, b, published)
    state.blocks[published].ref_count += 1
    enter_residency(state, published)
    f = state.blocks[published].device_frame
    state.table[at] = published
    state.frame_table[at] = f
    sequence.table_changed = state.ledger[0].clock
    sequence.fence_in = max(sequence.fence_in, state.frames[device_at(state, f)].fence_in)
    state.ledger[0].merged += 1
    if adopted:
        state.blocks[b].num_resident -= 1
        state.blocks[b].ref_count -= 1
        settle(state, b)
    else:
        release_entry(state, s, b)
    settle_lists(state, published)


@compiled
def publish(state: State, s: int) -> None:
    """Publish the full blocks of a sequence that are not published yet. O(their tokens)."""
    ledger, sequence = state.ledger[0], state.sequences[s]
    if sequence.publish == 0 or sequence.state != RESIDENT:
        return
    full = min(int(sequence.num_stored), num_known(state, s)) // ledger.block_size
    while sequence.num_published < full:
        i = int(sequence.num_published)
        parent = path_end(state, s)
        b = entry(state, s, i)
        n = int(state.blocks[b].node)
        if n:  # a fork published it first
            if state.nodes[n].parent != parent:
                return
            sequence.num_published += 1
            continue
        start = int(sequence.keys_start + i * ledger.block_size)
        row_hash = hash_row(state, parent_hash(state, parent), start)
        n = find_child(state, parent, row_hash, start)
        if n:
            published = int(state.node_blocks[n, GROUP])
            if not can_merge(state, b):
                return
            merge(state, s, i, published)
        else:
            state.blocks[b].node = insert_node(state, parent, row_hash, start, b)
            frame = state.frames[device_at(state, state.blocks[b].device_frame)]
            # whoever merges into it, or copies it, waits for its writer (R6)
            frame.last_use = max(frame.last_use, sequence.last_step)
            ledger.published += 1
            if ledger.tier_policy == WRITE_THROUGH:
                queue_block(state, b)
        sequence.num_published += 1
