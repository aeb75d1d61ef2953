"""Four query rows against a tile of 64 positions: the inner loops of the vector twin.

    query rows      packed [chunk][4][PAIR]       K rows, where they lie
           \\                                       /
            dot_tile: scores [64][4]  --  weigh_tile: weights [64][4]
                                                     |
            V rows, where they lie  --  add_tile: sums [chunk][4][PAIR]

A *row* is one query head of one token, a *quad* four of them: the heads of a group at decode,
neighbours in (token, head) order in a prompt. A *chunk* is `PAIR` elements of a row of K or V, two
vectors; where the width is no multiple of that, the last chunk starts early and overlaps the one
before.

K and V are read in place, through tables of 64 addresses, so block size and layout are none of
these loops' business. They are also asked for one tile ahead, which is what makes paged K/V as
fast as contiguous K/V: the processor's own prefetcher stops at each block's end.

What a row's result is made of, and in which order, is the same in any quad, beside any other rows:
rule 5 of README.md. A score that its row may not read is replaced by -inf by a select, never
multiplied away, and V is read from first to last position that the row attends to (rule 4).

Two positions x four rows, and two vectors x four rows, are eight sums in registers: as many as
hide the latency of the multiply-adds, with room for the operands in 16 registers. Loops over
chunks have run-time lengths: unrolled, they spill.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import literal_unroll, njit

from cuda_kernels.simd import LINE_BYTES, prefetch
from cuda_kernels.vectors import (
    PAIR,
    QUAD,
    QUAD_STEP,
    VECTOR_BYTES,
    add,
    any_greater,
    eight_zeros,
    exp2,
    finite_or_zero,
    greater,
    keep_between,
    lane_places,
    load,
    load_eight,
    load_int64,
    load_pair,
    load_quad,
    multiply,
    multiply_add,
    row_maxima,
    split_rows,
    spread,
    spread_at,
    store,
    store_eight,
    store_sums,
    subtract,
    tag_bytes,
    tanh,
)

TILE = 64
_STEP = 8  # positions between requests for V ahead
ADDRESS_BYTES = 8
SCORE_BYTES = 4 * QUAD  # of a position: one score a row
CHUNK_BYTES = QUAD * 2 * VECTOR_BYTES  # of a packed query or of sums
_MINUS_INFINITY = np.float32(-np.inf)

quad_code = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
inlined = njit(cache=True, nogil=True, error_model="numpy", _nrt=False, forceinline=True)


@inlined
def add_dots(sums: Any, x: Any, y: Any, packed: int) -> Any:
    """Add one chunk of two K rows, x and y, times four packed query rows to their eight sums."""
    x0, x1, x2, x3, y0, y1, y2, y3 = sums
    k, m = x
    n, o = y
    q = load(packed)
    x0 = multiply_add(q, k, x0)
    y0 = multiply_add(q, n, y0)
    q = load(packed + 2 * VECTOR_BYTES)
    x1 = multiply_add(q, k, x1)
    y1 = multiply_add(q, n, y1)
    q = load(packed + 4 * VECTOR_BYTES)
    x2 = multiply_add(q, k, x2)
    y2 = multiply_add(q, n, y2)
    q = load(packed + 6 * VECTOR_BYTES)
    x3 = multiply_add(q, k, x3)
    y3 = multiply_add(q, n, y3)
    q = load(packed + VECTOR_BYTES)
    x0 = multiply_add(q, m, x0)
    y0 = multiply_add(q, o, y0)
    q = load(packed + 3 * VECTOR_BYTES)
    x1 = multiply_add(q, m, x1)
    y1 = multiply_add(q, o, y1)
    q = load(packed + 5 * VECTOR_BYTES)
    x2 = multiply_add(q, m, x2)
    y2 = multiply_add(q, o, y2)
    q = load(packed + 7 * VECTOR_BYTES)
    x3 = multiply_add(q, m, x3)
    y3 = multiply_add(q, o, y3)
    return x0, x1, x2, x3, y0, y1, y2, y3


@inlined
def add_weighted(sums: Any, pair: Any, weights: int) -> Any:
    """Add one chunk of a V row times four weights to the eight sums of the quad's chunk."""
    x0, y0, x1, y1, x2, y2, x3, y3 = sums
    v, w = pair
    p = spread_at(weights)
    x0 = multiply_add(p, v, x0)
    y0 = multiply_add(p, w, y0)
    p = spread_at(weights + 4)
    x1 = multiply_add(p, v, x1)
    y1 = multiply_add(p, w, y1)
    p = spread_at(weights + 8)
    x2 = multiply_add(p, v, x2)
    y2 = multiply_add(p, w, y2)
    p = spread_at(weights + 12)
    x3 = multiply_add(p, v, x3)
    y3 = multiply_add(p, w, y3)
    return x0, y0, x1, y1, x2, y2, x3, y3


