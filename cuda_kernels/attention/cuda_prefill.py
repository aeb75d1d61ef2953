"""The CUDA kernel of `paged_attention` for prompts, on tensor cores: K and V through shared memory.

    blockIdx.x = a tile of query tokens of one row, .y = query heads of one KV head
    a block takes 64 query rows: each of its tokens with each of its heads; a warp has 16 of them
    it walks the positions 32 at a time, in ascending order, at fixed places

      K of a tile   global --cp.async, 16 bytes-->  shared [32][dims], 16 bytes of a row a lane
      q [16][dims]  in registers, once a block  --------->  mma   S [16 rows][32 positions], float32
                                                             v
                     scale, softcap, ALiBi, mask, maximum by shuffles, weights P, as fragments
                                                             v
      V of a tile   global --cp.async-->  shared, read by ldmatrix --> mma   O [16][dims] += P V

    V is on its way while S is computed, the next K while O is; two barriers a tile

A row of K or V is read once for 64 query rows. A tile that no row attends to is skipped; for a row
that attends to nothing of a tile, the tile changes nothing, bit for bit. So a token's result hangs
neither on the other tokens of its tile nor on where the prompt was cut.

In tiles that some row attends to in part (those around the diagonal and around a window's begin),
numbers of V that aren't finite are taken out, since 0 times NaN is NaN, and added by hand to the
sums of the rows that do attend to them. Positions that no token of the block attends to are never
read: zeros stand in their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from cuda_kernels.attention.cuda_parts import (
    LOG2_E,
    LOWEST,
    bend,
    divide,
    load_index,
    multiply,
    store_element,
)
from cuda_kernels.attention.cuda_shared_tiles import (
    TILE,
    add_odd_values,
    clean_values,
    copy_row,
    find_place,
    first_of,
    traded,
)
from cuda_kernels.cuda.prims import (
    any_lane,
    await_copies,
    exp2,
    load_float,
    load_line,
    load_shared_line,
    load_transposed,
    maximum,
    mma_bfloat16,
    mma_float16,
    multiply_add,
    narrow_bfloat16,
    narrow_float16,
    number_here,
    quotient,
    shared_address,
    shuffle_xor,
    store_float,
    store_word,
    widen_bfloat16,
    widen_float16,
)
from cuda_kernels.dtypes import BFLOAT16

ROWS, WARPS = 64, 4


@cuda.jit(device=True, inline="always")
def find_slot(query_start: int, num_rows: int, slot: int, tokens: int, size: int) -> Any:
    """The row whose tile a block takes: the last one with query_start // tokens + row <= slot.

    So each row has a number of slots that needs no sum over the rows before it: its tiles, and at
    most one more.
    """
    low, high = int64(0), int64(num_rows)
    while low < high:
        middle = (low + high) >> 1
        if quotient(load_index(query_start, middle, size), tokens) + middle <= slot:
            low = middle + 1
        else:
            high = middle
    return low - 1


@cuda.jit(device=True, inline="always")
def add_scores(
    mma: Any, scores: Any, n: int, queries: Any, chunks: int, address: int, flip: int
) -> None:
    """S of 8 positions: each 16 bytes of a row of K are the words of two products, as are q's."""
    for j in range(chunks):
        words = load_shared_line(int32(traded(address, flip, j) + j * 64))
        for step in range(2):
            near, far = j * 4 + 2 * step, (chunks + j) * 4 + 2 * step
            a = (queries[near], queries[far], queries[near + 1], queries[far + 1])
            multiply(mma, a, (words[2 * step], words[2 * step + 1]), scores, n * 4)


@cuda.jit(device=True, inline="always")
def weigh(scores: Any, half: int, tiles: int, top: Any, total: Any) -> Any:
    """Turn a row's scores of a tile into weights; the factor of what was before."""
    peak = top[half]
    for n in range(tiles):
        for e in range(2):
            peak = maximum(peak, scores[n * 4 + half * 2 + e])
    for bit in (1, 2):
        peak = maximum(peak, shuffle_xor(peak, int32(bit)))
    factor = exp2(top[half] - peak)
    whole = float32(0)
    for n in range(tiles):
        for e in range(2):
            i = n * 4 + half * 2 + e
            scores[i] = exp2(scores[i] - peak)
            whole += scores[i]
    top[half] = peak
    total[half] = multiply_add(total[half], factor, whole)
    return factor


