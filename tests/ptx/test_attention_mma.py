"""Attention on tensor cores: the real PTX, interpreted, against the float64 reference.

As in `test_attention.py`, poison is everywhere a token may not read. Splits are mostly made shorter
than what is shipped, by an argument of the same kernels: so small shapes have many of them.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.attention import cuda_call
from cuda_kernels.attention.cuda_call import (
    MERGE_KERNELS,
    TENSOR_KERNELS,
    tensor_kernel_for,
    workspace_elements,
)
from cuda_kernels.attention.spec import SPEC
from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, FP8_E4M3, bits_to_float
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import OutOfBounds
from tests.ptx.machine import Buffer
from tests.ptx.test_attention import (
    NAMES,
    check,
    dtypes,
    label,
    largest,
    mapped,
    near,
    split_by,
    workspace,
)

SHAPES = {(9, 0): 16, (8, 0): 16}
MORE = int(os.environ.get("KVMEM_PTX_SHAPES", "1"))
#: Every kernel for sm_90; for sm_80 two, or all. fp8_e4m3: test_attention_fp8.py.
WHOLE = [key for key in TENSOR_KERNELS if key[0] != FP8_E4M3]
CASES = [((9, 0), key) for key in WHOLE]
SOME = ((BFLOAT16, 128, 2), (FLOAT16, 64, 1))
CASES += [((8, 0), key) for key in WHOLE if key in SOME or MORE > 1]


def draw(rng: np.random.Generator, key: tuple[int, int, int], split: int) -> dict[str, Any]:
    """Arguments for which one kernel is chosen, all rules drawn."""
    kind, dims, tiles = key
    group = int(rng.integers(1, 9)) + 8 * (tiles - 1)
    if dims != 128 or tiles == 2:  # sometimes several blocks a KV head, the last with fewer heads
        group += 8 * tiles * int(rng.random() < 0.25)
    kv_heads = int(rng.integers(1, 3))
    block = int(rng.choice([16, 32, 64, 128]))
    edges = (0, 1, 15, 16, 33, block, 64, split)
    if split < 512:
        edges += (2 * split, 3 * split)
    lens = [near(rng, *edges) for _ in range(int(rng.integers(1, 5)))]
    news = [min(length, 1) if rng.random() < 0.7 else int(rng.integers(0, min(length, 3) + 1))
            for length in lens]  # fmt: skip
    news = [1 if length == 0 and rng.random() < 0.5 else n for n, length in zip(news, lens)]
    if not any(news):
        lens, news = [*lens, split + 1], [*news, 1]
    rules: dict[str, Any] = {}
    if rng.random() < 0.3:
        rules["window"] = int(rng.choice([1, 2, 17, 64, 100]))
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
        **dtypes(rng, kind, "bfloat16", "float16"),
        seq_lens=lens,
        query_lens=news,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=dims,
        value_dim=dims,
        block_size=block,
        layout=str(rng.choice(["HND", "NHD"])),
        alignment=16 if kind == FP8_E4M3 else 8,
        **rules,
    )  # type: ignore[no-any-return]


def attend(device: InterpretedDevice, a: dict[str, Any], *, cut: bool = False) -> None:
    """Run a call on tensor cores; everything that belongs to a row's tokens gets written."""
    device.clear()
    given = mapped(device, a)
    options = workspace(device, a) if cut else {}
    cuda_kernels.paged_attention(**given, cores="tensor", **options)
    for name in ("out", "lse"):
        (buffer,) = (b for b in device.buffers if b.address == given[name].address)
        assert buffer.known is not None and buffer.known.all(), name


