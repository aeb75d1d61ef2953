"""Pass 1 of a plan: decide, row by row, what a step computes and whether there is room (R7).

Nothing is written but the rows, scratch and MARKED bits (cleared before returning to Python), so
`can_fit`, `make_room` and the step itself ask the same function. A block is counted once however
many rows need it: the first row that does marks it.

    needed     frames to take: table blocks without device frame, new blocks, copies on write
    reclaimed  evictable frames that the rows use themselves, so they are not there to take
    room       free + evictable - reclaimed - needed >= reserve, after each row
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import compiled, prefetch
from .sequence import entry, num_blocks_for, num_known, path_end
from .spans import span_capacity
from .state import DEVICE, GROUP, MARKED, RESIDENT, Rows, State
from .trie import find_path, hash_row, parent_hash

# Codes that batch operations return.
OK = 0
NO_DEVICE_ROOM = 1
NO_HOST_ROOM = 2
TOO_LONG = 3
GROW_TOKENS = 4  # the array named is too short: Python grows it and calls again
GROW_TABLE = 5
GROW_SCRATCH = 6
DRAFTS_PENDING = 7
TOO_MANY_ACCEPTED = 8
IN_STEP = 9
TOO_MANY_PINS = 10
GROW_LISTS = 11
BAD_TOKEN = 12

# Why a row is left out of a step (Step.left_out).
PLANNED = 0
IDLE = 1  # nothing pending
BUDGET = 2  # max_tokens was used up by earlier rows
ROOM = 3  # no device frames now
ARRIVING = 4  # an earlier row of this step computes the block it needs next
NEVER = 5  # longer than the device pool

NO_HASH = -1


@compiled
def clear_marks(state: State, rows: Rows, found: NDArray[np.int32]) -> None:
    """Take back the MARKED bits of the planned rows. O(marked)."""
    for i in range(rows.shape[0]):
        row = rows[i]
        table = state.tables[row.sequence, GROUP]
        if state.sequences[row.sequence].state != RESIDENT:
            for j in range(table.num_blocks):
                state.blocks[state.table[table.start + j]].bits &= ~MARKED
        for j in range(row.found_start, row.found_start + row.num_found):
            state.blocks[found[j]].bits &= ~MARKED


@compiled
def look_up(state: State, row_at: Rows, found: NDArray[np.int32], top: int) -> int:
    """Find the cached blocks that continue a row's table, into `found[top:]`; return the hash of
    the next block if its tokens are known, else NO_HASH. O(tokens hit)."""
    row = row_at[0]
    s = row.sequence
    sequence = state.sequences[s]
    block_size = state.ledger[0].block_size
    row.found_start = top
    row.num_found = 0
    i = int(sequence.num_published)
    if i != sequence.num_stored // block_size:
        return NO_HASH  # an unpublished block lies before, so the path is not known
    known = num_known(state, int(s)) // block_size
    if i >= known:
        return NO_HASH
    parent = path_end(state, s)
    if may_hit(state, row_at):
        limit = known
        if sequence.max_cached >= 0:
            limit = min(known, int(sequence.max_cached) // block_size)
        start = int(sequence.keys_start) + i * block_size
        row.num_found = find_path(state, parent, start, limit - i, found, top)
        if row.num_found:
            i += row.num_found
            parent = int(state.blocks[found[top + row.num_found - 1]].node)
    if i >= known:
        return NO_HASH
    start = int(sequence.keys_start) + i * block_size
    return hash_row(state, parent_hash(state, parent), start)


@compiled
def may_hit(state: State, row_at: Rows) -> bool:
    """True when a cached block could be a row's next: it has not begun its own, nor reached its
    limit. O(1)."""
    sequence = state.sequences[row_at[0].sequence]
    block_size = state.ledger[0].block_size
    stored = stored_after(state, row_at)
    return bool(
        stored % block_size == 0
        and (sequence.max_cached < 0 or stored // block_size < sequence.max_cached // block_size)
    )


@compiled
def max_found(state: State, s: int) -> int:
    """The most blocks `look_up` can find for a sequence. O(1)."""
    return int(state.sequences[s].num_tokens // state.ledger[0].block_size)


@compiled
def count_block(state: State, b: int, need: NDArray[np.int64]) -> None:
    """Add one block that a row wants on the device to its `need` (needed, reclaimed). O(1)."""
    block = state.blocks[b]
    if block.bits & MARKED:
        return
    if block.device_frame == 0:
        need[0] += 1
    elif block.num_resident == 0 and block.num_pins == 0:
        need[1] += 1


@compiled
def writes_shared(state: State, s: int) -> bool:
    """True when the next write of a sequence falls into a block it must copy first (R3). O(1)."""
    sequence = state.sequences[s]
    block_size = state.ledger[0].block_size
    if sequence.num_stored % block_size == 0:
        return False
    block = state.blocks[entry(state, s, sequence.num_stored // block_size)]
    return bool(block.ref_count > 1 or block.node != 0 or block.num_pins > 0)


@compiled
def stored_after(state: State, row_at: Rows) -> int:
    """Tokens with K/V after a row's hits and before its own tokens. O(1)."""
    row = row_at[0]
    block_size = state.ledger[0].block_size
    stored = int(state.sequences[row.sequence].num_stored)
    return stored + int(row.num_found) * block_size


