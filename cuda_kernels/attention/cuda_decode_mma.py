"""The CUDA kernels of `paged_attention` on tensor cores: bfloat16 and float16, decode first.

    blockIdx.x = query token, .y = up to 8 * tiles query heads of one KV head, .z = a part
    a part takes the splits of the token's positions whose number is its own modulo the parts
    a split's 64 positions at a time are 4 tiles of 16, one for each warp

      K of a tile   8 words a lane and 32 dims  ---+
      [16][dims]    16-byte loads                  v
      q [8][dims]   in registers  ------------->  mma   S^T [16 positions][8 heads], float32
                                                   v
                    scale, softcap, ALiBi, mask, maximum by shuffles, weights P^T
                                                   v    two halves in a word, movmatrix
      V of a tile   4 positions a lane         -> mma   O^T [dims][8 heads], float32, += V^T P^T
      [16][dims]    16-byte loads, halves paired by prmt, zeros where a position is masked

    warps are merged through shared memory; splits are folded in ascending order, here (one
    part) or by `cuda_merge.py` (several), with the same instructions

Registers are filled straight from global memory. The order of dims in a dot product is free, so a
lane's 16 bytes of K are two fragments of A as they are, if q is cut alike: no shared memory, no
ldmatrix, no copy to wait for. Positions are the 16 rows of a product and heads its 8 columns: a
group of 1 to 8 heads costs the same, and no row is padding.

Positions are cut at fixed places, so a token's result hangs on its own row only, not on the batch
or the number of parts. A wholly masked tile changes nothing, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from cuda_kernels.attention.cuda_parts import (
    LOWEST,
    bend,
    find_row,
    load_index,
    num_queries_of,
)
from cuda_kernels.attention.cuda_splits import WARPS, begin_splits, end_split, store_results
from cuda_kernels.cuda.prims import (
    exp2,
    load_float,
    load_int32,
    load_line,
    lower_halves,
    maximum,
    mma_bfloat16,
    mma_float16,
    multiply_add,
    narrow_bfloat16,
    narrow_float16,
    quotient,
    shuffle_xor,
    transpose_matrix,
    upper_halves,
)
from cuda_kernels.dtypes import BFLOAT16

TILE, COLUMNS = 16, 8
STEP = WARPS * TILE


@cuda.jit(device=True, inline="always")
def multiply(mma: Any, a: Any, b: Any, c: Any, at: int) -> None:
    """c[at .. at + 3] += A B for fragments of two-byte elements."""
    found = mma(a[0], a[1], a[2], a[3], b[0], b[1], c[at], c[at + 1], c[at + 2], c[at + 3])
    for i in range(4):
        c[at + i] = found[i]


@cuda.jit(device=True, inline="always")
def load_queries(
    queries: Any, tiles: int, chunks: int, query: int, head_stride: int, last: int, row: int
) -> None:
    """Fragments of B: lane column `row` of tile n is head 8n + row; heads past the last repeat it.

    `query` is the address of the first head's dims of this lane's quad.
    """
    for n in range(tiles):
        head = min(int64(n * COLUMNS) + row, last)
        for j in range(chunks):
            words = load_line(query + head * head_stride + j * 64)
            for i in range(4):
                queries[(n * chunks + j) * 4 + i] = words[i]


@cuda.jit(device=True, inline="always")
def add_scores(
    mma: Any, scores: Any, queries: Any, tiles: int, chunks: int, address: int, stride: int
) -> None:
    """S^T = K q^T of a tile: each 16-byte load of a row of K is the words of two products."""
    for i in range(4 * tiles):
        scores[i] = float32(0)
    for j in range(chunks):
        near, far = load_line(address + j * 64), load_line(address + 8 * stride + j * 64)
        for half in range(2):
            a = (near[2 * half], far[2 * half], near[2 * half + 1], far[2 * half + 1])
            for n in range(tiles):
                at = (n * chunks + j) * 4 + 2 * half
                multiply(mma, a, (queries[at], queries[at + 1]), scores, n * 4)


@cuda.jit(device=True, inline="always")
def load_values(values: Any, chunks: int, dims: int, address: int, stride: int, row: int) -> None:
    """V of positions 2 * quad, + 1, + 8, + 9: 8 dims of each in each chunk of 64 dims.

    `address` is that of dims 8 * row of the first. In the last half chunk of 96 dims rows 4 to 7
    load what rows 0 to 3 do.
    """
    for c in range(chunks):
        at = address + c * 128
        if (c + 1) * 64 > dims:
            at -= (row & 4) * 16
        for e in range(4):
            words = load_line(at + ((e >> 1) * 8 + (e & 1)) * stride)
            for i in range(4):
                values[(c * 4 + e) * 4 + i] = words[i]


@cuda.jit(device=True, inline="always")
def clear_values(values: Any, chunks: int, quad: int, below: int, above: int) -> None:
    """Zeros for positions of the tile that aren't attended to: 0 times a stale NaN is NaN."""
    for e in range(4):
        place = 2 * quad + int32((e >> 1) * 8 + (e & 1))
        if place < below or place > above:
            for c in range(chunks):
                for i in range(4):
                    values[(c * 4 + e) * 4 + i] = uint32(0)


