"""K and V as fp8_e4m3: the conversions, how far results move, what is refused.

That attention is right over what is stored is shown by test_paged_attention.py, and that rows are
stored rightly by test_moves.py, both for all dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

import cuda_kernels
from cuda_kernels import numeric
from cuda_kernels.attention.spec import SPEC
from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Launch
from cuda_kernels.dtypes import FP8_E4M3, FP8_VALUES, STORAGE_DTYPES, bits_to_float, float_to_bits

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
PATTERNS = np.arange(256, dtype=np.uint8)


@njit
def widen_all(bits: np.ndarray) -> np.ndarray:
    result = np.empty(bits.shape[0], np.float32)
    for k in range(bits.shape[0]):
        result[k] = numeric.widen(bits[k], FP8_E4M3)
    return result


def stored(values: np.ndarray, scale: float | None = None, dtype: str = "float32") -> np.ndarray:
    """What `write_kv` makes of some numbers."""
    rows = float_to_bits(values, dtype).reshape(-1, 1, 1)
    arena = np.zeros((1, 2 * len(rows)), np.uint8)
    scales = None if scale is None else np.array([scale], np.float32)
    cuda_kernels.write_kv(
        arena, rows, rows, dtype=dtype, kv_dtype="fp8_e4m3", key_offset=0, value_offset=len(rows),
        block_size=len(rows), num_kv_heads=1, head_dim=1, value_dim=1,
        slot_mapping=np.arange(len(rows)), key_scale=scales, value_scale=scales,
    )  # fmt: skip
    assert np.array_equal(arena[0, : len(rows)], arena[0, len(rows) :])
    return arena[0, : len(rows)]


def numbers(seed: int) -> np.ndarray:
    """Every number there is, every midpoint and its neighbours, and numbers of all sizes."""
    rng = np.random.default_rng(seed)
    finite = FP8_VALUES[:127]
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([finite, middles])
    edges = np.concatenate([edges, np.nextafter(edges, 1e9), np.nextafter(edges, -1e9)])
    drawn = rng.standard_normal(4000) * 2.0 ** rng.uniform(-16, 8, 4000)
    both = np.concatenate([edges, -edges, drawn]).astype(np.float32)
    return both[np.abs(both) <= LARGEST]


# -- conversions ----------------------------------------------------------------------------------


def test_every_pattern_is_widened_as_torch_does() -> None:
    expected = torch.from_numpy(PATTERNS).view(FP8).float().numpy()
    assert np.array_equal(bits_to_float(PATTERNS, "fp8_e4m3"), expected, equal_nan=True)
    assert np.array_equal(widen_all(PATTERNS), expected, equal_nan=True)
    assert np.isnan(expected).sum() == 2
    assert np.nanmax(expected) == LARGEST


def test_narrowing_rounds_to_nearest_even_as_torch_does(seed: int) -> None:
    values = numbers(seed)
    expected = torch.from_numpy(values).to(FP8).view(torch.uint8).numpy()
    assert np.array_equal(float_to_bits(values, "fp8_e4m3"), expected)
    assert np.array_equal(stored(values), expected)


def test_what_is_too_large_saturates_and_nan_stays_nan() -> None:
    values = np.array([448, 449, 464, 1e30, np.inf, -449, -np.inf, np.nan], np.float32)
    expected = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F]
    for got in (float_to_bits(values, "fp8_e4m3"), stored(values)):
        assert got.tolist() == expected


@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_every_number_survives_being_written_and_scaled(dtype: str) -> None:
    """What is stored is exact if the quotient is: a power of two as scale loses nothing."""
    finite = FP8_VALUES[np.isfinite(FP8_VALUES)]
    for scale in (None, 0.25, 4.0):
        bits = stored(finite * np.float32(scale or 1), scale, dtype)
        assert np.array_equal(bits_to_float(bits, "fp8_e4m3"), finite)


# -- how far results move -------------------------------------------------------------------------


def bound(a: dict[str, Any], exact: dict[str, Any]) -> float:
    """How far any result may lie from that of K and V as they were, for any numbers.

    A stored number is off by 2**-4 of its size, or by half a quantum below 2**-6 of the scale. So a
    score is off by at most e = scale * sum |q| |dk|; a weight by a factor e**(2 e); a result
    by (e**(2 e) - 1) max |V|, and by e**(2 e) max |dV| for V's own rounding.
    """
    heads = a["num_kv_heads"]
    group = a["query"].shape[1] // heads
    off: dict[str, Any] = {}
    for name in ("key", "value"):
        rows, scale = exact[name], a[f"{name}_scale"][:, None, None]
        off[name] = np.maximum(np.abs(rows) * 2.0**-4, scale * 2.0**-10)
    query = np.abs(bits_to_float(a["query"], a["dtype"]).astype(np.float64))
    scale = a["head_dim"] ** -0.5
    e = max(
        float((query[:, h] @ off["key"][h // group].T).max()) * scale for h in range(heads * group)
    )
    largest = float(np.abs(exact["value"]).max())
    return (np.exp(2 * e) - 1) * largest + np.exp(2 * e) * float(off["value"].max())


def quantised(rng: np.random.Generator, dtype: str, length: int, head_dim: int) -> Any:
    """A row whose K and V are drawn, written by `write_kv`; and the same before it."""
    heads, size = 2, 16
    frames = -(-length // size)
    exact = {name: rng.standard_normal((heads, length, head_dim)) for name in ("key", "value")}
    exact = {n: bits_to_float(float_to_bits(r, dtype), dtype) for n, r in exact.items()}
    scales = {f"{n}_scale": np.abs(r).max((1, 2)) / np.float32(LARGEST) for n, r in exact.items()}
    plane = heads * size * head_dim
    geometry = {
        "dtype": dtype, "key_offset": 0, "value_offset": plane, "block_size": size,
        "num_kv_heads": heads, "head_dim": head_dim, "value_dim": head_dim,
    }  # fmt: skip
    arena = np.zeros((frames, 2 * plane), np.uint8)
    rows = [float_to_bits(exact[n].transpose(1, 0, 2), dtype) for n in ("key", "value")]
    cuda_kernels.write_kv(
        arena, *rows, **geometry, kv_dtype="fp8_e4m3", slot_mapping=np.arange(length), **scales
    )
    query = float_to_bits(rng.standard_normal((1, 4, head_dim)), dtype)
    return exact, {
        **geometry, **scales, "kv_dtype": "fp8_e4m3", "arena": arena, "query": query,
        "out": np.zeros_like(query), "lse": np.zeros((1, 4), np.float32),
        "table": np.arange(frames, dtype=np.int32), "table_start": np.array([0]),
        "seq_lens": np.array([length]), "query_start": np.array([0, 1]),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_against_what_was_not_quantised(seed: int, dtype: str) -> None:
    """Within the bound for any numbers; and, for such as are drawn here, within 5 % of max |V|."""
    rng = np.random.default_rng(seed)
    worst = 0.0
    for _ in range(30):
        length, head_dim = int(rng.integers(1, 400)), int(rng.choice([16, 64, 80, 128]))
        exact, a = quantised(rng, dtype, length, head_dim)
        cuda_kernels.paged_attention(**a)
        found = bits_to_float(a["out"], dtype)
        query = bits_to_float(a["query"], dtype).astype(np.float64)
        for h in range(4):
            scores = exact["key"][h // 2] @ query[0, h] * head_dim**-0.5
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ exact["value"][h // 2]
            error = np.abs(found[0, h] - expected).max()
            tolerance = SPEC.tolerance[dtype] * np.abs(exact["value"]).max()
            assert error <= bound(a, exact) + tolerance
            worst = max(worst, float(error / np.abs(exact["value"]).max()))
    print(f"{dtype}: off by at most {worst:.4f} of max |V|")
    assert worst <= 0.05


# -- what is refused ------------------------------------------------------------------------------


class Recorder:
    """A device that only notes what it is asked to launch."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []

    def launch(self, launch: Launch, stream: int) -> None:
        self.launched.append(launch)