@needs_compiler
@pytest.mark.parametrize(("capability", "key"), CASES, ids=label)
def test_attention(
    seed: int,
    capability: tuple[int, int],
    key: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, device = np.random.default_rng(seed), InterpretedDevice(capability)
    for _ in range(SHAPES[capability] * MORE):
        split = int(rng.choice([64, 64, 128, 512]))
        split_by(monkeypatch, split, int(rng.choice([16, 528])))
        arguments = draw(rng, key, split)
        integers = (np.int32, np.int64)[int(rng.integers(2))]
        for name in ("table_start", "seq_lens", "query_start"):
            arguments[name] = arguments[name].astype(integers)
        attend(device, arguments, cut=rng.random() < 0.6)
        check(arguments)
        (first, _), *rest = device.launched
        assert first.source is TENSOR_KERNELS[key]
        assert [launch.source for launch, _ in rest] == [MERGE_KERNELS[key[0]]] * len(rest)
        assert bool(rest) == (first.grid[2] > 1)


@needs_compiler
@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16])
def test_the_same_bits_however_rows_are_cut(
    seed: int, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part, two, three or one for each split; also with a window and with sinks."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    for rules in ({}, {"window": 150, "sinks": rng.normal(size=4).astype(np.float32)}):
        arguments = SPEC.make_inputs(
            rng, dtype=NAMES[kind], seq_lens=[300, 64, 0, 65], query_lens=[2, 1, 1, 1],
            num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, block_size=32, alignment=8,
            **rules,
        )  # fmt: skip
        found = set()
        for parts, wanted in ((1, 10), (2, 20), (3, 30), (5, 50)):
            split_by(monkeypatch, 64, wanted)
            attend(device, arguments, cut=True)
            most = 4 if rules else 5
            assert device.launched[0][0].grid == (5, 2, min(parts, most))
            found.add(arguments["out"].tobytes() + arguments["lse"].tobytes())
        assert len(found) == 1
        check(arguments)


@needs_compiler
def test_a_row_alone_and_in_a_batch(seed: int) -> None:
    """Bit for bit, with the splits that are shipped: rows, frames, block size, layout, parts."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    dims, length = 64, 600
    shape = {
        "dtype": "bfloat16", "num_heads": 4, "num_kv_heads": 1, "head_dim": dims,
        "value_dim": dims, "alignment": 8,
    }  # fmt: skip
    batch = SPEC.make_inputs(
        rng, seq_lens=[70, length, 5], query_lens=[1, 3, 1], block_size=16, **shape
    )
    alone = SPEC.make_inputs(rng, seq_lens=[length], query_lens=[1], block_size=128, **shape)
    frames = batch["table"][batch["table_start"][1] :][: -(-length // 16)]
    for offset in ("key_offset", "value_offset"):
        rows = batch["arena"][frames, batch[offset] : batch[offset] + 16 * dims]
        own = np.full((5 * 128, dims), batch["out"][0, 0, 0])
        own[:length] = rows.reshape(-1, dims)[:length]
        place = slice(alone[offset], alone[offset] + 128 * dims)
        alone["arena"][alone["table"], place] = own.reshape(5, -1)
    alone["query"] = batch["query"][3:4].copy()
    attend(device, batch)
    attend(device, alone, cut=True)
    assert device.launched[0][0].grid == (1, 1, 2)
    assert np.array_equal(batch["out"][3], alone["out"][0])
    assert np.array_equal(batch["lse"][3], alone["lse"][0])


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_two_kernels_agree(seed: int, dtype: str) -> None:
    """Each is the other's second opinion; they round differently."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    arguments = SPEC.make_inputs(
        rng, dtype=dtype, seq_lens=[130, 1, 77], query_lens=[1, 1, 2], num_heads=8,
        num_kv_heads=2, head_dim=64, value_dim=64, block_size=16, alignment=8, softcap=20.0,
    )  # fmt: skip
    found = []
    for cores in ("tensor", "ordinary"):
        device.clear()
        cuda_kernels.paged_attention(**mapped(device, arguments), cores=cores)
        assert (device.launched[0][0].source in TENSOR_KERNELS.values()) == (cores == "tensor")
        found.append(bits_to_float(arguments["out"], dtype))
    assert np.abs(found[0] - found[1]).max() <= SPEC.tolerance[dtype] * largest(arguments)
    assert not np.array_equal(*found)


@needs_compiler
def test_frames_far_apart(seed: int) -> None:
    """Case 71: frame ids times strides pass 2**31 and 2**32; index arithmetic is int64."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    arguments = SPEC.make_inputs(
        rng, dtype="bfloat16", seq_lens=[50], query_lens=[1], num_heads=4, num_kv_heads=1,
        head_dim=64, value_dim=64, block_size=16, alignment=8,
    )  # fmt: skip
    arena, base, stride = arguments["arena"], 1 << 44, 3 * 2**30 + 4096
    given = mapped(device, arguments | {"arena": None})
    for i, frame in enumerate(arena):
        device.buffers.append(Buffer(f"frame {i}", base + i * stride, frame))
    given["arena"] = DeviceArray(base, arena.shape, arena.dtype, device, (stride, 2))
    cuda_kernels.paged_attention(**given, check=False, cores="tensor")
    check(arguments)


@needs_compiler
def test_a_frame_id_past_the_arena_is_found(seed: int) -> None:
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    arguments = draw(rng, (BFLOAT16, 64, 1), 64) | {"seq_lens": np.array([20])}
    arguments |= {"query_start": np.array([0, arguments["query"].shape[0]])}
    arguments["table"] = np.full(8, arguments["arena"].shape[0] + 1000, np.int32)
    arguments["table_start"] = np.array([0])
    with pytest.raises(OutOfBounds):
        cuda_kernels.paged_attention(**mapped(device, arguments), cores="tensor")


# -- which kernel, and what is refused -------------------------------------------------------------


class Recorder:
    """A device that only notes what it is asked to launch."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def launch(self, launch: Any, stream: int) -> None:
        self.launched.append((launch, stream))


def on_recorder(arguments: dict[str, Any], **options: Any) -> Recorder:
    device = Recorder()
    address = iter(range(1 << 20, 1 << 30, 1 << 20))
    given: dict[str, Any] = {
        name: DeviceArray(next(address), value.shape, value.dtype, device, value.strides)
        if isinstance(value, np.ndarray)
        else value
        for name, value in arguments.items()
    }
    for name, change in options.items():
        if callable(change):
            given[name] = change(given.get(name), device)
        else:
            given[name] = change
    cuda_kernels.paged_attention(**given)
    return device


