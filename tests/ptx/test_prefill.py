"""Attention of prompts on tensor cores: the real PTX, interpreted, against the float64 reference.

As in `test_attention.py`, poison is everywhere a token may not read. Rows with few tokens go to the
kernel for decode in the same call.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.attention import cuda_call
from cuda_kernels.attention.cuda_call import PROMPT_KERNELS, PROMPT_TOKENS
from cuda_kernels.attention.spec import SPEC
from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.dtypes import BFLOAT16, FLOAT16, bits_to_float
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import OutOfBounds
from tests.ptx.machine import Buffer
from tests.ptx.test_attention import NAMES, check, label, largest, mapped, near, split_by
from tests.ptx.test_attention_mma import attend, on_recorder

SHAPES = {(9, 0): 26, (8, 0): 16}
MORE = int(os.environ.get("KVMEM_PTX_SHAPES", "1"))
#: Every kernel for sm_90; for sm_80 two, or all.
CASES = [((9, 0), key) for key in PROMPT_KERNELS]
SOME = ((BFLOAT16, 128), (FLOAT16, 64))
CASES += [((8, 0), key) for key in PROMPT_KERNELS if key in SOME or MORE > 1]


def draw(rng: np.random.Generator, key: tuple[int, int]) -> dict[str, Any]:
    """A batch with at least one prompt, all rules drawn; prompts mostly continue a prefix."""
    kind, dims = key
    group = int(rng.choice([1, 2, 3, 4, 4, 6, 8, 16])) if rng.random() < 0.97 else 71
    kv_heads = int(rng.integers(1, 3)) if group < 4 else 1
    block = int(rng.choice([16, 16, 32, 48, 64]))
    tokens = 64 // group if group < 64 else 1
    many = (tokens, 32, 33, 48) if group < 16 else ()  # many heads take a block for each few tokens
    lens, news = [], []
    for i in range(int(rng.integers(1, 3))):
        new = near(rng, PROMPT_TOKENS, 17, *many)
        new = max(new, PROMPT_TOKENS) if i == 0 else new
        old = near(rng, 0, 0, 1, 31, 32, block, 65)
        lens.append(new + old)
        news.append(new)
        kinds = rng.random()
        if kinds < 0.3:  # a row that decodes, or verifies a draft
            lens.append(near(rng, 1, 16, 64, 70) + 1)
            news.append(min(lens[-1], int(rng.integers(1, 5))))
        elif kinds < 0.4:  # nothing to compute, or nothing to attend to
            lens.append(int(rng.choice([0, 20])))
            news.append(int(rng.choice([1, PROMPT_TOKENS + 2])) if lens[-1] == 0 else 0)
    order = rng.permutation(len(lens))
    rules: dict[str, Any] = {}
    if rng.random() < 0.35:
        rules["window"] = int(rng.choice([1, 2, 17, 32, 64, 100, 2**40]))
    if rng.random() < 0.3:
        rules["softcap"] = float(rng.choice([5.0, 30.0]))
    if rng.random() < 0.3:
        rules["alibi"] = rng.random(group * kv_heads).astype(np.float32) * np.float32(0.1)
    if rng.random() < 0.3:
        rules["sinks"] = rng.normal(size=group * kv_heads).astype(np.float32)
    if rng.random() < 0.4:  # large scores: few positions have all the weight, and maxima rise far
        rules["scale"] = float(rng.choice([0.3 / dims**0.5, 1.0]))
    return SPEC.make_inputs(
        rng,
        dtype=NAMES[kind],
        seq_lens=[lens[i] for i in order],
        query_lens=[news[i] for i in order],
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=dims,
        value_dim=dims,
        block_size=block,
        layout=str(rng.choice(["HND", "NHD"])),
        alignment=8,
        **rules,
    )  # type: ignore[no-any-return]


@needs_compiler
@pytest.mark.parametrize(("capability", "key"), CASES, ids=label)
def test_prompts(
    seed: int, capability: tuple[int, int], key: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, device = np.random.default_rng(seed), InterpretedDevice(capability)
    for _ in range(SHAPES[capability] * MORE):
        split_by(monkeypatch, 64)
        arguments = draw(rng, key)
        integers = (np.int32, np.int64)[int(rng.integers(2))]
        for name in ("table_start", "seq_lens", "query_start"):
            arguments[name] = arguments[name].astype(integers)
        attend(device, arguments, cut=rng.random() < 0.3)
        check(arguments)
        sources = [launch.source for launch, _ in device.launched]
        assert sources.count(PROMPT_KERNELS[key]) == 1


def usual(rng: np.random.Generator, **changes: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "dtype": "bfloat16", "seq_lens": [100], "query_lens": [40], "num_heads": 4,
        "num_kv_heads": 1, "head_dim": 64, "value_dim": 64, "block_size": 16, "alignment": 8,
    }  # fmt: skip
    return SPEC.make_inputs(rng, **(shape | changes))  # type: ignore[no-any-return]


def part(arguments: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Some of the tokens of a call's only row, as a step of their own."""
    length = int(arguments["seq_lens"][0]) - int(arguments["query_start"][1]) + last
    return arguments | {
        "query": arguments["query"][first:last].copy(),
        "out": np.full_like(arguments["out"][first:last], 0xFFFF),
        "lse": np.full_like(arguments["lse"][first:last], np.nan),
        "seq_lens": np.array([length]),
        "query_start": np.array([0, last - first]),
    }