def test_scales_on_a_device_lie_where_the_rest_does() -> None:
    """They reach the kernel as addresses; what they hold isn't looked at, their shape is."""
    device = Recorder()

    def array(kind: str, *shape: int, address: int = 4096) -> DeviceArray:
        return DeviceArray(address, shape, np.dtype(kind), device)

    geometry: dict[str, Any] = {
        "dtype": "bfloat16", "kv_dtype": "fp8_e4m3", "key_offset": 0, "value_offset": 128,
        "block_size": 16, "num_kv_heads": 1, "head_dim": 8, "value_dim": 8,
    }  # fmt: skip
    rows, arena = array("u2", 2, 1, 8), array("u1", 4, 512)
    tables = {
        "table": array("i4", 2), "table_start": array("i8", 2), "seq_lens": array("i8", 2),
        "query_start": array("i8", 3),
    }  # fmt: skip

    def both(**scales: Any) -> None:
        slots = array("i8", 2)
        cuda_kernels.write_kv(arena, rows, rows, slot_mapping=slots, **geometry, **scales)
        cuda_kernels.paged_attention(rows, rows, arena, **tables, **geometry, **scales)

    places = (0x11110000, 0x22220000)
    both(key_scale=array("f4", 1, address=places[0]), value_scale=array("f4", 1, address=places[1]))
    both()
    given = [set(places) & set(launch.arguments) for launch in device.launched]
    assert given == [set(places), set(places), set(), set()]
    with pytest.raises(TypeError, match="key_scale must be a DeviceArray as"):
        both(key_scale=np.ones(1, np.float32))
    with pytest.raises(ValueError, match=r"value_scale must have shape \[1\], got \[2\]"):
        both(value_scale=array("f4", 2))
    with pytest.raises(TypeError, match="key_scale must have dtype float32"):
        both(key_scale=array("f8", 1))