@inlined
def num_chunks(dims: int) -> int:
    """Chunks of a row that is `dims` wide."""
    return (dims + PAIR - 1) // PAIR


@inlined
def prefetch_rows(table: int, start: int, stop: int, first_line: int, last_line: int) -> None:
    """Ask for some 64-byte lines of the rows whose addresses are table[start:stop]."""
    for position in range(start, stop):
        row = load_int64(table + position * ADDRESS_BYTES)
        for line in range(first_line, last_line):
            prefetch(row + line * LINE_BYTES)


@quad_code
def dot_tile_of(
    tag: Any,
    scores: int,
    packed: int,
    keys: int,
    start: int,
    stop: int,
    dims: int,
    ahead: int,
    ahead_lines: int,
) -> None:
    """scores[start:stop] of a quad; start and stop are even, dims >= PAIR.

    `keys` and `ahead` are the addresses of the tables of this tile's and the next tile's K rows.
    An overlap's elements count once: there the packed query is 0. (Inf in such an element of K
    makes the score NaN even where its sign would have made it -inf.)
    """
    whole = dims // PAIR
    chunk_bytes = PAIR * tag_bytes(tag)
    last = (dims - PAIR) * tag_bytes(tag)
    for position in range(start, stop, 2):
        x = load_int64(keys + position * ADDRESS_BYTES)
        y = load_int64(keys + position * ADDRESS_BYTES + ADDRESS_BYTES)
        if ahead_lines > 0:
            prefetch_rows(ahead, position, position + 2, 0, ahead_lines)
        sums = eight_zeros()
        rows = packed
        for chunk in range(whole):
            at = chunk * chunk_bytes
            sums = add_dots(sums, load_pair(x + at, tag), load_pair(y + at, tag), rows)
            rows += CHUNK_BYTES
        if whole * PAIR < dims:
            sums = add_dots(sums, load_pair(x + last, tag), load_pair(y + last, tag), rows)
        store_sums(scores + position * SCORE_BYTES, sums)


@quad_code
def bend_and_mask(
    scores: int,
    start: int,
    stop: int,
    softcap: np.float32,
    slopes: int,
    firsts: int,
    lasts: int,
    masked: bool,
) -> None:
    """Softcap, ALiBi and mask, in place; scores are in units of log2(e).

    `slopes`, `firsts` and `lasts` are addresses of a float32 a row: the slope, and the first and
    last position that the row attends to, counted from the tile's first. `slopes` 0: no ALiBi.
    """
    cap = spread(softcap)
    first = load_quad(firsts)
    last = load_quad(lasts)
    place = add(lane_places(), spread(np.float32(start)))
    step = spread(np.float32(QUAD_STEP))
    for position in range(start, stop, QUAD_STEP):
        at = scores + position * SCORE_BYTES
        score = load(at)
        if softcap > 0:
            score = multiply(cap, tanh(score))
        if slopes != 0:
            score = multiply_add(load_quad(slopes), subtract(place, last), score)
        if masked:
            score = keep_between(score, place, first, last)
        store(at, score)
        place = add(place, step)


