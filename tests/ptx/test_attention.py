"""Attention on ordinary cores: its real PTX, interpreted, against the float64 reference.

Poison is everywhere a token may not read: in unused frames, behind a row's end, between the
planes. Frames are permuted; lengths stand around the edges of blocks and tiles.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.attention import cuda_call
from cuda_kernels.attention.cuda_call import (
    KERNELS,
    MERGE_KERNELS,
    kernel_for,
    workspace_elements,
)
from cuda_kernels.attention.spec import SPEC, scale_of, stored_as
from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.dtypes import FP8_E4M3, STORAGE_DTYPES, bits_to_float
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import OutOfBounds
from tests.ptx.machine import Buffer

pytestmark = needs_compiler

SHAPES = {(9, 0): 9, (8, 0): 12}
MORE = int(os.environ.get("KVMEM_PTX_SHAPES", "1"))
NAMES = {storage.kind: name for name, storage in STORAGE_DTYPES.items()}
#: Every kernel for sm_90; for sm_80 one of each dtype, or all. fp8_e4m3: test_attention_fp8.py.
WHOLE = [key for key in KERNELS if key[0] != FP8_E4M3]
CASES = [((9, 0), key) for key in WHOLE]
CASES += [((8, 0), key) for key in WHOLE if key[1:] == (4, 128) or MORE > 1]


def label(value: object) -> str:
    return "_".join(map(str, value)) if isinstance(value, tuple) else str(value)


def near(rng: np.random.Generator, *edges: int) -> int:
    """A length at, just below or just above an edge."""
    return max(0, int(rng.choice(edges)) + int(rng.integers(-1, 2)))


def dtypes(rng: np.random.Generator, kind: int, *computed: str) -> dict[str, Any]:
    """The dtypes that a kernel is for; over fp8_e4m3 it is one for several dtypes of queries."""
    if kind == FP8_E4M3:
        return {"dtype": str(rng.choice(computed)), "kv_dtype": "fp8_e4m3"}
    return {"dtype": NAMES[kind]}


def draw(rng: np.random.Generator, key: tuple[int, int, int]) -> dict[str, Any]:
    """Arguments for which exactly one kernel is chosen, all rules drawn."""
    kind, heads, width = key
    group = heads * int(rng.choice([1, 3]))  # three blocks a KV head, or one
    if heads == 8 or rng.random() < 0.5:
        group = heads
    kv_heads = int(rng.integers(1, 3))
    least = {128: 1, 256: 129, 512: 257}[width]
    usual = [d for d in (64, 80, 96, 128, 192, 256, 512) if least <= d <= width]
    dims = [
        int(rng.choice(usual)) if rng.random() < 0.5 else int(rng.integers(least, width + 1))
        for _ in "kv"
    ]
    if width == 128 and rng.random() < 0.5:
        dims[1] = int(rng.integers(1, 129))
    block = int(rng.choice([1, 3, 16, 64]))
    rows = int(rng.integers(1, 4))
    # Wide kernels are slow here; longer rows would show nothing that four tiles don't.
    edges = (0, 1, block, 31, 32, 33, 64, *((128, 160) if width == 128 else ()))
    lens = [near(rng, *edges) for _ in range(rows)]
    news = [min(length, 1) if rng.random() < 0.7 else int(rng.integers(0, min(length, 4) + 1))
            for length in lens]  # fmt: skip
    news = [1 if length == 0 and rng.random() < 0.5 else n for n, length in zip(news, lens)]
    rules: dict[str, Any] = {}
    if rng.random() < 0.3:
        rules["window"] = int(rng.choice([1, 2, 31, 33, 100]))
    if rng.random() < 0.3:
        rules["softcap"] = float(rng.choice([5.0, 30.0]))
    if rng.random() < 0.3:
        rules["alibi"] = rng.random(group * kv_heads).astype(np.float32) * np.float32(0.1)
    if rng.random() < 0.3:
        rules["sinks"] = rng.normal(size=group * kv_heads).astype(np.float32)
    if rng.random() < 0.2:
        rules["scale"] = 0.3 / dims[0] ** 0.5
    return SPEC.make_inputs(
        rng,
        **dtypes(rng, kind, *STORAGE_DTYPES),
        seq_lens=lens,
        query_lens=news,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=dims[0],
        value_dim=dims[1],
        block_size=block,
        layout=str(rng.choice(["HND", "NHD"])),
        **rules,
    )  # type: ignore[no-any-return]


def mapped(device: InterpretedDevice, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays on a device; results are what nothing has written yet."""
    results = ("out", "lse")
    return {
        name: device.array(value, writable=name in results, initialised=name not in results)
        if isinstance(value, np.ndarray)
        else value
        for name, value in arguments.items()
    }


def workspace(device: InterpretedDevice, a: dict[str, Any]) -> dict[str, Any]:
    """Options that let rows be cut over blocks; nothing has written the memory yet."""
    num_tokens, num_heads, dims = a["out"].shape
    longest = int(a["seq_lens"].max(initial=0))
    count = workspace_elements(num_tokens, num_heads, dims, longest, a.get("window"))
    room = device.array(np.full(count, np.nan, np.float32), writable=True, initialised=False)
    return {"max_seq_len": longest, "workspace": room}


def split_by(monkeypatch: pytest.MonkeyPatch, tokens: int, blocks: int = 528) -> None:
    monkeypatch.setattr(cuda_call, "SPLIT_TOKENS", tokens)
    monkeypatch.setattr(cuda_call, "WANTED_BLOCKS", blocks)


