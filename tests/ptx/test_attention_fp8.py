"""Attention over K and V stored as fp8_e4m3: the real PTX, interpreted, against float64.

Shapes and rules are drawn as in `test_attention.py` and `test_attention_mma.py`. Poison is the byte
0xFF, a NaN: in unused frames, behind a row's end, between the planes. What is stored is the
reference's input, so the tolerance is that of the queries' dtype.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.attention.cuda_call import KERNELS, MERGE_KERNELS, TENSOR_KERNELS
from cuda_kernels.cuda.kernel import KernelSource, Launch
from cuda_kernels.dtypes import FP8_E4M3, FP8_VALUES, STORAGE_DTYPES, bits_to_float, float_to_bits
from tests.ptx import test_attention, test_attention_mma
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.test_attention import check, label, mapped, split_by, workspace
from tests.ptx.test_attention_mma import attend, usual

MORE = int(os.environ.get("KVMEM_PTX_SHAPES", "1"))
FP8_KERNELS = {
    "tensor": {key: source for key, source in TENSOR_KERNELS.items() if key[0] == FP8_E4M3},
    "ordinary": {key: source for key, source in KERNELS.items() if key[0] == FP8_E4M3},
}
#: Shapes of each kernel for sm_90, and of some for sm_80, where other instructions widen.
SHAPES = {
    ((9, 0), "tensor"): 16, ((8, 0), "tensor"): 12,
    ((9, 0), "ordinary"): 13, ((8, 0), "ordinary"): 12,
}  # fmt: skip
CASES = [((9, 0), cores, key) for cores, kernels in FP8_KERNELS.items() for key in kernels]
SOME = ((FP8_E4M3, 96, 1), (FP8_E4M3, 128, 2), (FP8_E4M3, 4, 128))
CASES += [((8, 0), cores, key) for _, cores, key in CASES if key in SOME or MORE > 1]


def poisoned(a: dict[str, Any]) -> dict[str, Any]:
    """The other NaN, all ones, wherever `make_inputs` left one."""
    a["arena"][a["arena"] == 0x7F] = 0xFF
    return a


def draw(
    rng: np.random.Generator, cores: str, key: tuple[int, int, int], split: int
) -> dict[str, Any]:
    """Arguments for one kernel; sometimes without scales, sometimes with queries far from 1."""
    if cores == "tensor":
        a = test_attention_mma.draw(rng, key, split)
    else:
        a = test_attention.draw(rng, key)
    if rng.random() < 0.2:
        a["key_scale"] = a["value_scale"] = None
    if rng.random() < 0.2:  # the same scores from other numbers
        by = 2.0 ** int(rng.integers(-12, 12))
        a["query"] = float_to_bits(bits_to_float(a["query"], a["dtype"]) * by, a["dtype"])
        a["scale"] = a["head_dim"] ** -0.5 / by
    return poisoned(a)


WIDEN = """
from numba import cuda, int64
from cuda_kernels.attention.cuda_fp8 import widening
from cuda_kernels.cuda.prims import load_word, store_word

def widen_words(capability):
    lower, upper = widening(capability)
    def kernel(source: int, target: int) -> None:
        i = int64(cuda.threadIdx.x)
        word = load_word(source + i * 4)
        store_word(target + i * 8, lower(word))
        store_word(target + i * 8 + 4, upper(word))
    return kernel
