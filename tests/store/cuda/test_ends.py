"""Ends and the steady state: nothing is left behind, nothing is made anew for each call."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from kvmem.store.cuda import device
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.device import Stream
from tests.cuda_double.faults import Error
from tests.cuda_double.opening import MODES, Double
from tests.driver import SMALL, Driver, GoodWork
from tests.store.conformance.worlds import ticket
from tests.store.fakes import ids

ROOT = Path(__file__).resolve().parents[3]
Doubles = Callable[..., list[Double]]


def nothing_left(double: Double) -> None:
    """Neither memory nor page-locking of a Manager that ended."""
    gc.collect()
    assert not double.memory.registered
    assert not double.memory.in_use()
    assert double.torch.current_device() == 0
    what = [line[0] for line in double.memory.history]
    assert what.count("registered") == what.count("unregistered") > 0
    double.check()


def some_work(d: Driver) -> None:
    seqs = [d.create([i, 2, 3, 4, 5, 6]) for i in range(3)]
    d.step(seqs)
    d.manager.swap_out(seqs)
    d.manager.evict(100)
    d.manager.prefetch(seqs)


@pytest.mark.parametrize("mode", MODES)
def test_close_ends_what_is_under_way(doubles: Doubles, mode: str) -> None:
    made = doubles(mode)
    threads = threading.active_count()
    d = Driver(device="cuda", zero_on_free="always")
    some_work(d)
    d.manager.close()
    d.manager.close()
    assert not made[0].memory.registered
    assert not made[0].streams.pending()
    d.live.clear()
    del d  # its handles keep small buffers
    nothing_left(made[0])
    assert threading.active_count() == threads


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # its sequences were not freed
def test_a_dropped_manager_gives_everything_back(doubles: Doubles) -> None:
    made = doubles("late")
    d = Driver(device="cuda")
    some_work(d)
    memory = weakref.ref(d.store._host_arena)
    d.live.clear()
    del d
    gc.collect()
    assert memory() is None
    nothing_left(made[0])


def test_the_interpreter_ends_with_copies_under_way() -> None:
    body = """
import pytest
from tests.cuda_double.opening import install
made = install(pytest.MonkeyPatch(), 5, "late")
from tests.driver import Driver
from tests.store.cuda.test_ends import some_work
d = Driver(device="cuda")
some_work(d)
assert any(d.store.device.streams.queues.values())
import atexit, weakref
atexit._run_exitfuncs()
assert not made[0].memory.registered
made[0].check()
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", body],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert not done.stderr


# --- starts that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name", "raised"),
    [
        ("kvmem.store.cuda.compute.CudaCompute.__init__", None, MemoryError),
        ("kvmem.store.cuda.guards.CudaGuards.__init__", None, MemoryError),
        ("kvmem.runtime._new_ledger", None, MemoryError),
        ("", "Stream", kvmem.DeviceUnavailable),
        ("", "memory", kvmem.ConfigError),
        ("", "cudaMemsetAsync", kvmem.DeviceUnavailable),
        ("", "cudaMemcpyAsync", kvmem.DeviceUnavailable),
        ("", "pinned memory", kvmem.DeviceUnavailable),
    ],
)
def test_a_start_that_fails_gives_everything_back(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, where: str, name: str, raised: type
) -> None:
    made = doubles("late")
    opened = device_opened(monkeypatch, made, name)
    if where:

        def refuse(*_: Any, **__: Any) -> None:
            raise MemoryError("refused")

        monkeypatch.setattr(where, refuse)
    with pytest.raises(raised):
        kvmem.Manager(kvmem.Config(**SMALL, device="cuda"))
    assert opened
    gc.collect()
    (double,) = made
    assert not double.memory.registered
    assert not double.memory.in_use()
    double.check()


def device_opened(
    monkeypatch: pytest.MonkeyPatch, made: list[Double], name: str | None
) -> list[str]:
    """Let the first call of a name fail on the next double; a list of those opened."""
    from kvmem.store.cuda import api

    original, opened = api.open_cuda, list[str]()

    def failing(wanted: str) -> Any:
        cuda = original(wanted)
        opened.append(wanted)
        if name is not None:
            made[-1].runtime.fail(name, 1, Error.cudaErrorInvalidValue)
        return cuda

    monkeypatch.setattr(api, "open_cuda", failing)
    return opened


# --- what is not over in time --------------------------------------------------------------------


