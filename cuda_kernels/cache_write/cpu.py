"""The CPU twin of `write_kv`: single-threaded, GIL released, rows copied by 64-byte lines."""

from __future__ import annotations

import numpy as np
from numba import njit

from cuda_kernels.dtypes import Bits, Int64s
from cuda_kernels.plane import Plane
from cuda_kernels.simd import JIT_DISABLED, LINE_BYTES, copy_bytes, load_line, store_line
from cuda_kernels.threads import address

compiled = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)


@compiled
def copy_row(target: int, source: int, size: int) -> None:
    """Copy `size` bytes; a last line that isn't whole overlaps the one before.

    Rows of K and V are short: calling memcpy for each would cost as much as the copy.
    """
    if size < LINE_BYTES:
        copy_bytes(target, source, size)
        return
    last = size - LINE_BYTES
    for at in range(0, last, LINE_BYTES):
        store_line(target + at, load_line(source + at))
    store_line(target + last, load_line(source + last))


@compiled
def store_rows(
    slots: Int64s,
    block_size: int,
    num_heads: int,
    row_bytes: int,
    plane: int,
    frame_bytes: int,
    head_bytes: int,
    token_bytes: int,
    source: int,
    source_token: int,
    source_head: int,
) -> None:
    """Store the heads of each token whose slot isn't -1 in one plane; strides are in bytes.

    `plane` is the address of head 0 in frame 0. Offsets are int64 throughout (case 71).
    """
    if source_head == row_bytes and head_bytes == row_bytes:
        # Heads lie side by side in both: one row.
        row_bytes *= num_heads
        num_heads = 1
    for token in range(slots.shape[0]):
        slot = slots[token]
        if slot < 0:
            continue
        frame = slot // block_size
        target = plane + frame * frame_bytes + (slot - frame * block_size) * token_bytes
        row = source + token * source_token
        for _ in range(num_heads):
            copy_row(target, row, row_bytes)
            target += head_bytes
            row += source_head


def write_plainly(arena: Bits, rows: Bits, plane: Plane, block_size: int, slots: Int64s) -> None:
    """The same under NUMBA_DISABLE_JIT=1, where instructions have no Python form."""
    strides = (arena.shape[1], plane.token_stride, plane.head_stride, 1)
    stored = np.lib.stride_tricks.as_strided(
        arena.reshape(-1)[plane.offset :],
        (arena.shape[0], block_size, *rows.shape[1:]),
        tuple(stride * arena.itemsize for stride in strides),
    )
    kept = slots >= 0
    stored[slots[kept] // block_size, slots[kept] % block_size] = rows[kept]


def write(arena: Bits, rows: Bits, plane: Plane, block_size: int, slots: Int64s) -> None:
    """Store rows ``[num_tokens, num_heads, dims]`` of any strides in a plane of an arena."""
    if JIT_DISABLED:
        write_plainly(arena, rows, plane, block_size, slots)
        return
    size = rows.itemsize
    if rows.strides[2] != size:
        rows = np.ascontiguousarray(rows)
    store_rows(
        slots,
        block_size,
        rows.shape[1],
        rows.shape[2] * size,
        address(arena) + plane.offset * size,
        arena.strides[0],
        plane.head_stride * size,
        plane.token_stride * size,
        address(rows),
        rows.strides[0],
        rows.strides[1],
    )
