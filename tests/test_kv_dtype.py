"""`Config(kv_dtype="fp8_e4m3")` end to end: sizes, bits stored, swaps, copies, an engine."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from kvmem.sim_options import MODES, SimOptions
from kvmem.stress import StressOptions, run_stress
from tests.sim.test_engine import answers
from tests.test_zero_on_free import settle

FP8 = torch.float8_e4m3fn
LAYERS, HEADS, HEAD_DIM, VALUE_DIM, BLOCK = 2, 2, 24, 40, 8
K_SCALE = torch.tensor([[0.5, 0.01], [0.25, 0.125]])
V_SCALE = [0.75, 0.3]  # of both layers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def config(**changes: Any) -> kvmem.Config:
    settings: dict[str, Any] = {
        "num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": HEAD_DIM,
        "v_head_dim": VALUE_DIM, "block_size": BLOCK, "device_blocks": 8, "host_blocks": 16,
        "kv_dtype": "fp8_e4m3", "k_scale": K_SCALE, "v_scale": V_SCALE, "debug": True,
    }  # fmt: skip
    return kvmem.Config(**(settings | changes))


def scales(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one layer: ``[heads, 1]``."""
    return K_SCALE[layer][:, None], torch.tensor(V_SCALE)[:, None]


class Rows:
    """Drawn K, V and queries of sequences, by layer and position, and what they give."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.numbers = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.written: dict[int, list[list[torch.Tensor]]] = {}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.numbers).to(self.dtype)

    def of(self, seq: kvmem.Sequence) -> list[list[torch.Tensor]]:
        """K and V of each layer as they must be stored, in fp8_e4m3."""
        empty = [[torch.zeros(0, HEADS, n).to(FP8) for n in (HEAD_DIM, VALUE_DIM)]] * LAYERS
        return self.written.setdefault(seq.id, empty)

    def step(self, manager: kvmem.Manager, seqs: list[kvmem.Sequence]) -> float:
        """Compute what is pending; the largest error of attention, in float64, against what is
        stored, relative to max |V|."""
        worst = 0.0
        with manager.step(seqs) as step:
            starts = step.query_start.tolist()
            for layer in range(LAYERS):
                key = self.draw(step.num_tokens, HEADS, HEAD_DIM)
                value = self.draw(step.num_tokens, HEADS, VALUE_DIM)
                query = self.draw(step.num_tokens, 2 * HEADS, HEAD_DIM)
                step.write(layer, key, value)
                out = step.attend(layer, query)
                assert isinstance(out, torch.Tensor)
                assert out.dtype == self.dtype
                for row, seq in enumerate(step.seqs):
                    tokens = slice(starts[row], starts[row + 1])
                    more = [
                        (rows[tokens].float() / by).to(FP8)
                        for rows, by in zip((key, value), scales(layer), strict=True)
                    ]
                    before = self.of(seq)
                    both = [
                        torch.cat([old.view(torch.uint8), new.view(torch.uint8)]).view(FP8)
                        for old, new in zip(before[layer], more, strict=True)
                    ]
                    self.written[seq.id] = [*before[:layer], both, *before[layer + 1 :]]
                    found = out[tokens].double()
                    error = (found - self.attended(seq, layer, query[tokens])).abs().max()
                    worst = max(worst, float(error))
        return worst / 4

    def attended(self, seq: kvmem.Sequence, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Dense causal attention over what is stored, in float64."""
        key, value = (
            (rows.double() * by).transpose(0, 1).repeat_interleave(2, 0)
            for rows, by in zip(self.of(seq)[layer], scales(layer), strict=True)
        )
        count, length = len(query), key.shape[1]
        scores = query.double().transpose(0, 1) @ key.transpose(1, 2) * HEAD_DIM**-0.5
        ahead = torch.ones(count, length).tril(length - count) == 0
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return (weights @ value).transpose(0, 1)

    def check(self, manager: kvmem.Manager, seq: kvmem.Sequence) -> None:
        """Every block of the sequence holds these bits, on the device or on the host."""
        for number, block_id in enumerate(seq.block_ids):
            block = manager.block(block_id)
            tokens = slice(number * BLOCK, (number + 1) * BLOCK)
            for layer in range(LAYERS):
                if block.frame_ids[0]:
                    pair = block.k_data(layer), block.v_data(layer)
                else:
                    pair = block.host_data(layer)
                for view, rows in zip(pair, self.of(seq)[layer], strict=True):
                    wanted = rows[tokens].view(torch.uint8)
                    assert view.dtype == FP8
                    assert torch.equal(view.view(torch.uint8)[: len(wanted)], wanted)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_takes_a_byte(dtype: torch.dtype) -> None:
    made = config(dtype=dtype)
    assert (made.dtype, made.kv_dtype, made.kv_dtype_name) == (dtype, FP8, "fp8_e4m3")
    numbers = LAYERS * HEADS * (HEAD_DIM + VALUE_DIM)
    plan = made.plan()
    assert plan.token_bytes == numbers
    assert plan.block_bytes == numbers * BLOCK  # each plane is a multiple of 64 bytes here
    assert plan.device_bytes == (8 + 2) * plan.block_bytes
    with kvmem.Manager(made) as manager:
        assert manager.stats().device.arena_bytes == plan.device_bytes
        assert manager.kv(1)[0].dtype == FP8
        assert tuple(manager.kv(1)[1].shape) == (9, BLOCK, HEADS, VALUE_DIM)


