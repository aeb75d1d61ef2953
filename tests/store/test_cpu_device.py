"""Streams, fences, failures and counters of the CPU device."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvmem.errors import CorruptEntry, DeviceUnavailable, ManagerClosed
from kvmem.store.cpu import JOIN_SECONDS, CpuDevice
from kvmem.store.device import Moved, Stream
from tests.store.fakes import ids

OUT, IN, COMPUTE = Stream.OUT, Stream.IN, Stream.COMPUTE


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice()
    yield made
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


def test_a_stream_is_a_fifo(device: CpuDevice) -> None:
    seen: list[int] = []
    device.hold(OUT)
    for number in range(50):
        device.launch(OUT, lambda n=number: seen.append(n))
    fence = device.new_fence("all")
    device.record(OUT, fence)
    assert seen == []
    assert not device.query(fence)
    device.release(OUT)
    assert device.synchronize(fence, 60)
    assert seen == list(range(50))
    assert device.query(fence)


def test_a_wait_holds_one_stream_and_not_the_host(device: CpuDevice) -> None:
    seen: list[str] = []
    first, second = device.new_fence("first"), device.new_fence("second")
    device.hold(OUT)
    device.launch(OUT, lambda: seen.append("out"))
    device.record(OUT, first)
    device.wait(IN, first)
    device.launch(IN, lambda: seen.append("in"))
    device.record(IN, second)
    assert not device.synchronize(second, 0.02)
    device.release(OUT)
    assert device.synchronize(second, 60)
    assert seen == ["out", "in"]


def test_a_stream_may_wait_for_a_step_that_has_not_ended(device: CpuDevice) -> None:
    step, done = device.new_fence("step 1"), device.new_fence("done")
    device.wait(OUT, step)
    device.record(OUT, done)
    assert not device.synchronize(done, 0.02)
    device.record(COMPUTE, step)
    assert device.synchronize(done, 60)


def test_copies_move_whole_frames_and_count_when_done(device: CpuDevice) -> None:
    source = device.new_arena("device", 4, 64, host=False)
    target = device.new_arena("host", 4, 64, host=True)
    source.bytes[1], source.bytes[3] = 11, 33
    device.hold(OUT)
    device.copy_async(OUT, target, ids(2, 1), source, ids(1, 3))
    fence = device.new_fence("copy")
    device.record(OUT, fence)
    assert device.moved(OUT) == Moved(0, 0, 0)
    device.release(OUT)
    assert device.synchronize(fence, 60)
    assert (target.bytes[2] == 11).all()
    assert (target.bytes[1] == 33).all()
    assert not target.bytes[[0, 3]].any()
    assert device.moved(OUT) == Moved(2, 128, 2)
    assert device.moved(IN) == Moved(0, 0, 0)


def test_a_big_copy_is_moved_in_chunks(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmem.store.cpu.CHUNK_BYTES", 128)
    source = device.new_arena("device", 8, 64, host=False)
    target = device.new_arena("host", 8, 64, host=True)
    source.bytes[:] = ids(*range(8))[:, None]
    device.copy_async(OUT, target, ids(*range(7, -1, -1)), source, ids(*range(8)))
    fence = device.new_fence("copy")
    device.record(OUT, fence)
    assert device.synchronize(fence, 60)
    assert (target.bytes[:, 0] == ids(*range(7, -1, -1))).all()


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    ("raised", "seen"), [(OSError("boom"), DeviceUnavailable), (CorruptEntry("bad"), CorruptEntry)]
)
def test_a_failed_copy_is_kept_and_fails_the_device(
    sync: bool, raised: Exception, seen: type[Exception]
) -> None:
    def hook(*_: object) -> None:
        raise raised

    device = CpuDevice(sync=sync, hook=hook)
    source = device.new_arena("device", 2, 64, host=False)
    target = device.new_arena("host", 2, 64, host=True)
    fence, later = device.new_fence("copy 1"), device.new_fence("copy 2")
    device.hold(OUT)
    device.copy_async(OUT, target, ids(1), source, ids(1))
    device.record(OUT, fence)
    device.release(OUT)
    with pytest.raises(seen, match=r"device cpu failed \(copy 1\)"):
        device.synchronize(fence, 60)
    assert device.error is raised
    assert not device.query(fence)
    assert device.moved(OUT) == Moved(0, 0, 0), "a failed copy was counted (case 35)"
    with pytest.raises(seen):
        device.copy_async(IN, source, ids(1), target, ids(1))
    with pytest.raises(seen):
        device.wait(COMPUTE, later)
    device.record(COMPUTE, later)  # ending a step is legal after a failure
    assert not device.query(later)
    device.close()


def test_compute_runs_on_the_caller_and_raises_there(device: CpuDevice) -> None:
    seen: list[threading.Thread] = []
    device.launch(COMPUTE, lambda: seen.append(threading.current_thread()), moved=Moved(1, 8, 1))
    assert seen == [threading.current_thread()]
    assert device.moved(COMPUTE) == Moved(1, 8, 1)
    with pytest.raises(ZeroDivisionError):
        device.launch(COMPUTE, lambda: 1 / 0)
    assert device.error is None
    assert device.moved(COMPUTE) == Moved(1, 8, 1)


def test_sync_runs_at_once_and_refuses_what_it_cannot_wait_for() -> None:
    device = CpuDevice(sync=True)
    seen: list[int] = []
    device.launch(OUT, lambda: seen.append(1))
    assert seen == [1]
    step, fence = device.new_fence("step 1"), device.new_fence("copy")
    with pytest.raises(RuntimeError, match="step 1 is not reached: with sync=True"):
        device.wait(OUT, step)
    device.record(COMPUTE, step)
    device.wait(OUT, step)
    device.record(OUT, fence)
    assert device.query(fence)
    assert device._threads == ()
    device.close()


def test_close_abandons_what_waits_and_wakes_the_waiters() -> None:
    device = CpuDevice()
    device.hold(OUT)
    fence = device.new_fence("copy 7")
    device.record(OUT, fence)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            device.synchronize(fence)
        except BaseException as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    device.close()
    waiter.join(60)
    assert [type(error) for error in raised] == [ManagerClosed]
    device.close()
    with pytest.raises(ManagerClosed):
        device.launch(OUT, lambda: None)


def test_a_dropped_device_ends_its_workers() -> None:
    device = CpuDevice()
    threads = device._threads
    device.hold(IN)
    device.record(IN, device.new_fence("never"))
    del device
    assert not any(thread.is_alive() for thread in threads)


def test_a_fence_of_another_device_is_refused(device: CpuDevice) -> None:
    from kvmem.store.device import Fence

    class Other(Fence):
        pass

    with pytest.raises(TypeError, match="fence x is of another device"):
        device.wait(OUT, Other("x"))


def test_ending_takes_less_than_what_is_promised() -> None:
    assert JOIN_SECONDS < 5
