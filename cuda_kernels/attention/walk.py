"""The vector twin's walk over a row's positions: address tables, tiles of 64, splits of 1,024.

A task is a query tile (rows of one KV head: tokens x heads of the group, in quads) against all
the positions it may read, or against one split of them. Positions are cut at multiples of 64 and
1,024, wherever the tile's own start and end lie, so a row meets the same cuts alone, in a batch,
at decode and in a prompt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.attention.quad import (
    ADDRESS_BYTES,
    CHUNK_BYTES,
    SCORE_BYTES,
    TILE,
    bend_and_mask,
    num_chunks,
    prefetch_rows,
    quad_code,
    weigh_tile,
)
from cuda_kernels.attention.state import clear, divide_by_total, fold, state_bytes
from cuda_kernels.attention.storage import (
    add_tile,
    add_tile_row,
    dot_tile,
    pack_row,
    store_row,
)
from cuda_kernels.attention.tasks import (
    HEAD,
    NUM_TOKENS,
    ROW,
    SLOT,
    SPLIT,
    SPLIT_TOKENS,
    TOKEN,
    first_read,
)
from cuda_kernels.simd import LINE_BYTES
from cuda_kernels.vectors import (
    PAIR,
    QUAD,
    QUAD_STEP,
    VECTOR_BYTES,
    copy_bytes,
    load_float,
    load_int32,
    load_int64,
    store,
    store_float,
    store_int64,
    zeros,
)

_MINUS_INFINITY = np.float32(-np.inf)
_TABLE_BYTES = TILE * ADDRESS_BYTES
_SPARE_BYTES = 2 * VECTOR_BYTES
_NARROW_BYTES = TILE * _SPARE_BYTES


class Query(NamedTuple):
    """A query tile: which rows they are, and where they stand."""

    row: int
    head: int  # KV head
    token: int  # of the batch: the tile's first
    num_tokens: int
    position: int  # of the first token
    quads: int


class Room(NamedTuple):
    """A task's scratch, by address."""

    keys: int  # two tables of row addresses: of tiles with even and with odd numbers
    values: int
    scores: int
    positions: int  # of each row: int64
    firsts: int  # what a row attends to in this tile, from the tile's start: float32
    lasts: int
    spare: int  # a pair
    narrow: int  # copies of narrow K rows, then of narrow V rows
    slopes: int  # of each row: float32
    packed: int
    total: int
    part: int


@quad_code
def scratch_size(rows: int, head_dim: int, value_dim: int) -> int:
    """Bytes of scratch that a task of up to `rows` query rows needs, alignment included."""
    quads = (rows + QUAD - 1) // QUAD
    size = 4 * _TABLE_BYTES + TILE * SCORE_BYTES + 2 * _NARROW_BYTES + _SPARE_BYTES + LINE_BYTES
    size += quads * QUAD * (ADDRESS_BYTES + 4 + 4 + 4)
    size += quads * (num_chunks(head_dim) * CHUNK_BYTES + 2 * state_bytes(num_chunks(value_dim)))
    return size


