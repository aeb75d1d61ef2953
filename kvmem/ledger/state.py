"""All records of the ledger: the only place with dtypes, and the object that owns the arrays.

Id 0 means "none" everywhere: block 0, frame 0 of each tier and node 0 are reserved, so zeroed
memory is a valid empty state. Each field has a comment: unit, and the rule that binds it.
Compiled functions take the whole `State` (a named tuple, free inside compiled code; Python passes
its addresses, see address.py) and write `state.blocks[b].ref_count += 1`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .address import Layout, opener
from .jit import JIT_DISABLED

Rows: TypeAlias = Any  # ROW [rows of a step]

DEVICE = 0
HOST = 1
NUM_TIERS = 2
MAX_NAMESPACE = 32767  # that a frame can tell; larger ones it can't say
GROUP = 0  # this version has one layer group; the records carry the axis

# Sequence states (design section 2). 0 is a record without a sequence.
NO_SEQUENCE = 0
WAITING = 1  # claims no blocks
RESIDENT = 2  # each of its blocks has a device frame
SWAPPED = 3  # its blocks may be anywhere, never lost

# Tier policies: what becomes of cached blocks on their way out of the device.
DROP = 0  # they go, unless the host tier caches their children (R4)
WRITE_BACK = 1  # copied to the host tier when evicted
WRITE_THROUGH = 2  # full blocks are copied while nothing else is, see cleaning.py
EXCLUSIVE = 3  # as WRITE_BACK, and what is copied in gives up its host copy
TIER_POLICIES = {
    "none": DROP,
    "write_back": WRITE_BACK,
    "write_through": WRITE_THROUGH,
    "exclusive": EXCLUSIVE,
}

# Bits of BLOCK.bits
IN_DEVICE_LRU = 1  # its device frame is evictable
IN_HOST_LRU = 2  # its host frame is evictable
MARKED = 4  # counted by the plan being decided; clear between calls
BUSY = 8  # its host frame is the source of a copy of the plan being made; clear between calls
SWEPT = 16  # cleaning has passed it since it became evictable, see cleaning.py
QUEUED = 32  # its id is in `to_clean`, perhaps since it was another block's
UNSAVED = 64  # its copy out failed: a SWAPPED owner relies on its device frame
OUT_OF_PLACE = 128  # a block below it was saved after it had been swept, see evict_device

# Bits of SEQUENCE.at_end
FREED = 1  # freed inside an open step: it goes
LOST = 2  # a copy failed: what it lost is cut off

LEDGER = np.dtype(
    [
        ("epoch", "i8"),  # last step planned
        ("last_out", "i8"),  # last out transfer id given to a plan
        ("last_in", "i8"),  # last in transfer id given to a plan
        ("retired_out", "i8"),  # out transfers up to here are known to be done
        ("retired_in", "i8"),
        ("arrivals", "i8"),  # sequences ever made; gives SEQUENCE.arrival
        ("clock", "i8"),  # copies of tables for steps so far; see SEQUENCE.table_changed
        ("num_out", "i4"),  # rows of the plan lists filled by the call in progress
        ("num_in", "i4"),
        ("num_copies", "i4"),
        ("num_fills", "i4"),
        ("in_begin", "i4"),  # rows of in_list that are issued already, in earlier rounds
        ("num_rounds", "i4"),  # earlier rounds of the plan being made, see issue.py
        ("num_busy", "i4"),  # blocks that the plan being made copies in
        ("clean_low", "i4"),  # watermarks of the device tier, see cleaning.py; frames
        ("clean_high", "i4"),
        ("newest_swept", "i4"),  # device frame that ends the swept run of the LRU, 0 none
        ("num_swept", "i4"),
        ("queue_begin", "i4"),  # of `to_clean`
        ("num_queued", "i4"),
        ("may_evict", "i4"),  # cached host copies it may evict before it begins another round
        ("out_after_step", "i8"),  # waits of the plan being made, see Plan
        ("out_after_in", "i8"),
        ("in_after_step", "i8"),
        ("in_after_out", "i8"),
        ("step_after_in", "i8"),
        ("step_after_out", "i8"),
        ("out_opened", "i4"),  # 1: frames carry the id last_out + 1, so the plan must issue it
        ("num_groups", "i4"),
        ("block_size", "i4"),  # tokens
        ("tier_policy", "i4"),  # see TIER_POLICIES
        ("record_fills", "i4"),  # 1: vacated device frames are listed to be filled: poison, zeros
        ("clears", "i4"),  # 1: those too that a block takes from another namespace (R12)
        ("block_free", "i4"),  # head of the free block ids, linked through BLOCK.node
        ("num_blocks_used", "i4"),
        ("node_free", "i4"),  # head of the free nodes, linked through NODE.parent
        ("num_nodes", "i4"),
        ("id_bits", "i4"),  # that hold any node id, in the entries of `index`
        ("sequence_free", "i4"),  # head of the free sequence records, linked by next_free
        ("num_sequences", "i4"),
        ("tokens_top", "i8"),  # spans of `tokens` begin below here
        ("table_top", "i8"),
        ("num_reclaimed", "i4"),  # pass 1 of a plan: evictable frames its rows use themselves
        ("num_needed", "i4"),  # pass 1 of a plan: frames to take
        ("error_row", "i4"),  # detail of the error code a batch op returned
        ("error_needed", "i8"),
        ("error_available", "i8"),
        # counters for stats(), never reset (R10)
        ("hit_tokens", "i8"),
        ("query_tokens", "i8"),  # known tokens of sequences at their first plan
        ("evicted_device", "i8"),  # blocks that lost their device frame
        ("evicted_host", "i8"),
        ("dropped", "i8"),  # cached blocks that left their last tier
        ("swap_outs", "i8"),  # sequences swapped out
        ("swap_ins", "i8"),  # SWAPPED sequences made RESIDENT
        ("recomputes", "i8"),  # sequences that gave up their blocks
        ("evicted_clean", "i8"),  # of evicted_device: host copy complete, nothing copied
        ("clean_swap_outs", "i8"),  # blocks that swap_out found clean: nothing copied
        ("blocks_out", "i8"),  # blocks copied device to host
        ("blocks_in", "i8"),
        ("blocks_cleaned", "i8"),  # of blocks_out: ahead of their eviction
        ("copied_on_write", "i8"),
        ("merged", "i8"),  # blocks replaced by an equal published block
        ("published", "i8"),
    ]
)

POOL = np.dtype(  # one per group and tier
    [
        ("first", "i8"),  # index in `frames` of this pool's frame 0
        ("num_frames", "i4"),  # usable frames, without the reserved frame 0
        ("num_free", "i4"),  # R1
        ("free_head", "i4"),  # linked through FRAME.previous / next
        ("free_tail", "i4"),
        ("quarantine", "i4"),  # 1: a frame given back is the last to be taken again
        ("num_evictable", "i4"),  # length of the LRU list (R2)
        ("oldest", "i4"),  # LRU ends, linked through FRAME.previous / next
        ("newest", "i4"),
        ("peak", "i4"),  # most frames not free at once (R10)
    ]
)

BLOCK = np.dtype(
    [
        ("ref_count", "i4"),  # table entries naming it, and copy-on-write sources held (R2)
        ("num_resident", "i4"),  # of these, entries of RESIDENT tables
        ("node", "i4"),  # its trie node once published (R4); free ids: the next free id
        ("device_frame", "i4"),
        ("host_frame", "i4"),
        ("num_tokens", "i2"),  # valid slots, counted from offset 0
        ("num_pins", "i2"),  # live pins naming it
        ("bits", "i4"),
    ]
)

FRAME = np.dtype(
    [
        ("block", "i4"),  # 0: free (or reserved)
        ("previous", "i4"),  # in the LRU: the next older frame; on the free list: the one before
        ("next", "i4"),  # in the LRU: the next newer; on the free list: the next free
        ("generation", "u4"),  # number of its reuse (R11)
        ("last_use", "i8"),  # device: last step of a sequence that could touch it (R6)
        ("fence_out", "i8"),  # last out transfer reading (device) or writing (host) it (R3)
        ("fence_in", "i8"),  # last in transfer writing (device) or reading (host) it
        ("num_tokens", "i2"),  # host: tokens the copy holds; clean = the block's number
        ("namespace", "i2"),  # device: whose bytes it holds, 0 nobody's, -1 it can't say (R12)
    ]
)

NODE = np.dtype(
    [
        ("parent", "i4"),  # > 0 a node, < 0 minus a namespace id; free nodes: the next free
        ("num_children", "i4"),
        ("hash", "u4"),  # chained; also says where the index keeps it
    ]
)

NAMESPACE = np.dtype([("num_children", "i4"), ("num_sequences", "i4")])

TABLE = np.dtype([("start", "i8"), ("capacity", "i4"), ("num_blocks", "i4")])

SEQUENCE = np.dtype(  # what a decode step reads comes first, in one cache line
    [
        ("state", "i4"),
        ("num_tokens", "i4"),  # known tokens, drafts included
        ("step", "i8"),  # the open step it is planned in, 0 none
        ("last_step", "i8"),  # last step it was planned in
        ("num_computed", "i4"),  # tokens whose hidden state was computed, or need not be
        ("num_stored", "i4"),  # tokens whose K/V is stored; > num_computed only on a full hit
        ("tokens_start", "i8"),  # span in `tokens`
        ("num_drafts", "i4"),  # unaccepted, at the end
        ("num_published", "i4"),  # leading blocks that are in the trie
        ("publish", "i1"),  # 1: its full blocks enter the trie
        ("queried", "i1"),  # 1: counted in query_tokens
        ("fresh", "i1"),  # 1: swapped in and not yet stepped, so no victim (design section 2)
        ("at_end", "i1"),  # what happens to it when its open step ends: FREED, LOST
        ("tokens_capacity", "i4"),
        ("table_changed", "i8"),  # LEDGER.clock when an entry of its frame table last changed
        # (not: was added)
        ("fence_in", "i8"),  # its blocks have arrived when this in transfer is done
        ("num_cached", "i4"),  # tokens served by the trie, once queried
        ("max_cached", "i4"),  # limit of num_cached, -1 none
        ("keys_start", "i8"),  # span of what the trie compares: the tokens' own, or, with extras,
        # another one of the same capacity
        ("next_free", "i4"),
        ("namespace", "i4"),
        ("priority", "i4"),
        ("num_swaps", "i4"),  # times swapped out
        ("arrival", "i8"),  # order of coming
        ("lost", "i4"),  # 1 + the table entry from which on its K/V is lost, 0 nothing is
        ("num_unknown", "i4"),  # last tokens, whose values are still on their way to the host
        ("left_in", "i8"),  # its fence_in when it gave up blocks: what it computed hangs on it
    ]
)

ROW = np.dtype(  # one sequence of a step, from decision to end
    [
        ("sequence", "i4"),
        ("num_tokens", "i4"),  # asked for (-1: what is pending), then decided
        ("reason", "i4"),  # why it is left out, 0: it is planned
        ("found_start", "i4"),  # in the scratch list of blocks found in the trie
        ("num_found", "i4"),
        ("old_state", "i4"),  # what an exception in the body restores
        ("old_blocks", "i4"),
        ("old_computed", "i4"),
        ("old_stored", "i4"),
        ("old_published", "i4"),
        ("old_cached", "i4"),
        ("old_queried", "i4"),
        ("copy_index", "i4"),  # table entry that was copied on write, -1 none
        ("copy_source", "i4"),  # its former block, held until the step ends
        ("tail", "i4"),  # decode.py: the block of its one token; else 0
    ]
)

SPAN_CLASS = np.dtype([("free_head", "i8")])  # -1 none; one per size class and kind of span
NUM_SPAN_CLASSES = 40
MAX_ROUNDS = 64  # of a plan, see issue.py
COPIES = 9  # numbers that say what a round copies, see sealed.py
LOOKAHEAD = 8  # blocks of a prompt whose lookups overlap


class State(NamedTuple):
    """The arrays of one ledger. `sequences`, `tables`, `namespaces`, `tokens`, `table`,
    `frame_table` and the plan lists grow; the others have their final size from the start."""

    ledger: NDArray[Any]  # LEDGER, one record
    pools: NDArray[Any]  # POOL [num_groups * NUM_TIERS]
    blocks: NDArray[Any]  # BLOCK [1 + frames of all tiers]
    frames: NDArray[Any]  # FRAME, the pools one after another
    nodes: NDArray[Any]  # NODE [1 + frames of all tiers]
    node_blocks: NDArray[np.int32]  # [nodes, num_groups]: block id of the node, 0 none
    node_keys: NDArray[np.int32]  # [nodes, block_size]: its token row (R4)
    index: NDArray[np.uint32]  # open addressing by hash: node id, and above it (LEDGER.id_bits)
    # as many low bits of the hash as there is room for
    hash_keys: NDArray[np.int64]  # [block_size + 2] secret random numbers (trie.py)
    lookahead: NDArray[np.int64]  # [LOOKAHEAD]: hashes of the blocks being looked up
    namespaces: NDArray[Any]  # NAMESPACE, id 0 unused
    sequences: NDArray[Any]  # SEQUENCE, record 0 unused
    tables: NDArray[Any]  # TABLE [sequences, num_groups]
    spans: NDArray[Any]  # SPAN_CLASS [2 * NUM_SPAN_CLASSES]: tokens, then table
    tokens: NDArray[np.int32]  # token ids, a span or two per sequence
    table: NDArray[np.int32]  # block ids, a span per sequence and group
    frame_table: NDArray[np.int32]  # the same spans: device frames while RESIDENT, else stale
    out_list: NDArray[np.int32]  # [rows, 4]: device frame, host frame, tokens, host generation
    in_list: NDArray[np.int32]  # [rows, 4]: host frame, device frame, tokens, generation likewise
    copy_list: NDArray[np.int32]  # [rows, 3]: source, target, tokens
    fill_list: NDArray[np.int32]  # device frames vacated (debug)
    to_clean: NDArray[np.int32]  # ring of block ids [as many as blocks]
    rounds: NDArray[np.int64]  # [MAX_ROUNDS, COPIES]: earlier rounds of the plan being made


_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
LAYOUT: Layout = {
    "ledger": (LEDGER, 1),
    "pools": (POOL, 1),
    "blocks": (BLOCK, 1),
    "frames": (FRAME, 1),
    "nodes": (NODE, 1),
    "node_blocks": (_INT32, 2),
    "node_keys": (_INT32, 2),
    "index": (np.dtype(np.uint32), 1),
    "hash_keys": (_INT64, 1),
    "lookahead": (_INT64, 1),
    "namespaces": (NAMESPACE, 1),
    "sequences": (SEQUENCE, 1),
    "tables": (TABLE, 2),
    "spans": (SPAN_CLASS, 1),
    "tokens": (_INT32, 1),
    "table": (_INT32, 1),
    "frame_table": (_INT32, 1),
    "out_list": (_INT32, 2),
    "in_list": (_INT32, 2),
    "copy_list": (_INT32, 2),
    "fill_list": (_INT32, 1),
    "to_clean": (_INT32, 1),
    "rounds": (_INT64, 2),
}
opened = opener(State, LAYOUT)


CACHE_LINE = 64


def records(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeroed records that begin at a cache line; attribute access works in plain Python too
    (NUMBA_DISABLE_JIT=1)."""
    shape = (shape,) if isinstance(shape, int) else shape
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % CACHE_LINE
    array = memory[first : first + size].view(dtype).reshape(shape)
    return array.view(np.recarray) if JIT_DISABLED else array


def grown(array: NDArray[Any], length: int) -> NDArray[Any]:
    """A copy of `array` with at least `length` rows, the new ones zero. Amortised O(1)."""
    length = max(length, array.shape[0] * 2)
    shape = (length, *array.shape[1:])
    bigger = records(shape, array.dtype) if array.dtype.names else np.zeros(shape, array.dtype)
    bigger[: array.shape[0]] = array
    return bigger


def metadata_bytes_per_block(block_size: int, num_groups: int = 1) -> int:
    """Bytes of records per frame of either tier, without the token row itself."""
    index_bytes = 3 * 4 // 2  # one and a half index entries a node
    return BLOCK.itemsize + FRAME.itemsize + NODE.itemsize + 4 * num_groups + index_bytes
