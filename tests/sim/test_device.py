"""Streams, fences, holds and faults of the simulated device, without a Manager."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvmem.errors import ConfigError, DeviceUnavailable, ManagerClosed, RaceError
from kvmem.sim_options import MODES, FailAt, SimOptions
from kvmem.store.arena import Arena
from kvmem.store.device import Moved, Stream
from kvmem.store.sim import SimDeadlock, SimDevice
from tests.store.fakes import ids

OUT, IN, COMPUTE = Stream.OUT, Stream.IN, Stream.COMPUTE


def made(**options: Any) -> tuple[SimDevice, Arena, Arena]:
    """A device with two small arenas; frame f of the device one holds bytes f."""
    device = SimDevice(SimOptions(**options))
    arenas = [device.new_arena(n, 8, 64, host=n == "host") for n in ("device", "host")]
    arenas[0].bytes[:] = np.arange(8)[:, None]
    return device, *arenas


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_is_a_fifo_and_a_wait_is_for_a_stream(mode: str) -> None:
    for seed in range(5):
        device, _, _ = made(mode=mode, seed=seed)
        seen: list[str] = []
        fence, end = device.new_fence("fence"), device.new_fence("end")
        device.wait(IN, fence)
        for i in range(3):
            device.launch(IN, partial(seen.append, f"in {i}"))
        device.record(IN, end)
        for i in range(3):
            device.launch(OUT, partial(seen.append, f"out {i}"))
        device.record(OUT, fence)
        assert device.synchronize(end)
        assert seen == [f"{s} {i}" for s in ("out", "in") for i in range(3)]


def test_late_runs_only_what_someone_waits_for() -> None:
    device, here, there = made(mode="late")
    out, into = device.new_fence("out"), device.new_fence("in")
    device.copy_async(OUT, there, ids(1), here, ids(1))
    device.record(OUT, out)
    device.copy_async(IN, here, ids(2), there, ids(2))
    device.record(IN, into)
    assert not there.bytes.any()
    assert device.synchronize(out)
    assert (there.bytes[1] == 1).all()
    assert not into.reached


def test_reverse_runs_the_newest_first() -> None:
    device, _, _ = made(mode="reverse")
    seen: list[str] = []
    fence = device.new_fence("out")
    device.launch(OUT, lambda: seen.append("out"))
    device.record(OUT, fence)
    device.launch(IN, lambda: seen.append("in"))
    assert device.synchronize(fence)
    assert seen == ["in", "out"]


@pytest.mark.parametrize("stream", list(Stream), ids=lambda stream: stream.name)
def test_a_starved_stream_runs_only_when_nothing_else_can(stream: Stream) -> None:
    device, _, _ = made(mode="starve", starve=stream.name.lower())
    seen: list[str] = []
    fence = device.new_fence("end")
    for _ in range(3):
        for each in Stream:
            device.launch(each, lambda n=each.name: seen.append(n))
    device.record(stream, fence)
    assert device.synchronize(fence)
    assert seen[-3:] == [stream.name] * 3


def test_a_copy_reads_its_source_when_it_runs_and_can_be_seen_half_done() -> None:
    device, here, there = made(mode="late")
    device.copy_async(OUT, there, ids(1), here, ids(1))
    here.bytes[1] = 9  # behind the device's back: it must not have been read yet
    device.run(OUT, 1)
    half = there.bytes[1]
    assert 0 < np.count_nonzero(half == 9) < 64
    assert device.moved(OUT) == Moved(0, 0, 0), "counted before it was done (case 35)"
    device.hold(OUT)
    with pytest.raises(SimDeadlock, match="OUT: held, OUT 1 copy device"):
        device.settle(OUT)
    device.release(OUT)
    device.settle(OUT)
    assert (there.bytes[1] == 9).all()
    assert device.moved(OUT) == Moved(1, 64, 1)


@pytest.mark.parametrize("engines", [1, 2])
def test_copies_of_both_directions_overlap_only_on_two_engines(engines: int) -> None:
    device, here, there = made(mode="late", copy_engines=engines)
    device.copy_async(OUT, there, ids(1), here, ids(1))
    device.copy_async(IN, here, ids(2), there, ids(2))
    device.run(OUT, 1)
    assert device.run(IN, 1) == engines - 1
    device.drain()


def test_a_wait_that_never_ends_says_so() -> None:
    device, _, _ = made(mode="random")
    one, other, end = (device.new_fence(n) for n in ("one", "other", "end"))
    device.wait(OUT, one)
    device.record(OUT, other)
    device.wait(IN, other)
    device.record(IN, end)
    with pytest.raises(SimDeadlock, match=r"end: .*OUT: OUT 1 wait one \(never recorded\)"):
        device.synchronize(end)
    assert not device.synchronize(end, 0.01)
    device.record(IN, one)  # behind its own wait: a cycle
    with pytest.raises(SimDeadlock, match="IN: IN 3 wait other"):
        device.synchronize(end)


def test_another_thread_may_bring_on_what_one_waits_for() -> None:
    device, _, _ = made(mode="random")
    fence = device.new_fence("step")
    device.launch(IN, lambda: None)

    def end() -> None:
        device.launch(COMPUTE, lambda: None)
        device.record(COMPUTE, fence)

    thread = threading.Timer(0.05, end)
    thread.start()
    assert device.synchronize(fence)
    thread.join()


@pytest.mark.parametrize("mode", MODES)
def test_a_loop_of_queries_ends_whatever_the_mode(mode: str) -> None:
    for seed in range(5):
        device, here, there = made(mode=mode, seed=seed, not_yet=0.9)
        fence = device.new_fence("end")
        device.copy_async(OUT, there, ids(1), here, ids(1))
        device.record(OUT, fence)
        assert any(device.query(fence) for _ in range(5000)), "it never said yes"
        assert device.query(fence), "what the host has seen stays true"


def test_what_was_waited_for_is_never_not_yet() -> None:
    device, _, _ = made(mode="late", not_yet=0.99)
    fences = [device.new_fence(str(i)) for i in range(20)]
    for fence in fences:
        device.record(OUT, fence)
    assert device.synchronize(fences[-1])
    assert all(device.query(fence) for fence in fences)


def test_a_timeout_counts_turns() -> None:
    device, here, there = made(mode="late", faults={"slow_copy": 1})
    fence = device.new_fence("end")
    device.copy_async(OUT, there, ids(1), here, ids(1))
    device.record(OUT, fence)
    assert not device.synchronize(fence, 1e-4)  # 100 turns of 1,000
    assert device.synchronize(fence, 1e-2)


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["copy_before", "copy_after", "event", "sticky"])
def test_a_fault_of_a_stream_fails_the_device(site: str) -> None:
    device, here, there = made(mode="late", fail_at=FailAt(site, 2), seed=4)
    fences = [device.new_fence(str(i)) for i in range(3)]
    for i, fence in enumerate(fences):
        device.copy_async(OUT, there, ids(i + 1), here, ids(i + 1))
        device.record(OUT, fence)
    if site != "sticky":  # passed at each entry that starts
        assert device.synchronize(fences[0])
    with pytest.raises(DeviceUnavailable, match=f"injected fault {site}"):
        device.synchronize(fences[2])
    assert device.faults.struck[site] == 1
    copied = int(np.count_nonzero(there.bytes[2] == 2))
    want = {"copy_before": [0], "copy_after": range(1, 64), "event": [64], "sticky": [0]}
    assert copied in want[site]
    assert not any(device.query(fence) for fence in fences[1:])
    with pytest.raises(DeviceUnavailable):
        device.copy_async(OUT, there, ids(1), here, ids(1))
    device.record(COMPUTE, device.new_fence("a step may end"))


@pytest.mark.parametrize(("site", "host"), [("device_alloc", False), ("host_alloc", True)])
def test_memory_is_refused(site: str, host: bool) -> None:
    device = SimDevice(SimOptions(fail_at=FailAt(site, 1)))
    with pytest.raises(ConfigError, match="refused"):
        device.new_arena("x", 2, 64, host=host)
    device.new_arena("y", 2, 64, host=host)  # once only
    device = SimDevice(SimOptions(fail_at=FailAt(site, 1, onwards=True)))
    for _ in range(3):
        with pytest.raises(ConfigError):
            device.new_arena("x", 2, 64, host=host)


def test_rates_are_drawn_from_the_seed_and_can_be_switched_off() -> None:
    def struck(seed: int) -> list[bool]:
        device = SimDevice(SimOptions(seed=seed, faults={"slow_copy": 0.3}))
        return [device.faults.strikes("slow_copy", "x") for _ in range(200)]

    assert struck(1) == struck(1) != struck(2)
    assert 30 < sum(struck(1)) < 90
    device = SimDevice(SimOptions(faults={"slow_copy": 1.0}))
    device.faults.enabled = False
    assert not device.faults.strikes("slow_copy", "x")


def test_closed_and_failed_devices_say_so() -> None:
    device, here, there = made()
    fence = device.new_fence("end")
    device.wait(OUT, fence)
    device.close()
    device.close()
    with pytest.raises(ManagerClosed):
        device.copy_async(OUT, there, ids(1), here, ids(1))
    with pytest.raises(ManagerClosed):
        device.synchronize(fence)
    assert not device.query(fence)


def test_a_kernel_that_raises_fails_the_device() -> None:
    device, _, _ = made(mode="late")

    def broken() -> None:
        raise ZeroDivisionError("in a kernel")

    device.launch(IN, broken)
    with pytest.raises(DeviceUnavailable, match="in a kernel"):
        device.settle(IN)
    assert isinstance(device.error, ZeroDivisionError)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"mode": "lazy"}, ConfigError, "did you mean|supported"),
        ({"mode": 3}, TypeError, "mode must be a str"),
        ({"seed": -1}, ConfigError, "seed=-1"),
        ({"starve": "in"}, ConfigError, "needs mode='starve'"),
        ({"mode": "starve", "starve": "disk"}, ConfigError, "starve='disk'"),
        ({"not_yet": 1}, ConfigError, "no query"),
        ({"not_yet": "x"}, TypeError, "not_yet must be"),
        ({"copy_engines": 3}, ConfigError, "copy_engines=3"),
        ({"faults": {"disk": 0.1}}, ConfigError, "faults='disk'"),
        ({"faults": {"event": 2}}, ConfigError, r"faults\['event'\]=2"),
        ({"faults": 3}, TypeError, "faults must map"),
        ({"fail_at": ("event", 0)}, ConfigError, "fail_at.nth=0"),
        ({"fail_at": "event"}, TypeError, "fail_at must be"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        SimOptions(**options)


def test_options_are_values() -> None:
    one = SimOptions(faults={"event": 0.5, "sticky": 0.1}, fail_at=("event", 3))
    other = SimOptions(faults={"sticky": 0.1, "event": 0.5}, fail_at=FailAt("event", 3))
    assert one == other
    assert hash(one) == hash(other)


def test_a_race_fails_the_device_and_is_raised_by_its_own_name() -> None:
    device, here, there = made(mode="late")
    device.copy_async(OUT, there, ids(1), here, ids(1))
    device.copy_async(IN, here, ids(1), there, ids(2))
    with pytest.raises(RaceError):
        device.drain()
    with pytest.raises(RaceError):
        device.launch(COMPUTE, lambda: None)
