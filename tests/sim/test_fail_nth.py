"""Fail the n-th allocation, copy, fence or piece of work of scripted workloads, for each n.

Once, and from then on. Each run ends with a clean error or none, valid records, a Manager that goes
on after a failed copy and says that it failed after anything worse (R8), and nothing left behind:
no memory, no thread.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import kvmem
from kvmem.sim_options import FailAt, SimOptions
from kvmem.store.arena import Arena
from tests.driver import Driver

MOST = 600  # passes of a site in a workload; more would be a mistake of the test


def swap_round_trip(d: Driver) -> None:
    seqs = [d.create([i, 2, 3, 4, 5, 6]) for i in range(3)]
    d.step(seqs)
    d.manager.swap_out(seqs).wait()
    d.manager.evict(100)
    d.manager.prefetch(seqs)
    d.step(seqs)
    d.check_content()


def forks_across_tiers(d: Driver) -> None:
    parent = d.create([1, 2, 3, 4, 5, 6])
    d.step([parent])
    d.manager.swap_out([parent])
    children = d.fork(parent, 2)
    d.manager.evict(100)
    for child in children:
        d.manager.append([child], [9])
        d.step([child])
    d.free(parent)
    d.check_content()


def cached_prefixes_written_back(d: Driver) -> None:
    for i in range(4):
        seq = d.create([i] * 12)
        d.step([seq])
        d.free(seq)
    again = d.create([0] * 12 + [1])
    d.step([again])
    stats = d.manager.stats()
    assert again.num_cached == 12 or stats.blocks_out_failed or stats.blocks_in_failed
    d.check_content()


def aborts_in_flight(d: Driver) -> None:
    seqs = [d.create([i, 2, 3, 4, 5]) for i in range(2)]
    d.step(seqs)
    d.manager.swap_out(seqs)
    d.manager.evict(100)
    d.manager.swap_in(seqs[:1])
    step = d.manager.step(seqs)
    step.cancel()
    d.free(seqs[0])
    other = d.create([7] * 9)
    d.step([other])
    d.step([seqs[1]])
    d.check_content()


WORKLOADS = [
    swap_round_trip,
    forks_across_tiers,
    cached_prefixes_written_back,
    aborts_in_flight,
]


def finish(d: Driver) -> None:
    """After failed copies: what is pending is computed, the content is right, all comes back."""
    d.manager.poll()
    for pin in d.pins:
        pin.release()
    for _ in range(40):
        todo = [seq for seq in d.live if seq.num_computed < seq.num_tokens]
        if not todo:
            break
        try:
            d.manager.make_room(todo)
            d.step(todo, fit="some")
        except kvmem.TransferError as error:
            assert error.lost
    else:
        pytest.fail("copies that fail keep the work from ending (R9)")
    d.drain()
    d.store.device.drain()
    d.manager.verify()


def run_once(
    workload: Callable[[Driver], None], mode: str, site: str, nth: int, onwards: bool
) -> tuple[bool, Any]:
    """One run; whether the fault struck, and a weak reference to the device's memory."""
    sim = SimOptions(mode=mode, seed=nth, fail_at=FailAt(site, nth, onwards), poison=nth % 2 == 0)
    try:
        d = Driver(device="sim", sim=sim, device_blocks=6, debug=False)
    except kvmem.ConfigError as error:
        assert "refused" in str(error)
        assert site.endswith("_alloc")
        return True, None
    device = d.store.device
    memory = weakref.ref(d.store._device_arena)
    try:
        workload(d)
        d.drain()
        device.drain()
        if site.startswith("copy_"):
            finish(d)
        else:
            assert device.faults.struck[site] == 0, "a fault struck and nobody was told"
    except (kvmem.DeviceUnavailable, kvmem.TransferError) as error:
        assert "fail" in str(error)
        assert device.faults.struck[site] >= 1
        if site.startswith("copy_"):
            finish(d)
            return True, memory
        d.manager._runtime.ledger.verify()  # integers are sound whatever the bytes
        for act in (partial(d.manager.create, [1]), d.manager.stats, partial(d.manager.step, [])):
            with pytest.raises(kvmem.DeviceUnavailable):
                act()
    finally:
        d.manager.close()
    return bool(device.faults.struck[site]), memory


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an error in a step leaves its handle
@pytest.mark.parametrize("onwards", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "site", ["device_alloc", "host_alloc", "copy_before", "copy_after", "event", "sticky"]
)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_fail_the_nth(workload: Callable[[Driver], None], site: str, onwards: bool) -> None:
    threads = threading.active_count()
    runs = 0
    for mode in ("random",) if site == "sticky" else ("late", "random"):
        for nth in range(1, MOST):
            struck, memory = run_once(workload, mode, site, nth, onwards)
            runs += 1
            if nth < 4 and memory is not None:
                gc.collect()
                assert memory() is None, "the arena of a failed Manager lives on"
            if not struck:
                assert nth > 1, f"{workload.__name__} never passes {site}"
                break
        else:
            pytest.fail("it never ends")
    assert threading.active_count() == threads
    print(f"{workload.__name__}: {runs} runs failed at {site}, each n once")


def test_a_refused_host_arena_gives_the_device_arena_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Arena]] = []
    original = Arena.__init__

    def init(self: Arena, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Arena, "__init__", init)
    with pytest.raises(kvmem.ConfigError):
        Driver(device="sim", sim=SimOptions(fail_at=FailAt("host_alloc", 1)))
    gc.collect()
    assert len(made) == 1
    assert made[0]() is None
