"""A task's query tile, packed, and the scratch that its walk needs, by address."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.attention.quad import (
    ADDRESS_BYTES,
    CHUNK_BYTES,
    SCORE_BYTES,
    TILE,
    num_chunks,
    quad_code,
)
from cuda_kernels.attention.state import deal_row, state_bytes
from cuda_kernels.attention.storage import pack_row
from cuda_kernels.attention.tasks import HEAD, NUM_TOKENS, ROW, TOKEN
from cuda_kernels.simd import LINE_BYTES
from cuda_kernels.vectors import (
    QUAD,
    VECTOR_BYTES,
    load_float,
    load_int64,
    store,
    store_float,
    store_int64,
    zeros,
)

TABLE_BYTES = TILE * ADDRESS_BYTES
SPARE_BYTES = 2 * VECTOR_BYTES
NARROW_BYTES = TILE * SPARE_BYTES


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
    size = 4 * TABLE_BYTES + TILE * SCORE_BYTES + 2 * NARROW_BYTES + SPARE_BYTES + LINE_BYTES
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
    narrow = spare + SPARE_BYTES
    scores = narrow + 2 * NARROW_BYTES
    keys = scores + TILE * SCORE_BYTES
    values = keys + 2 * TABLE_BYTES
    positions = values + 2 * TABLE_BYTES
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
    scale = call.scale
    if call.key_scales != 0:
        scale = scale * load_float(call.key_scales + 4 * query.head)
    k = 0
    for token in range(query.num_tokens):
        source = call.query + (query.token + token) * call.query_token
        source += query.head * group * call.query_head
        for _ in range(group):
            packed = room.packed + k // QUAD * quad_bytes
            pack_row(call.kind, packed, source, k % QUAD, call.head_dim, scale, room.spare)
            if call.dealt:
                deal_row(packed, k % QUAD, num_chunks(call.head_dim))
            store_int64(room.positions + k * ADDRESS_BYTES, query.position + token)
            source += call.query_head
            k += 1