@cuda.jit(device=True, inline="always")
def weigh(scores: Any, n: int, e: int, top: Any, total: Any) -> Any:
    """Turn a lane's two scores of head 2 * quad + e into weights; the factor of what was before."""
    at = n * 2 + e
    near, far = scores[n * 4 + e], scores[n * 4 + 2 + e]
    peak = maximum(near, far)
    for bit in (4, 8, 16):
        peak = maximum(peak, shuffle_xor(peak, int32(bit)))
    peak = maximum(peak, top[at])
    factor = exp2(top[at] - peak)
    near, far = exp2(near - peak), exp2(far - peak)
    scores[n * 4 + e], scores[n * 4 + 2 + e] = near, far
    top[at] = peak
    total[at] = multiply_add(total[at], factor, near + far)
    return factor


@cuda.jit(device=True, inline="always")
def add_values(mma: Any, sums: Any, at: int, values: Any, chunks: int, b: Any) -> None:
    """O^T += V^T P^T: two dims of a word are rows `row` and `row + 8` of a product."""
    for c in range(chunks):
        for i in range(4):
            first, second = values[c * 16 + i], values[c * 16 + 4 + i]
            third, fourth = values[c * 16 + 8 + i], values[c * 16 + 12 + i]
            a = (
                lower_halves(first, second),
                upper_halves(first, second),
                lower_halves(third, fourth),
                upper_halves(third, fourth),
            )
            multiply(mma, a, b, sums, at + (c * 4 + i) * 4)


@cuda.jit(device=True, inline="always")
def find_tile(columns: int, tile: int, low: int, high: int, block_size: int) -> Any:
    """Frame of the block that a tile lies in, and the tile's offset there.

    Of a tile outside of low to high, those of the nearest one inside.
    """
    place = int64(max(low & -TILE, min(tile, high & -TILE)))
    column = quotient(place, block_size)
    return int64(load_int32(columns + column * 4)), place - column * block_size


@cuda.jit(device=True, inline="always")
def share_part(
    shared: Any, tops: Any, totals: Any, sums: Any, top: Any, total: Any,
    tiles: int, chunks: int, dims: int, warp: int, row: int, quad: int,
) -> None:  # fmt: skip
    """Lay a warp's part of a split in shared memory: sums by [warp][head][dim]."""
    heads = tiles * COLUMNS
    for n in range(tiles):
        for e in range(2):
            at = warp * heads + n * COLUMNS + 2 * quad + e
            whole = total[n * 2 + e]
            for bit in (4, 8, 16):
                whole += shuffle_xor(whole, int32(bit))
            if row == 0:
                tops[at], totals[at] = top[n * 2 + e], whole
            for c in range(chunks):
                for i in range(4):
                    d = c * 64 + row * 8 + 2 * i
                    if (c + 1) * 64 <= dims or row < 4:
                        part = ((n * chunks + c) * 4 + i) * 4 + e
                        shared[at * dims + d] = sums[part]
                        shared[at * dims + d + 1] = sums[part + 2]