def same(one: dict[str, Any], other: dict[str, Any], tokens: slice = slice(None)) -> bool:
    """Whether results have the same bits; `tokens` of the first."""
    return one["out"][tokens].tobytes() == other["out"].tobytes() and (
        one["lse"][tokens].tobytes() == other["lse"].tobytes()
    )


RULES: list[dict[str, Any]] = [
    {},
    {"window": 37, "num_heads": 3, "alibi": np.array([0.1, 0.2, 0.0], np.float32)},
    {"softcap": 20.0, "num_heads": 5, "sinks": np.arange(5, dtype=np.float32)},
]


@needs_compiler
@pytest.mark.parametrize("rules", RULES, ids=["plain", "window", "softcap"])
def test_the_same_bits_however_a_prompt_is_cut(seed: int, rules: dict[str, Any]) -> None:
    """As long as each step has so many tokens that it counts as a prompt."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    length = 140
    whole = usual(rng, seq_lens=[length], query_lens=[length], **rules)
    attend(device, whole)
    check(whole)
    for _ in range(3):
        cuts = np.sort(rng.choice(np.arange(1, 8), 3, replace=False)) * 16
        cuts = [0, *(cuts + rng.integers(0, 4, 3).cumsum()), length]
        for first, last in pairwise(cuts):
            step = part(whole, int(first), int(last))
            attend(device, step)
            assert same(whole, step, slice(first, last)), (first, last)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_prompt_alone_and_in_a_batch(seed: int, dtype: str) -> None:
    """Bit for bit: other rows, frames, block size, layout; and the rows that decode beside it."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    lens, news = [90, 150, 5, 70, 33], [1, 60, 5, 3, 20]
    batch = usual(rng, dtype=dtype, seq_lens=lens, query_lens=news)
    attend(device, batch)
    check(batch)
    for row, (length, new) in enumerate(zip(lens, news)):
        alone = usual(rng, dtype=dtype, seq_lens=[length], query_lens=[new], block_size=64,
                      layout="NHD")  # fmt: skip
        count = -(-length // 16)
        frames = batch["table"][batch["table_start"][row] :][:count]
        blocks = -(-length // 64)
        for offset in ("key_offset", "value_offset"):
            rows = batch["arena"][frames, batch[offset] : batch[offset] + 16 * 64]
            own = np.full((blocks * 64, 64), 0xFFFF, np.uint16)
            own[:length] = rows.reshape(-1, 64)[:length]
            place = slice(alone[offset], alone[offset] + 64 * 64)
            alone["arena"][alone["table"], place] = own.reshape(blocks, -1)
        tokens = slice(batch["query_start"][row], batch["query_start"][row + 1])
        alone["query"] = batch["query"][tokens].copy()
        attend(device, alone, cut=True)
        assert same(batch, alone, tokens), row


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_that_are_not_finite(seed: int, dtype: str) -> None:
    """They reach the tokens that attend to them, in the dims that have them; others by no bit."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    window, length, new = 24, 120, 90
    clean = usual(
        rng, dtype=dtype, seq_lens=[length], query_lens=[new], window=window,
    )  # fmt: skip
    attend(device, clean)
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00}[dtype]
    for _ in range(4):
        place, dim = int(rng.integers(length - new, length)), int(rng.integers(64))
        bits = int(rng.choice([infinity, infinity | 0x8000, infinity + 1, 0xFFFF]))
        odd = part(clean, 0, new) | {"arena": clean["arena"].copy()}
        frame, slot = clean["table"][place // 16], place % 16
        odd["arena"][frame, clean["value_offset"] + slot * 64 + dim] = bits
        attend(device, odd)
        positions = np.arange(length - new, length)
        reached = (positions >= place) & (positions < place + window)
        assert reached.any()
        found, right = (bits_to_float(a["out"], dtype) for a in (odd, clean))
        assert not np.isfinite(found[reached][:, :, dim]).any()
        found[reached, :, dim] = right[reached, :, dim] = 0
        assert np.array_equal(found, right), (place, dim, hex(bits))
        assert np.array_equal(odd["lse"], clean["lse"])
        # In K: the tokens that attend to it have no result at all.
        odd = part(clean, 0, new) | {"arena": clean["arena"].copy()}
        odd["arena"][frame, clean["key_offset"] + slot * 64 + dim] = 0xFFFF
        attend(device, odd)
        found = bits_to_float(odd["out"], dtype)
        assert np.isnan(found[reached]).all()
        assert np.array_equal(odd["out"][~reached], clean["out"][~reached])


@needs_compiler
def test_both_kernels_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the one for decode makes of the same prompt; they round differently."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    prompt = usual(rng, head_dim=96, value_dim=96, softcap=20.0)
    attend(device, prompt)
    decoded = part(prompt, 0, 40)
    monkeypatch.setattr(cuda_call, "PROMPT_TOKENS", 41)
    attend(device, decoded)
    assert [launch.source.maker for launch, _ in device.launched] == ["attend"]
    found, other = (bits_to_float(a["out"], "bfloat16") for a in (prompt, decoded))
    assert np.abs(found - other).max() <= SPEC.tolerance["bfloat16"] * largest(prompt)
    assert not np.array_equal(found, other)


@needs_compiler
def test_results_of_any_strides(seed: int) -> None:
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    given = usual(rng, dtype="float16")
    attend(device, given)
    for shape, view in (
        ((40, 4, 65), lambda a: a[:, :, 1:]),
        ((64, 4, 40), lambda a: a.transpose(2, 1, 0)),
        ((4, 40, 66), lambda a: a.transpose(1, 0, 2)[:, :, 2:]),
    ):
        strided = part(given, 0, 40)
        strided["out"] = view(np.full(shape, 0xFFFF, np.uint16))
        device.clear()
        cuda_kernels.paged_attention(**mapped(device, strided), cores="tensor")
        assert np.array_equal(strided["out"], given["out"])
    without = part(given, 0, 40) | {"lse": None}
    device.clear()
    cuda_kernels.paged_attention(**mapped(device, without), cores="tensor")
    assert np.array_equal(without["out"], given["out"])


@needs_compiler
def test_frames_far_apart(seed: int) -> None:
    """Case 71: frame ids times strides pass 2**31 and 2**32; index arithmetic is int64."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    arguments = usual(rng, seq_lens=[50], query_lens=[30])
    arena, base, stride = arguments["arena"], 1 << 44, 3 * 2**30 + 4096
    given = mapped(device, arguments | {"arena": None})
    for i, frame in enumerate(arena):
        device.buffers.append(Buffer(f"frame {i}", base + i * stride, frame))
    given["arena"] = DeviceArray(base, arena.shape, arena.dtype, device, (stride, 2))
    cuda_kernels.paged_attention(**given, check=False, cores="tensor")
    check(arguments)


@needs_compiler
def test_a_table_is_read_where_tokens_attend(seed: int) -> None:
    """A bad frame id is found; before a window's begin there may be any."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    arguments = usual(rng, seq_lens=[100], query_lens=[20], window=5)
    first = (80 - 4) // 16
    arguments["table"][:first] = 1 << 30
    attend(device, arguments)
    whole = part(arguments, 0, 20)
    arguments["table"][first] = 1 << 30
    with pytest.raises(OutOfBounds):
        attend(device, whole)


def test_when_there_are_prompts(seed: int) -> None:
    """What is launched hangs on sizes and on what the caller says, and grids on neither rows."""
    rng = np.random.default_rng(seed)

    def launches(query_lens: list[int], **options: Any) -> list[tuple[str, tuple[int, ...]]]:
        dims = options.pop("dims", 64)
        arguments = usual(rng, seq_lens=query_lens, query_lens=query_lens, head_dim=dims,
                          value_dim=dims, num_heads=options.pop("heads", 4))  # fmt: skip
        found = on_recorder(arguments, **options).launched
        return [(launch.source.maker, launch.grid) for launch, _ in found]

    both = [("attend", (40, 1, 1)), ("attend_prompts", (40 // 16 + 2, 1, 1))]
    assert launches([30, 10]) == both
    assert launches([20, 20], max_query_len=20) == both
    assert launches([30, 10], max_query_len=PROMPT_TOKENS) == both
    assert launches([15]) == [("attend", (15, 1, 1))]
    assert launches([1] * 40, max_query_len=1) == [("attend", (40, 1, 1))]
    assert launches([40], dims=256) == [("attend", (40, 1, 1))]
    assert launches([40], cores="ordinary") == [("attend", (40, 1, 1))]
    assert launches([40], heads=1)[1] == ("attend_prompts", (0 + 1, 1, 1))
    assert launches([40], heads=71)[1] == ("attend_prompts", (40 + 1, 2, 1))
    assert launches([40], window=2**40)[1][0] == "attend_prompts"
    with pytest.raises(ValueError, match="max_query_len must be"):
        launches([40], max_query_len=-1)
