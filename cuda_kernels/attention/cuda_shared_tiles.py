"""Tiles of K and V in shared memory, for prompts: where they lie, how they get there, what is odd.

A block copies a tile with all its threads: 4 share a row, each has 16 of every 64 bytes. The places
are such that 8 lanes which copy, or read, 16 bytes each don't meet in a bank: rows of K trade the
halves of 128 bytes, those of V are padded by 16 bytes. (With 96 dims, two lanes that copy K meet.)
"""

from __future__ import annotations

from typing import Any

from numba import cuda, int32, int64, uint32

from cuda_kernels.cuda.prims import (
    copy_line,
    load_int32,
    load_shared_line,
    load_word,
    number_here,
    quotient,
    store_shared_line,
)

#: Positions of a tile.
TILE = 32


@cuda.jit(device=True, inline="always")
def first_of(own: int, window: int) -> Any:
    """The first position that the token at a position attends to."""
    return max(int32(0), int32(own - window + 1)) if window > 0 else int32(0)


@cuda.jit(device=True, inline="always")
def traded(address: int, flip: int, chunk: int) -> Any:
    """Where 64 bytes lie, less their number times 64: `flip`, 0 or 64, trades each two of them."""
    return address - flip if chunk & 1 else address + flip


@cuda.jit(device=True, inline="always")
def copy_row(
    target: int, flip: int, address: int, quad: int, place: Any, frame_stride: int,
    token_stride: int, chunks: int,
) -> None:  # fmt: skip
    """Begin to copy this thread's part of a tile: 16 of each 64 bytes of a row."""
    target, flip = number_here(target), number_here(flip)
    address += int64(place[0]) * frame_stride + int64(place[1]) * token_stride
    address += int64(number_here(int32(quad * 16)))
    for j in range(chunks):
        copy_line(int32(traded(target, flip, j) + j * 64), address + j * 64, place[2])


@cuda.jit(device=True, inline="always")
def find_place(columns: int, position: int, low: int, high: int, block_size: int) -> Any:
    """Frame of a position, its offset there, bytes to read: of one outside of low to high none.

    Then frame and offset are those of the nearest inside.
    """
    inside = max(low, min(position, high))
    column = quotient(int64(inside), block_size)
    frame = load_int32(columns + column * 4)
    size = int32(16) if inside == position else int32(0)
    return frame, int32(inside - int32(column * block_size)), size


@cuda.jit(device=True, inline="always")
def take_out(word: Any, infinite: int) -> Any:
    """A word without the halves that aren't finite numbers: all ones in `infinite`'s bits."""
    if word & uint32(infinite) == uint32(infinite):
        word = word & uint32(0xFFFF0000)
    if word & uint32(infinite << 16) == uint32(infinite << 16):
        word = word & uint32(0xFFFF)
    return word


@cuda.jit(device=True, inline="always")
def clean_values(target: int, chunks: int, infinite: int) -> Any:
    """Take what isn't finite out of what this thread copied; whether there was any, as a word."""
    odd = uint32(0)
    target = number_here(target)
    for j in range(chunks):
        at = int32(target + j * 64)
        a, b, c, d = load_shared_line(at)
        e, f = take_out(a, infinite), take_out(b, infinite)
        g, h = take_out(c, infinite), take_out(d, infinite)
        changed = (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h)
        if changed != uint32(0):
            store_shared_line(at, e, f, g, h)
        odd |= changed
    return odd


@cuda.jit(device=True, inline="always")
def add_odd_values(
    widen: Any, sums: Any, tiles: int, owns: Any, window: int, tile: int, low: int, high: int,
    columns: int, block_size: int, value: int, quad: int, frame_stride: int, token_stride: int,
    infinite: int,
) -> None:  # fmt: skip
    """Add the numbers that were taken out of a tile to the rows that attend to them.

    Whatever their weight, the result is not a finite number either.
    """
    value += int64(number_here(int32(quad * 4)))
    place = max(low, tile)
    while place <= min(high, int32(tile + TILE - 1)):
        column = quotient(int64(place), block_size)
        at = value + int64(load_int32(columns + column * 4)) * frame_stride
        at += (int64(place) - column * block_size) * token_stride
        for n in range(tiles):
            word = load_word(at + n * 16)
            odd = widen(word ^ take_out(word, infinite))
            for half in range(2):
                if place >= first_of(owns[half], window) and place <= owns[half]:
                    for e in range(2):
                        sums[n * 4 + half * 2 + e] += odd[e]
        place = int32(place + 1)
