"""The CUDA kernel of `write_kv` for K and V stored as fp8_e4m3: a block for K and one for V.

blockIdx.x = token, blockIdx.y = 0 (key) or 1 (value)
slot = slots[token]; -1: the block ends

    a piece    8 (float32: 4) elements of a head's row    one load of 16 bytes
       / scale                                            float32, rounded
       -> fp8  rounded once more, ties to even            one store of 8 (4) bytes

Where an address or a width doesn't allow that, a thread takes an element at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, float32, int64, uint64

from cuda_kernels.cuda.prims import (
    as_float,
    divide,
    load_float,
    load_half,
    load_int32,
    load_int64,
    load_line,
    lower_halves,
    lowest_bytes,
    narrow_fp8,
    quotient,
    store_byte,
    store_pair,
    store_word,
    widen_bfloat16,
    widen_float16,
)
from cuda_kernels.dtypes import BFLOAT16, FLOAT32


@cuda.jit(device=True, inline="always")
def narrow_four(first: Any, second: Any, third: Any, fourth: Any, scale: Any) -> Any:
    """Four elements by the scale, as the bytes of a word."""
    return lower_halves(
        lowest_bytes(
            narrow_fp8(divide(first, scale), first), narrow_fp8(divide(second, scale), second)
        ),
        lowest_bytes(
            narrow_fp8(divide(third, scale), third), narrow_fp8(divide(fourth, scale), fourth)
        ),
    )


@cuda.jit(device=True, inline="always")
def store_piece(target: int, source: int, scale: Any, kind: int, widen: Any) -> None:
    """Load 16 bytes of elements, store as many bytes as there are."""
    words = load_line(source)
    if kind == FLOAT32:
        store_word(
            target,
            narrow_four(
                as_float(words[0]),
                as_float(words[1]),
                as_float(words[2]),
                as_float(words[3]),
                scale,
            ),
        )
    else:
        first, second = widen(words[0])
        third, fourth = widen(words[1])
        fifth, sixth = widen(words[2])
        seventh, eighth = widen(words[3])
        store_pair(
            target,
            narrow_four(first, second, third, fourth, scale),
            narrow_four(fifth, sixth, seventh, eighth, scale),
        )


@cuda.jit(device=True, inline="always")
def narrow_rows(
    target: int, target_head: int, source: int, source_head: int,
    num_heads: int, dims: int, scales: int, kind: int, widen: Any,
) -> None:  # fmt: skip
    """Store a token's heads; strides in bytes, `scales` is the address of a float32 a head or 0."""
    size = 4 if kind == FLOAT32 else 2
    piece = 16 // size
    threads = int64(cuda.blockDim.x)
    i = int64(cuda.threadIdx.x)
    odd_source, odd_target = source, target | dims
    if num_heads > 1:
        odd_source |= source_head
        odd_target |= target_head
    scale = float32(1)
    if odd_source & 15 == 0 and odd_target & (piece - 1) == 0:
        pieces = dims // piece
        while i < num_heads * pieces:
            head = quotient(i, pieces)
            at = (i - head * pieces) * piece
            if scales != 0:
                scale = load_float(scales + head * 4)
            store_piece(
                target + head * target_head + at,
                source + head * source_head + at * size,
                scale, kind, widen,
            )  # fmt: skip
            i += threads
    else:
        while i < num_heads * dims:
            head = quotient(i, dims)
            at = i - head * dims
            if scales != 0:
                scale = load_float(scales + head * 4)
            if kind == FLOAT32:
                element = load_float(source + head * source_head + at * 4)
            else:
                element = widen(load_half(source + head * source_head + at * 2))[0]
            store_byte(
                target + head * target_head + at, narrow_fp8(divide(element, scale), element)
            )
            i += threads


def write_kv_fp8(kind: int) -> Callable[..., Any]:
    """The kernel for rows of a dtype. Strides in bytes; index arithmetic is int64."""
    widen = widen_bfloat16 if kind == BFLOAT16 else widen_float16

    def kernel(
        slots: int, slot_bytes: int, block_size: int, num_heads: int,
        key: int, key_token: int, key_head: int, key_dims: int, key_scales: int,
        key_plane: int, key_frame: int, key_plane_token: int, key_plane_head: int,
        value: int, value_token: int, value_head: int, value_dims: int, value_scales: int,
        value_plane: int, value_frame: int, value_plane_token: int, value_plane_head: int,
    ) -> None:  # fmt: skip
        token = int64(cuda.blockIdx.x)
        if slot_bytes == 8:
            slot = load_int64(slots + token * 8)
        else:
            slot = int64(load_int32(slots + token * 4))
        if slot < 0:
            return
        frame = int64(uint64(slot) // uint64(block_size))
        offset = slot - frame * block_size
        if cuda.blockIdx.y == 0:
            source, source_head, dims, scales = (
                key + token * key_token,
                key_head,
                key_dims,
                key_scales,
            )
            target = key_plane + frame * key_frame + offset * key_plane_token
            target_head = key_plane_head
        else:
            source, source_head = value + token * value_token, value_head
            dims, scales = value_dims, value_scales
            target = value_plane + frame * value_frame + offset * value_plane_token
            target_head = value_plane_head
        narrow_rows(target, target_head, source, source_head, num_heads, dims, scales, kind, widen)

    return kernel
