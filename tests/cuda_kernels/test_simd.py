"""The IR layer under the twins, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from cuda_kernels import simd, vectors
from cuda_kernels.dtypes import bits_to_float, float_to_bits

LANES = vectors.LANES
TAGS = {"float32": vectors.FLOAT32_TAG, "bfloat16": vectors.BFLOAT16_TAG}
TAGS["float16"] = vectors.FLOAT16_TAG


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


def test_fetch_add() -> None:
    @njit
    def take(counter: np.ndarray) -> int:
        return simd.fetch_add(simd.address_of(counter), 3)

    counter = np.array([5], np.int64)
    assert (take(counter), take(counter), counter[0]) == (5, 8, 11)


@njit
def widen_pairs(target: np.ndarray, source: np.ndarray, size: int, tag: object) -> None:
    """Through a pair and back as float32, in the dtype's own order of lanes."""
    for k in range(0, source.size, vectors.PAIR):
        x, y = vectors.load_pair(simd.address_of(source) + k * size, tag)
        vectors.store(simd.address_of(target) + 4 * k, x)
        vectors.store(simd.address_of(target) + 4 * (k + LANES), y)


@njit
def narrow_pairs(target: np.ndarray, source: np.ndarray, size: int, tag: object) -> None:
    for k in range(0, source.size, vectors.PAIR):
        x = vectors.load(simd.address_of(source) + 4 * k)
        y = vectors.load(simd.address_of(source) + 4 * (k + LANES))
        vectors.store_pair(simd.address_of(target) + k * size, x, y, tag)


