"""The CUDA kernel of `copy_blocks`: a block of threads for each plane of each pair.

    blockIdx.x = pair, blockIdx.y = plane
    frame source[pair]: [rows, block_size, width] at the plane's offset
        row 0: |filled slots......|rest|   row 1: |filled slots......|rest|   ...
                       |                                  |
    frame target[pair]: the same places, only what is filled

Sources are read by the read-only path: no frame is a source and a target (R3, case 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, int64

from cuda_kernels.cuda.copying import copy_rows
from cuda_kernels.cuda.prims import load_int32, load_int64


def copy_blocks(pair_bytes: int, plane_bytes: int) -> Callable[..., Any]:
    """The kernel for arrays of pairs, and of planes, whose integers have 4 or 8 bytes."""

    def kernel(
        arena: int,
        frame_bytes: int,
        item_bytes: int,
        block_size: int,
        source: int,
        target: int,
        num_tokens: int,
        plane_offset: int,
        plane_rows: int,
        plane_width: int,
    ) -> None:
        pair = int64(cuda.blockIdx.x)
        plane = int64(cuda.blockIdx.y)
        if pair_bytes == 8:
            origin = load_int64(source + pair * 8)
            destination = load_int64(target + pair * 8)
            filled = load_int64(num_tokens + pair * 8)
        else:
            origin = int64(load_int32(source + pair * 4))
            destination = int64(load_int32(target + pair * 4))
            filled = int64(load_int32(num_tokens + pair * 4))
        if origin == destination:
            return
        if plane_bytes == 8:
            offset = load_int64(plane_offset + plane * 8)
            rows = load_int64(plane_rows + plane * 8)
            width = load_int64(plane_width + plane * 8)
        else:
            offset = int64(load_int32(plane_offset + plane * 4))
            rows = int64(load_int32(plane_rows + plane * 4))
            width = int64(load_int32(plane_width + plane * 4))
        slot_bytes = width * item_bytes
        base = arena + offset * item_bytes
        stride = block_size * slot_bytes
        thread, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        copy_rows(
            base + destination * frame_bytes, stride, base + origin * frame_bytes, stride,
            rows, filled * slot_bytes, thread, threads,
        )  # fmt: skip

    return kernel
