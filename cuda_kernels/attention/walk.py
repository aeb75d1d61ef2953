"""The vector twin's walk over a row's positions: address tables, tiles of 64, splits of 1,024.

A task is a query tile (rows of one KV head: tokens x heads of the group, in quads) against all
the positions it may read, or against one split of them. Positions are cut at multiples of 64 and
1,024, wherever the tile's own start and end lie, so a row meets the same cuts alone, in a batch,
at decode and in a prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels.attention.quad import (
    ADDRESS_BYTES,
    CHUNK_BYTES,
    TILE,
    bend_and_mask,
    num_chunks,
    prefetch_rows,
    quad_code,
    weigh_tile,
)
from cuda_kernels.attention.room import (
    NARROW_BYTES,
    SPARE_BYTES,
    TABLE_BYTES,
    Query,
    Room,
    lay_out,
    pack_query,
    spread_by_head,
    take_query,
    with_part,
)
from cuda_kernels.attention.state import (
    clear,
    divide_by_total,
    fold,
    riffle_row,
    scale_values,
    state_bytes,
)
from cuda_kernels.attention.storage import (
    add_tile,
    add_tile_row,
    dot_tile,
    store_row,
)
from cuda_kernels.attention.tasks import (
    SLOT,
    SPLIT,
    SPLIT_TOKENS,
    first_read,
)
from cuda_kernels.simd import LINE_BYTES, copy_bytes
from cuda_kernels.vectors import (
    PAIR,
    QUAD,
    QUAD_STEP,
    VECTOR_BYTES,
    load_float,
    load_int32,
    load_int64,
    store,
    store_float,
    store_int64,
    zeros,
)

_MINUS_INFINITY = np.float32(-np.inf)


@quad_code
def find_rows(
    table: int,
    start: int,
    frames: int,
    frame_bytes: int,
    token_bytes: int,
    block_size: int,
    base: int,
    low: int,
    high: int,
) -> None:
    """Fill a table with the addresses of 64 rows of K or V, from position `base` on.

    `start` is the head's plane in frame 0, `frames` the row's part of the block table. Outside
    low..high, what the tile may read, the table repeats the nearest row inside: so the loops may
    load a pair of which one is masked, and ask for rows ahead, without touching a frame that the
    row doesn't own.
    """
    position = low
    while position <= high:
        block = position // block_size
        offset = position - block * block_size
        run = min(block_size - offset, high - position + 1)
        address = start + load_int32(frames + 4 * block) * frame_bytes + offset * token_bytes
        into = table + (position - base) * ADDRESS_BYTES
        for _ in range(run):
            store_int64(into, address)
            into += ADDRESS_BYTES
            address += token_bytes
        position += run
    nearest = load_int64(table + (low - base) * ADDRESS_BYTES)
    for k in range(low - base):
        store_int64(table + k * ADDRESS_BYTES, nearest)
    nearest = load_int64(table + (high - base) * ADDRESS_BYTES)
    for k in range(high - base + 1, TILE):
        store_int64(table + k * ADDRESS_BYTES, nearest)


@quad_code
def copy_narrow_rows(table: int, copies: int, row_bytes: int) -> None:
    """Copy 64 rows that are narrower than a pair beside zeros, and point the table there."""
    for k in range(TILE):
        copy = copies + k * SPARE_BYTES
        store(copy, zeros())
        store(copy + VECTOR_BYTES, zeros())
        copy_bytes(copy, load_int64(table + k * ADDRESS_BYTES), row_bytes)
        store_int64(table + k * ADDRESS_BYTES, copy)


@quad_code
def find_bounds(room: Room, quad: int, base: int, window: int) -> tuple[int, int, int, int]:
    """What the quad's rows attend to in the tile at `base`, noted for each row.

    Returns the first and last position of any row, and those from and up to which all do.
    """
    first_of_any = TILE
    last_of_any = -1
    first_of_all = 0
    last_of_all = TILE
    for k in range(quad * QUAD, (quad + 1) * QUAD):
        here = load_int64(room.positions + k * ADDRESS_BYTES)
        first = max(first_read(here, window) - base, 0)
        last = min(here - base, TILE - 1)
        store_float(room.firsts + 4 * k, np.float32(first))
        store_float(room.lasts + 4 * k, np.float32(here - base))
        first_of_any = min(first_of_any, first)
        last_of_any = max(last_of_any, last)
        first_of_all = max(first_of_all, first)
        last_of_all = min(last_of_all, last)
    return first_of_any, last_of_any, first_of_all, last_of_all


@quad_code
def attend_quad(
    call: Any,
    room: Room,
    quad: int,
    base: int,
    key_lines: int,
    value_lines: int,
) -> None:
    """One quad against one tile: its part of the split grows.

    So many lines of each of the next tile's rows are asked for; 0 for none.
    """
    side = base // TILE % 2 * TABLE_BYTES
    low, high, common_low, common_high = find_bounds(room, quad, base, call.window)
    if high < low:
        return
    start = low // QUAD_STEP * QUAD_STEP
    stop = (high + QUAD_STEP) // QUAD_STEP * QUAD_STEP
    packed = room.packed + quad * num_chunks(call.head_dim) * CHUNK_BYTES
    table = room.keys + side
    ahead = room.keys + TABLE_BYTES - side
    dims = max(call.head_dim, PAIR)
    dot_tile(call.kv_kind, room.scores, packed, table, start, stop, dims, ahead, key_lines)
    masked = start < common_low or stop > common_high + 1
    slopes = room.slopes + quad * QUAD * 4 if call.slopes != 0 else 0
    if masked or call.softcap > 0 or slopes != 0:
        firsts = room.firsts + quad * QUAD * 4
        lasts = room.lasts + quad * QUAD * 4
        bend_and_mask(room.scores, start, stop, call.softcap, slopes, firsts, lasts, masked)
    chunks = num_chunks(call.value_dim)
    sums = room.part + quad * state_bytes(chunks)
    peaks = sums + chunks * CHUNK_BYTES
    weigh_tile(room.scores, sums, peaks, peaks + VECTOR_BYTES, start, stop, chunks)
    table = room.values + side
    ahead = room.values + TABLE_BYTES - side
    dims = max(call.value_dim, PAIR)
    if low == common_low and high == common_high:
        add_tile(call.kv_kind, sums, room.scores, table, low, high, dims, ahead, value_lines)
        return
    for row in range(QUAD):
        here = load_int64(room.positions + (quad * QUAD + row) * ADDRESS_BYTES)
        first = max(first_read(here, call.window) - base, 0)
        last = min(here - base, TILE - 1)
        into = sums + row * 2 * VECTOR_BYTES
        add_tile_row(call.kv_kind, into, room.scores + 4 * row, table, first, last, dims)


@quad_code
def find_tile(call: Any, query: Query, room: Room, base: int, low: int, high: int) -> None:
    """Fill the address tables for the tile at `base`, on its side."""
    first = max(low, base)
    last = min(high, base + TILE - 1)
    side = base // TILE % 2 * TABLE_BYTES
    frames = call.table + 4 * load_int64(call.table_start + ADDRESS_BYTES * query.row)
    key = call.key + query.head * call.key_head
    value = call.value + query.head * call.value_head
    size = call.block_size
    keys = room.keys + side
    values = room.values + side
    find_rows(keys, key, frames, call.key_frame, call.key_token, size, base, first, last)
    find_rows(values, value, frames, call.value_frame, call.value_token, size, base, first, last)


@quad_code
def walk(call: Any, query: Query, room: Room, low: int, high: int, whole: bool) -> None:
    """All quads against positions low..high; parts are folded into totals if `whole`."""
    size = call.kv_bytes
    key_lines = (call.head_dim * size + LINE_BYTES - 1) // LINE_BYTES
    value_lines = (call.value_dim * size + LINE_BYTES - 1) // LINE_BYTES
    chunks = num_chunks(call.value_dim)
    base = low // TILE * TILE
    find_tile(call, query, room, base, low, high)
    side = base // TILE % 2 * TABLE_BYTES
    prefetch_rows(room.keys + side, 0, TILE, 0, key_lines)
    prefetch_rows(room.values + side, 0, TILE, 0, value_lines)
    while base <= high:
        side = base // TILE % 2 * TABLE_BYTES
        more = base + TILE <= high
        if more:
            find_tile(call, query, room, base + TILE, low, high)
        if call.head_dim < PAIR:
            copy_narrow_rows(room.keys + side, room.narrow, call.head_dim * size)
        if call.value_dim < PAIR:
            copy_narrow_rows(room.values + side, room.narrow + NARROW_BYTES, call.value_dim * size)
        for quad in range(query.quads):
            # One quad asks for the next tile's rows, on behalf of all.
            ask = more and quad == 0
            attend_quad(call, room, quad, base, key_lines * ask, value_lines * ask)
        base += TILE
        if whole and (base % SPLIT_TOKENS == 0 or base > high):
            for quad in range(query.quads):
                at = quad * state_bytes(chunks)
                fold(room.total + at, room.part + at, chunks)
                clear(room.part + at, chunks)


@quad_code
def finish(call: Any, query: Query, room: Room) -> None:
    """Divide the totals and store the tile's rows and log-sum-exps."""
    chunks = num_chunks(call.value_dim)
    spread_by_head(room.firsts, call.sinks, call, query, _MINUS_INFINITY)
    for quad in range(query.quads):
        state = room.total + quad * state_bytes(chunks)
        divide_by_total(state, room.firsts + quad * QUAD * 4, chunks)
        if call.value_scales != 0:
            scale_values(state, load_float(call.value_scales + 4 * query.head), chunks)
    k = 0
    for token in range(query.token, query.token + query.num_tokens):
        head = query.head * call.group
        out = call.out + token * call.out_token + head * call.out_head
        lse = call.lse + token * call.lse_token + head * call.lse_head
        for _ in range(call.group):
            state = room.total + k // QUAD * state_bytes(chunks)
            if call.dealt:
                riffle_row(state, k % QUAD, chunks)
            store_row(call.kind, out, state, k % QUAD, call.value_dim, room.spare)
            if call.lse != 0:
                log = load_float(state + chunks * CHUNK_BYTES + 4 * (k % QUAD))
                store_float(lse, log)
            out += call.out_head
            lse += call.lse_head
            k += 1