def lane_order(dtype: str, size: int) -> np.ndarray:
    """Which element of an array stands at each place of the loaded pairs."""
    order = np.arange(size).reshape(-1, vectors.PAIR)
    if dtype == "bfloat16":
        order = np.concatenate([order[:, ::2], order[:, 1::2]], axis=1)
    return order.reshape(-1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pairs_widen_every_bit_pattern(dtype: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    got = np.zeros(65536, np.float32)
    widen_pairs(got, bits, 2, TAGS[dtype])
    expected = bits_to_float(bits, dtype)[lane_order(dtype, bits.size)]
    nan = np.isnan(expected)
    assert np.array_equal(nan, np.isnan(got))
    assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("dtype", list(TAGS))
def test_pairs_narrow_to_nearest_even(seed: int, dtype: str) -> None:
    """Every value of the 16-bit dtype, every midpoint and its neighbours, and random bits."""
    rng = np.random.default_rng(seed)
    exact = bits_to_float(np.arange(65536, dtype=np.uint16), "bfloat16" if "3" in dtype else dtype)
    finite = np.sort(exact[np.isfinite(exact)].astype(np.float64))
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]
    anything = rng.integers(0, 2**32, 65536, np.uint64).astype(np.uint32).view(np.float32)
    values = np.concatenate([exact, middle, *near, anything])
    values = values[: values.size // vectors.PAIR * vectors.PAIR]
    expected = float_to_bits(values, dtype)
    got = np.zeros_like(expected)
    narrow_pairs(got, values[lane_order(dtype, values.size)], got.itemsize, TAGS[dtype])
    nan = np.isnan(values)
    assert np.isnan(bits_to_float(got[nan], dtype)).all()
    assert np.array_equal(got[~nan], expected[~nan])


@njit
def map_exp2(values: np.ndarray) -> None:
    for k in range(0, values.size, LANES):
        at = simd.address_of(values) + 4 * k
        vectors.store(at, vectors.exp2(vectors.load(at)))


@njit
def map_tanh(values: np.ndarray) -> None:
    for k in range(0, values.size, LANES):
        at = simd.address_of(values) + 4 * k
        vectors.store(at, vectors.tanh(vectors.load(at)))


def test_exp2() -> None:
    x = np.linspace(-126, 20, 160_000).astype(np.float32)
    got = x.copy()
    map_exp2(got)
    assert np.abs(got / np.exp2(x.astype(np.float64)) - 1).max() < 2e-7
    special = np.resize(np.array([0, -0.0, -np.inf, -126.5, -1e30, np.nan, 3, -7], np.float32), 16)
    map_exp2(special)
    assert np.array_equal(special[:5], [1, 1, 0, 0, 0])
    assert np.isnan(special[5])
    assert np.array_equal(special[6:8], [8, 2.0**-7])


def test_tanh() -> None:
    x = np.concatenate([np.linspace(-40, 40, 160_000), np.logspace(-30, 0, 1600)])
    x = np.concatenate([x, -np.logspace(-30, 38, 1600)]).astype(np.float32)
    got = x.copy()
    map_tanh(got)
    assert np.abs(got / np.tanh(x.astype(np.float64)) - 1)[x != 0].max() < 5e-7
    special = np.resize(np.array([0, np.inf, -np.inf, np.nan], np.float32), 16)
    map_tanh(special)
    assert np.array_equal(special[:3], [0, 1, -1])
    assert np.isnan(special[3])


@njit
def lanes_of(result: np.ndarray, x: np.ndarray, y: np.ndarray) -> bool:
    """What each function of vectors makes of x and y, row by row of result."""
    a, b = vectors.load(simd.address_of(x)), vectors.load(simd.address_of(y))
    out = simd.address_of(result)
    size = vectors.VECTOR_BYTES
    vectors.store(out, vectors.add(a, b))
    vectors.store(out + size, vectors.subtract(a, b))
    vectors.store(out + 2 * size, vectors.multiply(a, b))
    vectors.store(out + 3 * size, vectors.divide(a, b))
    vectors.store(out + 4 * size, vectors.greater(a, b))
    vectors.store(out + 5 * size, vectors.row_sums(a))
    vectors.store(out + 6 * size, vectors.row_maxima(a))
    vectors.store(out + 7 * size, vectors.lane_places())
    vectors.store(out + 8 * size, vectors.finite_or_zero(a))
    vectors.store(out + 9 * size, vectors.spread_at(simd.address_of(y)))
    vectors.store(out + 10 * size, vectors.load_quad(simd.address_of(y)))
    low, high = vectors.spread(np.float32(-0.5)), vectors.spread(np.float32(0.5))
    vectors.store(out + 11 * size, vectors.keep_between(a, b, low, high))
    vectors.store(out + 12 * size, vectors.split_rows(a)[2])
    vectors.store(out + 13 * size, vectors.multiply_add(a, b, a))
    return vectors.any_greater(a, b)


def test_lanes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, LANES)).astype(np.float32)
    result = np.zeros((14, LANES), np.float32)
    assert lanes_of(result, x, y) == (x > y).any()
    rows = x.reshape(-1, vectors.QUAD)
    repeated = LANES // vectors.QUAD
    expected = [x + y, x - y, x * y, x / y, np.maximum(x, y)]
    assert np.array_equal(result[:5], expected)
    assert np.allclose(result[5], np.tile(rows.sum(axis=0), repeated), atol=1e-5)
    assert np.array_equal(result[6], np.tile(rows.max(axis=0), repeated))
    assert np.array_equal(result[7], np.arange(LANES) // vectors.QUAD)
    assert np.array_equal(result[8], x)
    assert np.array_equal(result[9], np.full(LANES, y[0]))
    assert np.array_equal(result[10], np.tile(y[:4], repeated))
    assert np.array_equal(result[11], np.where(np.abs(y) <= 0.5, x, -np.inf))
    assert np.array_equal(result[12], np.full(LANES, x[2]))
    assert np.allclose(result[13], x * y + x, atol=1e-6)
    x[:] = -np.inf
    assert not lanes_of(result, x, y)
    assert not result[8].any()


@njit
def sums_of(result: np.ndarray, vectors_of: np.ndarray) -> None:
    eight = vectors.load_eight(simd.address_of(vectors_of))
    vectors.store_sums(simd.address_of(result), eight)
    vectors.store_eight(simd.address_of(vectors_of), vectors.eight_zeros())


def test_eight_sums_come_in_order_and_alike(seed: int) -> None:
    """Each vector's sum at its own place; and the same bits at every place."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((8, LANES)).astype(np.float32)
    result = np.zeros(8, np.float32)
    sums_of(result, numbers.copy())
    assert np.allclose(result, numbers.sum(axis=1), atol=1e-5)
    same = np.repeat(numbers[:1], 8, axis=0)
    sums_of(result, same)
    assert np.unique(result).size == 1
    assert not same.any()
