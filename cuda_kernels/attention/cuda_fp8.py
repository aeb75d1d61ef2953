"""What the attention kernels do otherwise where K and V are stored as fp8_e4m3.

A number of fp8_e4m3 is a number of float16, so whatever the queries' dtype, products on tensor
cores are of float16: with queries brought into its range by a power of 2 a head, and with weights,
which are at most 1.

A lane's 16 bytes of a row of K are 16 dims, four a word. The order of dims in a dot product is
free:

    word i of a row:  dims 4i, 4i + 1 | 4i + 2, 4i + 3
                      lower two bytes | upper two bytes   widened: the words a0 (a1), a2 (a3) of A
    q, 32 bytes:      word 2i         | word 2i + 1       as they are: b0, b1

V pairs positions, so bytes of two positions are dealt first: 2 prmt for 4 dims, then widened.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int32, int64, uint32

from cuda_kernels.attention.cuda_parts import multiply
from cuda_kernels.cuda.prims import (
    as_float,
    as_word,
    convert_lower_fp8,
    convert_upper_fp8,
    load_byte,
    load_line,
    load_pair,
    lower_bytes,
    maximum,
    mma_float16,
    narrow_float16,
    shuffle_xor,
    upper_bytes,
    widen_bfloat16,
    widen_float16,
    widen_lower_fp8,
    widen_upper_fp8,
)
from cuda_kernels.dtypes import BFLOAT16

COLUMNS = 8
#: The first architecture with an instruction that widens.
CONVERTS = (8, 9)
#: Of the architectures that there are kernels for.
OLDEST = (8, 0)


def widening(capability: tuple[int, int]) -> tuple[Any, Any]:
    """What widens the lower, and the upper, two bytes of a word to float16 on an architecture."""
    if capability >= CONVERTS:
        return convert_lower_fp8, convert_upper_fp8
    return widen_lower_fp8, widen_upper_fp8


@cuda.jit(device=True, inline="always")
def load_fp8(address: int, lower: Any) -> Any:
    """One number as float32."""
    return widen_float16(lower(load_byte(address)))[0]


@cuda.jit(device=True, inline="always")
def add_word(
    scores: Any, query: Any, heads: int, dims: int, at: int, word: Any, lower: Any, upper: Any
) -> None:
    """Four dims of a row of K, from dim `at` on, with the heads' queries, [heads][dims]."""
    first, second = widen_float16(lower(word))
    third, fourth = widen_float16(upper(word))
    for h in range(heads):
        scores[h] += first * query[h * dims + at]
        scores[h] += second * query[h * dims + at + 1]
        scores[h] += third * query[h * dims + at + 2]
        scores[h] += fourth * query[h * dims + at + 3]


@cuda.jit(device=True, inline="always")
def load_queries(
    queries: Any, factors: Any, tiles: int, chunks: int, dims: int, kind: int, scale: Any,
    query: int, head_stride: int, last: int, thread: int, row: int, quad: int,
) -> None:  # fmt: skip
    """Fragments of B; lane column `row` of tile n is head 8n + row, heads past the last repeat it.

    `query` is the address of the first head's dims of this lane's quad. `factors`, in shared
    memory, becomes what scores of each head are multiplied by, `scale` included; a barrier comes
    after. In the last half chunk of 96 dims quads 2 and 3 have zeros.
    """
    for n in range(tiles):
        head = min(int64(n * COLUMNS) + row, last)
        first = n * chunks * 8
        for j in range(chunks):
            at = query + head * head_stride + j * 128
            if (j + 1) * 64 > dims:
                at -= (quad & 2) * 32
            for k in range(2):
                words = load_line(at + k * 16)
                for i in range(4):
                    here = words[i]
                    if (j + 1) * 64 > dims and quad >= 2:
                        here = uint32(0)
                    queries[first + j * 8 + k * 4 + i] = here
        factor = fit_float16(queries, first, chunks * 8, kind)
        # Not by a shuffle: after one from lane to lane sm_80 gets a slow form of all others.
        if thread < 32 and quad == 0:
            factors[n * COLUMNS + row] = factor * scale


