"""The CUDA kernel of `fill_frames`: a word over and over.

    frame:  |..|----------------|----------------|----------------|...|
            bytes up to a       stores of 16 bytes                bytes
            multiple of 16

Frames are cut into chunks that the blocks of threads take in turn, as in `cuda_move.py`. Where the
stores of 16 bytes begin in the middle of the pattern, it is turned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, int64, uint32

from cuda_kernels.cuda.prims import load_int32, load_int64, quotient, store_byte, store_line

LINE = 16


def fill_frames(id_bytes: int) -> Callable[..., Any]:
    """The kernel for ids of 4 or 8 bytes; `chunk_bytes` is a multiple of 4."""

    def kernel(
        arena: int,
        frame_bytes: int,
        ids: int,
        num_ids: int,
        pattern: int,  # 4 bytes; byte k of a frame is byte k % 4 of it
        chunk_bytes: int,
        num_chunks: int,
    ) -> None:
        thread, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        task = int64(cuda.blockIdx.x)
        while task < num_ids * num_chunks:
            i = quotient(task, num_chunks)
            start = (task - i * num_chunks) * chunk_bytes
            if id_bytes == 8:
                frame = load_int64(ids + i * 8)
            else:
                frame = int64(load_int32(ids + i * 4))
            at = arena + frame * frame_bytes + start
            size = min(chunk_bytes, frame_bytes - start)
            head = min(-at & (LINE - 1), size)
            lines = (size - head) >> 4
            bits = (head & 3) * 8
            word = uint32((pattern >> bits) | (pattern << (32 - bits)))
            k = thread
            while k < lines:
                store_line(at + head + k * LINE, word, word, word, word)
                k += threads
            k = thread
            while k < size - lines * LINE:
                place = k if k < head else k + lines * LINE
                store_byte(at + place, uint32(pattern >> ((place & 3) * 8)))
                k += threads
            task += int64(cuda.gridDim.x)

    return kernel