ONES = np.ones(2, np.float32)
BAD = [
    ({"kv_dtype": "fp8"}, ValueError, "kv_dtype 'fp8' is not supported beside dtype 'float32'"),
    ({"kv_dtype": "bfloat16"}, ValueError, "supported: None .the same., 'fp8_e4m3'"),
    ({"kv_dtype": 8}, TypeError, "kv_dtype must be a string or None; got int"),
    ({"kv_dtype": None}, TypeError, "arena must have dtype float32, got uint8"),
    ({"key_scale": ONES[:1]}, ValueError, r"key_scale must have shape \[2\], got \[1\]"),
    ({"key_scale": np.ones(2)}, TypeError, "key_scale must have dtype float32"),
    ({"value_scale": [1.0, 1.0]}, TypeError, "value_scale must be a numpy array"),
    ({"value_scale": ONES * [1, 0]}, TypeError, "value_scale must have dtype float32"),
    ({"value_scale": np.float32([1, 0])}, ValueError, r"value_scale\[1\] is not a number from"),
    ({"value_scale": np.float32([np.nan, 1])}, ValueError, r"value_scale\[0\] is not a number"),
    ({"key_scale": np.float32([1, np.inf])}, ValueError, r"key_scale\[1\] is not a number"),
    ({"key_scale": -ONES}, ValueError, r"key_scale\[0\] is not a number"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=lambda x: str(x)[:40])
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    rng = np.random.default_rng(0)
    a = SPEC.make_inputs(
        rng, dtype="float32", kv_dtype="fp8_e4m3", seq_lens=[5], query_lens=[1], num_heads=2,
        num_kv_heads=2, head_dim=8, value_dim=8, block_size=4,
    )  # fmt: skip
    with pytest.raises(error, match=message):
        cuda_kernels.paged_attention(**(a | changes))
    assert np.isnan(a["out"]).all()
    named = ("key_offset", "value_offset", "block_size", "num_kv_heads", "head_dim", "value_dim")
    geometry = {name: a[name] for name in named}
    arena, rows = a["arena"].copy(), np.ones((1, 2, 8), np.float32)
    with pytest.raises(error, match=message):
        cuda_kernels.write_kv(
            arena, rows, rows, dtype="float32", slot_mapping=np.array([3]), **geometry,
            **({"kv_dtype": "fp8_e4m3"} | changes),
        )  # fmt: skip
    assert np.array_equal(arena, a["arena"])


def test_scales_without_fp8_are_refused() -> None:
    rows, arena = np.ones((1, 2, 8), np.float32), np.zeros((2, 128), np.float32)
    with pytest.raises(ValueError, match="key_scale needs kv_dtype 'fp8_e4m3'; K and V are float"):
        cuda_kernels.write_kv(
            arena, rows, rows, dtype="float32", key_offset=0, value_offset=64, block_size=4,
            num_kv_heads=2, head_dim=8, value_dim=8, slot_mapping=np.array([3]), key_scale=ONES,
        )  # fmt: skip
    assert not arena.any()
