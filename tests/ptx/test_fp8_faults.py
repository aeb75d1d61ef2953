"""Mistakes planted in what the CUDA kernels do for fp8_e4m3; their own tests must notice each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ptx import test_attention_fp8, test_attention_mma, test_moves_fp8
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import PtxError
from tests.ptx.seeded_faults import ATTENTION, KernelFault, faulty, skip_unless_drawn

pytestmark = needs_compiler

SM_90, SM_80 = (9, 0), (8, 0)
SEED = 1
TENSOR = "cuda_kernels.attention.cuda_decode_mma"
FRAGMENTS = "cuda_kernels.attention.cuda_fp8"
WRITE = "cuda_kernels.cache_write.cuda_write_fp8"
PRIMITIVES = "cuda_kernels.cuda.prims"

Test = Callable[[pytest.MonkeyPatch], None]


def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    test_attention_fp8.test_attention_over_fp8(SEED, SM_90, "ordinary", (3, 1, 128), monkeypatch)


def tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    test_attention_fp8.test_attention_over_fp8(SEED, SM_90, "tensor", (3, 64, 1), monkeypatch)
    test_attention_fp8.test_queries_over_the_whole_range_of_bfloat16(SEED)


def half_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    test_attention_fp8.test_attention_over_fp8(SEED, SM_90, "tensor", (3, 96, 1), monkeypatch)


def on_sm_80(monkeypatch: pytest.MonkeyPatch) -> None:
    test_attention_fp8.test_attention_over_fp8(SEED, SM_80, "tensor", (3, 96, 1), monkeypatch)


def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for scale in (None, 0.37):
        test_moves_fp8.test_numbers_of_float32(SEED, SM_90, 64, scale)


def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    test_moves_fp8.test_shapes(SEED, SM_90)


class Fault(NamedTuple):
    """What is planted, and the test that has to object."""

    name: str
    module: str
    right: str
    wrong: str
    victim: str
    test: Test


KEY_SCALE, VALUE_SCALE = (
    "load_float(key_scales + kv_head * 4)",
    "load_float(value_scales + kv_head * 4)",
)
TIES = "add.u32 word, word, size; "
FAULTS = [
    *(
        Fault(f"{where}: {name}", module, right, wrong, module, test)
        for where, module, test in (("ordinary", ATTENTION, ordinary), ("tensor", TENSOR, tensor))
        for name, right, wrong in (
            ("K's scale of the wrong head", KEY_SCALE, "load_float(key_scales)"),
            ("V's scale of the wrong head", VALUE_SCALE, "load_float(value_scales)"),
            ("no scale of V", VALUE_SCALE, "float32(1)"),
        )
    ),
    Fault("tensor: no scale of K", TENSOR, f"scale * {KEY_SCALE}", "scale", TENSOR, tensor),
    Fault("tensor: positions of V swapped", FRAGMENTS,
          "near, far = lower_bytes(first, second), lower_bytes(third, fourth)",
          "near, far = lower_bytes(second, first), lower_bytes(third, fourth)", TENSOR, tensor),
    Fault("tensor: too large for float16", FRAGMENTS, "(268 - exponent)", "(270 - exponent)",
          TENSOR, tensor),
    Fault("tensor: what is beside a half chunk", FRAGMENTS, "here = uint32(0)", "here = words[0]",
          TENSOR, half_a_chunk),
    Fault("tensor: the other half on sm_80", FRAGMENTS, "return widen_lower_fp8, widen_upper_fp8",
          "return widen_upper_fp8, widen_lower_fp8", TENSOR, on_sm_80),
    Fault("write: ties away from zero", PRIMITIVES, "and.b32 word, word, 1; " + TIES,
          "or.b32 word, word, 1; and.b32 word, word, 1; " + TIES, WRITE, numbers),
    Fault("write: rounded toward zero", PRIMITIVES, "sub.u32 word, word, 0x3bf80001",
          "sub.u32 word, size, 0x3c000000", WRITE, numbers),
    Fault("write: too few subnormals", PRIMITIVES, "setp.lt.u32 small, size, 0x3c800000",
          "setp.lt.u32 small, size, 0x3c000000", WRITE, numbers),
    Fault("write: saturated above 448", PRIMITIVES, "min.u32 size, size, 0x43e00000",
          "min.u32 size, size, 0x43f00000", WRITE, numbers),
    Fault("write: the sign of NaN lost", PRIMITIVES, "mov.b32 sign, $2;", "mov.b32 sign, $1;",
          WRITE, numbers),
    Fault("write: multiplied by the inverse", PRIMITIVES, '"div.rn.f32 $0, $1, $2;"',
          '"{ .reg .f32 by; rcp.rn.f32 by, $2; mul.f32 $0, $1, by; }"', WRITE, numbers),
    Fault("write: K's scale for V", WRITE, "dims, scales = value_dims, value_scales",
          "dims, scales = value_dims, key_scales", WRITE, shapes),
    Fault("write: no scale of V", WRITE, "dims, scales = value_dims, value_scales",
          "dims, scales = value_dims, int64(0)", WRITE, shapes),
    Fault("write: the first head's scale in pieces", WRITE,
          "scale = load_float(scales + head * 4)\n            store_piece",
          "scale = load_float(scales)\n            store_piece", WRITE, shapes),
    Fault("write: a target that isn't aligned", WRITE, "odd_target & (piece - 1) == 0",
          "odd_target & 1 == 0", WRITE, shapes),
]  # fmt: skip


def on(device: type[InterpretedDevice], fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_attention_fp8, test_attention_mma, test_moves_fp8):
        monkeypatch.setattr(module, "InterpretedDevice", device)
    fault.test(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_mistake_is_found(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_drawn(fault.name)
    planted = KernelFault(fault.module, fault.right, fault.wrong, fault.victim)
    with faulty(planted, tmp_path) as device:
        with pytest.raises((AssertionError, PtxError)) as found:
            on(device, fault, monkeypatch)
    print("found as:", type(found.value).__name__, str(found.value)[:200])


@pytest.mark.parametrize("test", [ordinary, tensor, half_a_chunk, on_sm_80, numbers, shapes])
def test_the_same_shapes_pass_without_a_mistake(
    test: Test, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(InterpretedDevice, FAULTS[0]._replace(test=test), monkeypatch)