@compiled
def computed_after(state: State, row_at: Rows) -> int:
    """The position of a row's first token: behind its hits, but never past the last known token,
    whose hidden state is needed even when its K/V is there (full hit). O(1)."""
    row = row_at[0]
    sequence = state.sequences[row.sequence]
    if row.num_found == 0:
        return int(sequence.num_computed)
    last = int(sequence.num_tokens - sequence.num_drafts) - 1
    return max(int(sequence.num_computed), min(stored_after(state, row_at), last))


@compiled
def count_row(state: State, row_at: Rows, found: NDArray[np.int32], need: NDArray[np.int64]) -> int:
    """Fill `need` with the frames a row takes and reclaims; return the length of its table after
    the step. O(blocks of a row that is not RESIDENT, else new blocks)."""
    row = row_at[0]
    s = row.sequence
    sequence = state.sequences[s]
    table = state.tables[s, GROUP]
    need[0] = need[1] = 0
    if sequence.state != RESIDENT:
        for j in range(table.num_blocks):
            count_block(state, int(state.table[table.start + j]), need)
    for j in range(row.found_start, row.found_start + row.num_found):
        count_block(state, int(found[j]), need)
        prefetch(state.frames, state.blocks[found[j]].device_frame)  # take_hold moves it
    stored = stored_after(state, row_at)
    end = max(stored, computed_after(state, row_at) + int(row.num_tokens))
    length = num_blocks_for(state, end)
    need[0] += length - int(table.num_blocks) - int(row.num_found)
    if row.num_found == 0 and end > stored and writes_shared(state, s):
        need[0] += 1
    return length


@compiled
def mark_row(state: State, row_at: Rows, found: NDArray[np.int32]) -> None:
    """Mark the blocks that a planned row wants on the device as counted. O(blocks)."""
    row = row_at[0]
    table = state.tables[row.sequence, GROUP]
    if state.sequences[row.sequence].state != RESIDENT:
        for j in range(table.num_blocks):
            state.blocks[state.table[table.start + j]].bits |= MARKED
    for j in range(row.found_start, row.found_start + row.num_found):
        state.blocks[found[j]].bits |= MARKED


@compiled
def has_hash(hashes: NDArray[np.int64], row_hash: int) -> bool:
    """True when an earlier row computes the block of this hash (a collision delays). O(1)."""
    i = row_hash % hashes.shape[0]
    while hashes[i] != NO_HASH:
        if hashes[i] == row_hash:
            return True
        i = (i + 1) % hashes.shape[0]
    return False


@compiled
def add_hash(hashes: NDArray[np.int64], row_hash: int) -> None:
    """Note that a row of this step computes the block of this hash. O(1)."""
    i = row_hash % hashes.shape[0]
    while hashes[i] != NO_HASH and hashes[i] != row_hash:
        i = (i + 1) % hashes.shape[0]
    hashes[i] = row_hash


@compiled
def add_hashes(state: State, row_at: Rows, row_hash: int, hashes: NDArray[np.int64]) -> None:
    """Note the known full blocks that a planned row computes in this step. O(its tokens)."""
    row = row_at[0]
    sequence = state.sequences[row.sequence]
    block_size = state.ledger[0].block_size
    if sequence.publish == 0:
        return
    known = num_known(state, int(row.sequence)) // block_size
    i = stored_after(state, row_at) // block_size
    end = computed_after(state, row_at) + int(row.num_tokens)
    while True:
        add_hash(hashes, row_hash)
        i += 1
        if i >= known or i * block_size >= end:
            return
        row_hash = hash_row(state, row_hash, int(sequence.keys_start) + i * block_size)


@compiled
def too_long(state: State, row_at: Rows, reserve: int) -> bool:
    """True when a row's sequence and the reserve can never be on the device together. O(1)."""
    num_tokens = int(state.sequences[row_at[0].sequence].num_tokens)
    return num_blocks_for(state, num_tokens) + reserve > int(state.pools[DEVICE].num_frames)


@compiled
def find_too_long(state: State, rows: Rows, reserve: int) -> int:
    """The first row that computes something and can never fit, -1 none. O(rows)."""
    for i in range(rows.shape[0]):
        sequence = state.sequences[rows[i].sequence]
        computes = sequence.num_tokens > sequence.num_computed and rows[i].num_tokens != 0
        if computes and too_long(state, rows[i : i + 1], reserve):
            return i
    return -1


