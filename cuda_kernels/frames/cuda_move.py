"""The CUDA kernel of `move_frames`, `gather_frames`, `scatter_frames`: pieces of frames.

    piece i: target + target_ids[i] * target_stride  <-  source + source_ids[i] * source_stride

Pieces are cut into chunks, and the blocks of threads take chunk after chunk, however few blocks
there are: a copy beside the compute gets a cap on them, which leaves it the other processors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, int64

from cuda_kernels.cuda.copying import copy_bytes
from cuda_kernels.cuda.prims import load_int32, load_int64, quotient


def move_pieces(target_id_bytes: int, source_id_bytes: int) -> Callable[..., Any]:
    """The kernel for ids of 4 or 8 bytes; 0: there are no ids, piece i is row i."""

    def kernel(
        target: int,
        target_stride: int,
        target_ids: int,
        source: int,
        source_stride: int,
        source_ids: int,
        num_pieces: int,
        piece_bytes: int,
        chunk_bytes: int,
        num_chunks: int,
    ) -> None:
        thread, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        task = int64(cuda.blockIdx.x)
        while task < num_pieces * num_chunks:
            piece = quotient(task, num_chunks)
            start = (task - piece * num_chunks) * chunk_bytes
            if target_id_bytes == 8:
                into = load_int64(target_ids + piece * 8)
            elif target_id_bytes == 4:
                into = int64(load_int32(target_ids + piece * 4))
            else:
                into = piece
            if source_id_bytes == 8:
                origin = load_int64(source_ids + piece * 8)
            elif source_id_bytes == 4:
                origin = int64(load_int32(source_ids + piece * 4))
            else:
                origin = piece
            size = min(chunk_bytes, piece_bytes - start)
            copy_bytes(
                target + into * target_stride + start,
                source + origin * source_stride + start,
                size, thread, threads,
            )  # fmt: skip
            task += int64(cuda.gridDim.x)

    return kernel