@cuda.jit(device=True, inline="always")
def fit_float16(queries: Any, first: int, count: int, kind: int) -> Any:
    """Turn a head's words into float16 whose largest is in 2**14 to 2**15; what undoes that.

    Nothing is lost of what is above 2**-28 of the largest; the rest is off by 2**-39 of it at most.
    """
    peak = float32(0)
    for i in range(count):
        low, high = widen_query(uint32(queries[first + i] & uint32(0x7FFF7FFF)), kind)
        peak = maximum(peak, maximum(low, high))
    for bit in (1, 2):
        peak = maximum(peak, shuffle_xor(peak, int32(bit)))
    exponent = max(int32(as_word(peak) >> uint32(23)), int32(15))
    by = as_float(uint32((268 - exponent) << 23))
    for i in range(count):
        low, high = widen_query(queries[first + i], kind)
        queries[first + i] = narrow_float16(low * by, high * by)
    return as_float(uint32((exponent - 14) << 23))


@cuda.jit(device=True, inline="always")
def widen_query(word: Any, kind: int) -> Any:
    """Two values of bfloat16 or float16 in one word."""
    low, high = widen_bfloat16(word)
    other_low, other_high = widen_float16(word)
    brain = kind == BFLOAT16
    return low if brain else other_low, high if brain else other_high


@cuda.jit(device=True, inline="always")
def add_scores(
    lower: Any, upper: Any, scores: Any, queries: Any,
    tiles: int, chunks: int, dims: int, address: int, stride: int, quad: int,
) -> None:  # fmt: skip
    """S^T = K q^T of a tile: each word of a row of K is the words of one product.

    In the last half chunk of 96 dims quads 2 and 3 load what quads 0 and 1 do, against zeros.
    """
    for i in range(4 * tiles):
        scores[i] = float32(0)
    for j in range(chunks):
        at = address + j * 64
        if (j + 1) * 64 > dims:
            at -= (quad & 2) * 16
        near, far = load_line(at), load_line(at + 8 * stride)
        for i in range(4):
            a = (lower(near[i]), lower(far[i]), upper(near[i]), upper(far[i]))
            for n in range(tiles):
                own = (n * chunks + j) * 8 + 2 * i
                multiply(mma_float16, a, (queries[own], queries[own + 1]), scores, n * 4)


@cuda.jit(device=True, inline="always")
def load_values(values: Any, words: int, address: int, stride: int) -> None:
    """V of positions 2 * quad, + 1, + 8, + 9: `words` words of each, 16 dims in 128; 2: of 64 dims.

    `address` is that of the first position's dims of this lane's row.
    """
    for e in range(4):
        at = address + ((e >> 1) * 8 + (e & 1)) * stride
        if words == 2:
            pair = load_pair(at)
            for i in range(2):
                values[e * 2 + i] = pair[i]
        else:
            for c in range(words // 4):
                line = load_line(at + c * 128)
                for i in range(4):
                    values[e * words + c * 4 + i] = line[i]


@cuda.jit(device=True, inline="always")
def add_values(
    lower: Any, upper: Any, sums: Any, tile_sums: int, tiles: int,
    values: Any, words: int, weights: Any,
) -> None:  # fmt: skip
    """O^T += V^T P^T: two dims next to each other are rows `row` and `row + 8` of a product.

    What is widened serves all tiles of heads; `weights` are the fragments B of each.
    """
    for w in range(words):
        first, second = values[w], values[words + w]
        third, fourth = values[2 * words + w], values[3 * words + w]
        near, far = lower_bytes(first, second), lower_bytes(third, fourth)
        a = (lower(near), upper(near), lower(far), upper(far))
        near, far = upper_bytes(first, second), upper_bytes(third, fourth)
        c = (lower(near), upper(near), lower(far), upper(far))
        for n in range(tiles):
            b, at = (weights[2 * n], weights[2 * n + 1]), n * tile_sums + w * 8
            multiply(mma_float16, a, b, sums, at)
            multiply(mma_float16, c, b, sums, at + 4)
