"""The CUDA kernel of `paged_attention` on ordinary cores: every dtype, head size and rule.

    blockIdx.x = query token, blockIdx.y = a group of HEADS query heads of one KV head
    warp w takes the tiles of 32 positions whose number is w modulo 4:

      scores   lane i has position 32 * tile + i: its own row of K, against q in shared memory
      weights  over the lanes: maximum and sum by shuffles, the old ones rescaled
      values   lane i has the value dims i, i + 32, ...: row after row of V, weight by shuffle

    then the four warps are merged through shared memory, in ascending order

Positions are cut at fixed places, so a token's result hangs on its own row only. What lies past a
row's length, or outside a window, is not read: lanes without a position read the token's own. One
token is one block here, however long its row is: a decode of few long rows keeps few processors
busy, and a prompt reads K and V once for each token. This kernel is for what the tensor cores can't
do, and a second opinion on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, float32, int32, int64

from cuda_kernels.attention.cuda_parts import (
    LN_2,
    LOG2_E,
    LOWEST,
    bend,
    find_row,
    load_element,
    load_index,
    store_element,
)
from cuda_kernels.cuda.prims import (
    as_float,
    exp2,
    load_float,
    load_int32,
    load_line,
    log2,
    maximum,
    quotient,
    shuffle_from,
    shuffle_integer_from,
    shuffle_xor,
    store_float,
    widen_bfloat16,
    widen_float16,
)
from cuda_kernels.dtypes import BFLOAT16, FLOAT32

WARPS, TILE = 4, 32


@cuda.jit(device=True, inline="always")
def add_products(
    scores: Any, query: Any, heads: int, dims: int, address: int, aligned: bool, kind: int
) -> None:
    """Dot products of one row of K with the heads' queries, [heads][dims] in shared memory."""
    for h in range(heads):
        scores[h] = float32(0)
    done = int64(0)
    if aligned and kind == FLOAT32:
        while done + 4 <= dims:
            words = load_line(address + done * 4)
            for j in range(4):
                for h in range(heads):
                    scores[h] += as_float(words[j]) * query[h * dims + done + j]
            done += 4
    elif aligned:
        while done + 8 <= dims:
            words = load_line(address + done * 2)
            for j in range(4):
                if kind == BFLOAT16:
                    low, high = widen_bfloat16(words[j])
                else:
                    low, high = widen_float16(words[j])
                for h in range(heads):
                    scores[h] += low * query[h * dims + done + 2 * j]
                    scores[h] += high * query[h * dims + done + 2 * j + 1]
            done += 8
    while done < dims:
        element = load_element(address + done * (4 if kind == FLOAT32 else 2), kind)
        for h in range(heads):
            scores[h] += element * query[h * dims + done]
        done += 1


@cuda.jit(device=True, inline="always")
def weigh(score: Any, top: Any, total: Any) -> Any:
    """A tile's weight of one head: (weight, new maximum, this lane's new sum, factor of old)."""
    peak = score
    for bit in (16, 8, 4, 2, 1):
        peak = maximum(peak, shuffle_xor(peak, int32(bit)))
    peak = maximum(peak, top)
    factor = exp2(top - peak)
    weight = exp2(score - peak)
    return weight, peak, total * factor + weight, factor


@cuda.jit(device=True, inline="always")
def finish(
    tops: Any, totals: Any, sums: Any, heads: int, h: int, d: int, width: int, sink: Any, sunk: bool
) -> Any:
    """Merge the warps' parts of one head and value dim: (result, log-sum-exp)."""
    top = float32(LOWEST)
    for w in range(WARPS):
        top = maximum(top, tops[w * heads + h])
    if sunk:
        top = maximum(top, sink)
    total, found = float32(0), float32(0)
    for w in range(WARPS):
        factor = exp2(tops[w * heads + h] - top)
        total += factor * totals[w * heads + h]
        found += factor * sums[(w * heads + h) * width + d]
    if sunk:
        total += exp2(sink - top)
    return found / total, (top + log2(total)) * float32(LN_2)