def test_the_same_memory_holds_twice_the_blocks_of_bfloat16() -> None:
    sizes = {"device_blocks": None, "device_memory": "1MiB", "host_blocks": None, "debug": False}
    half = config(dtype="bfloat16", kv_dtype=None, k_scale=None, v_scale=None, **sizes)
    whole = config(dtype="bfloat16", **sizes)
    assert whole.device_blocks == 2 * half.device_blocks + 1  # the null frame is smaller too


def test_the_settings() -> None:
    assert config() == config(kv_dtype=FP8, k_scale=K_SCALE.tolist())
    assert hash(config()) == hash(config(kv_dtype="float8_e4m3fn"))
    assert config() != config(k_scale=1.0)
    assert config().k_scale == tuple(map(tuple, K_SCALE.tolist()))
    assert config().v_scale == (tuple(np.float32(V_SCALE).tolist()),) * LAYERS
    per_layer = config(v_scale=np.array([[0.5], [2.0]]))
    assert per_layer.v_scale == ((0.5, 0.5), (2.0, 2.0))
    assert config(k_scale=None).k_scale == ((1.0, 1.0),) * LAYERS
    plain = config(kv_dtype=None, k_scale=None, v_scale=None)
    assert (plain.kv_dtype, plain.k_scale, plain.v_scale) == (torch.float32, None, None)
    assert plain == config(kv_dtype="float32", k_scale=None, v_scale=None)
    with pytest.raises(FrozenInstanceError):
        config().k_scale = None  # type: ignore[misc]


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_attended_swapped_forked(seed: int, dtype: torch.dtype, device: str) -> None:
    """The bits stored are torch's; they survive swaps, with checksums, and copies on write."""
    rows = Rows(seed, dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    with kvmem.Manager(config(dtype=dtype, device=device)) as manager:
        seq = manager.create(list(range(20)), publish=False)
        other = manager.create(list(range(30, 41)))
        assert rows.step(manager, [seq, other]) <= tolerance
        rows.check(manager, seq)
        (fork,) = manager.fork(seq)
        rows.written[fork.id] = rows.of(seq)
        manager.append([seq, fork], [1, 2])
        assert rows.step(manager, [seq, fork]) <= tolerance  # one copies the last block
        for each in (seq, fork, other):
            rows.check(manager, each)
        manager.swap_out([seq, fork]).wait()
        manager.evict(8)
        rows.check(manager, fork)
        manager.swap_in([seq, fork]).wait()
        manager.append([seq, fork, other], [5, 6, 7])
        assert rows.step(manager, [seq, fork, other]) <= tolerance
        for each in (seq, fork, other):
            rows.check(manager, each)
        stats = manager.stats()
        assert stats.blocks_copied_on_write >= 1
        assert stats.bytes_out == stats.blocks_out * manager.config.plan().block_bytes
        manager.verify()
        manager.free([seq, fork, other])


def write(manager: kvmem.Manager, seq: kvmem.Sequence, key: torch.Tensor) -> None:
    with manager.step([seq]) as step:
        for layer in range(LAYERS):
            value = torch.zeros(step.num_tokens, HEADS, VALUE_DIM)
            step.write(layer, key.expand(step.num_tokens, HEADS, HEAD_DIM), value)


def test_saturation_and_nan() -> None:
    """What is too large is stored as 448 of its scale; NaN is kept, and with debug refused."""
    key = torch.zeros(HEAD_DIM)
    key[:4] = torch.tensor([1e30, -torch.inf, 300.0, torch.nan])
    with kvmem.Manager(config(debug=False)) as manager:
        seq = manager.create([1])
        write(manager, seq, key)
        stored = manager.block(seq.block_ids[0]).k_data(0)[0].float()
        assert stored[0, :3].tolist() == [448, -448, 448]
        assert stored[1, :3].tolist() == [448, -448, 448]
        assert stored[:, 3].isnan().all()
        assert not stored[:, 4:].any()
        manager.free([seq])
    with kvmem.Manager(config()) as manager:
        seq = manager.create([1])
        with pytest.raises(kvmem.ShapeError, match="key holds NaN"):
            write(manager, seq, key)
        manager.free([seq])


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_vacated_frames_are_zeroed_or_poisoned(device: str) -> None:
    for changes in ({"zero_on_free": "always", "debug": False}, {"debug": True}):
        with kvmem.Manager(config(device=device, host_blocks=0, **changes)) as manager:
            seq = manager.create(list(range(20)), publish=False)
            write(manager, seq, torch.ones(HEAD_DIM))
            frames = [manager.block(b).frame_ids[0] for b in seq.block_ids]
            manager.free([seq])
            manager.evict(8)
            settle(manager)
            bits = manager.kv(0)[0].view(torch.uint8)[frames]
            if changes["debug"]:
                assert (bits == 0x7F).all()
            else:
                assert not bits.any()


def test_tensors_have_the_dtype_that_is_computed_in() -> None:
    with kvmem.Manager(config(dtype="bfloat16")) as manager:
        seq = manager.create([1, 2])
        with manager.step([seq]) as step:
            key = torch.zeros(2, HEADS, HEAD_DIM, dtype=torch.bfloat16)
            value = torch.zeros(2, HEADS, VALUE_DIM, dtype=torch.bfloat16)
            with pytest.raises(kvmem.ShapeError, match="float8_e4m3fn; expected torch.bfloat16"):
                step.write(0, key.to(FP8), value)
            for layer in range(LAYERS):
                step.write(layer, key, value)
            with pytest.raises(kvmem.ShapeError, match="float8_e4m3fn; expected torch.bfloat16"):
                step.attend(0, torch.zeros(2, HEADS, HEAD_DIM).to(FP8))
        manager.free([seq])


# -- an engine ------------------------------------------------------------------------------------


def test_the_example_engine_under_swap_pressure() -> None:
    """Its answers hang neither on memory nor on the device, mode by mode."""
    options = {"kv_dtype": "fp8_e4m3", "k_scale": 0.02, "v_scale": [0.02, 0.04]}
    ample, few = answers(device_blocks=60, **options)
    scarce, many = answers(debug=True, **options)
    assert (few.swap_outs, many.swap_outs > 3) == (0, True)
    assert scarce == ample
    assert many.bytes_out == many.bytes_out_done > 0
    for mode in MODES:
        sim = SimOptions(seed=1, mode=mode, starve="compute" if mode == "starve" else None)
        assert answers(device="sim", sim=sim, **options)[0] == ample
    assert answers(kv_dtype="fp8_e4m3", v_scale=1e9)[0] != ample  # then V is 0: it is read


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_stress(device: str, seed: int) -> None:
    """Each row bit by bit, each attention within the tolerance of the dtype."""
    faults = 0.1 if device == "sim" else 0.0
    report = run_stress(
        StressOptions(
            device=device, dtype="bfloat16", kv_dtype="fp8_e4m3", ops=300, faults=faults, seed=seed
        )
    )
    assert report.ok, report
