"""What a quad has gathered: sums, peaks, totals; cleared, folded, finished.

A state lies at an address: sums ``[chunk][4][PAIR]``, then a vector of peaks and one of totals,
float32. Peaks are in units of log2(e); see `quad.weigh_tile` for what the lanes hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels.attention.quad import CHUNK_BYTES, num_chunks, quad_code, scale_rows
from cuda_kernels.simd import copy_bytes
from cuda_kernels.vectors import (
    PAIR,
    QUAD,
    VECTOR_BYTES,
    add,
    deal,
    divide,
    exp2,
    finite_or_zero,
    greater,
    load,
    load_float,
    load_pair,
    load_quad,
    multiply,
    multiply_add,
    riffle,
    row_sums,
    split_rows,
    spread,
    store,
    store_float,
    store_pair,
    subtract,
    tag_bytes,
    zeros,
)

_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
_MINUS_INFINITY = np.float32(-np.inf)


@quad_code
def state_bytes(chunks: int) -> int:
    """Size of the state of one quad."""
    return chunks * CHUNK_BYTES + 2 * VECTOR_BYTES


@quad_code
def clear(state: int, chunks: int) -> None:
    """The state of no positions."""
    for k in range(2 * QUAD * chunks):
        store(state + k * VECTOR_BYTES, zeros())
    store(state + chunks * CHUNK_BYTES, spread(_MINUS_INFINITY))
    store(state + chunks * CHUNK_BYTES + VECTOR_BYTES, zeros())


@quad_code
def fold(total: int, part: int, chunks: int) -> None:
    """Fold a split's state into the total (log-sum-exp merge); an empty split changes no bit."""
    peaks = chunks * CHUNK_BYTES
    totals = peaks + VECTOR_BYTES
    old_peak = load(total + peaks)
    new_peak = load(part + peaks)
    peak = greater(new_peak, old_peak)
    shift = finite_or_zero(peak)
    old = exp2(subtract(old_peak, shift))
    new = exp2(subtract(new_peak, shift))
    more = multiply(row_sums(load(part + totals)), new)
    store(total + peaks, peak)
    weight = multiply_add(load(total + totals), old, more)
    store(total + totals, weight)
    old_rows = split_rows(old)
    new_rows = split_rows(new)
    at = 0
    for _ in range(chunks):
        for row in range(QUAD):
            for _ in range(2):
                more = multiply(load(part + at), new_rows[row])
                store(total + at, multiply_add(load(total + at), old_rows[row], more))
                at += VECTOR_BYTES


@quad_code
def divide_by_total(state: int, sinks: int, chunks: int) -> None:
    """Sums become the result, peaks the natural log-sum-exp: totals and sinks are divided by.

    `state` is a total that splits were folded into: its totals are whole in every lane. `sinks`:
    address of a float32 a row, in units of log2(e); -inf is no sink.
    """
    peaks = state + chunks * CHUNK_BYTES
    sink = load_quad(sinks)
    peak = load(peaks)
    shift = finite_or_zero(greater(sink, peak))
    weight = exp2(subtract(peak, shift))
    total = multiply(load(peaks + VECTOR_BYTES), weight)
    total = add(total, exp2(subtract(sink, shift)))
    scale = split_rows(divide(weight, total))
    scale_rows(state, scale, chunks)
    store(peaks, shift)
    store(peaks + VECTOR_BYTES, total)
    for row in range(QUAD):
        log = np.float32(np.log(load_float(peaks + VECTOR_BYTES + 4 * row)))
        store_float(peaks + 4 * row, load_float(peaks + 4 * row) * _LN_2 + log)


@quad_code
def scale_values(state: int, factor: np.float32, chunks: int) -> None:
    """Multiply a finished state by what stored V was divided by."""
    by = spread(factor)
    for k in range(2 * QUAD * chunks):
        at = state + k * VECTOR_BYTES
        store(at, multiply(load(at), by))


@quad_code
def deal_row(packed: int, row: int, chunks: int) -> None:
    """One packed query row, which is in order, as even and odd elements, as K is loaded."""
    at = packed + row * 2 * VECTOR_BYTES
    for _ in range(chunks):
        x, y = deal(load(at), load(at + VECTOR_BYTES))
        store(at, x)
        store(at + VECTOR_BYTES, y)
        at += CHUNK_BYTES


@quad_code
def riffle_row(state: int, row: int, chunks: int) -> None:
    """One row of a finished state, which is even and odd elements as V is loaded, in order."""
    at = state + row * 2 * VECTOR_BYTES
    for _ in range(chunks):
        x, y = riffle(load(at), load(at + VECTOR_BYTES))
        store(at, x)
        store(at + VECTOR_BYTES, y)
        at += CHUNK_BYTES


@quad_code
def store_row_of(tag: Any, out: int, state: int, row: int, dims: int, spare: int) -> None:
    """One row of a finished state, rounded, to its place in the result.

    `spare` is room for a pair, for rows narrower than one.
    """
    size = tag_bytes(tag)
    sums = state + row * 2 * VECTOR_BYTES
    if dims < PAIR:
        store_pair(spare, load(sums), load(sums + VECTOR_BYTES), tag)
        copy_bytes(out, spare, dims * size)
        return
    for chunk in range(num_chunks(dims)):
        at = min(chunk * PAIR, dims - PAIR) * size
        store_pair(out + at, load(sums), load(sums + VECTOR_BYTES), tag)
        sums += CHUNK_BYTES


@quad_code
def pack_row_of(
    tag: Any, packed: int, query: int, row: int, dims: int, scale: np.float32, spare: int
) -> None:
    """One query row, widened and scaled, to its place in the packed quad."""
    size = tag_bytes(tag)
    factor = spread(scale)
    into = packed + row * 2 * VECTOR_BYTES
    whole = dims // PAIR
    for chunk in range(whole):
        x, y = load_pair(query + chunk * PAIR * size, tag)
        store(into, multiply(x, factor))
        store(into + VECTOR_BYTES, multiply(y, factor))
        into += CHUNK_BYTES
    rest = dims - whole * PAIR
    if rest > 0:
        # The last chunk overlaps the one before: zeros there. A narrow row has zeros behind it.
        store(spare, zeros())
        store(spare + VECTOR_BYTES, zeros())
        before = (PAIR - rest) * size if whole > 0 else 0
        copy_bytes(spare + before, query + whole * PAIR * size, rest * size)
        x, y = load_pair(spare, tag)
        store(into, multiply(x, factor))
        store(into + VECTOR_BYTES, multiply(y, factor))