def test_memory_in_use_outlives_the_manager(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU that is not done 5 s after `close` must not find its memory gone."""
    monkeypatch.setattr(device, "CLOSE_SECONDS", 0.01)
    made = doubles("late")
    d = Driver(device="cuda")
    d.hold("out", "in")
    some_work(d)
    held = [d.store.device.stream(stream).cuda_stream for stream in (Stream.OUT, Stream.IN)]
    d.manager.close()
    assert "stays taken until the process ends" in caplog.text
    d.live.clear()
    del d
    gc.collect()
    (double,) = made
    assert double.memory.registered
    for handle in held:
        double.streams.let_go(handle)
    double.check()  # all of it runs, into memory that is still there
    double.memory.registered.clear()


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_device_is_waited_for_as_well(doubles: Doubles, mode: str) -> None:
    """What failed may be one call; the copies before it go on."""
    made = doubles(mode)
    d = Driver(device="cuda", debug=False)
    some_work(d)

    def broken() -> None:
        raise ZeroDivisionError("a mistake")

    with pytest.raises(kvmem.DeviceUnavailable, match="a mistake"):
        d.store.device.launch(Stream.OUT, broken)
    d.manager.close()
    assert not made[0].streams.pending()
    d.live.clear()
    del d
    nothing_left(made[0])


# --- the steady state ----------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("asks", [False, True], ids=["nobody asks", "stats are asked"])
def test_nothing_is_made_for_each_call(doubles: Doubles, debug: bool, asks: bool) -> None:
    """Events, streams, buffers and memory: as many after 20 rounds as after 60."""
    made = doubles("random")
    with Driver(device="cuda", debug=debug, zero_on_free="always") as d:
        seqs = [d.create([i, 2, 3, 4, 5, 6]) for i in range(3)]
        (double,) = made
        others = [double.torch.Stream(device=double.torch.ordinal) for _ in range(2)]

        def rounds(count: int) -> tuple[int, ...]:
            for i in range(count):
                with double.torch.stream(others[i % 2]):
                    d.step(seqs)
                    d.manager.swap_out(seqs).wait()
                    d.manager.evict(100)
                    d.manager.prefetch(seqs)
                    for seq in seqs:
                        d.manager.truncate([seq], [5])
                        d.manager.append([seq], [6])
                if asks:
                    d.manager.stats()
            return (
                double.torch.num_events,
                len(double.streams.queues),
                d.store.device.uploads.num_buffers,
                len(double.memory._regions),
            )

        first, later = rounds(20), rounds(60)
        assert all(b - a <= 4 for a, b in zip(first, later, strict=True)), (first, later)
        assert sum(map(len, d.store.device._counting.values())) < 20


def test_an_observed_transfer_makes_no_events_either(doubles: Doubles) -> None:
    made = doubles("random")
    with Driver(device="cuda", debug=False) as d:
        seq = d.create([1, 2, 3, 4, 5, 6])
        told: list[tuple[Any, ...]] = []
        d.store.observers = (lambda *what: told.append(what),)

        def rounds(count: int) -> int:
            for _ in range(count):
                d.step([seq])
                d.manager.swap_out([seq]).wait()
                d.manager.evict(100)
                d.manager.truncate([seq], [5])
                d.manager.append([seq], [6])
                d.manager.stats()
            return made[0].torch.num_events

        first = rounds(10)
        assert rounds(30) - first <= 4
        assert len(told) > 30


def test_uploads_of_calls_that_raise_are_used_again(doubles: Doubles) -> None:
    doubles("eager")
    with Driver(device="cuda", debug=False) as d:
        seq = d.create([1, 2, 3])
        uploads = d.store.device.uploads
        with d.manager.step([seq]) as step:
            d.run(step)
            counts = set()
            for _ in range(30):
                try:
                    step.attend(0, torch.ones(3, 2, 4), softcap=-1.0, alibi=[1.0, 2.0])
                except ValueError as error:  # not by pytest, which keeps the frames
                    assert "softcap" in str(error)
                counts.add(uploads.num_buffers)
            assert len(counts) < 8, "a buffer is lost in each call that raises"


# --- several of them -----------------------------------------------------------------------------


def test_two_managers_do_not_disturb_each_other(doubles: Doubles, seed: int) -> None:
    made = doubles("random")
    with Driver(device="cuda") as one, Driver(device="cuda", debug=False) as other:
        works = [GoodWork(d, seed + i) for i, d in enumerate((one, other))]
        for _ in range(40):
            for work in works:
                work.run(1)
        other.store.device._fail(RuntimeError("lost"))
        works[0].run(20)
        one.check_content()
        with pytest.raises(kvmem.DeviceUnavailable):
            other.manager.stats()
        other.manager.close()
        assert one.manager.stats().bytes_out == one.manager.stats().bytes_out_done
    assert len(made) == 2
    for double in made:
        assert not double.memory.registered


def test_each_call_goes_to_its_gpu_and_comes_back(seed: int) -> None:
    """The caller's current GPU is another one, before and after, whatever the call does."""
    double = Double.new(seed, "random")
    made = CudaDevice(double.cuda)
    torch_cuda = double.torch
    with torch_cuda.device(7):
        arena = made.new_arena("device", 4, 64, host=False)
        fence = made.new_fence("x")
        acts: list[Callable[[], Any]] = [
            lambda: made.record(Stream.OUT, fence),
            lambda: made.wait(Stream.IN, fence),
            lambda: made.synchronize(fence, 10),
            lambda: arena.read(ids(0, 1)),
            lambda: arena.fill(0, 64, 3, made.handle(Stream.OUT)),
            lambda: made.launch(Stream.OUT, lambda: None),
            lambda: made.uploads.upload(made.stream(Stream.COMPUTE), [np.arange(9)]),
            lambda: made.moved(Stream.OUT),
            made.close,
        ]
        for act in acts:
            act()
            assert torch_cuda.current_device() == 7
    assert torch_cuda.current_device() == 0
    arena.close()
    double.check()


def test_work_of_two_current_streams_is_in_order(seed: int) -> None:
    """What COMPUTE is given under one current stream comes after what it was given under another,
    both ways, and once for each switch."""
    double = Double.new(seed, "late")
    made = CudaDevice(double.cuda)
    streams = [double.torch.Stream(device=double.torch.ordinal, priority=-1) for _ in range(2)]
    arena = made.new_arena("device", 4, 64, host=False)
    for i in range(20):
        with double.torch.stream(streams[i // 2 % 2]):
            arena.fill(0, 256, i, made.handle(Stream.COMPUTE))
    fence = made.new_fence("end")
    with double.torch.stream(streams[0]):
        made.record(Stream.COMPUTE, fence)
    assert made.synchronize(fence, 10)
    assert (arena.read(ids(0, 3)) == 19).all()
    assert sum(line.endswith("wait") for line in double.streams.log) == 10
    made.close()
    arena.close()
    double.check()


def test_reading_under_another_stream_comes_after_the_work(doubles: Doubles) -> None:
    made = doubles("random")
    with Driver(device="cuda", debug=False) as d:
        seq = d.create([1, 2, 3, 4, 5])
        d.step([seq])
        (double,) = made
        for number, read in enumerate((
            lambda: d.manager.kv(0), lambda: d.manager.block(seq.block_ids[0]).k_data(0),
        )):  # fmt: skip
            other = double.torch.Stream(device=double.torch.ordinal)
            with double.torch.stream(other):
                read()
            name = f"{other.cuda_stream:#x} wait"
            assert double.streams.log.count(name) == 1, number


def test_work_in_a_capture_asks_nothing_of_the_host(seed: int) -> None:
    """No event, allocation or look at the GPU while a graph is captured, though the current stream
    is another one than COMPUTE was last."""
    double = Double.new(seed, "random")
    made = CudaDevice(double.cuda)
    arena = made.new_arena("device", 4, 64, host=False)
    made.handle(Stream.COMPUTE)
    other = double.torch.Stream(device=double.torch.ordinal)
    with double.torch.stream(other):
        double.torch.capturing = True
        assert made.stream(Stream.COMPUTE) is other
        double.torch.capturing = False
    made.close()
    arena.close()
    double.check()


# --- what a caller may not do --------------------------------------------------------------------


def test_a_wait_for_what_was_never_recorded_is_refused(seed: int) -> None:
    double = Double.new(seed, "random")
    made = double.device()
    with pytest.raises(RuntimeError, match="step 3 is not recorded yet"):
        made.wait(Stream.OUT, made.new_fence("step 3"))
    assert made.error is None
    made.close()
    double.check()


def test_a_lost_context_fails_whoever_comes_next(seed: int) -> None:
    double = Double.new(seed, "random")
    made = double.device()
    arena = made.new_arena("device", 4, 64, host=False)
    host = made.new_arena("host", 4, 64, host=True)
    fence = made.new_fence("x")
    made.record(Stream.OUT, fence)
    double.runtime.fail("cudaMemcpyAsync", 1, Error.cudaErrorIllegalAddress)
    told = ticket(Stream.OUT)
    with pytest.raises(kvmem.DeviceUnavailable, match="IllegalAddress"):
        made.copy_async(Stream.OUT, host, ids(1), arena, ids(1), told)
    assert told.error is None
    assert not made.query(fence)
    assert made.moved(Stream.OUT).frames == 0
    made.settle(Stream.COMPUTE)
    made.close()
    arena.close()
    host.close()
    double.check()