"""


@needs_compiler
@pytest.mark.parametrize("capability", [(9, 0), (8, 9), (8, 6), (8, 0)], ids=label)
def test_every_pattern_is_widened(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 256 in each place of a word, to the exact float16, NaN to NaN of its sign."""
    (tmp_path / "planted_widening.py").write_text(WIDEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = KernelSource(
        "planted_widening", "widen_words", ("int64",) * 2, 256, by_capability=True
    )
    patterns = np.arange(256).astype(np.uint8)
    words = np.stack([patterns, patterns[::-1], np.roll(patterns, 3), patterns ^ 0x5A], axis=1)
    words, found = np.ascontiguousarray(words), np.zeros((256, 4), np.float16)
    device = InterpretedDevice(capability)
    places = device.array(words), device.array(found, writable=True)
    device.launch(Launch(source, (1, 1, 1), tuple(place.address for place in places)), 0)
    assert np.array_equal(found.astype(np.float32), FP8_VALUES[words], equal_nan=True)
    assert np.array_equal(np.signbit(found), words >= 128)
    text = device.compiled(source)[0].ptx
    assert (b"e4m3x2" in text) == (capability >= (8, 9))


@needs_compiler
@pytest.mark.parametrize(("capability", "cores", "key"), CASES, ids=label)
def test_attention_over_fp8(
    seed: int,
    capability: tuple[int, int],
    cores: str,
    key: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, device = np.random.default_rng(seed), InterpretedDevice(capability)
    for _ in range(SHAPES[capability, cores] * MORE):
        split = int(rng.choice([64, 64, 128, 512]))
        split_by(monkeypatch, split, int(rng.choice([16, 528])))
        arguments = draw(rng, cores, key, split)
        run(device, arguments, cores, cut=rng.random() < 0.6)
        check(arguments)
        if not device.launched:  # no tokens were drawn
            continue
        (first, _), *rest = device.launched
        assert first.source is FP8_KERNELS[cores][key]
        merge = MERGE_KERNELS[STORAGE_DTYPES[arguments["dtype"]].kind]
        assert [launch.source for launch, _ in rest] == [merge] * len(rest)


def run(device: InterpretedDevice, a: dict[str, Any], cores: str, *, cut: bool) -> None:
    """One call; everything that belongs to a row's tokens gets written."""
    if cores == "tensor":
        attend(device, a, cut=cut)
        return
    device.clear()
    options = workspace(device, a) if cut else {}
    cuda_kernels.paged_attention(**mapped(device, a), cores=cores, **options)


def in_fp8(seed: int, **changes: Any) -> dict[str, Any]:
    return poisoned(usual(seed, **({"kv_dtype": "fp8_e4m3", "alignment": 16} | changes)))


@needs_compiler
@pytest.mark.parametrize("cores", ["tensor", "ordinary"])
def test_the_same_bits_however_rows_are_cut(
    seed: int, cores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part or several; the scales of V are in both."""
    device = InterpretedDevice((9, 0))
    arguments = in_fp8(
        seed, seq_lens=[300, 64, 65], query_lens=[2, 1, 1], num_kv_heads=2, block_size=32
    )
    found, parts = set(), set()
    for wanted in (8, 24, 64):
        split_by(monkeypatch, 64, wanted)
        run(device, arguments, cores, cut=True)
        parts.add(device.launched[0][0].grid[2])
        found.add(arguments["out"].tobytes() + arguments["lse"].tobytes())
    assert len(found) == 1
    assert len(parts) > 1
    check(arguments)


@needs_compiler
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=label)
@pytest.mark.parametrize("cores", ["tensor", "ordinary"])
@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_is_not_hidden(seed: int, capability: tuple[int, int], cores: str, where: str) -> None:
    """NaN at a position reaches the tokens that attend to it: of V in its dim only."""
    rng, device = np.random.default_rng(seed), InterpretedDevice(capability)
    arguments = in_fp8(seed, seq_lens=[40], query_lens=[4])
    position, dim = 38, int(rng.integers(64))
    column, offset = divmod(position, 16)
    at = arguments[f"{where}_offset"] + offset * 64 + dim
    arguments["arena"][arguments["table"][column], at] = rng.choice([0x7F, 0xFF])
    run(device, arguments, cores, cut=False)
    found = np.isnan(bits_to_float(arguments["out"], "bfloat16"))
    assert not found[:2].any()
    assert found[2:, :, dim].all()
    if where == "value":
        assert found[2:].sum() == 2 * 4


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_prompt(seed: int, dtype: str) -> None:
    """A row of many tokens: the same kernel, whatever there may be for prompts in other dtypes."""
    device = InterpretedDevice((9, 0))
    arguments = in_fp8(seed, dtype=dtype, seq_lens=[70, 20], query_lens=[40, 1])
    given = mapped(device, arguments)
    cuda_kernels.paged_attention(**given)
    check(arguments)
    assert [launch.source for launch, _ in device.launched] == [TENSOR_KERNELS[FP8_E4M3, 64, 1]]


@needs_compiler
def test_queries_over_the_whole_range_of_bfloat16(seed: int) -> None:
    """Products are of float16, and yet large and small queries lose nothing that counts."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    for exponent in (-100, -20, 15, 40, 100):
        arguments = in_fp8(seed, seq_lens=[70], query_lens=[1])
        scaled = bits_to_float(arguments["query"], "bfloat16") * 2.0**exponent
        scaled[0, 1] *= 2.0 ** rng.uniform(-20, 0, 64)
        scaled[0, 2] = 0
        arguments["query"] = float_to_bits(scaled, "bfloat16")
        arguments["scale"] = 2.0 ** -(exponent + 3)
        run(device, arguments, "tensor", cut=False)
        check(arguments)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16"),
        ({"head_dim": 80, "value_dim": 80}, "one of"),
        ({"alignment": 8, "key_offset": 8}, "multiple of 16 bytes"),
    ],
)
def test_what_tensor_cores_cannot_do(seed: int, changes: dict[str, Any], why: str) -> None:
    offset = {"key_offset": changes.pop("key_offset")} if "key_offset" in changes else {}
    arguments = in_fp8(seed, **changes) | offset
    ((launch, _),) = test_attention_mma.on_recorder(arguments).launched
    assert launch.source in FP8_KERNELS["ordinary"].values()
    with pytest.raises(ValueError, match=f"'tensor'.*{why}"):
        test_attention_mma.on_recorder(arguments, cores="tensor")
