"""The CUDA kernel that joins the splits of a row's positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, float32, int64

from cuda_kernels.attention.cuda_parts import (
    LOG2_E,
    LOWEST,
    divide,
    find_row,
    fold,
    load_index,
    num_queries_of,
    store_element,
)
from cuda_kernels.cuda.prims import load_float, multiply_add, store_float

THREADS = 128


def merge(kind: int) -> Callable[..., Any]:
    """The kernel that folds the splits of `attend` in ascending order, as `attend` itself would.

    blockIdx.x = query token, .y = query head; a thread takes every 128th dim.
    """

    def kernel(
        partial: int, splits: int, dims: int, split_bits: int,
        out: int, out_token: int, out_head: int, out_dim: int,
        lse: int, lse_token: int, lse_head: int,
        seq_lens: int, query_start: int, index_bytes: int, num_rows: int,
        window: int, sinks: int, prompt_tokens: int,
    ) -> None:  # fmt: skip
        token = int64(cuda.blockIdx.x)
        head, num_heads = int64(cuda.blockIdx.y), int64(cuda.gridDim.y)
        sequence = find_row(query_start, num_rows, token, index_bytes)
        if sequence >= num_rows:
            return
        if num_queries_of(query_start, sequence, index_bytes) >= prompt_tokens:
            return
        length = load_index(seq_lens, sequence, index_bytes)
        position = length - load_index(query_start, sequence + 1, index_bytes) + token
        position = position if length > 0 else int64(-1)
        first = max(int64(0), position - window + 1) if window > 0 else int64(0)
        count = (position >> split_bits) - (first >> split_bits) + 1
        sink = float32(0)
        if sinks != 0:
            sink = load_float(sinks + head * 4) * float32(LOG2_E)
        at = (token * num_heads + head) * splits
        weights = partial + int64(cuda.gridDim.x) * num_heads * splits * (dims * 4) + at * 8
        d = int64(cuda.threadIdx.x)
        while d < dims:
            top, total, found = float32(LOWEST), float32(0), float32(0)
            for i in range(count):
                peak, weight = load_float(weights + i * 8), load_float(weights + i * 8 + 4)
                top, total, old, new = fold(top, total, peak, weight)
                part = load_float(partial + ((at + i) * dims + d) * 4)
                found = multiply_add(found, old, part * new)
            logarithm = float32(-float("inf"))
            if position >= 0:
                found, logarithm = divide(found, top, total, sink, sinks != 0)
            store_element(out + token * out_token + head * out_head + d * out_dim, found, kind)
            if d == 0 and lse != 0:
                store_float(lse + token * lse_token + head * lse_head, logarithm)
            d += THREADS

    return kernel
