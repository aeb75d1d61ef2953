"""The loops that touch K, V, queries and results, by storage dtype.

Each is compiled once for each dtype and chosen here, at the innermost call: so all that lies
above is compiled once, which more than halves the time of a first call.
"""

from __future__ import annotations

import numpy as np

from cuda_kernels.attention.quad import add_tile_of, add_tile_row_of, dot_tile_of, quad_code
from cuda_kernels.attention.state import pack_row_of, store_row_of
from cuda_kernels.dtypes import BFLOAT16, FLOAT32, FP8_E4M3
from cuda_kernels.vectors import BFLOAT16_TAG, FLOAT16_TAG, FLOAT32_TAG, FP8_TAG


@quad_code
def dot_tile(
    kind: int,
    scores: int,
    packed: int,
    keys: int,
    start: int,
    stop: int,
    dims: int,
    ahead: int,
    ahead_lines: int,
) -> None:
    """Scores of a quad; see `quad.dot_tile_of`."""
    if kind == FLOAT32:
        dot_tile_of(FLOAT32_TAG, scores, packed, keys, start, stop, dims, ahead, ahead_lines)
    elif kind == BFLOAT16:
        dot_tile_of(BFLOAT16_TAG, scores, packed, keys, start, stop, dims, ahead, ahead_lines)
    elif kind == FP8_E4M3:
        dot_tile_of(FP8_TAG, scores, packed, keys, start, stop, dims, ahead, ahead_lines)
    else:
        dot_tile_of(FLOAT16_TAG, scores, packed, keys, start, stop, dims, ahead, ahead_lines)


@quad_code
def add_tile(
    kind: int,
    sums: int,
    weights: int,
    values: int,
    first: int,
    last: int,
    dims: int,
    ahead: int,
    ahead_lines: int,
) -> None:
    """Weights times values; see `quad.add_tile_of`."""
    if kind == FLOAT32:
        add_tile_of(FLOAT32_TAG, sums, weights, values, first, last, dims, ahead, ahead_lines)
    elif kind == BFLOAT16:
        add_tile_of(BFLOAT16_TAG, sums, weights, values, first, last, dims, ahead, ahead_lines)
    elif kind == FP8_E4M3:
        add_tile_of(FP8_TAG, sums, weights, values, first, last, dims, ahead, ahead_lines)
    else:
        add_tile_of(FLOAT16_TAG, sums, weights, values, first, last, dims, ahead, ahead_lines)


@quad_code
def add_tile_row(
    kind: int, sums: int, weights: int, values: int, first: int, last: int, dims: int
) -> None:
    """The same for one row; see `quad.add_tile_row_of`."""
    if kind == FLOAT32:
        add_tile_row_of(FLOAT32_TAG, sums, weights, values, first, last, dims)
    elif kind == BFLOAT16:
        add_tile_row_of(BFLOAT16_TAG, sums, weights, values, first, last, dims)
    elif kind == FP8_E4M3:
        add_tile_row_of(FP8_TAG, sums, weights, values, first, last, dims)
    else:
        add_tile_row_of(FLOAT16_TAG, sums, weights, values, first, last, dims)


@quad_code
def pack_row(
    kind: int, packed: int, query: int, row: int, dims: int, scale: np.float32, spare: int
) -> None:
    """One query row; see `state.pack_row_of`."""
    if kind == FLOAT32:
        pack_row_of(FLOAT32_TAG, packed, query, row, dims, scale, spare)
    elif kind == BFLOAT16:
        pack_row_of(BFLOAT16_TAG, packed, query, row, dims, scale, spare)
    else:
        pack_row_of(FLOAT16_TAG, packed, query, row, dims, scale, spare)


@quad_code
def store_row(kind: int, out: int, state: int, row: int, dims: int, spare: int) -> None:
    """One row of the result; see `state.store_row_of`."""
    if kind == FLOAT32:
        store_row_of(FLOAT32_TAG, out, state, row, dims, spare)
    elif kind == BFLOAT16:
        store_row_of(BFLOAT16_TAG, out, state, row, dims, spare)
    else:
        store_row_of(FLOAT16_TAG, out, state, row, dims, spare)
