"""The example engine and the public API on ``device="sim"``: the same tokens in each mode."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kvmem
from kvmem.sim_options import MODES, STREAMS, FailAt, SimOptions
from tests.driver import Driver, GoodWork

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "examples"))

from engine import Engine  # noqa: E402

VOCABULARY, WIDTH, HEADS, LAYERS = 50, 16, 2, 2
SCHEDULES = [
    *((mode, None) for mode in MODES if mode != "starve"),
    *(("starve", s) for s in STREAMS),
]


class Toy:
    """A small attention model with fixed random weights."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.embed = torch.randn(VOCABULARY, WIDTH, generator=numbers)
        self.mix = torch.randn(LAYERS, 3, WIDTH, WIDTH, generator=numbers) / WIDTH**0.5

    def __call__(self, step: kvmem.Step) -> torch.Tensor:
        hidden = self.embed[step.tokens] + torch.sin(step.positions[:, None] * 0.1)
        for layer in range(LAYERS):
            parts = [(hidden @ w).reshape(-1, HEADS, WIDTH // HEADS) for w in self.mix[layer]]
            step.write(layer, parts[1], parts[2])
            for part in parts[1:]:
                part.zero_()  # the engine may reuse its buffers at once
            out = step.attend(layer, parts[0])
            hidden = torch.nn.functional.normalize(hidden + out.reshape(-1, WIDTH)) * 4
        return hidden[step.last] @ self.embed.T


def answers(device_blocks: int = 9, **options: Any) -> tuple[list[list[int]], kvmem.Stats]:
    """What the example engine answers to six prompts with too little memory for all of them."""
    config = kvmem.Config(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=WIDTH // HEADS,
        block_size=4,
        device_blocks=device_blocks,
        host_blocks=24,
        **options,
    )
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8][: 3 + i] + [10 + i] * 3 for i in range(6)]
    with kvmem.Manager(config) as manager:
        engine = Engine(manager, Toy(), max_tokens=8, turn_steps=2)
        requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
        while engine.busy:
            engine.step()
        manager.verify()
        if config.device == "sim":
            manager._runtime.store.device.drain()
        return [request.output for request in requests], manager.stats()


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    tokens, stats = answers()
    assert stats.swap_outs > 3
    assert len({tuple(answer) for answer in tokens}) == 6
    return tokens


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("mode", "starve"), SCHEDULES)
def test_the_example_engine_answers_as_on_the_cpu(
    mode: str, starve: str | None, debug: bool, wanted: list[list[int]]
) -> None:
    for seed in range(3):
        sim = SimOptions(seed=seed, mode=mode, starve=starve)
        tokens, stats = answers(device="sim", sim=sim, debug=debug)
        assert tokens == wanted
        assert stats.swap_outs > 3
        assert stats.bytes_out == stats.bytes_out_done > 0
        assert stats.bytes_in == stats.bytes_in_done > 0


def test_sync_and_no_options(wanted: list[list[int]]) -> None:
    assert answers(device="sim")[0] == wanted
    assert answers(device="sim", sync=True, sim=SimOptions(mode="late"))[0] == wanted
    assert answers(device="sim", sim=SimOptions(copy_engines=1, mode="reverse"))[0] == wanted


@pytest.mark.parametrize("mode", MODES)
def test_good_work_with_content_checks(mode: str, seed: int) -> None:
    for i in range(2):
        print("seed", seed + i)
        sim = SimOptions(seed=seed + i, mode=mode, faults={"slow_copy": 0.2})
        with Driver(device="sim", sim=sim, debug=i == 0) as d:
            GoodWork(d, seed + i).run(80)
            d.check_content()
            device = d.store.device
        assert device.error is None
        assert device.faults.struck["slow_copy"] or device.faults.passed["slow_copy"] < 20


def test_results_may_be_late() -> None:
    """An output is NaN until its kernel has run; nothing is forced."""
    sim = SimOptions(mode="late", late_results=True)
    config = kvmem.Config(
        num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, device_blocks=4,
        device="sim", sim=sim,
    )  # fmt: skip
    with kvmem.Manager(config) as m:
        seq = m.create([1, 2, 3])
        with m.step([seq]) as step:
            one = torch.ones(3, 1, 4)
            step.write(0, one, one)
            out, lse = step.attend(0, one, return_lse=True)
            assert torch.isnan(out).all()
            assert torch.isnan(lse).all()
        m._runtime.store.device.drain()
        assert torch.equal(out, one)
        assert torch.isfinite(lse).all()
        m.free([seq])