def attend_prompts(kind: int, dims: int) -> Callable[..., Any]:
    """The kernel for a storage dtype and a head and value size, 64, 96 or 128.

    Addresses and strides in bytes. 0 as an address: not given; as window or softcap: off. Each
    address and stride of q, K and V is a multiple of 16, block_size one of 16, a row has less than
    2**31 positions. A block has `tokens` query tokens of a row and `heads` query heads of a KV
    head, tokens * heads <= 64; rows with less than `prompt_tokens` tokens are left alone.
    """
    mma = mma_bfloat16 if kind == BFLOAT16 else mma_float16
    pack = narrow_bfloat16 if kind == BFLOAT16 else narrow_float16
    widen = widen_bfloat16 if kind == BFLOAT16 else widen_float16
    infinite = 0x7F80 if kind == BFLOAT16 else 0x7C00
    chunks, dim_tiles, tiles = dims // 32, dims // 8, TILE // 8
    key_bytes, value_bytes, trade = 2 * dims, 2 * dims + 16, 64 if dims % 64 == 0 else 0
    query_room, sum_room, score_room = chunks * 8, dim_tiles * 4, tiles * 4
    key_room, value_room = TILE * key_bytes // 4, TILE * value_bytes // 4

    def kernel(
        query: int, query_token: int, query_head: int,
        out: int, out_token: int, out_head: int, out_dim: int,
        lse: int, lse_token: int, lse_head: int,
        key: int, key_frame: int, key_head: int, key_token: int,
        value: int, value_frame: int, value_head: int, value_token: int,
        table: int, table_start: int, seq_lens: int, query_start: int, index_bytes: int,
        num_rows: int, block_size: int, group: int, blocks_per_head: int,
        heads: int, tokens: int, prompt_tokens: int,
        window: int, slopes: int, sinks: int,
        scale: float, softcap: float,
    ) -> None:  # fmt: skip
        # The last tiles of a prompt are the longest: they begin first.
        slot = int64(cuda.gridDim.x) - 1 - int64(cuda.blockIdx.x)
        thread = int32(cuda.threadIdx.x)
        row, quad, warp = int32((thread & 31) >> 2), int32(thread & 3), int32(thread >> 5)
        sequence = find_slot(query_start, num_rows, slot, tokens, index_bytes)
        first_query = load_index(query_start, sequence, index_bytes)
        num_queries = load_index(query_start, sequence + 1, index_bytes) - first_query
        slot = (slot - sequence - quotient(first_query, tokens)) * tokens
        count = int32(min(num_queries - slot, int64(tokens)))
        if count <= 0 or num_queries < prompt_tokens:
            return
        length = load_index(seq_lens, sequence, index_bytes)
        # Of the block's first token; the row's tokens are its last positions.
        position = int32(length - num_queries + slot if length > 0 else int64(-ROWS))
        first_token = first_query + slot
        kv_head = quotient(int64(cuda.blockIdx.y), blocks_per_head)
        first_head = int32((int64(cuda.blockIdx.y) - kv_head * blocks_per_head) * heads)
        num_heads = int32(min(group - first_head, int64(heads)))
        first_head = int32(first_head + kv_head * group)
        columns = table + load_index(table_start, sequence, index_bytes) * 4
        last = int32(position + count - 1)
        low = first_of(position, window)

        keys = cuda.shared.array(key_room, uint32, alignment=16)
        shared_values = cuda.shared.array(value_room, uint32, alignment=16)
        flags = cuda.shared.array(WARPS, uint32)
        kept = cuda.shared.array(4, int32)
        queries = cuda.local.array(query_room, uint32)
        sums = cuda.local.array(sum_room, float32)
        scores = cuda.local.array(score_room, float32)
        top = cuda.local.array(2, float32)
        total = cuda.local.array(2, float32)
        factors = cuda.local.array(2, float32)
        slope = cuda.local.array(2, float32)
        owns = cuda.local.array(2, int32)

        if thread == 0:  # what only the end needs holds no registers until then
            kept[0], kept[1] = int32(first_token), count
            kept[2], kept[3] = first_head, num_heads
        # This lane's two query rows; those past the last repeat it and are not stored.
        for half in range(2):
            place = int64(warp * 16 + half * 8 + row)
            its_token = quotient(place, heads)
            its_head = min(place - its_token * heads, int64(num_heads - 1))
            its_token = min(its_token, int64(count - 1))
            at = query + (first_token + its_token) * query_token
            at += (first_head + its_head) * query_head + quad * 16
            for j in range(chunks):
                words = load_line(at + j * 64)
                for i in range(4):
                    queries[(half * chunks + j) * 4 + i] = words[i]
            owns[half] = int32(position + int32(its_token))
            slope[half] = float32(0)
            if slopes != 0:
                slope[half] = load_float(slopes + (first_head + its_head) * 4)
            top[half], total[half] = float32(LOWEST), float32(0)
        for i in range(sum_room):
            sums[i] = float32(0)

        # What this thread copies: a quarter of the row `copied` of a tile.
        copied = int32(warp * 8 + ((thread >> 3) & 3) + (thread & 4))
        flip = int32(((copied ^ (copied >> 2)) & 1) * trade)
        key_target = int32(shared_address(keys) + copied * key_bytes + quad * 16)
        value_target = int32(shared_address(shared_values) + copied * value_bytes + quad * 16)
        key_at, value_at = key + kv_head * key_head, value + kv_head * value_head
        # What this lane reads of K: row `row` of each 8; of V: a row of each of 4 matrices.
        read_flip = int32(((row ^ (row >> 2)) & 1) * trade)
        key_read = int32(shared_address(keys) + row * key_bytes + quad * 16)
        value_read = int32(
            shared_address(shared_values) + (thread & 15) * value_bytes + ((thread >> 4) & 1) * 16
        )

        tile = int32(low & -TILE)
        source = (int32(0), int32(0), int32(0))
        if tile <= last:
            source = find_place(columns, int32(tile + copied), low, last, block_size)
            copy_row(key_target, flip, key_at, quad, source, key_frame, key_token, chunks)
        while tile <= last:
            await_copies()
            cuda.syncthreads()
            copy_row(value_target, 0, value_at, quad, source, value_frame, value_token, chunks)
            next_tile = int32(tile + TILE)
            source = find_place(columns, int32(next_tile + copied), low, last, block_size)
            for i in range(score_room):
                scores[i] = float32(0)
            read_here = number_here(key_read)
            for n in range(tiles):
                row_here = int32(read_here + n * 8 * key_bytes)
                add_scores(mma, scores, n, queries, chunks, row_here, read_flip)

            # Of this lane's first score: what is derived from it isn't kept in registers.
            first_place = int32(tile + number_here(int32(2 * quad)))
            if slopes != 0 or softcap > float32(0):
                for half in range(2):
                    for n in range(tiles):
                        for e in range(2):
                            i = n * 4 + half * 2 + e
                            distance = int32(owns[half] - first_place - n * 8 - e)
                            scores[i] = bend(scores[i] * scale, softcap, slope[half], distance)
            else:
                for i in range(score_room):
                    scores[i] = scores[i] * (scale * float32(LOG2_E))
            partly = tile < first_of(last, window) or next_tile > position + 1
            if partly:
                for half in range(2):
                    least = first_of(owns[half], window)
                    for n in range(tiles):
                        for e in range(2):
                            here = int32(first_place + n * 8 + e)
                            if here < least or here > owns[half]:
                                scores[n * 4 + half * 2 + e] = float32(LOWEST * 2)
            factors[0] = weigh(scores, 0, tiles, top, total)
            factors[1] = weigh(scores, 1, tiles, top, total)
            # Mostly no maximum has risen, and all factors are 1.
            if any_lane(uint32(factors[0] != float32(1) or factors[1] != float32(1))) != uint32(0):
                for half in range(2):
                    for n in range(dim_tiles):
                        for e in range(2):
                            sums[n * 4 + half * 2 + e] *= factors[half]

            await_copies()
            if partly:
                odd = any_lane(clean_values(value_target, chunks, infinite))
                if thread & 31 == 0:
                    flags[warp] = odd
            cuda.syncthreads()
            if next_tile <= last:
                copy_row(key_target, flip, key_at, quad, source, key_frame, key_token, chunks)
            read_here = number_here(value_read)
            for c in range(TILE // 16):
                a = (
                    pack(scores[c * 8], scores[c * 8 + 1]),
                    pack(scores[c * 8 + 2], scores[c * 8 + 3]),
                    pack(scores[c * 8 + 4], scores[c * 8 + 5]),
                    pack(scores[c * 8 + 6], scores[c * 8 + 7]),
                )
                for n in range(dim_tiles // 2):
                    words = load_transposed(int32(read_here + c * 16 * value_bytes + n * 32))
                    for side in range(2):
                        b = (words[2 * side], words[2 * side + 1])
                        multiply(mma, a, b, sums, (2 * n + side) * 4)
            if partly:
                if flags[0] | flags[1] | flags[2] | flags[3] != uint32(0):
                    add_odd_values(
                        widen, sums, dim_tiles, owns, window, tile, low, last, columns, block_size,
                        value_at, quad, value_frame, value_token, infinite,
                    )  # fmt: skip
            tile = next_tile

        cuda.syncthreads()
        first_token, count = int64(kept[0]), kept[1]
        first_head, num_heads = kept[2], kept[3]
        aligned = out_dim == 2 and (out | out_token | out_head) & 3 == 0
        for half in range(2):
            for bit in (1, 2):
                total[half] += shuffle_xor(total[half], int32(bit))
            place = int64(number_here(int32(warp * 16 + half * 8 + row)))
            its_token = quotient(place, heads)
            its_head = place - its_token * heads
            if its_token < count and its_head < num_heads:
                inverse, logarithm = float32(0), float32(-float("inf"))
                its_head += first_head
                if owns[half] >= 0:
                    sink = float32(0)
                    if sinks != 0:
                        sink = load_float(sinks + its_head * 4) * float32(LOG2_E)
                    inverse, logarithm = divide(
                        float32(1), top[half], total[half], sink, sinks != 0
                    )
                its_token += first_token
                if lse != 0 and quad == 0:
                    store_float(lse + its_token * lse_token + its_head * lse_head, logarithm)
                at = out + its_token * out_token + its_head * out_head
                for n in range(dim_tiles):
                    near = sums[n * 4 + half * 2] * inverse
                    far = sums[n * 4 + half * 2 + 1] * inverse
                    place = int64(n * 8 + 2 * quad)
                    if aligned:
                        store_word(at + place * 2, pack(near, far))
                    else:
                        store_element(at + place * out_dim, near, kind)
                        store_element(at + (place + 1) * out_dim, far, kind)

    return kernel
