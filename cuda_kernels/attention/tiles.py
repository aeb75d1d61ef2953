"""The inner loops of the attention twin: one tile of keys against a tile of query rows.

    K of a frame           packed, transposed          scores             probabilities
    [position][dim]  --->  key_tile [dim][64]   --->   [row][64]   --->   [row][64]
                                                                             |
    V of a frame           packed in panels                                  v
    [position][dim]  --->  value_tile [panel][64][32]  --->  sums [panel][row][32] += p * v

A *row* is one query head of one token. Loops run over constant widths (64 positions, 32 values
of a panel) along contiguous memory with few arrays in sight: so LLVM vectorises them without
run-time alias tests. Each position's and each row's arithmetic is the same wherever it stands in
a tile; that is what makes results independent of batch, chunking and threads.

Positions that no row of the tile may read are never loaded: the tile holds zeros there, so that
NaN in a stale slot can't reach a result (case 67). All functions allocate nothing; `_nrt=False`
spares the reference counting of each slice.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cuda_kernels.dtypes import BFLOAT16, FLOAT32, FP8_E4M3, Bits, Float32s, Int32s
from cuda_kernels.numeric import exp, tanh, widen_bfloat16, widen_float16, widen_fp8

TILE_KEYS = 64
PANEL = 32
_DIM_STEP = 8
_KEY_STEP = 8
_ZERO = np.float32(0)

tile_code = njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy", _nrt=False)
# Sums over the 64 places of a tile: LLVM picks the order once, for a constant length.
reduction_code = njit(
    cache=True,
    nogil=True,
    fastmath={"contract", "reassoc", "nsz"},
    error_model="numpy",
    _nrt=False,
)


@tile_code
def pack_keys(
    key_tile: Float32s,
    arena: Bits,
    kind: int,
    plane: int,
    stride: int,
    block_size: int,
    dims: int,
    table: Int32s,
    base: int,
    low: int,
    high: int,
) -> None:
    """Gather positions low..high of one head, transposed: key_tile[d * 64 + position - base].

    `plane` is the element offset of the head's first row in a frame, `stride` leads to the next
    row. Other columns are zeroed. Cost: one strided store an element, repaid by the query rows
    that share the tile.
    """
    if low > base or high < base + TILE_KEYS - 1:
        key_tile[:] = _ZERO
    position = low
    while position <= high:
        block = position // block_size
        offset = position - block * block_size
        run = min(block_size - offset, high - position + 1)
        start = plane + offset * stride
        source = arena[np.int64(table[block]), start : start + (run - 1) * stride + dims]
        for k in range(run):
            column = key_tile[position - base + k :]
            row = source[k * stride : k * stride + dims]
            if kind == FLOAT32:
                for d in range(dims):
                    column[d * TILE_KEYS] = np.uint32(row[d]).view(np.float32)
            elif kind == BFLOAT16:
                for d in range(dims):
                    column[d * TILE_KEYS] = widen_bfloat16(row[d])
            elif kind == FP8_E4M3:
                for d in range(dims):
                    column[d * TILE_KEYS] = widen_fp8(row[d])
            else:
                for d in range(dims):
                    column[d * TILE_KEYS] = widen_float16(row[d])
        position += run


@tile_code
def pack_values(
    value_tile: Float32s,
    arena: Bits,
    kind: int,
    plane: int,
    stride: int,
    block_size: int,
    dims: int,
    table: Int32s,
    base: int,
    low: int,
    high: int,
) -> bool:
    """Gather positions low..high of one head in panels of 32 values; the rest is zeros.

    Returns whether all gathered values are finite.
    """
    if low > base or high < base + TILE_KEYS - 1:
        value_tile[:] = _ZERO
    position = low
    while position <= high:
        block = position // block_size
        offset = position - block * block_size
        run = min(block_size - offset, high - position + 1)
        start = plane + offset * stride
        source = arena[np.int64(table[block]), start : start + (run - 1) * stride + dims]
        for panel in range((dims + PANEL - 1) // PANEL):
            width = min(PANEL, dims - panel * PANEL)
            into = (panel * TILE_KEYS + position - base) * PANEL
            target = value_tile[into : into + run * PANEL]
            _widen_rows(target, source[panel * PANEL :], kind, run, width, stride)
        position += run
    return _all_finite(value_tile)


@tile_code
def _widen_rows(
    target: Float32s, source: Bits, kind: int, run: int, width: int, stride: int
) -> None:
    """target[k][32] = source[k * stride] for `run` rows, the first `width` values of each."""
    for k in range(run):
        into = target[k * PANEL : k * PANEL + width]
        row = source[k * stride : k * stride + width]
        if kind == FLOAT32:
            for d in range(width):
                into[d] = np.uint32(row[d]).view(np.float32)
        elif kind == BFLOAT16:
            for d in range(width):
                into[d] = widen_bfloat16(row[d])
        elif kind == FP8_E4M3:
            for d in range(width):
                into[d] = widen_fp8(row[d])
        else:
            for d in range(width):
                into[d] = widen_float16(row[d])


@tile_code
def _all_finite(values: Float32s) -> bool:
    """Say whether an array, a multiple of 32 long, holds no Inf or NaN (0 * x is then 0)."""
    bad = np.uint32(0)
    bits = values.view(np.uint32)
    for k in range(bits.shape[0]):
        bad |= np.uint32((bits[k] & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    return bad == 0


@tile_code
def dot_keys(scores: Float32s, query: Float32s, key_tile: Float32s, rows: int, dims: int) -> None:
    """scores[row][64] = query[row][dims] . key_tile[dims][64]; rows even, dims a multiple of 8.

    Two rows by eight dims at a time: 16 multiply-adds for 10 loads and 2 stores of a vector.
    """
    scores[: rows * TILE_KEYS] = _ZERO
    for row in range(0, rows, 2):
        s = scores[row * TILE_KEYS : (row + 2) * TILE_KEYS]
        for d in range(0, dims, _DIM_STEP):
            k = key_tile[d * TILE_KEYS : (d + _DIM_STEP) * TILE_KEYS]
            a = query[row * dims + d : row * dims + d + _DIM_STEP]
            b = query[(row + 1) * dims + d : (row + 1) * dims + d + _DIM_STEP]
            a0, a1, a2, a3, a4, a5, a6, a7 = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
            b0, b1, b2, b3, b4, b5, b6, b7 = b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]
            for j in range(TILE_KEYS):
                x = s[j]
                y = s[TILE_KEYS + j]
                v = k[j]
                x += a0 * v
                y += b0 * v
                v = k[TILE_KEYS + j]
                x += a1 * v
                y += b1 * v
                v = k[2 * TILE_KEYS + j]
                x += a2 * v
                y += b2 * v
                v = k[3 * TILE_KEYS + j]
                x += a3 * v
                y += b3 * v
                v = k[4 * TILE_KEYS + j]
                x += a4 * v
                y += b4 * v
                v = k[5 * TILE_KEYS + j]
                x += a5 * v
                y += b5 * v
                v = k[6 * TILE_KEYS + j]
                x += a6 * v
                y += b6 * v
                v = k[7 * TILE_KEYS + j]
                x += a7 * v
                y += b7 * v
                s[j] = x
                s[TILE_KEYS + j] = y


@tile_code
def add_values(
    sums: Float32s, scores: Float32s, value_tile: Float32s, rows: int, panels: int
) -> None:
    """sums[panel][row][32] += scores[row][64] . value_tile[panel][64][32]; rows even.

    Two rows by eight positions at a time, as in `dot_keys`.
    """
    for panel in range(panels):
        for row in range(0, rows, 2):
            at = (panel * rows + row) * PANEL
            s = sums[at : at + 2 * PANEL]
            for position in range(0, TILE_KEYS, _KEY_STEP):
                into = (panel * TILE_KEYS + position) * PANEL
                v = value_tile[into : into + _KEY_STEP * PANEL]
                into = row * TILE_KEYS + position
                a = scores[into : into + _KEY_STEP]
                b = scores[into + TILE_KEYS : into + TILE_KEYS + _KEY_STEP]
                a0, a1, a2, a3, a4, a5, a6, a7 = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
                b0, b1, b2, b3, b4, b5, b6, b7 = b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]
                for d in range(PANEL):
                    x = s[d]
                    y = s[PANEL + d]
                    w = v[d]
                    x += a0 * w
                    y += b0 * w
                    w = v[PANEL + d]
                    x += a1 * w
                    y += b1 * w
                    w = v[2 * PANEL + d]
                    x += a2 * w
                    y += b2 * w
                    w = v[3 * PANEL + d]
                    x += a3 * w
                    y += b3 * w
                    w = v[4 * PANEL + d]
                    x += a4 * w
                    y += b4 * w
                    w = v[5 * PANEL + d]
                    x += a5 * w
                    y += b5 * w
                    w = v[6 * PANEL + d]
                    x += a6 * w
                    y += b6 * w
                    w = v[7 * PANEL + d]
                    x += a7 * w
                    y += b7 * w
                    s[d] = x
                    s[PANEL + d] = y


@tile_code
def add_values_in_range(
    sums: Float32s,
    scores: Float32s,
    value_tile: Float32s,
    rows: int,
    panels: int,
    row: int,
    first: int,
    last: int,
) -> None:
    """`add_values` for one row and the positions it attends to only.

    Used where a tile holds Inf or NaN: there a masked position's 0 weight times its value is
    NaN, which must not reach the rows that don't attend to it.
    """
    for panel in range(panels):
        at = (panel * rows + row) * PANEL
        s = sums[at : at + PANEL]
        for position in range(first, last + 1):
            into = (panel * TILE_KEYS + position) * PANEL
            v = value_tile[into : into + PANEL]
            weight = scores[row * TILE_KEYS + position]
            for d in range(PANEL):
                s[d] += weight * v[d]


@tile_code
def bend_scores(row: Float32s, distance: int, softcap: np.float32, slope: np.float32) -> None:
    """Apply softcap (0: none), then ALiBi (slope 0: none) to the 64 scores of one row.

    `distance` is query position minus the tile's first position; the newest key's bias is 0
    (case 63).
    """
    if softcap > 0:
        inverse = np.float32(1) / softcap
        for j in range(TILE_KEYS):
            row[j] = softcap * tanh(row[j] * inverse)
    if slope != 0:
        for j in range(TILE_KEYS):
            row[j] -= slope * np.float32(np.int32(distance) - np.int32(j))


@tile_code
def _ordered(bits: np.int32) -> np.int32:
    """Map float32 bits to an int32 of the same order, and back: it is its own inverse."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@tile_code
def row_maximum(row: Float32s) -> np.float32:
    """Maximum of 64 scores; of a row that holds NaN, NaN or any of them.

    Compared as integers: a float maximum isn't vectorised unless NaN is ruled out.
    """
    best = np.int32(-(2**31))
    for j in range(TILE_KEYS):
        key = _ordered(np.float32(row[j]).view(np.int32))
        best = key if key > best else best
    return np.int32(_ordered(best)).view(np.float32)


@reduction_code
def row_sum(row: Float32s) -> np.float32:
    """Sum of 64 weights; the length is left to run time, else LLVM unrolls it into scalars."""
    total = _ZERO
    for j in range(row.shape[0]):
        total += row[j]
    return total


@tile_code
def row_weights(row: Float32s, maximum: np.float32) -> None:
    """Replace 64 scores by exp(score - maximum)."""
    for j in range(TILE_KEYS):
        row[j] = exp(row[j] - maximum)


@tile_code
def scale_row(sums: Float32s, rows: int, panels: int, row: int, factor: np.float32) -> None:
    """Multiply one row of the running sums."""
    for panel in range(panels):
        at = (panel * rows + row) * PANEL
        s = sums[at : at + PANEL]
        for d in range(PANEL):
            s[d] *= factor
