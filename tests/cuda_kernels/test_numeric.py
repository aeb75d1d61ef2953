"""The float conversions and functions that the twins share."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from cuda_kernels import numeric
from cuda_kernels.dtypes import (
    BFLOAT16,
    FLOAT16,
    STORAGE_DTYPES,
    bits_to_float,
    float_to_bits,
    nan_pattern,
)

KINDS = {"bfloat16": BFLOAT16, "float16": FLOAT16}


@njit
def widen_all(bits: np.ndarray, kind: int) -> np.ndarray:
    result = np.empty(bits.shape[0], np.float32)
    for k in range(bits.shape[0]):
        result[k] = numeric.widen(bits[k], kind)
    return result


@njit
def narrow_all(values: np.ndarray, kind: int) -> np.ndarray:
    result = np.empty(values.shape[0], np.uint16)
    for k in range(values.shape[0]):
        result[k] = numeric.narrow(values[k], kind)
    return result


@njit
def map_exp(values: np.ndarray) -> np.ndarray:
    result = np.empty_like(values)
    for k in range(values.shape[0]):
        result[k] = numeric.exp(values[k])
    return result


@njit
def map_tanh(values: np.ndarray) -> np.ndarray:
    result = np.empty_like(values)
    for k in range(values.shape[0]):
        result[k] = numeric.tanh(values[k])
    return result


@pytest.mark.parametrize("dtype", list(KINDS))
def test_widen_every_bit_pattern(dtype: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    got = widen_all(bits, KINDS[dtype])
    expected = bits_to_float(bits, dtype)
    nan = np.isnan(expected)
    assert np.array_equal(nan, np.isnan(got))
    assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("dtype", list(KINDS))
def test_narrow_rounds_to_nearest_even(seed: int, dtype: str) -> None:
    """Every value, every midpoint and its neighbours, and random bits."""
    rng = np.random.default_rng(seed)
    exact = bits_to_float(np.arange(65536, dtype=np.uint16), dtype)
    finite = np.sort(exact[np.isfinite(exact)].astype(np.float64))
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]
    anything = rng.integers(0, 2**32, 200_000, np.uint64).astype(np.uint32).view(np.float32)
    for values in (exact, middle, *near, anything):
        got = narrow_all(values, KINDS[dtype])
        expected = float_to_bits(values, dtype)
        nan = np.isnan(values)
        assert np.isnan(bits_to_float(got[nan], dtype)).all()
        assert np.array_equal(got[~nan], expected[~nan])


def test_exp() -> None:
    x = np.linspace(-87, 88, 400_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(map_exp(x) / exact - 1)
    assert error[np.abs(x) < 1].max() < 2e-7
    assert error.max() < 1e-5
    special = map_exp(np.array([0, -np.inf, -88, -1e30, np.nan], np.float32))
    assert special[0] == 1
    assert not special[1:4].any()
    assert np.isnan(special[4])


def test_tanh() -> None:
    x = np.concatenate([np.linspace(-40, 40, 400_001), np.logspace(-30, 0, 1000)])
    x = x.astype(np.float32)
    x = x[x != 0]
    assert np.abs(map_tanh(x) / np.tanh(x.astype(np.float64)) - 1).max() < 4e-7
    assert np.array_equal(map_tanh(np.array([0, np.inf, -np.inf], np.float32)), [0, 1, -1])
    assert np.isnan(map_tanh(np.array([np.nan], np.float32))).all()


def test_nan_patterns() -> None:
    for dtype, storage in STORAGE_DTYPES.items():
        pattern = np.full(3, nan_pattern(dtype)).view(storage.array_dtype)
        assert np.isnan(bits_to_float(pattern, dtype)).all()