def attend(kind: int, dims: int, tiles: int) -> Callable[..., Any]:
    """The kernel for a storage dtype, head and value size, and 8 * tiles query heads a block.

    Addresses and strides in bytes. 0 as an address: not given; as window or softcap: off. Each
    address and stride of q, K and V is a multiple of 16, block_size one of 16. A split has
    1 << split_bits positions (>= 64), a row less than 2**31. Rows of `prompt_tokens` tokens and
    more are left to `cuda_prefill.py`. With `partial` results go there for `merge`, by
    [token][head][splits]: sums [dims], and behind all of them (maximum, weight).
    """
    mma = mma_bfloat16 if kind == BFLOAT16 else mma_float16
    pack = narrow_bfloat16 if kind == BFLOAT16 else narrow_float16
    heads = tiles * COLUMNS
    key_chunks, chunks = dims // 32, (dims + 63) // 64
    query_room, value_room = tiles * key_chunks * 4, chunks * 16
    accumulators, tile_sums = tiles * chunks * 16, chunks * 16
    score_room, lane_heads = tiles * 4, tiles * 2
    parts_room, shared_room, result_room = WARPS * heads, WARPS * heads * dims, heads * dims

    def kernel(
        query: int, query_token: int, query_head: int,
        out: int, out_token: int, out_head: int, out_dim: int,
        lse: int, lse_token: int, lse_head: int,
        key: int, key_frame: int, key_head: int, key_token: int,
        value: int, value_frame: int, value_head: int, value_token: int,
        table: int, table_start: int, seq_lens: int, query_start: int, index_bytes: int,
        num_rows: int, block_size: int, num_heads: int, group: int, blocks_per_head: int,
        prompt_tokens: int,
        window: int, slopes: int, sinks: int,
        split_bits: int, parts: int, partial: int, splits: int,
        scale: float, softcap: float,
    ) -> None:  # fmt: skip
        token = int64(cuda.blockIdx.x)
        thread = int64(cuda.threadIdx.x)
        row, quad, warp = (thread & 31) >> 2, thread & 3, thread >> 5
        small_row, small_quad = int32(row), int32(quad)
        sequence = find_row(query_start, num_rows, token, index_bytes)
        if sequence >= num_rows:
            return
        if num_queries_of(query_start, sequence, index_bytes) >= prompt_tokens:
            return
        kv_head = quotient(int64(cuda.blockIdx.y), blocks_per_head)
        first_head = int32((int64(cuda.blockIdx.y) - kv_head * blocks_per_head) * heads)
        count = int32(min(group - first_head, int64(heads)))
        first_head = int32(first_head + kv_head * group)
        length = load_index(seq_lens, sequence, index_bytes)
        # The row's tokens are its last positions; -1: there is nothing to attend to.
        position = length - load_index(query_start, sequence + 1, index_bytes) + token
        # Positions take 32 bits: what lives through the loop is half as many registers.
        own = int32(position if length > 0 else int64(-1))
        first = int32(max(int64(0), own - window + 1) if window > 0 else int64(0))
        columns = table + load_index(table_start, sequence, index_bytes) * 4

        queries = cuda.local.array(query_room, uint32)
        values = cuda.local.array(value_room, uint32)
        sums = cuda.local.array(accumulators, float32)
        scores = cuda.local.array(score_room, float32)
        top = cuda.local.array(lane_heads, float32)
        total = cuda.local.array(lane_heads, float32)
        slope = cuda.local.array(lane_heads, float32)
        shared_sums = cuda.shared.array(shared_room, float32)
        shared_tops = cuda.shared.array(parts_room, float32)
        shared_totals = cuda.shared.array(parts_room, float32)
        factors = cuda.shared.array(parts_room, float32)
        # What was folded so far, of one head each; sums belong to the thread that adds to them.
        whole_tops = cuda.shared.array(heads, float32)
        whole_totals = cuda.shared.array(heads, float32)
        olds = cuda.shared.array(heads, float32)
        news = cuda.shared.array(heads, float32)
        whole_sums = cuda.shared.array(result_room, float32)

        q_at = query + token * query_token + first_head * query_head + quad * 16
        load_queries(queries, tiles, key_chunks, q_at, query_head, count - 1, row)
        for n in range(tiles):
            for e in range(2):
                slope[n * 2 + e] = float32(0)
                if slopes != 0:
                    head = first_head + min(n * COLUMNS + 2 * quad + e, count - 1)
                    slope[n * 2 + e] = load_float(slopes + head * 4)
        begin_splits(thread, count, dims, dims, whole_tops, whole_totals, whole_sums)
        key_at = key + kv_head * key_head + row * key_token + quad * 16
        value_at = value + kv_head * value_head + 2 * quad * value_token + row * 16

        bits = int32(split_bits)
        first_split = int32(first >> bits)
        split = int32(first_split + cuda.blockIdx.z)
        while int32(split << bits) <= own:
            for i in range(lane_heads):
                top[i], total[i] = float32(LOWEST), float32(0)
            for i in range(accumulators):
                sums[i] = float32(0)
            low = int32(max(first, int32(split << bits)))
            high = int32(min(own, int32(((split + 1) << bits) - 1)))
            base = int32(low & -STEP)
            tile = int32(base + warp * TILE)
            # All warps take as many turns; one without a tile reads another's and masks all of it.
            frame, offset = find_tile(columns, tile, low, high, block_size)
            while base <= high:
                at = key_at + frame * key_frame + offset * key_token
                add_scores(mma, scores, queries, tiles, key_chunks, at, key_token)
                at = value_at + frame * value_frame + offset * value_token
                load_values(values, chunks, dims, at, value_token, row)
                below, above = int32(low - tile), int32(high - tile)
                if below > 0 or above < TILE - 1:
                    clear_values(values, chunks, small_quad, below, above)
                distance = int32(own - tile - small_row)
                tile = int32(tile + STEP)
                frame, offset = find_tile(columns, tile, low, high, block_size)
                for n in range(tiles):
                    for e in range(2):
                        for half in range(2):
                            i = n * 4 + 2 * half + e
                            score = bend(
                                scores[i] * scale, softcap, slope[n * 2 + e], distance - 8 * half
                            )
                            place = small_row + int32(8 * half)
                            read = place >= below and place <= above
                            scores[i] = score if read else float32(LOWEST * 2)
                        factor = weigh(scores, n, e, top, total)
                        for i in range(e, tile_sums, 2):
                            sums[n * tile_sums + i] *= factor
                    b = (
                        transpose_matrix(pack(scores[n * 4], scores[n * 4 + 1])),
                        transpose_matrix(pack(scores[n * 4 + 2], scores[n * 4 + 3])),
                    )
                    add_values(mma, sums, n * tile_sums, values, chunks, b)
                base = int32(base + STEP)

            share_part(
                shared_sums, shared_tops, shared_totals, sums, top, total,
                tiles, chunks, dims, warp, row, quad,
            )  # fmt: skip
            end_split(
                count, heads, dims, dims,
                shared_tops, shared_totals, shared_sums, factors,
                whole_tops, whole_totals, whole_sums, olds, news,
                partial, first_head, num_heads, splits, split - first_split,
            )  # fmt: skip
            split = int32(split + parts)

        if partial != 0:
            return
        store_results(
            thread, count, dims, dims, kind, own < 0,
            whole_tops, whole_totals, whole_sums, sinks + first_head * 4 if sinks != 0 else 0,
            out + token * out_token + first_head * out_head, out_head, out_dim,
            lse + token * lse_token + first_head * lse_head if lse != 0 else 0, lse_head,
        )  # fmt: skip

    return kernel
