"""``swap_in(by_layer=n)``: the first layers compute while later ones are under way."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

import kvmem
from kvmem.sim_options import MODES, SimOptions
from kvmem.store.device import Stream
from kvmem.store.store import Store
from tests.driver import Driver

LAYERS = 5


def moved_away(d: Driver, tokens: list[int]) -> kvmem.Sequence:
    seq = d.create(tokens)
    d.step([seq])
    d.manager.swap_out([seq]).wait(30)
    d.manager.evict(100)
    d.wait()
    return seq


def step_by_step(d: Driver, seqs: list[kvmem.Sequence]) -> None:
    """A step of one token each; the body checks attention of each layer against the stamps."""
    for seq in seqs:
        d.manager.append([seq], [seq.num_tokens])
    d.step(seqs)


@pytest.mark.parametrize("by_layer", [1, 2, 4, 5])
@pytest.mark.parametrize("mode", [*MODES, "cpu"])
def test_content_is_right_in_each_mode(mode: str, by_layer: int, seed: int) -> None:
    for i in range(3):
        options: dict[str, Any] = {"device": "cpu"}
        if mode != "cpu":
            sim = SimOptions(mode=mode, seed=seed + i, poison=i != 1)
            options = {"device": "sim", "sim": sim}
        rng = random.Random(f"{seed}:{i}")
        with Driver(
            num_layers=LAYERS, device_blocks=14, host_blocks=16, debug=i == 2, **options
        ) as d:
            seqs = [moved_away(d, [k, *range(2, 9)]) for k in range(3)]
            for _ in range(4):
                transfer = d.manager.swap_in(seqs[:2], by_layer=by_layer)
                some = rng.choice((seqs[:1], seqs[:2], seqs))
                if rng.random() < 0.5:  # copies on write wait for whole frames
                    child = d.fork(seqs[0])[0]
                    step_by_step(d, [child, *some])
                    d.free(child)
                else:
                    step_by_step(d, some)
                if rng.random() < 0.3:
                    d.manager.swap_in(seqs)  # in one piece, behind it
                d.manager.swap_out(seqs)
                transfer.wait(30)
                d.manager.evict(rng.choice((1, 100)))
                d.check_content()
            stats = d.manager.stats()
            assert stats.bytes_in == stats.bytes_in_done > 0
            assert d.store.counters()["in_blocks"] == stats.blocks_in


def test_a_layer_computes_before_the_next_has_moved() -> None:
    """On the simulated device the third slice stands still while two layers are computed."""
    sim = SimOptions(mode="late", poison=False)
    with Driver(num_layers=3, device="sim", sim=sim, debug=False) as d:
        seq = moved_away(d, list(range(1, 7)))
        device = d.store.device
        device.hold(Stream.IN)
        d.manager.swap_in([seq], by_layer=1)
        d.manager.append([seq], [9])
        fences = [part.fence for part in d.store._moves._slices[d.store._moves.into.last]]
        assert len(fences) == 3
        with d.manager.step([seq]) as step:
            one = torch.ones(1, 1, 4)
            for layer in range(3):
                step.write(layer, one, one)
            for i in range(3):
                while not fences[i].reached:
                    assert device.run(Stream.IN, 1) == 1
                before = device.scheduler.num_turns
                device.run(Stream.COMPUTE)
                ran = device.scheduler.num_turns - before
                assert ran > 0, f"nothing of layer {i} could run"
                assert not any(fence.reached for fence in fences[i + 1 :])
        device.release(Stream.IN)
        d.free(seq)


def test_on_the_cpu_a_layer_computes_while_the_next_is_copied() -> None:
    """The copy of the second half waits for attention over the first."""
    computed = threading.Event()
    with Driver(num_layers=4, device="cpu", debug=False) as d:
        seq = moved_away(d, list(range(1, 7)))
        copies = []

        def hook(stream: Stream, *_: object) -> None:
            copies.append(stream)
            if stream is Stream.IN and copies.count(Stream.IN) == 2:
                assert computed.wait(30), "the step waited for all layers"

        d.store.device.hook = hook
        d.manager.swap_in([seq], by_layer=2)
        d.manager.append([seq], [9])
        attend = d.manager._runtime.store.attend

        def noted(layer: int, *arguments: Any, **options: Any) -> Any:
            out = attend(layer, *arguments, **options)
            if layer == 1:
                computed.set()
            return out

        d.manager._runtime.store.attend = noted  # type: ignore[method-assign]
        d.step([seq])
        assert copies.count(Stream.IN) == 2
        d.manager._runtime.store.attend = attend  # type: ignore[method-assign]
        d.check_content()


@pytest.mark.parametrize("mode", ["late", "random", "reverse"])
def test_a_forgotten_wait_is_a_race(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "arrive", lambda *_: None)
    d = Driver(num_layers=3, device="sim", sim=SimOptions(mode=mode, poison=False), debug=False)
    seq = moved_away(d, list(range(1, 7)))
    d.manager.swap_in([seq], by_layer=1)
    d.manager.append([seq], [9])
    with pytest.raises((kvmem.RaceError, AssertionError)):
        d.step([seq])
        d.store.device.drain()
    d.manager.close()


@pytest.mark.parametrize("which", [1, 2, 3])
@pytest.mark.parametrize("mode", [*MODES, "cpu"])
def test_a_slice_that_fails_takes_the_transfer(mode: str, which: int) -> None:
    options: dict[str, Any] = {"device": "cpu"}
    if mode != "cpu":
        options = {"device": "sim", "sim": SimOptions(mode=mode, seed=which)}
    with Driver(num_layers=3, debug=False, **options) as d:
        seq = moved_away(d, list(range(1, 7)))
        count = 0

        def hook(stream: Stream, *_: object) -> None:
            nonlocal count
            count += stream is Stream.IN
            if stream is Stream.IN and count in (which, 3):  # the last one fails as well
                raise OSError("this slice fails")

        d.store.device.hook = hook
        d.manager.swap_in([seq], by_layer=1)
        d.manager.append([seq], [9])
        try:
            d.step([seq])
        except kvmem.TransferError as error:
            assert error.lost == ((seq.id, 0),)
        else:  # it was known before the step was planned
            assert seq.num_computed == 7
        told = [event for event in d.manager.events() if event.kind == "lost"]
        assert [event.sequence_ids for event in told] == [(seq.id,)]  # once
        assert d.manager.stats().blocks_in_failed == 2
        d.store.device.hook = None
        if seq.num_computed < 7:
            d.step([seq])
        d.check_content()


@pytest.mark.parametrize("bad", [0, -1, 4, 1.5, "1", True])
def test_bad_slices(bad: Any) -> None:
    with Driver(num_layers=3) as d:
        seq = d.create([1])
        with pytest.raises((TypeError, ValueError), match="by_layer"):
            d.manager.swap_in([seq], by_layer=bad)
