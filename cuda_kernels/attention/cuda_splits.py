"""The end of a split, for both attention kernels: warps joined, splits folded, results stored.

A block keeps four arrays of a split in shared memory, [warp][head] or [warp][head][width]: maxima,
weights, weighted sums, factors; and what it folded so far: maxima and weights by head, sums by
[head][width], the latter each touched by one thread only.

With `partial` nothing is folded: a split's part goes to global memory for `cuda_merge.py`. All
multiply-adds are written out, so that both ways give the same bits.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64

from cuda_kernels.attention.cuda_parts import LOG2_E, LOWEST, divide, fold, store_element
from cuda_kernels.cuda.prims import (
    block_here,
    exp2,
    load_float,
    maximum,
    multiply_add,
    store_float,
    thread_here,
)

WARPS, THREADS = 4, 128


@cuda.jit(device=True, inline="always")
def join_warps(tops: Any, totals: Any, factors: Any, heads: int, h: int) -> Any:
    """One head's maximum and weight over the warps, whose factors are kept."""
    top, total = float32(LOWEST), float32(0)
    for w in range(WARPS):
        top = maximum(top, tops[w * heads + h])
    for w in range(WARPS):
        factor = exp2(tops[w * heads + h] - top)
        factors[w * heads + h] = factor
        total = multiply_add(factor, totals[w * heads + h], total)
    return top, total


@cuda.jit(device=True, inline="always")
def end_split(
    count: int, heads: int, dims: int, width: int,
    tops: Any, totals: Any, sums: Any, factors: Any,
    whole_tops: Any, whole_totals: Any, whole_sums: Any, olds: Any, news: Any,
    partial: int, head: int, num_heads: int, splits: int, split: int,
) -> None:  # fmt: skip
    """Join the warps' parts of the first `count` of `heads` heads, then fold or hand on.

    In `partial` parts lie by [token][head][splits]: sums [dims], and behind all of them (maximum,
    weight). `head` is the first one's number. To be called by all threads.
    """
    thread = thread_here()
    place = (block_here() * num_heads + head) * splits + split
    weights = partial + int64(cuda.gridDim.x) * num_heads * splits * (dims * 4)
    cuda.syncthreads()
    if thread < count:
        top, total = join_warps(tops, totals, factors, heads, thread)
        if partial != 0:
            at = weights + (place + thread * splits) * 8
            store_float(at, top)
            store_float(at + 4, total)
        else:
            top, total, old, new = fold(whole_tops[thread], whole_totals[thread], top, total)
            whole_tops[thread], whole_totals[thread] = top, total
            olds[thread], news[thread] = old, new
    cuda.syncthreads()
    for h in range(count):
        d = thread
        while d < dims:
            part = float32(0)
            for w in range(WARPS):
                at = w * heads + h
                part = multiply_add(factors[at], sums[at * width + d], part)
            if partial != 0:
                store_float(partial + ((place + h * splits) * dims + d) * 4, part)
            else:
                at = h * width + d
                whole_sums[at] = multiply_add(whole_sums[at], olds[h], part * news[h])
            d += THREADS
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def begin_splits(
    thread: int, count: int, dims: int, width: int, tops: Any, totals: Any, sums: Any
) -> None:
    """Nothing folded yet; each thread clears what it will itself add to."""
    if thread < count:
        tops[thread], totals[thread] = float32(LOWEST), float32(0)
    for h in range(count):
        d = thread
        while d < dims:
            sums[h * width + d] = float32(0)
            d += THREADS


@cuda.jit(device=True, inline="always")
def store_results(
    thread: int, count: int, dims: int, width: int, kind: int, empty: bool,
    tops: Any, totals: Any, sums: Any, sinks: int,
    out: int, out_head: int, out_dim: int, lse: int, lse_head: int,
) -> None:  # fmt: skip
    """Results of `count` heads from what was folded; addresses are the first head's."""
    for h in range(count):
        sink = float32(0)
        if sinks != 0:
            sink = load_float(sinks + h * 4) * float32(LOG2_E)
        d = thread
        while d < dims:
            found, logarithm = float32(0), float32(-float("inf"))
            if not empty:
                found, logarithm = divide(sums[h * width + d], tops[h], totals[h], sink, sinks != 0)
            store_element(out + h * out_head + d * out_dim, found, kind)
            if d == 0 and lse != 0:
                store_float(lse + h * lse_head, logarithm)
            d += THREADS
