"""The CPU twin of `copy_blocks`: single-threaded, GIL released."""

from __future__ import annotations

import numpy as np
from numba import njit

from cuda_kernels.dtypes import Bits, Int64s

compiled = njit(cache=True, nogil=True, _nrt=False)


@compiled
def copy(
    arena: Bits,
    source: Int64s,
    target: Int64s,
    num_tokens: Int64s,
    block_size: int,
    plane_offset: Int64s,
    plane_rows: Int64s,
    plane_width: Int64s,
) -> None:
    """Copy plane row by plane row; the filled slots of a row are contiguous."""
    for i in range(source.shape[0]):
        origin = np.int64(source[i])
        destination = np.int64(target[i])
        if origin == destination:
            continue
        for p in range(plane_offset.shape[0]):
            width = np.int64(plane_width[p])
            length = np.int64(num_tokens[i]) * width
            for row in range(plane_rows[p]):
                start = np.int64(plane_offset[p]) + row * block_size * width
                read = arena[origin, start : start + length]
                write = arena[destination, start : start + length]
                for k in range(length):
                    write[k] = read[k]