@quad_code
def lay_out(scratch: int, quads: int, head_dim: int, value_dim: int) -> Room:
    """Cut scratch into its parts, the largest vectors first, from a multiple of 64 on."""
    packed = (scratch + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    total = packed + quads * num_chunks(head_dim) * CHUNK_BYTES
    part = total + quads * state_bytes(num_chunks(value_dim))
    spare = part + quads * state_bytes(num_chunks(value_dim))
    narrow = spare + _SPARE_BYTES
    scores = narrow + 2 * _NARROW_BYTES
    keys = scores + TILE * SCORE_BYTES
    values = keys + 2 * _TABLE_BYTES
    positions = values + 2 * _TABLE_BYTES
    firsts = positions + quads * QUAD * ADDRESS_BYTES
    lasts = firsts + quads * QUAD * 4
    slopes = lasts + quads * QUAD * 4
    return Room(
        keys, values, scores, positions, firsts, lasts, spare, narrow, slopes, packed, total, part
    )


@quad_code
def with_part(room: Room, part: int) -> Room:
    """The same room, with the parts of the quads elsewhere: in the workspace."""
    return Room(
        room.keys,
        room.values,
        room.scores,
        room.positions,
        room.firsts,
        room.lasts,
        room.spare,
        room.narrow,
        room.slopes,
        room.packed,
        room.total,
        part,
    )


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
        copy = copies + k * _SPARE_BYTES
        store(copy, zeros())
        store(copy + VECTOR_BYTES, zeros())
        copy_bytes(copy, load_int64(table + k * ADDRESS_BYTES), row_bytes)
        store_int64(table + k * ADDRESS_BYTES, copy)


@quad_code
def take_query(call: Any, task: int) -> Query:
    """The query tile of a task or merge record at an address."""
    row = load_int64(task + ROW * ADDRESS_BYTES)
    num_tokens = load_int64(task + NUM_TOKENS * ADDRESS_BYTES)
    start = load_int64(call.query_start + ADDRESS_BYTES * row)
    stop = load_int64(call.query_start + ADDRESS_BYTES * (row + 1))
    token = start + load_int64(task + TOKEN * ADDRESS_BYTES)
    position = load_int64(call.seq_lens + ADDRESS_BYTES * row) - stop + token
    quads = (num_tokens * call.group + QUAD - 1) // QUAD
    head = load_int64(task + HEAD * ADDRESS_BYTES)
    return Query(row, head, token, num_tokens, position, quads)


@quad_code
def spread_by_head(into: int, source: int, call: Any, query: Query, otherwise: np.float32) -> None:
    """For each row of the tile, the float32 of its query head; `otherwise` where source is 0."""
    for k in range(query.quads * QUAD):
        value = otherwise
        if source != 0:
            head = query.head * call.group + k % call.group
            value = load_float(source + 4 * head)
        store_float(into + 4 * k, value)


@quad_code
def pack_query(call: Any, query: Query, room: Room) -> None:
    """Pack the tile's rows and note their positions; the last quad is filled up with zero rows."""
    group = call.group
    quad_bytes = num_chunks(call.head_dim) * CHUNK_BYTES
    last_quad = room.packed + (query.quads - 1) * quad_bytes
    for k in range(quad_bytes // VECTOR_BYTES):
        store(last_quad + k * VECTOR_BYTES, zeros())
    for k in range(query.num_tokens * group, query.quads * QUAD):
        last = query.position + query.num_tokens - 1
        store_int64(room.positions + k * ADDRESS_BYTES, last)
    k = 0
    for token in range(query.num_tokens):
        source = call.query + (query.token + token) * call.query_token
        source += query.head * group * call.query_head
        for _ in range(group):
            packed = room.packed + k // QUAD * quad_bytes
            pack_row(call.kind, packed, source, k % QUAD, call.head_dim, call.scale, room.spare)
            store_int64(room.positions + k * ADDRESS_BYTES, query.position + token)
            source += call.query_head
            k += 1


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
    side = base // TILE % 2 * _TABLE_BYTES
    low, high, common_low, common_high = find_bounds(room, quad, base, call.window)
    if high < low:
        return
    start = low // QUAD_STEP * QUAD_STEP
    stop = (high + QUAD_STEP) // QUAD_STEP * QUAD_STEP
    packed = room.packed + quad * num_chunks(call.head_dim) * CHUNK_BYTES
    table = room.keys + side
    ahead = room.keys + _TABLE_BYTES - side
    dims = max(call.head_dim, PAIR)
    dot_tile(call.kind, room.scores, packed, table, start, stop, dims, ahead, key_lines)
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
    ahead = room.values + _TABLE_BYTES - side
    dims = max(call.value_dim, PAIR)
    if low == common_low and high == common_high:
        add_tile(call.kind, sums, room.scores, table, low, high, dims, ahead, value_lines)
        return
    for row in range(QUAD):
        here = load_int64(room.positions + (quad * QUAD + row) * ADDRESS_BYTES)
        first = max(first_read(here, call.window) - base, 0)
        last = min(here - base, TILE - 1)
        into = sums + row * 2 * VECTOR_BYTES
        add_tile_row(call.kind, into, room.scores + 4 * row, table, first, last, dims)


@quad_code
def find_tile(call: Any, query: Query, room: Room, base: int, low: int, high: int) -> None:
    """Fill the address tables for the tile at `base`, on its side."""
    first = max(low, base)
    last = min(high, base + TILE - 1)
    side = base // TILE % 2 * _TABLE_BYTES
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
    size = call.item_bytes
    key_lines = (call.head_dim * size + LINE_BYTES - 1) // LINE_BYTES
    value_lines = (call.value_dim * size + LINE_BYTES - 1) // LINE_BYTES
    chunks = num_chunks(call.value_dim)
    base = low // TILE * TILE
    find_tile(call, query, room, base, low, high)
    side = base // TILE % 2 * _TABLE_BYTES
    prefetch_rows(room.keys + side, 0, TILE, 0, key_lines)
    prefetch_rows(room.values + side, 0, TILE, 0, value_lines)
    while base <= high:
        side = base // TILE % 2 * _TABLE_BYTES
        more = base + TILE <= high
        if more:
            find_tile(call, query, room, base + TILE, low, high)
        if call.head_dim < PAIR:
            copy_narrow_rows(room.keys + side, room.narrow, call.head_dim * size)
        if call.value_dim < PAIR:
            copy_narrow_rows(room.values + side, room.narrow + _NARROW_BYTES, call.value_dim * size)
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
    k = 0
    for token in range(query.token, query.token + query.num_tokens):
        head = query.head * call.group
        out = call.out + token * call.out_token + head * call.out_head
        lse = call.lse + token * call.lse_token + head * call.lse_head
        for _ in range(call.group):
            state = room.total + k // QUAD * state_bytes(chunks)
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
