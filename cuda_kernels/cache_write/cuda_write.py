"""The CUDA kernel of `write_kv`: a block for K and one for V of each token.

blockIdx.x = token, blockIdx.y = 0 (key) or 1 (value)
slot = slots[token]; -1: the block ends
head h of the token: [source + token * token_stride + h * head_stride]
   -> [plane + frame * frame_bytes + offset * token_bytes + h * head_bytes]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, int64, uint64

from cuda_kernels.cuda.copying import copy_rows
from cuda_kernels.cuda.prims import load_int32, load_int64


def write_kv(slot_bytes: int) -> Callable[..., Any]:
    """The kernel for slots of 4 or 8 bytes. Strides in bytes; index arithmetic is int64."""

    def kernel(
        slots: int,
        block_size: int,
        num_heads: int,
        key: int,
        key_token: int,
        key_head: int,
        key_bytes: int,
        key_plane: int,
        key_frame: int,
        key_plane_token: int,
        key_plane_head: int,
        value: int,
        value_token: int,
        value_head: int,
        value_bytes: int,
        value_plane: int,
        value_frame: int,
        value_plane_token: int,
        value_plane_head: int,
    ) -> None:
        token = int64(cuda.blockIdx.x)
        if slot_bytes == 8:
            slot = load_int64(slots + token * 8)
        else:
            slot = int64(load_int32(slots + token * 4))
        if slot < 0:
            return
        frame = int64(uint64(slot) // uint64(block_size))
        offset = slot - frame * block_size
        if cuda.blockIdx.y == 0:
            source, source_head, row_bytes = key + token * key_token, key_head, key_bytes
            target = key_plane + frame * key_frame + offset * key_plane_token
            target_head = key_plane_head
        else:
            source, source_head, row_bytes = value + token * value_token, value_head, value_bytes
            target = value_plane + frame * value_frame + offset * value_plane_token
            target_head = value_plane_head
        thread, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        copy_rows(target, target_head, source, source_head, num_heads, row_bytes, thread, threads)

    return kernel