def usual(seed: int, **changes: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "dtype": "bfloat16", "seq_lens": [70], "query_lens": [1], "num_heads": 4,
        "num_kv_heads": 1, "head_dim": 64, "value_dim": 64, "block_size": 16, "alignment": 8,
    }  # fmt: skip
    return SPEC.make_inputs(np.random.default_rng(seed), **(shape | changes))  # type: ignore[no-any-return]


def test_which_kernel_is_chosen() -> None:
    assert tensor_kernel_for(BFLOAT16, 1, 128) == (BFLOAT16, 128, 1)
    assert tensor_kernel_for(BFLOAT16, 8, 64) == (BFLOAT16, 64, 1)
    assert tensor_kernel_for(FLOAT16, 9, 128) == (FLOAT16, 128, 2)
    assert tensor_kernel_for(FLOAT16, 71, 64) == (FLOAT16, 64, 1)
    assert tensor_kernel_for(FLOAT16, 16, 256) == (FLOAT16, 256, 1)
    assert tensor_kernel_for(BFLOAT16, 4, 80) is None
    assert tensor_kernel_for(FLOAT32, 4, 64) is None


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({"dtype": "float32"}, {}, "bfloat16 or float16"),
        ({"head_dim": 80, "value_dim": 80}, {}, "one of"),
        ({"value_dim": 128}, {}, "head_dim = value_dim"),
        ({"block_size": 24}, {}, "block_size 24"),
        ({}, {"key_offset": 4}, "multiple of 16 bytes"),
        (
            {},
            {"query": lambda q, d: DeviceArray(q.address + 2, q.shape, q.dtype, d, q.strides)},
            "multiple of 16 bytes",
        ),
        (
            {},
            {"query": lambda q, d: DeviceArray(q.address, q.shape, q.dtype, d, (4096, 1024, 16))},
            "multiple of 16 bytes",
        ),
        ({}, {"cores": "ordinary"}, None),
    ],
)
def test_what_tensor_cores_cannot_do(
    seed: int, changes: dict[str, Any], options: dict[str, Any], why: str | None
) -> None:
    """Ordinary cores do it, unless tensor cores are insisted on."""
    arguments = usual(seed, **changes)
    ((launch, _),) = on_recorder(arguments, **options).launched
    assert launch.source in cuda_call.KERNELS.values()
    if why:
        with pytest.raises(ValueError, match=f"'tensor'.*{why}"):
            on_recorder(arguments, **options | {"cores": "tensor"})


def test_when_rows_are_cut(seed: int) -> None:
    """With a workspace, and as far as the tokens don't fill the processors by themselves."""

    def launches(seq_lens: list[int], longest: int | None, room: int | None) -> list[Any]:
        options: dict[str, Any] = {"max_seq_len": longest, "stream": 7, "max_query_len": 1}
        if room is not None:
            options["workspace"] = lambda _, device: DeviceArray(
                1 << 40, (room,), np.dtype(np.float32), device
            )
        short = usual(seed, seq_lens=[1] * len(seq_lens), query_lens=[1] * len(seq_lens))
        found = on_recorder(short, **options).launched
        assert {stream for _, stream in found} == {7}
        return [launch.grid for launch, _ in found]

    room = workspace_elements(1, 4, 64, 4096)
    assert room == 4 * 8 * 66
    assert launches([4096], 4096, room) == [(1, 1, 8), (1, 4, 1)]
    assert launches([4096], 4096, None) == [(1, 1, 1)]
    assert launches([4096], None, room) == [(1, 1, 1)]
    assert launches([400], 512, room) == [(1, 1, 1)]
    assert launches([600] * 200, 4096, 200 * room) == [(200, 1, 2), (200, 4, 1)]
    assert launches([600] * 300, 4096, 0) == [(300, 1, 1)]
    with pytest.raises(ValueError, match=rf"workspace has {room - 1} elements; {room} are needed"):
        launches([4096], 4096, room - 1)


def test_splits_that_a_window_touches() -> None:
    split = cuda_call.SPLIT_TOKENS
    for window in (1, 2, split - 1, split, split + 1, split + 2, 3 * split):
        touched = max(
            last // split - max(0, last - window + 1) // split + 1 for last in range(6 * split)
        )
        assert cuda_call.num_splits(6 * split, window) == touched
    assert cuda_call.num_splits(0, 0) == 1
    assert cuda_call.num_splits(split + 1, 0) == 2


def test_bad_options(seed: int) -> None:
    arguments = usual(seed)
    with pytest.raises(ValueError, match="cores must be"):
        on_recorder(arguments, cores="fast")
    with pytest.raises(ValueError, match="max_seq_len must be"):
        on_recorder(arguments, max_seq_len=-1)
    with pytest.raises(TypeError, match="workspace must be a DeviceArray"):
        on_recorder(arguments, workspace=np.zeros(9, np.float32))
    with pytest.raises(TypeError, match="workspace must have dtype float32"):
        on_recorder(
            arguments, workspace=lambda _, d: DeviceArray(1 << 40, (9,), np.dtype(np.int32), d)
        )