@quad_code
def run_task(call: Any, task: int, scratch: int) -> None:
    """All splits of a query tile, folded and finished; or one split, left in the workspace.

    `task` is the address of a record of `tasks.py`, scratch that of `scratch_size` bytes.
    """
    query = take_query(call, task)
    room = lay_out(scratch, query.quads, call.head_dim, call.value_dim)
    pack_query(call, query, room)
    spread_by_head(room.slopes, call.slopes, call, query, np.float32(0))
    split = load_int64(task + SPLIT * ADDRESS_BYTES)
    whole = split < 0
    low = first_read(query.position, call.window)
    high = query.position + query.num_tokens - 1
    if not whole:
        slot = load_int64(task + SLOT * ADDRESS_BYTES)
        room = with_part(room, call.workspace + slot * call.slot_bytes)
        low = max(low, split * SPLIT_TOKENS)
        high = min(high, (split + 1) * SPLIT_TOKENS - 1)
    chunks = num_chunks(call.value_dim)
    for quad in range(query.quads):
        clear(room.part + quad * state_bytes(chunks), chunks)
        if whole:
            clear(room.total + quad * state_bytes(chunks), chunks)
    walk(call, query, room, low, high, whole)
    if whole:
        finish(call, query, room)


@quad_code
def run_merge(call: Any, merge: int, scratch: int) -> None:
    """Fold the splits of one query tile, in ascending order, and finish."""
    query = take_query(call, merge)
    room = lay_out(scratch, query.quads, call.head_dim, call.value_dim)
    chunks = num_chunks(call.value_dim)
    slot = load_int64(merge + SLOT * ADDRESS_BYTES)
    for quad in range(query.quads):
        at = quad * state_bytes(chunks)
        clear(room.total + at, chunks)
        for split in range(load_int64(merge + SPLIT * ADDRESS_BYTES)):
            part = call.workspace + (slot + split) * call.slot_bytes + at
            fold(room.total + at, part, chunks)
    finish(call, query, room)
