"""The CUDA kernels of `paged_attention` on tensor cores: bfloat16 and float16, decode first.

K and V may also be stored as fp8_e4m3: then fragments are made by `cuda_fp8.py`, all else is here.

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

from cuda_kernels.attention import cuda_fp8
from cuda_kernels.attention.cuda_parts import (
    LOWEST,
    bend,
    find_row,
    load_index,
    multiply,
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
from cuda_kernels.dtypes import BFLOAT16, FP8_E4M3

TILE, COLUMNS = 16, 8
STEP = WARPS * TILE


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
                values[(e * chunks + c) * 4 + i] = words[i]


@cuda.jit(device=True, inline="always")
def clear_values(values: Any, words: int, quad: int, below: int, above: int) -> None:
    """Zeros for positions of the tile that aren't attended to: 0 times a stale NaN is NaN."""
    for e in range(4):
        place = 2 * quad + int32((e >> 1) * 8 + (e & 1))
        if place < below or place > above:
            for i in range(words):
                values[e * words + i] = uint32(0)


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
    words = chunks * 4
    for i in range(words):
        first, second = values[i], values[words + i]
        third, fourth = values[2 * words + i], values[3 * words + i]
        a = (
            lower_halves(first, second),
            upper_halves(first, second),
            lower_halves(third, fourth),
            upper_halves(third, fourth),
        )
        multiply(mma, a, b, sums, at + i * 4)


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
    shared: Any, tops: Any, totals: Any, sums: Any, top: Any, total: Any, by: Any,
    tiles: int, lane_dims: int, chunks: int, dims: int, warp: int, row: int, quad: int,
) -> None:  # fmt: skip
    """Lay a warp's part of a split in shared memory: sums by [warp][head][dim], multiplied by `by`.

    A lane has `lane_dims` dims next to each other of each chunk, two a fragment of sums.
    """
    heads = tiles * COLUMNS
    # All shuffles before the first branch: behind it sm_80 would get calls for lanes that are late.
    for i in range(2 * tiles):
        for bit in (4, 8, 16):
            total[i] += shuffle_xor(total[i], int32(bit))
    for n in range(tiles):
        for e in range(2):
            at = warp * heads + n * COLUMNS + 2 * quad + e
            if row == 0:
                tops[at], totals[at] = top[n * 2 + e], total[n * 2 + e]
            for c in range(chunks):
                lane_first = (c * 8 + row) * lane_dims
                for i in range(lane_dims // 2):
                    d = lane_first + 2 * i
                    if (c + 1) * 8 * lane_dims <= dims or lane_first < dims:
                        part = ((n * chunks + c) * (lane_dims // 2) + i) * 4 + e
                        shared[at * dims + d] = sums[part] * by
                        shared[at * dims + d + 1] = sums[part + 2] * by


def attend(
    kind: int, dims: int, tiles: int, capability: tuple[int, int] = cuda_fp8.OLDEST
) -> Callable[..., Any]:
    """The kernel for K and V of a dtype, head and value size, and 8 * tiles query heads a block.

    With fp8_e4m3, `query_kind` is the dtype of queries and results, what is stored is multiplied
    by a float32 a KV head, and the code differs by compute capability; else queries and results
    are of K's dtype, and the three are not used.

    Addresses and strides in bytes. 0 as an address: not given; as window or softcap: off. Each
    address and stride of q, K and V is a multiple of 16, block_size one of 16. A split has
    1 << split_bits positions (>= 64), a row less than 2**31. Rows of `prompt_tokens` tokens and
    more are left to `cuda_prefill.py`. With `partial` results go there for `merge`, by
    [token][head][splits]: sums [dims], and behind all of them (maximum, weight).
    """
    mma = mma_bfloat16 if kind == BFLOAT16 else mma_float16
    pack = narrow_bfloat16 if kind == BFLOAT16 else narrow_float16
    fp8, (lower, upper) = kind == FP8_E4M3, cuda_fp8.widening(capability)
    load_fp8_queries, add_fp8_scores = cuda_fp8.load_queries, cuda_fp8.add_scores
    load_fp8_values, add_fp8_values = cuda_fp8.load_values, cuda_fp8.add_values
    heads = tiles * COLUMNS
    # A lane's dims of V of a chunk, which 8 rows of lanes make up; bytes of a row of K a quad.
    lane_dims = 16 if fp8 and dims > 64 else 8
    chunks = -(-dims // (8 * lane_dims))
    lane_bytes, last_row = lane_dims * (1 if fp8 else 2), dims // lane_dims - 1
    key_chunks, key_words = (-(-dims // 64), 8) if fp8 else (dims // 32, 4)
    query_room, value_words = tiles * key_chunks * key_words, chunks * lane_bytes // 4
    value_room, quad_bytes = 4 * value_words, 32 if fp8 else 16
    accumulators, tile_sums = tiles * chunks * lane_dims * 2, chunks * lane_dims * 2
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
        prompt_tokens: int, query_kind: int, key_scales: int, value_scales: int,
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
        lane_scales = cuda.local.array(lane_heads, float32)
        weights = cuda.local.array(lane_heads, uint32)
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

        q_at = query + token * query_token + first_head * query_head + quad * quad_bytes
        # In shared memory: it holds no register through the loop, and it is loaded here. A load in
        # a loop may be moved out of it, past the test that it is wanted.
        value_scale = cuda.shared.array(1, float32)
        shared_scales = cuda.shared.array(heads, float32)
        if fp8:
            by = scale
            if key_scales != 0:
                by = scale * load_float(key_scales + kv_head * 4)
            load_fp8_queries(
                queries, shared_scales, tiles, key_chunks, dims, query_kind, by,
                q_at, query_head, count - 1, thread, row, quad,
            )  # fmt: skip
            if thread == 0:
                value_scale[0] = float32(1)
                if value_scales != 0:
                    value_scale[0] = load_float(value_scales + kv_head * 4)
            cuda.syncthreads()
            for n in range(tiles):
                for e in range(2):
                    lane_scales[n * 2 + e] = shared_scales[n * COLUMNS + 2 * quad + e]
        else:
            load_queries(queries, tiles, key_chunks, q_at, query_head, count - 1, row)
        for n in range(tiles):
            for e in range(2):
                slope[n * 2 + e] = float32(0)
                if slopes != 0:
                    head = first_head + min(n * COLUMNS + 2 * quad + e, count - 1)
                    slope[n * 2 + e] = load_float(slopes + head * 4)
        begin_splits(thread, count, dims, dims, whole_tops, whole_totals, whole_sums)
        key_at = key + kv_head * key_head + row * key_token + quad * 16
        value_at = value + kv_head * value_head + 2 * quad * value_token
        value_at += (min(row, int64(last_row)) if fp8 else row) * lane_bytes

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
                if fp8:
                    add_fp8_scores(
                        lower, upper, scores, queries,
                        tiles, key_chunks, dims, at, key_token, quad,
                    )  # fmt: skip
                else:
                    add_scores(mma, scores, queries, tiles, key_chunks, at, key_token)
                at = value_at + frame * value_frame + offset * value_token
                if fp8:
                    load_fp8_values(values, value_words, at, value_token)
                else:
                    load_values(values, chunks, dims, at, value_token, row)
                below, above = int32(low - tile), int32(high - tile)
                if below > 0 or above < TILE - 1:
                    clear_values(values, value_words, small_quad, below, above)
                distance = int32(own - tile - small_row)
                tile = int32(tile + STEP)
                frame, offset = find_tile(columns, tile, low, high, block_size)
                for n in range(tiles):
                    for e in range(2):
                        for half in range(2):
                            i = n * 4 + 2 * half + e
                            by = lane_scales[n * 2 + e] if fp8 else scale
                            score = bend(
                                scores[i] * by, softcap, slope[n * 2 + e], distance - 8 * half
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
                    if fp8:
                        weights[2 * n], weights[2 * n + 1] = b
                    else:
                        add_values(mma, sums, n * tile_sums, values, chunks, b)
                if fp8:
                    add_fp8_values(
                        lower, upper, sums, tile_sums, tiles, values, value_words, weights
                    )
                base = int32(base + STEP)

            share_part(
                shared_sums, shared_tops, shared_totals, sums, top, total,
                value_scale[0] if fp8 else float32(1),
                tiles, lane_dims, chunks, dims, warp, row, quad,
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
            thread, count, dims, dims, query_kind if fp8 else int64(kind), own < 0,
            whole_tops, whole_totals, whole_sums, sinks + first_head * 4 if sinks != 0 else 0,
            out + token * out_token + first_head * out_head, out_head, out_dim,
            lse + token * lse_token + first_head * lse_head if lse != 0 else 0, lse_head,
        )  # fmt: skip

    return kernel
