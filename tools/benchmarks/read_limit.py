"""What the machine can read: the limit that decode attention is held against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from cuda_kernels.simd import address_of, prefetch


@njit(fastmath=True, nogil=True, _nrt=False)
def add_up(numbers: Any, start: int, count: int) -> Any:
    total = np.float32(0)
    part = numbers[start : start + count]
    for k in range(count):
        total += part[k]
    return total


@njit(parallel=True, nogil=True)
def read_all(numbers: Any, threads: int) -> Any:
    """Read an array from start to end."""
    size = numbers.shape[0] // threads
    totals = np.zeros(16 * threads, np.float32)
    for t in prange(threads):
        totals[16 * t] = add_up(numbers, t * size, size)
    return totals.sum()


@njit(parallel=True, nogil=True)
def read_scattered(numbers: Any, order: Any, granule: int, threads: int) -> Any:
    """Read granules of so many float32 in the given order, each asked for one granule ahead."""
    count = order.shape[0] // threads
    totals = np.zeros(16 * threads, np.float32)
    base = address_of(numbers)
    for t in prange(threads):
        total = np.float32(0)
        for k in range(t * count, (t + 1) * count):
            ahead = base + order[min(k + 1, order.shape[0] - 1)] * granule * 4
            for part in range(0, granule, 256):
                for line in range(16):
                    prefetch(ahead + part * 4 + line * 64)
                total += add_up(numbers, order[k] * granule + part, 256)
        totals[16 * t] = total
    return totals.sum()