def test_wrong_arguments_raise_in_the_call_and_break_nothing() -> None:
    with Driver(device="sim", sim=SimOptions(mode="late")) as d:
        seq = d.create([1, 2, 3])
        with d.manager.step([seq]) as step:
            with pytest.raises(kvmem.ShapeError):
                step.write(0, torch.ones(2, 1, 4), torch.ones(3, 1, 4))
            with pytest.raises(ValueError, match="softcap"):
                step.attend(0, torch.ones(3, 2, 4), softcap=-1.0)
            with pytest.raises(kvmem.ShapeError):
                step.attend(0, torch.ones(3, 2, 5))
            d.run(step)


def test_reading_a_block_is_ordered_or_told() -> None:
    """``k_data`` runs what wrote it; the host copy of a block under way is a race of the reader."""
    with Driver(device="sim", sim=SimOptions(mode="late")) as d:
        seq = d.create([1, 2, 3, 4, 5])
        d.step([seq])
        block = d.manager.block(seq.block_ids[0])
        assert torch.isfinite(block.k_data(0)).all()
        transfer = d.manager.swap_out([seq])
        with pytest.raises(kvmem.RaceError):
            block.host_data(0)
        transfer.wait()
        assert torch.equal(block.host_data(0)[0], block.k_data(0))
        d.check_content()


def test_vacated_frames_are_poisoned_without_debug() -> None:
    with Driver(device="sim", sim=SimOptions(mode="eager"), debug=False) as d:
        seq = d.create([1, 2, 3, 4, 5])
        d.step([seq])
        frame = d.manager.block(seq.block_ids[1]).frame_ids[0]
        d.free(seq)
        d.store.device.drain()
        assert torch.isnan(d.manager.kv(0)[0][frame]).all()


@pytest.mark.parametrize("site", ["event", "sticky"])
def test_a_failed_device_fails_the_manager_and_says_so(site: str) -> None:
    """R8: the Manager enters its failed state."""
    for nth in (1, 2):
        d = Driver(
            device="sim", sim=SimOptions(mode="late", fail_at=FailAt(site, nth)), debug=False
        )
        seqs = [d.create([i, 2, 3, 4, 5, 6]) for i in range(2)]
        with pytest.raises((kvmem.DeviceUnavailable, kvmem.TransferError), match="injected fault"):
            for seq in seqs:
                d.step([seq])
                d.manager.swap_out([seq]).wait()
            d.manager.swap_in(seqs).wait()
        m = d.manager
        acts = (partial(m.step, seqs), partial(m.swap_out, seqs), partial(m.create, [1]), m.stats)
        for act in acts:
            with pytest.raises(kvmem.DeviceUnavailable, match="the device failed and the store"):
                act()
        d.manager.close()
        assert d.manager.closed


@pytest.mark.parametrize("site", ["device_alloc", "host_alloc"])
def test_a_refused_arena_is_a_clean_error(site: str) -> None:
    with pytest.raises(kvmem.ConfigError, match="refused"):
        Driver(device="sim", sim=SimOptions(fail_at=FailAt(site, 1)))


def test_the_config_says_what_goes_together() -> None:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "device_blocks": 4}
    config = kvmem.Config(**sizes, device="sim")
    assert config.sim == kvmem.SimOptions()
    assert config != kvmem.Config(**sizes, device="sim", sim=kvmem.SimOptions(seed=1))
    hash(config)
    with pytest.raises(kvmem.ConfigError, match="needs device='sim'"):
        kvmem.Config(**sizes, sim=kvmem.SimOptions())
    with pytest.raises(TypeError, match="SimOptions"):
        kvmem.Config(**sizes, device="sim", sim="random")  # type: ignore[arg-type]
    assert kvmem.Config(**sizes).sim is None


# --- one seed, one log ---------------------------------------------------------------------------


def log_of(seed: int) -> str:
    """The log hash of a run that has every kind of fault but the fatal ones."""
    sim = SimOptions(seed=seed, mode=MODES[seed % len(MODES)], faults={"slow_copy": 0.3})
    with Driver(device="sim", sim=sim) as d:
        GoodWork(d, seed).run(60)
        d.check_content()
        return d.store.device.log.digest()


def test_one_seed_has_one_log_in_any_process() -> None:
    """Two processes with different hash seeds, and this one."""
    code = "import tests.sim.test_engine as t; print(t.json.dumps([t.log_of(s) for s in range(5)]))"
    found = []
    for hash_seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=280,
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] == [log_of(seed) for seed in range(5)]
    assert len(set(found[0])) == 5
    print("log hash of 5 seeds", hashlib.sha256(str(found[0]).encode()).hexdigest()[:16])
