"""R12: with ``zero_on_free`` nothing of a former owner is readable in a frame of another's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from kvmem.sim_options import MODES, SimOptions

SECRET = 1234.5  # what one tenant writes; others write zeros


def config(zero: str, **more: Any) -> kvmem.Config:
    return kvmem.Config(
        num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, device_blocks=6, host_blocks=6,
        zero_on_free=zero, **more,
    )  # fmt: skip


def run(m: kvmem.Manager, seq: kvmem.Sequence, value: float) -> None:
    with m.step([seq]) as step:
        rows = torch.full((step.num_tokens, 1, 4), value)
        for layer in range(2):
            step.write(layer, rows, rows)


def settle(m: kvmem.Manager) -> None:
    """Wait for all copies: what is under way may not be read."""
    store = m._runtime.store
    for direction in ("out", "in"):
        store.wait(direction, store._transfers[direction].last, 30)  # type: ignore[arg-type]


def exposed(m: kvmem.Manager, seq: kvmem.Sequence) -> int:
    """Numbers of the secret in the frames of a sequence, slots that it has not filled included."""
    count = 0
    for b in seq.block_ids:
        block = m.block(b)
        for layer in range(2):
            if block.frame_ids[0]:
                for view in (block.k_data(layer), block.v_data(layer)):
                    count += int((view == SECRET).sum())
            if block.frame_ids[1]:
                for view in block.host_data(layer):
                    count += int((view == SECRET).sum())
    return count


def churn(m: kvmem.Manager, seed: int, rounds: int = 60) -> tuple[int, int]:
    """Two tenants, both tiers; numbers of the secret seen by the other, and blocks looked at."""
    rng = random.Random(seed)
    seen = looked = 0
    live: list[tuple[kvmem.Sequence, float]] = []
    for i in range(rounds):
        namespace, value = rng.choice((("a", SECRET), ("b", 0.0)))
        if len(live) >= 3:
            gone = [live.pop(rng.randrange(len(live)))[0]]
            m.free(gone)
        seq = m.create([i, *range(rng.randint(1, 8))], namespace=namespace)
        live.append((seq, value))
        m.swap_out([s for s, _ in live[:-1]], "auto")
        run(m, seq, value)
        for other, what in live:
            if rng.random() < 0.4 and other.state != "WAITING":
                m.swap_out([other], "auto").wait(30)
                m.evict(rng.choice((1, 100)))
                m.prefetch([other]).wait(30)
            if what != SECRET:
                settle(m)
                looked += len(other.block_ids)
                seen += exposed(m, other)
    m.free([s for s, _ in live])
    return seen, looked


def test_without_it_there_is_something_to_see(seed: int) -> None:
    with kvmem.Manager(config("never")) as m:
        seen, looked = churn(m, seed, 200)
        assert seen > 0, f"{looked} blocks hold nothing: the test can't fail"


@pytest.mark.parametrize("zero", ["cross_namespace", "always"])
@pytest.mark.parametrize("mode", [*MODES, "cpu"])
def test_nothing_of_another_tenant_is_seen(zero: str, mode: str, seed: int) -> None:
    options: dict[str, Any] = {}
    if mode != "cpu":
        options = {"device": "sim", "sim": SimOptions(mode=mode, seed=seed, poison=False)}
    with kvmem.Manager(config(zero, **options)) as m:
        seen, looked = churn(m, seed)
        assert looked > 50
        assert seen == 0
        m.verify()


def test_always_leaves_zeros_behind() -> None:
    with kvmem.Manager(config("always")) as m:
        seq = m.create(list(range(18)))
        run(m, seq, SECRET)
        m.free([seq])
        m.evict(100)
        settle(m)
        assert not any((cache != 0).any() for layer in range(2) for cache in m.kv(layer))


def test_within_a_namespace_nothing_is_cleared() -> None:
    """What "cross_namespace" saves: no fill where the owner's own tenant takes the frame over."""
    with kvmem.Manager(config("cross_namespace")) as m:
        fills: list[int] = []
        moves = m._runtime.store._moves
        submit = moves.submit

        def noted(plan: Any, parts: Any) -> None:
            fills.append(len(parts.fills))
            submit(plan, parts)

        moves.submit = noted  # type: ignore[method-assign]
        for namespace, wanted in (("a", 0), ("a", 0), ("b", 5), ("b", 0), ("a", 5)):
            fills.clear()
            seq = m.create(np.arange(18, dtype=np.int32) + len(fills), namespace=namespace)
            run(m, seq, 1.0)
            m.free([seq])
            m.evict(100)
            m.reset()
            m.evict(100, "host")
            assert sum(fills) == wanted, namespace


def test_a_number_of_a_forgotten_namespace_is_no_pass() -> None:
    """Numbers of namespaces are used again; frames of those before are cleared all the same."""
    with kvmem.Manager(config("cross_namespace")) as m:
        seq = m.create(list(range(20)), namespace="secret")
        run(m, seq, SECRET)
        m.free([seq])
        m.reset()
        for i in range(40):
            other = m.create([i, i], namespace=f"tenant {i}")
            run(m, other, 0.0)
            assert exposed(m, other) == 0
            m.free([other])
            m.reset()