def largest(a: dict[str, Any]) -> float:
    """max |V| of what rows may read, by which errors are measured."""
    values = bits_to_float(a["arena"], stored_as(a)) * scale_of(a, "value_scale").max()
    return float(np.abs(values[np.isfinite(values)]).max(initial=1.0))


def check(a: dict[str, Any]) -> None:
    """Results within the spec's tolerance; no NaN has come through."""
    out, lse = SPEC.reference(a)
    found = bits_to_float(a["out"], a["dtype"])
    assert np.isfinite(found).all()
    error = np.abs(found - out).max(initial=0)
    assert error <= SPEC.tolerance[a["dtype"]] * largest(a), error
    empty = np.isinf(lse)
    assert np.array_equal(np.isneginf(a["lse"]), empty)
    error = np.abs(a["lse"][~empty] - lse[~empty]).max(initial=0)
    assert error <= max(1e-4, 4e-7 * np.abs(lse[~empty]).max(initial=0)), error


@pytest.mark.parametrize(("capability", "key"), CASES, ids=label)
def test_attention(
    seed: int,
    capability: tuple[int, int],
    key: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one part, or in several that are merged; splits mostly shorter than what is shipped."""
    rng, device = np.random.default_rng(seed), InterpretedDevice(capability)
    for _ in range(SHAPES[capability] * MORE):
        device.clear()
        split_by(monkeypatch, int(rng.choice([64, 512])))
        arguments = draw(rng, key)
        integers = (np.int32, np.int64)[int(rng.integers(2))]
        for name in ("table_start", "seq_lens", "query_start"):
            arguments[name] = arguments[name].astype(integers)
        given = mapped(device, arguments)
        options = workspace(device, arguments) if rng.random() < 0.4 else {}
        cuda_kernels.paged_attention(**given, cores="ordinary", **options)
        check(arguments)
        for (launch, _), source in zip(device.launched, (KERNELS[key], MERGE_KERNELS[key[0]])):
            assert launch.source is source


@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_a_row_alone_and_in_a_batch(seed: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: a token's result hangs on its own row, not on frames, block size or parts."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    shape = {"dtype": dtype, "num_heads": 4, "num_kv_heads": 1, "head_dim": 32, "value_dim": 32}
    batch = SPEC.make_inputs(
        rng, seq_lens=[70, 200, 5], query_lens=[1, 3, 1], block_size=16, **shape
    )
    alone = SPEC.make_inputs(rng, seq_lens=[200], query_lens=[3], block_size=64, **shape)
    frames = batch["table"][batch["table_start"][1] :][:13]
    for offset in ("key_offset", "value_offset"):
        rows = batch["arena"][frames, batch[offset] : batch[offset] + 16 * 32].reshape(-1, 32)[:200]
        own = np.full((4 * 64, 32), rows[0, 0])
        own[:200] = rows
        alone["arena"][alone["table"], alone[offset] : alone[offset] + 64 * 32] = own.reshape(4, -1)
    alone["query"] = batch["query"][1:4]
    split_by(monkeypatch, 64)
    for arguments, cut in ((batch, False), (alone, True)):
        device.clear()
        given = mapped(device, arguments)
        options = workspace(device, arguments) if cut else {}
        cuda_kernels.paged_attention(**given, cores="ordinary", **options)
    assert [launch.grid[2] for launch, _ in device.launched] == [4, 1]
    assert np.array_equal(batch["out"][1:4], alone["out"])
    assert np.array_equal(batch["lse"][1:4], alone["lse"])


def test_frames_far_apart(seed: int) -> None:
    """Case 71: frame ids times strides pass 2**31 and 2**32; index arithmetic is int64."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    arguments = SPEC.make_inputs(
        rng, dtype="bfloat16", seq_lens=[50], query_lens=[1], num_heads=4, num_kv_heads=1,
        head_dim=64, value_dim=64, block_size=16,
    )  # fmt: skip
    arena, base, stride = arguments["arena"], 1 << 44, 3 * 2**30 + 4096
    given = mapped(device, arguments | {"arena": None})
    for i, frame in enumerate(arena):
        device.buffers.append(Buffer(f"frame {i}", base + i * stride, frame))
    given["arena"] = DeviceArray(base, arena.shape, arena.dtype, device, (stride, 2))
    cuda_kernels.paged_attention(**given, check=False, cores="ordinary")
    check(arguments)


def test_a_frame_id_past_the_arena_is_found(seed: int) -> None:
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    arguments = draw(rng, (0, 1, 128)) | {"window": None}
    while arguments["table"].size == 0 or arguments["query_start"][-1] == 0:
        arguments = draw(rng, (0, 1, 128)) | {"window": None}
    arguments["table"][:] = arguments["arena"].shape[0] + 1000
    rows = np.flatnonzero((np.diff(arguments["query_start"]) > 0) & (arguments["seq_lens"] > 0))
    if rows.size == 0:
        pytest.skip("no row reads anything")
    with pytest.raises(OutOfBounds):
        cuda_kernels.paged_attention(**mapped(device, arguments), cores="ordinary")


def test_which_kernel_is_chosen() -> None:
    assert kernel_for(1, 4, 128) == (1, 4, 128)
    assert kernel_for(1, 12, 64) == (1, 4, 128)
    assert kernel_for(0, 71, 64) == (0, 1, 128)
    assert kernel_for(2, 16, 96) == (2, 8, 128)
    assert kernel_for(2, 16, 256) == (2, 4, 256)
    assert kernel_for(2, 8, 257) == (2, 1, 512)
    with pytest.raises(ValueError, match="at most 512"):
        kernel_for(0, 1, 513)
