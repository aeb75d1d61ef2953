"""Each call of CUDA and of torch failing once, the nth of its name, for good and not.

A run ends with a clean error or none, never in a hang and never with wrong bytes; the Manager goes
on after what it survives and says that it failed after anything worse; nothing is left behind.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import kvmem
from kvmem.store.cuda import api, host_arena
from kvmem.store.cuda.pinning import pin
from tests.cuda_double.faults import Error
from tests.cuda_double.opening import Double
from tests.driver import Driver
from tests.sim.test_fail_nth import aborts_in_flight, forks_across_tiers, swap_round_trip

Doubles = Callable[..., list[Double]]
NAMES = (
    "cudaMemcpyAsync", "cudaMemsetAsync", "cudaHostRegister",
    "memory", "pinned memory", "Event.record", "Event.query", "Stream.wait_event", "Stream",
    "Stream.synchronize",
)  # fmt: skip
WORKLOADS = (swap_round_trip, forks_across_tiers, aborts_in_flight)
MOST = 400  # calls of a name in a workload; more would be a mistake of the test


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several registrations in an arena as small as these."""
    monkeypatch.setattr(host_arena, "pin", partial(pin, chunk_bytes=4096))


def run_once(
    made: list[Double], workload: Callable[[Driver], None], name: str, nth: int, error: Error
) -> bool:
    """Whether the call was ever made. Raises for whatever is wrong."""
    made.clear()
    told = False
    d: Driver | None = None
    opened = api.open_cuda

    def failing(device: str) -> Any:
        cuda = opened(device)
        made[-1].runtime.fail(name, nth, error)
        return cuda

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(api, "open_cuda", failing)
            d = Driver(
                device="cuda", device_blocks=6, host_blocks=40, debug=nth % 2 == 0,
                zero_on_free="always",
            )  # fmt: skip
        workload(d)
        d.drain()
    except (kvmem.KVMemError, RuntimeError) as raised:
        told = True
        check_told(raised, error)
    (double,) = made
    faults = double.runtime.faults
    if d is not None:
        go_on_or_say_so(d, double, told)
        d.manager.close()
        assert d.manager.closed
    del d
    gc.collect()
    assert double.torch.current_device() == 0
    double.check()
    assert not double.memory.in_use(), "memory of the GPU, or page-locked, was not given back"
    if not faults.lost:  # else the driver unregisters nothing: the mapping stays, once logged
        assert not double.memory.registered
    assert faults.struck or not told, "an error that nothing caused"
    return bool(faults.struck)


def finish(d: Driver) -> None:
    """What is pending is computed, the content is right, all comes back."""
    d.manager.poll()
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
    d.check_content()
    d.drain()


def check_told(raised: Exception, error: Error) -> None:
    """What came out names what went wrong, or says that K/V was lost."""
    assert not isinstance(raised, kvmem.CorruptEntry)
    if isinstance(raised, kvmem.KVMemError):
        kinds = (kvmem.DeviceUnavailable, kvmem.TransferError, kvmem.ConfigError)
        assert isinstance(raised, kinds), raised
    else:
        assert error.name in str(raised), raised
        assert error is not Error.cudaErrorIllegalAddress, "what lasts has a name of kvmem's"


def go_on_or_say_so(d: Driver, double: Double, told: bool) -> None:
    """After a failing call: the failed state, or all work comes to its end with the right bytes."""
    store = d.store
    if store.error is None and not double.runtime.faults.lost:
        finish(d)
        return
    d.manager._runtime.ledger.verify()  # integers are sound whatever the bytes
    acts = (partial(d.manager.create, [1]), d.manager.stats, partial(d.manager.step, []))
    if store.error is None:  # lost, and nobody has touched the GPU since
        with pytest.raises((kvmem.DeviceUnavailable, kvmem.TransferError)):
            d.step([d.create([1, 2, 3])])
            d.manager.swap_out(d.live).wait(30)
    for act in acts:
        with pytest.raises(kvmem.DeviceUnavailable):
            act()


@pytest.fixture
def threads() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.usefixtures("threads")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an error in a step leaves its handle
@pytest.mark.parametrize("error", [Error.cudaErrorInvalidValue, Error.cudaErrorIllegalAddress])
@pytest.mark.parametrize("name", NAMES)
def test_fail_the_nth(doubles: Doubles, name: str, error: Error, seed: int) -> None:
    made = doubles("random")
    runs = struck = 0
    skipped = seed % len(WORKLOADS)  # another one with the next seed
    for which, workload in enumerate(w for i, w in enumerate(WORKLOADS) if i != skipped):
        nth = 1
        while nth < MOST:
            runs += 1
            if not run_once(made, workload, name, nth, error):
                break
            struck += 1
            nth += 1 if nth < 4 else 5 + which + nth // 8  # the first ones, then some
        else:
            pytest.fail("it never ends")
    assert struck or name in ("Stream.synchronize",), f"{name} is never called"
    print(f"{name} {error.name}: {runs} runs, {struck} failed")
