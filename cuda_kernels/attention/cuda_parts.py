"""What the attention kernels share: rows, elements of a storage dtype, what bends a score."""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int64

from cuda_kernels.cuda.prims import (
    exp2,
    load_float,
    load_half,
    load_int32,
    load_int64,
    log2,
    maximum,
    multiply_add,
    narrow_bfloat16,
    narrow_float16,
    reciprocal,
    store_float,
    store_half,
    widen_bfloat16,
    widen_float16,
)
from cuda_kernels.dtypes import BFLOAT16, FLOAT32

# Below any score; finite, so that the difference of two maxima is never NaN.
LOWEST = -1.0e30
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


@cuda.jit(device=True, inline="always")
def load_element(address: int, kind: int) -> Any:
    """One element of a storage dtype as float32."""
    if kind == FLOAT32:
        return load_float(address)
    if kind == BFLOAT16:
        return widen_bfloat16(load_half(address))[0]
    return widen_float16(load_half(address))[0]


@cuda.jit(device=True, inline="always")
def store_element(address: int, value: Any, kind: int) -> None:
    """Round to a storage dtype and store."""
    if kind == FLOAT32:
        store_float(address, value)
    elif kind == BFLOAT16:
        store_half(address, narrow_bfloat16(value, float32(0)))
    else:
        store_half(address, narrow_float16(value, float32(0)))


@cuda.jit(device=True, inline="always")
def load_index(address: int, index: int, size: int) -> Any:
    """One element of an int32 or int64 array."""
    if size == 8:
        return load_int64(address + index * 8)
    return int64(load_int32(address + index * 4))


@cuda.jit(device=True, inline="always")
def find_row(query_start: int, num_rows: int, token: int, size: int) -> Any:
    """The row a token belongs to, by bisection; num_rows if it is past the last row's end."""
    low, high = int64(0), int64(num_rows) + 1
    while low < high:
        middle = (low + high) >> 1
        if load_index(query_start, middle, size) <= token:
            low = middle + 1
        else:
            high = middle
    return low - 1


@cuda.jit(device=True, inline="always")
def num_queries_of(query_start: int, row: int, size: int) -> Any:
    """How many query tokens a row has."""
    return load_index(query_start, row + 1, size) - load_index(query_start, row, size)


@cuda.jit(device=True, inline="always")
def bend(score: Any, softcap: Any, slope: Any, distance: int) -> Any:
    """Softcap, then ALiBi; the result is in units of log2(e). tanh(x) = 1 - 2 / (e^2x + 1)."""
    if softcap > float32(0):
        power = exp2(score * reciprocal(softcap) * float32(2 * LOG2_E))
        score = softcap * (float32(1) - float32(2) * reciprocal(power + float32(1)))
    return (score - slope * float32(distance)) * float32(LOG2_E)


@cuda.jit(device=True, inline="always")
def fold(top: Any, total: Any, part_top: Any, part_total: Any) -> Any:
    """Join the maxima and weights of two sets of positions: (maximum, weight, factors of sums)."""
    peak = maximum(top, part_top)
    old, new = exp2(top - peak), exp2(part_top - peak)
    return peak, multiply_add(total, old, part_total * new), old, new


@cuda.jit(device=True, inline="always")
def divide(found: Any, top: Any, total: Any, sink: Any, sunk: bool) -> Any:
    """Weighted sum by denominator, sink included: (result, natural log-sum-exp)."""
    if sunk:
        peak = maximum(top, sink)
        factor = exp2(top - peak)
        found, total, top = found * factor, multiply_add(total, factor, exp2(sink - peak)), peak
    return found / total, (top + log2(total)) * float32(LN_2)


@cuda.jit(device=True, inline="always")
def multiply(mma: Any, a: Any, b: Any, c: Any, at: int) -> None:
    """c[at .. at + 3] += A B for fragments of two-byte elements."""
    found = mma(a[0], a[1], a[2], a[3], b[0], b[1], c[at], c[at + 1], c[at + 2], c[at + 3])
    for i in range(4):
        c[at + i] = found[i]
