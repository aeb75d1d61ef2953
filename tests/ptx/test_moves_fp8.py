"""`write_kv` into fp8_e4m3 as CUDA kernels: their real PTX, interpreted, against the CPU twin."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.cache_write.cuda_call import FP8_KERNELS
from cuda_kernels.cache_write.spec import SPEC as WRITE
from cuda_kernels.dtypes import FP8_VALUES, STORAGE_DTYPES, float_to_bits
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import OutOfBounds
from tests.ptx.test_moves import cuts, integers, on_device, same_bits

pytestmark = needs_compiler

MORE = int(os.environ.get("KVMEM_PTX_SHAPES", "1"))
SHAPES = {(9, 0): 160 * MORE, (8, 0): 32 * MORE}
CAPABILITIES = pytest.mark.parametrize("capability", list(SHAPES), ids=["sm_90", "sm_80"])
#: Rows that are written in pieces of 16 bytes, and such that aren't.
WIDTHS = pytest.mark.parametrize("width", [64, 60], ids=["pieces", "elements"])


def written(device: InterpretedDevice, a: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What a device and the CPU twin make of some arguments; leaves the arena as it was."""
    before = a["arena"].copy()
    device.clear()
    cuda_kernels.write_kv(**on_device(device, a, "arena"))
    found = a["arena"].copy()
    a["arena"][:] = before
    cuda_kernels.write_kv(**a)
    expected = a["arena"].copy()
    a["arena"][:] = before
    return found, expected


def rows_of(bits: np.ndarray, dtype: str, width: int, scale: float | None) -> dict[str, Any]:
    """Arguments that write numbers as K in rows of a width, and as V backwards."""
    tokens = -(-bits.size // width)
    key = np.resize(bits, (tokens, 1, width))
    scales = None if scale is None else np.array([scale], np.float32)
    return {
        "arena": np.zeros((tokens, 2 * width), np.uint8), "key": key,
        "value": np.ascontiguousarray(key[::-1]), "dtype": dtype, "kv_dtype": "fp8_e4m3",
        "key_scale": scales, "value_scale": None, "key_offset": 0, "value_offset": width,
        "block_size": 1, "num_kv_heads": 1, "head_dim": width, "value_dim": width,
        "slot_mapping": np.arange(tokens),
    }  # fmt: skip


@CAPABILITIES
@WIDTHS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_sixteen_bits(
    seed: int, capability: tuple[int, int], dtype: str, width: int
) -> None:
    """All 65,536 patterns, NaN of both signs among them; K divided by a scale, V by none."""
    scale = float(np.random.default_rng(seed).uniform(0.01, 3))
    patterns = np.arange(2**16).astype(np.uint16)
    found, expected = written(InterpretedDevice(capability), rows_of(patterns, dtype, width, scale))
    assert same_bits(found, expected)
    assert np.unique(found).size == 256


def singles(seed: int, scale: float) -> np.ndarray:
    """float32: every number of fp8_e4m3, every tie, neighbours of both, also times the scale; all
    sizes; the odd ones.
    """
    rng = np.random.default_rng(seed)
    exact = FP8_VALUES[:127]
    ties = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    edges = np.concatenate([exact, ties, [464, 480]]).astype(np.float32)
    edges = np.concatenate([edges, edges * np.float32(scale)])
    edges = np.concatenate([edges, np.nextafter(edges, 1e9), np.nextafter(edges, -1e9)])
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    usual = rng.standard_normal(20000) * 2.0 ** rng.uniform(-18, 10, 20000)
    odd = np.array([0, np.inf, np.nan, 1e-45, 1e-38, 1e-40, 3.4e38])
    each = np.concatenate([edges, usual, odd]).astype(np.float32)
    return np.concatenate([each, -each, bits])


@CAPABILITIES
@WIDTHS
@pytest.mark.parametrize("scale", [None, 0.37])
def test_numbers_of_float32(
    seed: int, capability: tuple[int, int], width: int, scale: float | None
) -> None:
    numbers = singles(seed, scale or 1.0)
    found, expected = written(
        InterpretedDevice(capability), rows_of(numbers, "float32", width, scale)
    )
    assert same_bits(found, expected)


@CAPABILITIES
def test_shapes(seed: int, capability: tuple[int, int]) -> None:
    """Layouts, strides, skipped slots, scales of each head; any alignment."""
    rng, device = np.random.default_rng(seed), InterpretedDevice(capability)
    for _ in range(SHAPES[capability]):
        even = rng.random() < 0.5
        dims = [int(rng.choice([8, 16, 64, 128])) if even else 1 + cuts(rng, 4, 63) for _ in "kv"]
        a = WRITE.make_inputs(
            rng,
            dtype=str(rng.choice(list(STORAGE_DTYPES))),
            kv_dtype="fp8_e4m3",
            num_tokens=cuts(rng, 1, 16, 40),
            num_kv_heads=int(rng.integers(1, 5)),
            head_dim=dims[0],
            value_dim=dims[1],
            block_size=int(rng.choice([1, 2, 16, 64])),
            skipped=float(rng.choice([0, 0.2, 1])),
            layout=str(rng.choice(["HND", "NHD"])),
        )
        a["slot_mapping"] = a["slot_mapping"].astype(integers(rng))
        if even:
            frames, elements = a["arena"].shape
            a["key_offset"], a["value_offset"] = 0, -(-(a["value_offset"]) // 16) * 16
            a["arena"] = np.full((frames, -(-elements // 16) * 16 + 32), 0x7F, np.uint8)
        for name in ("key", "value"):
            if rng.random() < 0.3:  # a slice of a projection's output
                tokens, heads, width = a[name].shape
                wide = np.zeros((tokens, heads + 2, width), a[name].dtype)
                wide[:, 1 : heads + 1] = a[name]
                a[name] = wide[:, 1 : heads + 1]
        if rng.random() < 0.2:
            a["key_scale"] = None
        found, expected = written(device, a)
        assert same_bits(found, expected)
        assert same_bits(found, WRITE.reference(a))


@CAPABILITIES
def test_rows_are_loaded_sixteen_bytes_at_once(capability: tuple[int, int]) -> None:
    """8 heads of 128 values of 16 bits are 128 lines: one a thread, in step."""
    device = InterpretedDevice(capability)
    a = WRITE.make_inputs(
        np.random.default_rng(0), dtype="bfloat16", kv_dtype="fp8_e4m3", num_tokens=2,
        num_kv_heads=8, head_dim=128, value_dim=128, block_size=16, skipped=0,
    )  # fmt: skip
    a |= {"key_offset": 0, "value_offset": 8 * 16 * 128}
    a["arena"] = np.zeros((4, 2 * 8 * 16 * 128), np.uint8)
    found, expected = written(device, a)
    assert same_bits(found, expected)
    assert device.launched[0][0].source in FP8_KERNELS.values()
    assert device.launched[0][1].steps < 450


@CAPABILITIES
def test_a_slot_past_the_arena_is_found(capability: tuple[int, int]) -> None:
    bits = float_to_bits(np.ones(64), "float16")
    a = rows_of(bits, "float16", 16, 1.0)
    a["slot_mapping"][2] = 4
    device = InterpretedDevice(capability)
    with pytest.raises(OutOfBounds):
        cuda_kernels.write_kv(**on_device(device, a, "arena"))