@compiled
def decide_row(
    state: State,
    row_at: Rows,
    found: NDArray[np.int32],
    top: int,
    budget: int,
    reserve: int,
    hashes: NDArray[np.int64],
    need: NDArray[np.int64],
) -> int:
    """Decide one row: its tokens or the reason it is left out. Returns table entries to add to
    the table array if its span must move, else 0. O(tokens hit + blocks)."""
    ledger, pool, row = state.ledger[0], state.pools[DEVICE], row_at[0]
    sequence = state.sequences[row.sequence]
    asked = int(row.num_tokens)
    row_hash = look_up(state, row_at, found, top)
    pending = int(sequence.num_tokens) - computed_after(state, row_at)
    row.num_tokens = pending if asked < 0 else min(asked, pending)
    if row.num_tokens == 0:
        row.reason = IDLE
    elif too_long(state, row_at, reserve):
        row.reason = NEVER
    elif budget == 0:
        row.reason = BUDGET
    elif budget > 0 and row_hash != NO_HASH and has_hash(hashes, row_hash):
        row.reason = ARRIVING
    else:
        row.reason = PLANNED
        if budget > 0:
            row.num_tokens = min(int(row.num_tokens), budget)
    if row.reason != PLANNED:
        row.num_tokens = 0
        return 0
    length = count_row(state, row_at, found, need)
    available = pool.num_free + pool.num_evictable - ledger.num_reclaimed - ledger.num_needed
    if need[0] + need[1] + reserve > available:
        row.reason = ROOM
        row.num_tokens = 0
        ledger.error_needed = need[0] + need[1] + reserve
        ledger.error_available = available
        return 0
    ledger.num_needed += need[0]
    ledger.num_reclaimed += need[1]
    mark_row(state, row_at, found)
    if budget > 0 and row_hash != NO_HASH:
        add_hashes(state, row_at, row_hash, hashes)
    if length > state.tables[row.sequence, GROUP].capacity:
        return span_capacity(length)
    return 0


@compiled
def decide(
    state: State,
    rows: Rows,
    found: NDArray[np.int32],
    budget: int,
    reserve: int,
    need_all: bool,
    hashes: NDArray[np.int64],
    need: NDArray[np.int64],
) -> int:
    """Decide all rows, in order. `budget` < 0 means no limit on the tokens of the step.

    With `need_all` the first row without room ends it: NO_DEVICE_ROOM or TOO_LONG with
    `error_row`. Marks are left set; the caller clears them (`clear_marks`).
    """
    ledger = state.ledger[0]
    ledger.num_needed = 0
    ledger.num_reclaimed = 0
    for i in range(rows.shape[0]):
        if state.sequences[rows[i].sequence].step:
            ledger.error_row = i
            return IN_STEP
    hashes[:] = NO_HASH
    if need_all:  # before any shortage, so that nobody waits for what can't come
        ledger.error_row = find_too_long(state, rows, reserve)
        if ledger.error_row >= 0:
            return TOO_LONG
    top = np.int64(0)  # a plain 0 is a type of its own to Numba, and its callees compile twice
    new_entries = np.int64(0)
    code = OK
    for i in range(rows.shape[0]):
        row_at = rows[i : i + 1]
        row_at[0].num_found = 0
        row_at[0].found_start = top
        if top + max_found(state, row_at[0].sequence) > found.shape[0]:
            ledger.error_needed = top + max_found(state, row_at[0].sequence)
            row_at[0].reason = ROOM
            code = GROW_SCRATCH
        else:
            new_entries += decide_row(state, row_at, found, top, budget, reserve, hashes, need)
        if row_at[0].reason != PLANNED:
            row_at[0].num_found = 0  # nothing of it is marked
            if need_all and row_at[0].reason == ROOM and code == OK:
                code = NO_DEVICE_ROOM
        if code != OK:
            ledger.error_row = i
            return code
        top += row_at[0].num_found
        if budget > 0:
            budget -= row_at[0].num_tokens
    pool = state.pools[DEVICE]
    left = pool.num_free + pool.num_evictable - ledger.num_reclaimed - ledger.num_needed
    if need_all and left < reserve:  # rows that compute nothing did not ask
        ledger.error_row = 0
        ledger.error_needed = reserve
        ledger.error_available = left
        return NO_DEVICE_ROOM
    if ledger.table_top + new_entries > state.table.shape[0]:
        ledger.error_needed = ledger.table_top + new_entries
        return GROW_TABLE
    if ledger.num_needed > state.out_list.shape[0]:  # each frame taken may evict, copy in or write
        ledger.error_needed = ledger.num_needed
        return GROW_LISTS
    return OK
