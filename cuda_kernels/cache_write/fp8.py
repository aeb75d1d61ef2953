"""The CPU twin of `write_kv` for K and V stored as fp8_e4m3: divided by a scale a head, rounded.

    row of a head   [dims] of the storage dtype, a pair of vectors at a time
       / scale      float32
       -> fp8       rounded once, ties to even, saturated at 448; a byte an element

A row whose width is no multiple of a pair ends with one that overlaps the one before: it stores
the same bytes again. A row narrower than a pair goes by way of a spare one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.cache_write.cpu import compiled, write_plainly
from cuda_kernels.dtypes import (
    BFLOAT16,
    FLOAT32,
    Bits,
    Int64s,
    StorageDtype,
    bits_to_float,
    float_to_bits,
)
from cuda_kernels.plane import Plane
from cuda_kernels.simd import JIT_DISABLED, copy_bytes
from cuda_kernels.threads import address
from cuda_kernels.vectors import (
    BFLOAT16_TAG,
    FLOAT16_TAG,
    FLOAT32_TAG,
    FP8_TAG,
    PAIR,
    deal_loaded,
    divide,
    load_pair,
    spread_at,
    store_pair,
    tag_bytes,
)


@compiled
def narrow_pair(tag: Any, target: int, source: int, scale: int) -> None:
    """One pair of a row; `scale` is the address of the head's."""
    by = spread_at(scale)
    x, y = load_pair(source, tag)
    x, y = deal_loaded(x, y, tag)
    store_pair(target, divide(x, by), divide(y, by), FP8_TAG)


@compiled
def narrow_row(tag: Any, target: int, source: int, dims: int, scale: int, spare: int) -> None:
    """One row; `spare` is room for a pair of float32, and for one of fp8_e4m3 behind it."""
    size = tag_bytes(tag)
    if dims < PAIR:
        copy_bytes(spare, source, dims * size)
        narrow_pair(tag, spare + 4 * PAIR, spare, scale)
        copy_bytes(target, spare + 4 * PAIR, dims)
        return
    for chunk in range((dims + PAIR - 1) // PAIR):
        at = min(chunk * PAIR, dims - PAIR)
        narrow_pair(tag, target + at, source + at * size, scale)


@compiled
def store_rows(
    kind: int,
    slots: Int64s,
    block_size: int,
    num_heads: int,
    dims: int,
    plane: int,
    frame_bytes: int,
    head_bytes: int,
    token_bytes: int,
    source: int,
    source_token: int,
    source_head: int,
    scales: int,
    spare: int,
) -> None:
    """Store the heads of each token whose slot isn't -1 in one plane; strides are in bytes.

    `plane` is the address of head 0 in frame 0, `scales` that of a float32 a head. Offsets are
    int64 throughout (case 71).
    """
    for token in range(slots.shape[0]):
        slot = slots[token]
        if slot < 0:
            continue
        frame = slot // block_size
        target = plane + frame * frame_bytes + (slot - frame * block_size) * token_bytes
        row = source + token * source_token
        scale = scales
        for _ in range(num_heads):
            if kind == FLOAT32:
                narrow_row(FLOAT32_TAG, target, row, dims, scale, spare)
            elif kind == BFLOAT16:
                narrow_row(BFLOAT16_TAG, target, row, dims, scale, spare)
            else:
                narrow_row(FLOAT16_TAG, target, row, dims, scale, spare)
            target += head_bytes
            row += source_head
            scale += 4


def write(
    arena: Bits,
    rows: Bits,
    plane: Plane,
    block_size: int,
    slots: Int64s,
    storage: StorageDtype,
    scale: NDArray[np.float32] | None,
) -> None:
    """Store rows ``[num_tokens, num_heads, dims]`` of any strides in a plane of a uint8 arena."""
    if scale is None:
        scale = np.ones(rows.shape[1], np.float32)
    if JIT_DISABLED:
        scaled = bits_to_float(rows, storage.name) / scale[:, None]
        write_plainly(arena, float_to_bits(scaled, "fp8_e4m3"), plane, block_size, slots)
        return
    if rows.strides[2] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    spare = np.zeros(5 * PAIR, np.uint8)
    store_rows(
        storage.kind,
        slots,
        block_size,
        rows.shape[1],
        rows.shape[2],
        address(arena) + plane.offset,
        arena.strides[0],
        plane.head_stride,
        plane.token_stride,
        address(rows),
        rows.strides[0],
        rows.strides[1],
        address(scale),
        address(spare),
    )
