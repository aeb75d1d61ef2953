"""Copying rows of bytes by the threads of a block, in the widest pieces that the addresses allow.

    thread 0  1  2  3 ...   each piece: 16, 4 or 1 bytes at once; neighbours take neighbours,
           |  |  |  |       so a warp's 32 pieces are 512 consecutive bytes of a row (or of two)

Four pieces a thread are under way before the first is stored. What width is possible is the same
for the whole block, so no warp diverges over it.
"""

from __future__ import annotations

from numba import cuda

from cuda_kernels.cuda.prims import (
    load_byte,
    load_line,
    load_word,
    quotient,
    store_byte,
    store_line,
    store_word,
)

LINE, WORD = 16, 4


@cuda.jit(device=True, inline="always")
def copy_rows(
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    num_rows: int,
    row_bytes: int,
    thread: int,
    threads: int,
) -> None:
    """Copy `num_rows` rows of `row_bytes` bytes; thread `thread` of `threads` does its share.

    Addresses and strides in bytes, all int64; less than 2**32 pieces. The source is not written
    during the launch.
    """
    odd = target | source | row_bytes
    if num_rows > 1:
        odd |= target_stride | source_stride
    if odd & (LINE - 1) == 0:
        pieces = row_bytes // LINE
        count = num_rows * pieces
        i = thread
        while i + 3 * threads < count:
            j = i + threads
            k = j + threads
            m = k + threads
            ri, rj = quotient(i, pieces), quotient(j, pieces)
            rk, rm = quotient(k, pieces), quotient(m, pieces)
            ci = (i - ri * pieces) * LINE
            cj = (j - rj * pieces) * LINE
            ck = (k - rk * pieces) * LINE
            cm = (m - rm * pieces) * LINE
            a = load_line(source + ri * source_stride + ci)
            b = load_line(source + rj * source_stride + cj)
            c = load_line(source + rk * source_stride + ck)
            d = load_line(source + rm * source_stride + cm)
            store_line(target + ri * target_stride + ci, a[0], a[1], a[2], a[3])
            store_line(target + rj * target_stride + cj, b[0], b[1], b[2], b[3])
            store_line(target + rk * target_stride + ck, c[0], c[1], c[2], c[3])
            store_line(target + rm * target_stride + cm, d[0], d[1], d[2], d[3])
            i = m + threads
        while i < count:
            row = quotient(i, pieces)
            at = (i - row * pieces) * LINE
            a = load_line(source + row * source_stride + at)
            store_line(target + row * target_stride + at, a[0], a[1], a[2], a[3])
            i += threads
    elif odd & (WORD - 1) == 0:
        pieces = row_bytes // WORD
        count = num_rows * pieces
        i = thread
        while i < count:
            row = quotient(i, pieces)
            at = (i - row * pieces) * WORD
            store_word(
                target + row * target_stride + at, load_word(source + row * source_stride + at)
            )
            i += threads
    else:
        count = num_rows * row_bytes
        i = thread
        while i < count:
            row = quotient(i, row_bytes)
            at = i - row * row_bytes
            store_byte(
                target + row * target_stride + at, load_byte(source + row * source_stride + at)
            )
            i += threads


@cuda.jit(device=True, inline="always")
def copy_bytes(target: int, source: int, size: int, thread: int, threads: int) -> None:
    """Copy `size` consecutive bytes; thread `thread` of `threads` does its share."""
    odd = target | source | size
    step = threads * LINE
    if odd & (LINE - 1) == 0:
        i = thread * LINE
        while i + 3 * step < size:
            a = load_line(source + i)
            b = load_line(source + i + step)
            c = load_line(source + i + 2 * step)
            d = load_line(source + i + 3 * step)
            store_line(target + i, a[0], a[1], a[2], a[3])
            store_line(target + i + step, b[0], b[1], b[2], b[3])
            store_line(target + i + 2 * step, c[0], c[1], c[2], c[3])
            store_line(target + i + 3 * step, d[0], d[1], d[2], d[3])
            i += 4 * step
        while i < size:
            a = load_line(source + i)
            store_line(target + i, a[0], a[1], a[2], a[3])
            i += step
    elif odd & (WORD - 1) == 0:
        i = thread * WORD
        while i < size:
            store_word(target + i, load_word(source + i))
            i += threads * WORD
    else:
        i = thread
        while i < size:
            store_byte(target + i, load_byte(source + i))
            i += threads
