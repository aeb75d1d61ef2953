"""The CPU twins of moves and fills of frames: single-threaded, GIL released.

A swapped frame is read once, by nobody soon, and is larger than the caches near a core. Ordinary
stores would first read every line they overwrite, and then throw out what the compute keeps there;
stores past the cache do neither. That is also how memcpy moves what it is given in one piece, but
not frames of some MiB: those it takes for something to be used at once.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cuda_kernels.dtypes import Bits, Int32s, Int64s
from cuda_kernels.simd import (
    LINE_BYTES,
    address_of,
    fence,
    load_line,
    prefetch_near,
    store_line_past_cache,
)

compiled = njit(cache=True, nogil=True, _nrt=False)

# How far ahead a source is asked for: the processor's own prefetch ends with each page of 4 KiB.
AHEAD_BYTES = 512


@compiled
def move(
    target: Bits, target_ids: Int64s, source: Bits, source_ids: Int64s, frame_bytes: int
) -> None:
    """Copy runs of frames, arenas flat as uint8; bytes are in place when it returns.

    An id is int64 before it meets a stride (case 71). The target decides where lines lie: what is
    before its first one and behind its last one goes byte by byte, the source may lie anyhow.
    """
    to, origin = address_of(target), address_of(source)
    count = source_ids.shape[0]
    i = 0
    while i < count:
        read, written = np.int64(source_ids[i]), np.int64(target_ids[i])
        run = 1
        while i + run < count and (
            source_ids[i + run] == read + run and target_ids[i + run] == written + run
        ):
            run += 1
        i += run
        read, written, size = read * frame_bytes, written * frame_bytes, run * frame_bytes
        head = min((-(to + written)) % LINE_BYTES, size)
        end = head + (size - head) // LINE_BYTES * LINE_BYTES
        for k in range(head):
            target[written + k] = source[read + k]
        for k in range(head, end, LINE_BYTES):
            prefetch_near(origin + read + k + AHEAD_BYTES)
            store_line_past_cache(to + written + k, load_line(origin + read + k))
        for k in range(end, size):
            target[written + k] = source[read + k]
    fence()  # the caller tells other threads next (R3, R5)


def move_plainly(
    target: Bits, target_ids: Int32s, source: Bits, source_ids: Int32s, frame_bytes: int
) -> None:
    """The same under NUMBA_DISABLE_JIT=1, where instructions have no Python form."""
    target.reshape(-1, frame_bytes)[target_ids] = source.reshape(-1, frame_bytes)[source_ids]


@compiled
def gather(staging: Bits, arena: Bits, ids: Int64s, offset: int) -> None:
    """Copy piece by piece to staging, which a copy engine reads next: through the caches."""
    for i in range(ids.shape[0]):
        piece = arena[np.int64(ids[i]), offset : offset + staging.shape[1]]
        row = staging[i]
        for k in range(row.shape[0]):
            row[k] = piece[k]


@compiled
def scatter(staging: Bits, arena: Bits, ids: Int64s, offset: int) -> None:
    """Copy piece by piece from staging."""
    for i in range(ids.shape[0]):
        piece = arena[np.int64(ids[i]), offset : offset + staging.shape[1]]
        row = staging[i]
        for k in range(row.shape[0]):
            piece[k] = row[k]


@compiled
def fill(arena: Bits, ids: Int64s, pattern: np.generic) -> None:
    """Store one word over and over."""
    for i in range(ids.shape[0]):
        frame = arena[np.int64(ids[i])]
        for k in range(frame.shape[0]):
            frame[k] = pattern
