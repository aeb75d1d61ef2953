"""The CPU twin of `write_kv`: single-threaded, GIL released."""

from __future__ import annotations

import numpy as np
from numba import njit

from cuda_kernels.dtypes import Bits, Int64s

compiled = njit(cache=True, nogil=True, _nrt=False)


@compiled
def _store_row(
    arena: Bits, rows: Bits, token: int, frame: int, plane_offset: int, offset: int, block_size: int
) -> None:
    """Store one token's heads in one plane. Offsets are int64 throughout (case 71)."""
    width = rows.shape[2]
    for head in range(rows.shape[1]):
        start = plane_offset + (head * block_size + offset) * width
        target = arena[frame, start : start + width]
        source = rows[token, head]
        for d in range(width):
            target[d] = source[d]


@compiled
def write(
    arena: Bits,
    values: Bits,
    key: Bits,
    value: Bits,
    key_offset: int,
    value_offset: int,
    block_size: int,
    slot_mapping: Int64s,
) -> None:
    """Write each row whose slot isn't -1."""
    for token in range(slot_mapping.shape[0]):
        slot = np.int64(slot_mapping[token])
        if slot < 0:
            continue
        frame = slot // block_size
        offset = slot - frame * block_size
        _store_row(arena, key, token, frame, key_offset, offset, block_size)
        _store_row(values, value, token, frame, value_offset, offset, block_size)
