"""The example engine and random good work on the double of a GPU: as on the CPU, in each mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvmem
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.device import Fence, Stream
from tests.cuda_double.opening import MODES, Double
from tests.driver import Driver, GoodWork
from tests.sim.test_by_layer import LAYERS, moved_away, step_by_step
from tests.sim.test_engine import answers

Doubles = Callable[..., list[Double]]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return answers()[0]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_example_engine_answers_as_on_the_cpu(
    doubles: Doubles, mode: str, debug: bool, wanted: list[list[int]]
) -> None:
    made = doubles(mode)
    for more in ({}, {"zero_on_free": "always", "tier_policy": "exclusive"}):
        tokens, stats = answers(device="cuda", debug=debug, **more)
        assert tokens == wanted
        assert stats.swap_outs > 3
        assert stats.bytes_out == stats.bytes_out_done > 0
        assert stats.bytes_in == stats.bytes_in_done > 0
    for double in made:
        assert double.streams.num_checked > 1000
        assert not double.memory.registered


def test_sync_and_each_policy(doubles: Doubles, wanted: list[list[int]]) -> None:
    doubles("random")
    assert answers(device="cuda", sync=True)[0] == wanted
    for policy in ("write_back", "write_through", "exclusive"):
        assert answers(device="cuda", tier_policy=policy)[0] == wanted
    assert answers(device="cuda", zero_on_free="cross_namespace")[0] == wanted


@pytest.mark.parametrize("mode", MODES)
def test_keys_and_values_in_fp8(doubles: Doubles, mode: str) -> None:
    doubles(mode)
    stored = {"kv_dtype": "fp8_e4m3", "k_scale": [0.5, 0.25], "v_scale": 2.0}
    assert answers(device="cuda", **stored)[0] == answers(**stored)[0]
    assert answers(device="cuda", debug=True, kv_dtype="fp8_e4m3")[0]


@pytest.mark.parametrize("mode", MODES)
def test_good_work_with_content_checks(doubles: Doubles, mode: str, seed: int) -> None:
    doubles(mode)
    for i in range(3):
        print("seed", seed + i)
        free = ("never", "always", "cross_namespace")[i]
        with Driver(device="cuda", debug=i == 1, zero_on_free=free) as d:
            GoodWork(d, seed + i).run(80)
            d.check_content()
            assert d.store.device.error is None


@pytest.mark.parametrize("mode", MODES)
def test_two_torch_streams_plan_in_turns(doubles: Doubles, mode: str, seed: int) -> None:
    """Each call of a Manager may come under another current stream: its steps are in order."""
    made = doubles(mode)
    with Driver(device="cuda", debug=False) as d:
        (double,) = made
        others = [double.torch.Stream(device=double.torch.ordinal) for _ in range(2)]
        work, rng = GoodWork(d, seed), random.Random(seed)
        for number, other in enumerate(others):
            with double.torch.stream(other):
                d.step([d.create([number, 6, 7])])
        for _ in range(60):
            with double.torch.stream(rng.choice(others)):
                work.run(1)
        with double.torch.stream(others[0]):
            d.check_content()
        used = {line.split()[0] for line in double.streams.log if "kernel" in line}
        assert {f"{stream.cuda_stream:#x}" for stream in others} <= used
        assert double.torch.current_device() == 0


@pytest.mark.parametrize("by_layer", [1, 2, 5])
@pytest.mark.parametrize("mode", MODES)
def test_layers_arrive_one_by_one(doubles: Doubles, mode: str, by_layer: int, seed: int) -> None:
    doubles(mode)
    rng = random.Random(seed)
    with Driver(
        num_layers=LAYERS, device_blocks=14, host_blocks=16, debug=False, device="cuda"
    ) as d:
        seqs = [moved_away(d, [k, *range(2, 9)]) for k in range(3)]
        for _ in range(4):
            transfer = d.manager.swap_in(seqs[:2], by_layer=by_layer)
            some = rng.choice((seqs[:1], seqs[:2], seqs))
            if rng.random() < 0.5:
                child = d.fork(seqs[0])[0]
                step_by_step(d, [child, *some])
                d.free(child)
            else:
                step_by_step(d, some)
            d.manager.swap_out(seqs)
            transfer.wait(30)
            d.manager.evict(rng.choice((1, 100)))
            d.check_content()
        stats = d.manager.stats()
        assert stats.bytes_in == stats.bytes_in_done > 0


def test_a_layer_is_waited_for_when_it_is_touched(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COMPUTE waits for the first slice when the step begins, for each other one at its layer."""
    doubles("late")
    with Driver(num_layers=3, device="cuda", debug=False) as d:
        seq = moved_away(d, list(range(1, 7)))
        d.hold("in")
        d.manager.swap_in([seq], by_layer=1)
        d.manager.append([seq], [9])
        waits: list[str] = []
        original = CudaDevice.wait

        def wait(self: CudaDevice, stream: Stream, fence: Fence) -> None:
            waits.append(fence.label)
            original(self, stream, fence)

        monkeypatch.setattr(CudaDevice, "wait", wait)
        with d.manager.step([seq]) as step:
            one = torch.ones(1, 1, 4)
            d.release("in")
            for layer in range(3):
                layers = f"layers {layer} to {layer}"
                assert any(layers in label for label in waits) == (layer == 0)
                step.write(layer, one, one)
                assert layers in waits[-1]
        d.free(seq)


def test_the_ledger_never_waits_for_what_was_not_recorded(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A wait for a fence of an open step would be refused; CUDA itself would silently not wait."""
    doubles("late")
    waits = []
    original = CudaDevice.wait

    def wait(self: Any, stream: Stream, fence: Any) -> None:
        waits.append(fence.label.split()[0])
        assert fence.event is not None, fence.label
        original(self, stream, fence)

    monkeypatch.setattr(CudaDevice, "wait", wait)
    with Driver(device="cuda", debug=False) as d:
        for i in range(3):
            GoodWork(d, seed + i).run(60)
            open_one = d.create([7, 8, 9])
            try:
                step = d.manager.step([open_one])
            except kvmem.OutOfBlocks:
                d.free(open_one)
                continue
            with step:  # others are swapped and freed while it is open
                d.manager.swap_out([s for s in d.live if s is not open_one], how="auto")
                d.manager.evict(2)
                d.write(step)
            d.free(open_one)
    assert "step" in waits