def attend(kind: int, heads: int, width: int) -> Callable[..., Any]:
    """The kernel for a storage dtype, query heads a block, and at most `width` dims.

    Addresses and strides in bytes. 0 as an address: not given; as window or softcap: off.
    """
    panels = width // TILE
    query_room, sums_room, parts_room = heads * width, WARPS * heads * width, WARPS * heads
    accumulators = heads * panels
    size = 4 if kind == FLOAT32 else 2

    def kernel(
        query: int, query_token: int, query_head: int, query_dim: int,
        out: int, out_token: int, out_head: int, out_dim: int,
        lse: int, lse_token: int, lse_head: int,
        key: int, key_frame: int, key_head: int, key_token: int,
        value: int, value_frame: int, value_head: int, value_token: int,
        table: int, table_start: int, seq_lens: int, query_start: int, index_bytes: int,
        num_rows: int, block_size: int, head_dim: int, value_dim: int, blocks_per_head: int,
        window: int, slopes: int, sinks: int, scale: float, softcap: float,
    ) -> None:  # fmt: skip
        token = int64(cuda.blockIdx.x)
        thread = int64(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        row = find_row(query_start, num_rows, token, index_bytes)
        if row >= num_rows:
            return
        first_head = int64(cuda.blockIdx.y) * heads
        kv_head = quotient(int64(cuda.blockIdx.y), blocks_per_head)
        length = load_index(seq_lens, row, index_bytes)
        # The row's tokens are its last positions.
        position = length - load_index(query_start, row + 1, index_bytes) + token
        first = max(int64(0), position - window + 1) if window > 0 else int64(0)
        columns = table + load_index(table_start, row, index_bytes) * 4

        queries = cuda.shared.array(query_room, float32)
        i = thread
        while i < heads * head_dim:
            h = quotient(i, head_dim)
            d = i - h * head_dim
            at = query + token * query_token + (first_head + h) * query_head + d * query_dim
            queries[i] = load_element(at, kind) * scale
            i += WARPS * TILE
        cuda.syncthreads()

        scores = cuda.local.array(heads, float32)
        weights = cuda.local.array(heads, float32)
        top = cuda.local.array(heads, float32)
        total = cuda.local.array(heads, float32)
        slope = cuda.local.array(heads, float32)
        sums = cuda.local.array(accumulators, float32)
        for h in range(heads):
            top[h], total[h], slope[h] = float32(LOWEST), float32(0), float32(0)
            if slopes != 0:
                slope[h] = load_float(slopes + (first_head + h) * 4)
            for p in range(panels):
                sums[h * panels + p] = float32(0)
        key_plane, value_plane = key + kv_head * key_head, value + kv_head * value_head
        aligned = (key_plane | key_frame | key_token) & 15 == 0
        tile = first // TILE + ((warp - first // TILE) & (WARPS - 1))
        while tile * TILE <= position and length > 0:
            here = tile * TILE + lane
            read = here >= first and here <= position
            place = here if read else position
            column = quotient(place, block_size)
            offset = int32(place - column * block_size)
            frame = load_int32(columns + column * 4)
            at = key_plane + int64(frame) * key_frame + int64(offset) * key_token
            add_products(scores, queries, heads, head_dim, at, aligned, kind)
            for h in range(heads):
                score = bend(scores[h], softcap, slope[h], position - place)
                score = score if read else float32(LOWEST * 2)
                weight, peak, part, factor = weigh(score, top[h], total[h])
                weights[h], top[h], total[h] = weight, peak, part
                for p in range(panels):
                    sums[h * panels + p] *= factor
            start = max(first - tile * TILE, int64(0))
            stop = min(position - tile * TILE, int64(TILE - 1))
            for i in range(start, stop + 1):
                its_frame = int64(shuffle_integer_from(frame, int32(i)))
                its_offset = int64(shuffle_integer_from(offset, int32(i)))
                at = value_plane + its_frame * value_frame + its_offset * value_token
                for h in range(heads):
                    scores[h] = shuffle_from(weights[h], int32(i))
                for p in range(panels):
                    d = p * TILE + lane
                    if d < value_dim:
                        element = load_element(at + d * size, kind)
                        for h in range(heads):
                            sums[h * panels + p] += scores[h] * element
            tile += WARPS

        shared_tops = cuda.shared.array(parts_room, float32)
        shared_totals = cuda.shared.array(parts_room, float32)
        shared_sums = cuda.shared.array(sums_room, float32)
        for h in range(heads):
            whole = total[h]
            for bit in (16, 8, 4, 2, 1):
                whole += shuffle_xor(whole, int32(bit))
            if lane == 0:
                shared_tops[warp * heads + h] = top[h]
                shared_totals[warp * heads + h] = whole
            for p in range(panels):
                shared_sums[(warp * heads + h) * width + p * TILE + lane] = sums[h * panels + p]
        cuda.syncthreads()
        i = thread
        while i < heads * value_dim:
            h = quotient(i, value_dim)
            d = i - h * value_dim
            sink = float32(0)
            if sinks != 0:
                sink = load_float(sinks + (first_head + h) * 4) * float32(LOG2_E)
            found, logarithm = float32(0), float32(-float("inf"))
            if length > 0:
                found, logarithm = finish(
                    shared_tops, shared_totals, shared_sums, heads, h, d, width, sink, sinks != 0
                )
            at = out + token * out_token + (first_head + h) * out_head + d * out_dim
            store_element(at, found, kind)
            if d == 0 and lse != 0:
                store_float(lse + token * lse_token + (first_head + h) * lse_head, logarithm)
            i += WARPS * TILE

    return kernel
