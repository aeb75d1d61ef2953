"""Queues of transfers are bounded: who swaps faster than the link copies is held back."""

from __future__ import annotations

import threading

import pytest

import kvmem
from kvmem.store.device import Stream

LIMIT = 6


@pytest.fixture
def m(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> kvmem.Manager:
    monkeypatch.setattr("kvmem.runtime.MAX_QUEUED", LIMIT)
    config = kvmem.Config(
        num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4,
        device_blocks=8, host_blocks=8, device=request.param,
    )  # fmt: skip
    return kvmem.Manager(config)


def on_the_way(m: kvmem.Manager) -> int:
    return max(len(queue.pending) for queue in m._runtime.store._transfers.values())


def dirty(m: kvmem.Manager) -> kvmem.Sequence:
    seq = m.create([1, 2, 3], publish=False)
    with m.step([seq]):
        pass
    return seq


def bounce(m: kvmem.Manager, seq: kvmem.Sequence) -> None:
    """Out and in again, each a transfer."""
    m.swap_out([seq])
    m.evict(8)
    m.swap_in([seq])


@pytest.mark.parametrize("m", ["cpu"], indirect=True)
def test_the_caller_waits_for_a_slow_link(m: kvmem.Manager) -> None:
    with m:
        seq = dirty(m)
        device = m._runtime.store.device
        device.hold(Stream.OUT)  # type: ignore[attr-defined]
        most, turns = [0], [0]

        def swaps() -> None:
            for _ in range(20):
                bounce(m, seq)
                most[0] = max(most[0], on_the_way(m))
                turns[0] += 1

        thread = threading.Thread(target=swaps)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()  # held back: nothing is copied
        assert turns[0] < 20
        m.stats()  # while it waits, others go on
        device.release(Stream.OUT)  # type: ignore[attr-defined]
        thread.join(60)
        assert turns[0] == 20
        assert most[0] <= LIMIT + 2  # a call may add one or two
        m.free([seq])
        m.verify()


@pytest.mark.parametrize("m", ["sim"], indirect=True)
def test_the_simulated_device_runs_on(m: kvmem.Manager) -> None:
    with m:
        seq = dirty(m)
        for _ in range(50):
            bounce(m, seq)
            assert on_the_way(m) <= LIMIT + 2
        m.free([seq])
        m.verify()


@pytest.mark.parametrize("m", ["cpu", "sim"], indirect=True)
def test_nobody_waits_inside_a_step(m: kvmem.Manager) -> None:
    """Its frames are not free before it ends: the copies wait for it, it must not wait for them."""
    with m:
        seq, other = dirty(m), dirty(m)
        m.append([other], [4])
        with m.step([other]):
            for _ in range(2 * LIMIT):
                bounce(m, seq)
        bounce(m, seq)
        assert on_the_way(m) <= LIMIT + 2
        m.free([seq, other])
        m.verify()