@inlined
def scale_rows(sums: int, factors: Any, chunks: int) -> None:
    """Multiply each row of sums by its factor, a vector."""
    for chunk in range(chunks):
        at = sums + chunk * CHUNK_BYTES
        for factor in literal_unroll(factors):
            store(at, multiply(load(at), factor))
            store(at + VECTOR_BYTES, multiply(load(at + VECTOR_BYTES), factor))
            at += 2 * VECTOR_BYTES


@quad_code
def weigh_tile(
    scores: int, sums: int, peaks: int, totals: int, start: int, stop: int, chunks: int
) -> None:
    """Scores become weights, 2**(score - peak); what the quad gathered is rescaled if a peak rose.

    start and stop are multiples of QUAD_STEP. `peaks` and `totals` are a vector each: a row's peak
    in all its lanes; its total as partial sums, to be added over its lanes. A row whose peak did
    not rise is multiplied by exactly 1 if another's did.
    """
    top = spread(_MINUS_INFINITY)
    for position in range(start, stop, QUAD_STEP):
        top = greater(load(scores + position * SCORE_BYTES), top)
    old = load(peaks)
    new = greater(row_maxima(top), old)
    shift = finite_or_zero(new)
    total = load(totals)
    if any_greater(new, old):
        factor = exp2(subtract(old, shift))
        total = multiply(total, factor)
        store(peaks, new)
        scale_rows(sums, split_rows(factor), chunks)
    for position in range(start, stop, QUAD_STEP):
        at = scores + position * SCORE_BYTES
        weight = exp2(subtract(load(at), shift))
        total = add(total, weight)
        store(at, weight)
    store(totals, total)


@quad_code
def add_tile_of(
    tag: Any,
    sums: int,
    weights: int,
    values: int,
    first: int,
    last: int,
    dims: int,
    ahead: int,
    ahead_lines: int,
) -> None:
    """sums += weights[first..last] . V of a quad whose rows all attend to these; dims >= PAIR.

    `values` and `ahead` are the addresses of the tables of this tile's and the next tile's V
    rows. Each pass over the positions takes one chunk, and its share of the lines ahead.
    """
    chunks = num_chunks(dims)
    size = tag_bytes(tag)
    rows_a_step = (_STEP + chunks - 1) // chunks if ahead_lines > 0 else 0
    row_ahead = 0
    for chunk in range(chunks):
        at = min(chunk * PAIR, dims - PAIR) * size
        into = sums + chunk * CHUNK_BYTES
        chunk_sums = load_eight(into)
        for step in range(first, last + 1, _STEP):
            next_ahead = min(row_ahead + rows_a_step, TILE)
            prefetch_rows(ahead, row_ahead, next_ahead, 0, ahead_lines)
            row_ahead = next_ahead
            for position in range(step, min(step + _STEP, last + 1)):
                row = load_int64(values + position * ADDRESS_BYTES)
                pair = load_pair(row + at, tag)
                chunk_sums = add_weighted(chunk_sums, pair, weights + position * SCORE_BYTES)
        store_eight(into, chunk_sums)


@quad_code
def add_tile_row_of(
    tag: Any, sums: int, weights: int, values: int, first: int, last: int, dims: int
) -> None:
    """`add_tile_of` for one row, at the edge of what it attends to; the same arithmetic.

    `sums` and `weights` point at the row's place in the quad's.
    """
    for chunk in range(num_chunks(dims)):
        at = min(chunk * PAIR, dims - PAIR) * tag_bytes(tag)
        x = load(sums + chunk * CHUNK_BYTES)
        y = load(sums + chunk * CHUNK_BYTES + VECTOR_BYTES)
        for position in range(first, last + 1):
            row = load_int64(values + position * ADDRESS_BYTES)
            v, w = load_pair(row + at, tag)
            weight = spread_at(weights + position * SCORE_BYTES)
            x = multiply_add(weight, v, x)
            y = multiply_add(weight, w, y)
        store(sums + chunk * CHUNK_BYTES, x)
        store(sums + chunk * CHUNK_BYTES + VECTOR_BYTES, y)
