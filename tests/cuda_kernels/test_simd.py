"""The IR layer under the twins, against NumPy."""

from __future__ import annotations

import numpy as np
from numba import njit

from cuda_kernels import simd


@njit
def address(array: np.ndarray) -> int:
    return simd.address_of(array)


@njit
def copy_lines(target: int, source: int, lines: int, past_cache: bool) -> None:
    for k in range(lines):
        simd.prefetch(source + k * simd.LINE_BYTES + 512)
        simd.prefetch_near(source + k * simd.LINE_BYTES + 64)
        line = simd.load_line(source + k * simd.LINE_BYTES)
        if past_cache:
            simd.store_line_past_cache(target + k * simd.LINE_BYTES, line)
        else:
            simd.store_line(target + k * simd.LINE_BYTES, line)
    simd.fence()


def test_address_of() -> None:
    array = np.zeros((4, 6), np.uint16)
    for view in (array, array[1:], array[:, 2:], array[::2, ::-1]):
        assert address(view) == view.__array_interface__["data"][0]


def test_lines_are_copied_and_nothing_beside_them(seed: int) -> None:
    """From any address; past the cache to a multiple of 64, else to any address too."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 9 * 64, np.uint8)
    for past_cache in (False, True):
        for shift in (0, 1, 7, 63):
            target = np.full(10 * 64, 77, np.uint8)
            start = (-address(target)) % 64 + (0 if past_cache else shift)
            copy_lines(address(target) + start, address(source) + shift, 8, past_cache)
            end = start + 8 * 64
            assert np.array_equal(target[start:end], source[shift : shift + 8 * 64])
            assert (target[:start] == 77).all()
            assert (target[end:] == 77).all()
