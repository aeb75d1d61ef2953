"""The CUDA kernel of `paged_attention` on ordinary cores: every dtype, head size and rule.

    blockIdx.x = query token, .y = a group of HEADS query heads of one KV head, .z = a part
    a part takes the splits of the token's positions whose number is its own modulo the parts
    warp w takes the tiles of 32 positions whose number is w modulo 4:

      scores   lane i has position 32 * tile + i: its own row of K, against q in shared memory
      weights  over the lanes: maximum and sum by shuffles, the old ones rescaled
      values   lane i has the value dims i, i + 32, ...: row after row of V, weight by shuffle

    then the four warps are merged through shared memory and splits are folded, in ascending
    order: here (one part) or by `cuda_merge.py` (several), with the same instructions

Positions are cut at fixed places, so a token's result hangs on its own row only. What lies past a
row's length, or outside a window, is not read: lanes without a position read another's. A prompt
reads K and V once for each token. This kernel is for what the tensor cores can't do, and a second
opinion on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, float32, int32, int64

from cuda_kernels.attention.cuda_fp8 import OLDEST, add_word, load_fp8, widening
from cuda_kernels.attention.cuda_parts import LOWEST, bend, find_row, load_element, load_index
from cuda_kernels.attention.cuda_splits import WARPS, begin_splits, end_split, store_results
from cuda_kernels.cuda.prims import (
    as_float,
    exp2,
    load_float,
    load_int32,
    load_line,
    maximum,
    quotient,
    shuffle_from,
    shuffle_integer_from,
    shuffle_xor,
    widen_bfloat16,
    widen_float16,
)
from cuda_kernels.dtypes import BFLOAT16, FLOAT32, FP8_E4M3

TILE = 32


@cuda.jit(device=True, inline="always")
def add_products(
    scores: Any, query: Any, heads: int, dims: int, address: int, aligned: bool, kind: int,
    lower: Any, upper: Any,
) -> None:  # fmt: skip
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
    elif aligned and kind == FP8_E4M3:
        while done + 16 <= dims:
            words = load_line(address + done)
            for j in range(4):
                add_word(scores, query, heads, dims, done + 4 * j, words[j], lower, upper)
            done += 16
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
        if kind == FP8_E4M3:
            element = load_fp8(address + done, lower)
        else:
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


def attend(
    kind: int, heads: int, width: int, capability: tuple[int, int] = OLDEST
) -> Callable[..., Any]:
    """The kernel for K and V of a dtype, query heads a block, and at most `width` dims.

    With fp8_e4m3, `query_kind` is the dtype of queries and results, what is stored is multiplied
    by a float32 a KV head, and the code differs by compute capability; else queries and results
    are of K's dtype, and the three are not used.

    Addresses and strides in bytes. 0 as an address: not given; as window or softcap: off.
    """
    panels = width // TILE
    query_room, sums_room, parts_room = heads * width, WARPS * heads * width, WARPS * heads
    accumulators = heads * panels
    fp8, (lower, upper) = kind == FP8_E4M3, widening(capability)
    size = 1 if fp8 else 4 if kind == FLOAT32 else 2

    def kernel(
        query: int, query_token: int, query_head: int, query_dim: int,
        out: int, out_token: int, out_head: int, out_dim: int,
        lse: int, lse_token: int, lse_head: int,
        key: int, key_frame: int, key_head: int, key_token: int,
        value: int, value_frame: int, value_head: int, value_token: int,
        table: int, table_start: int, seq_lens: int, query_start: int, index_bytes: int,
        num_rows: int, block_size: int, head_dim: int, value_dim: int, blocks_per_head: int,
        query_kind: int, key_scales: int, value_scales: int,
        window: int, slopes: int, sinks: int,
        split_bits: int, parts: int, partial: int, splits: int,
        scale: float, softcap: float,
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
        # The row's tokens are its last positions; -1: there is nothing to attend to.
        position = length - load_index(query_start, row + 1, index_bytes) + token
        position = position if length > 0 else int64(-1)
        first = max(int64(0), position - window + 1) if window > 0 else int64(0)
        columns = table + load_index(table_start, row, index_bytes) * 4

        own_kind = query_kind if fp8 else int64(kind)
        # Loaded here: a load in a loop may be moved out of it, past the test that it is wanted.
        value_scale = cuda.shared.array(1, float32)
        if fp8 and thread == 0:
            value_scale[0] = float32(1)
            if value_scales != 0:
                value_scale[0] = load_float(value_scales + kv_head * 4)
        by = scale
        if fp8 and key_scales != 0:
            by = scale * load_float(key_scales + kv_head * 4)
        queries = cuda.shared.array(query_room, float32)
        i = thread
        while i < heads * head_dim:
            h = quotient(i, head_dim)
            d = i - h * head_dim
            at = query + token * query_token + (first_head + h) * query_head + d * query_dim
            queries[i] = load_element(at, own_kind) * by
            i += WARPS * TILE
        cuda.syncthreads()

        scores = cuda.local.array(heads, float32)
        weights = cuda.local.array(heads, float32)
        top = cuda.local.array(heads, float32)
        total = cuda.local.array(heads, float32)
        slope = cuda.local.array(heads, float32)
        sums = cuda.local.array(accumulators, float32)
        for h in range(heads):
            slope[h] = float32(0)
            if slopes != 0:
                slope[h] = load_float(slopes + (first_head + h) * 4)
        shared_tops = cuda.shared.array(parts_room, float32)
        shared_totals = cuda.shared.array(parts_room, float32)
        shared_sums = cuda.shared.array(sums_room, float32)
        factors = cuda.shared.array(parts_room, float32)
        whole_tops = cuda.shared.array(heads, float32)
        whole_totals = cuda.shared.array(heads, float32)
        olds = cuda.shared.array(heads, float32)
        news = cuda.shared.array(heads, float32)
        whole_sums = cuda.shared.array(query_room, float32)
        begin_splits(thread, heads, value_dim, width, whole_tops, whole_totals, whole_sums)
        key_plane, value_plane = key + kv_head * key_head, value + kv_head * value_head
        aligned = (key_plane | key_frame | key_token) & 15 == 0
        num_heads = int64(cuda.gridDim.y) * heads
        first_split = first >> split_bits
        split = first_split + int64(cuda.blockIdx.z)
        while split << split_bits <= position:
            low = max(first, split << split_bits)
            high = min(position, ((split + 1) << split_bits) - 1)
            for h in range(heads):
                top[h], total[h] = float32(LOWEST), float32(0)
                for p in range(panels):
                    sums[h * panels + p] = float32(0)
            tile = (low >> 5) + ((warp - (low >> 5)) & (WARPS - 1))
            while tile * TILE <= high:
                here = tile * TILE + lane
                read = here >= low and here <= high
                place = here if read else high
                column = quotient(place, block_size)
                offset = int32(place - column * block_size)
                frame = load_int32(columns + column * 4)
                at = key_plane + int64(frame) * key_frame + int64(offset) * key_token
                add_products(scores, queries, heads, head_dim, at, aligned, kind, lower, upper)
                for h in range(heads):
                    score = bend(scores[h], softcap, slope[h], position - place)
                    score = score if read else float32(LOWEST * 2)
                    weight, peak, part, factor = weigh(score, top[h], total[h])
                    weights[h], top[h], total[h] = weight, peak, part
                    for p in range(panels):
                        sums[h * panels + p] *= factor
                start = max(low - tile * TILE, int64(0))
                stop = min(high - tile * TILE, int64(TILE - 1))
                for i in range(start, stop + 1):
                    its_frame = int64(shuffle_integer_from(frame, int32(i)))
                    its_offset = int64(shuffle_integer_from(offset, int32(i)))
                    at = value_plane + its_frame * value_frame + its_offset * value_token
                    for h in range(heads):
                        scores[h] = shuffle_from(weights[h], int32(i))
                    for p in range(panels):
                        d = p * TILE + lane
                        if d < value_dim:
                            if fp8:
                                element = load_fp8(at + d, lower)
                            else:
                                element = load_element(at + d * size, kind)
                            for h in range(heads):
                                sums[h * panels + p] += scores[h] * element
                tile += WARPS
            by = value_scale[0] if fp8 else float32(1)
            for h in range(heads):
                whole = total[h]
                for bit in (16, 8, 4, 2, 1):
                    whole += shuffle_xor(whole, int32(bit))
                if lane == 0:
                    shared_tops[warp * heads + h] = top[h]
                    shared_totals[warp * heads + h] = whole
                for p in range(panels):
                    at = (warp * heads + h) * width + p * TILE + lane
                    shared_sums[at] = sums[h * panels + p] * by
            end_split(
                heads, heads, value_dim, width,
                shared_tops, shared_totals, shared_sums, factors,
                whole_tops, whole_totals, whole_sums, olds, news,
                partial, first_head, num_heads, splits, split - first_split,
            )  # fmt: skip
            split += parts

        if partial != 0:
            return
        store_results(
            thread, heads, value_dim, width, own_kind, position < 0,
            whole_tops, whole_totals, whole_sums, sinks + first_head * 4 if sinks != 0 else 0,
            out + token * out_token + first_head * out_head, out_head, out_dim,
            lse + token * lse_token + first_head * lse_head if lse != 0 else 0, lse_head,
        )  # fmt: skip

    return kernel
