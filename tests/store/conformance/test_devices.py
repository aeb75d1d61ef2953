"""What every device does alike: the CPU's, a simulated one in each mode, a GPU's double."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvmem.errors import ConfigError, DeviceUnavailable, ManagerClosed
from kvmem.store.device import Fence, FrameIds, Moved, Stream, Ticket, num_runs
from tests.store.conformance.worlds import (
    FRAME_BYTES,
    FRAMES,
    KINDS,
    PIECES,
    QUEUED,
    World,
    content,
    new_world,
    opened,
    ticket,
)
from tests.store.fakes import ids

OUT, IN, COMPUTE = Stream.OUT, Stream.IN, Stream.COMPUTE
BOTH = (OUT, IN)


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, seed: int) -> Iterator[World]:
    with opened(request.param, seed) as made:
        yield made


@pytest.fixture(params=QUEUED)
def queued(request: pytest.FixtureRequest, seed: int) -> Iterator[World]:
    """A world whose copies don't run at once."""
    with opened(request.param, seed) as made:
        yield made


# --- order ---------------------------------------------------------------------------------------


def test_a_stream_is_a_fifo(world: World) -> None:
    for frame in range(1, 6):
        world.copy(OUT, ids(3), ids(frame))
    assert world.device.synchronize(world.fence(OUT), 60)
    assert np.array_equal(world.bytes(world.arenas[1])[3], content([5])[0])


def test_a_wait_orders_a_stream_and_not_the_host(queued: World) -> None:
    device = queued.device
    device.hold(OUT)
    queued.copy(OUT, ids(2), ids(7))
    there = queued.fence(OUT)
    device.wait(IN, there)
    queued.copy(IN, ids(4), ids(2))
    back = queued.fence(IN)
    assert not device.query(back)
    assert not device.synchronize(back, 0.01)
    device.release(OUT)
    assert device.synchronize(back, 60)
    assert np.array_equal(queued.bytes(queued.arenas[0])[4], content([7])[0])


def test_a_wait_is_for_what_was_recorded_then(world: World) -> None:
    """A fence may go at once, and its event be recorded anew: what waits for it waits for that."""
    for i in range(1, 8):
        world.copy(OUT, ids(i), ids(i))
        first = world.fence(OUT)
        world.device.wait(IN, first)
        del first
        world.copy(IN, ids(8 + i % 4), ids(i))
    world.finish()
    here = world.bytes(world.arenas[0])
    assert np.array_equal(here[8:12], content([4, 5, 6, 7]))


class Programme:
    """Random copies of frames and of pieces, each behind the last one that touched what it does."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.wanted = [world.bytes(arena).copy() for arena in world.arenas]
        self.counts = dict.fromkeys(BOTH, Moved(0, 0, 0))
        self._last: dict[tuple[int, int], tuple[Stream, Fence]] = {}  # by (arena, frame)
        self.kept: list[Fence] = []

    def step(self) -> None:
        stream = self.random.choice(BOTH)
        count = self.random.randint(1, 6)
        here, there = (self._drawn(count) for _ in range(2))
        touched = [(0, f) for f in here] + [(1, f) for f in there]
        for place in dict.fromkeys(touched):
            before = self._last.get(place)
            if before is not None and before[0] is not stream:
                self.world.device.wait(stream, before[1])
        pieces = self.random.random() < 0.3
        self._copy(stream, np.array(here, np.int32), np.array(there, np.int32), pieces)
        fence = self.world.fence(stream)
        for place in touched:
            self._last[place] = stream, fence
        if self.random.random() < 0.2:
            self.world.device.query(self.random.choice([fence for _, fence in self._last.values()]))
        if self.random.random() < 0.1:
            assert self.world.device.synchronize(fence, 60)

    def _drawn(self, count: int) -> list[int]:
        """Different frames, often some that follow each other."""
        if self.random.random() < 0.5:
            first = self.random.randrange(FRAMES - count)
            return list(range(first, first + count))
        return self.random.sample(range(FRAMES), count)

    def _copy(self, stream: Stream, here: FrameIds, there: FrameIds, pieces: bool) -> None:
        arenas, wanted = self.world.arenas, self.wanted
        moved: Moved | None = None
        if pieces:  # one of those that each frame is made of
            which = self.random.randrange(PIECES)
            cut = [arena.pieces(PIECES) for arena in arenas]
            both = [np.asarray(f * PIECES + which, np.int32) for f in (here, there)]
            wanted = [w.reshape(FRAMES * PIECES, -1) for w in self.wanted]
            moved = Moved(0, len(here) * cut[0].frame_bytes, num_runs(both[0], both[1]))
        else:
            cut, both = list(arenas), [here, there]
        to, origin = (1, 0) if stream is OUT else (0, 1)
        wanted[to][both[to]] = wanted[origin][both[origin]]
        self.world.device.copy_async(
            stream, cut[to], both[to], cut[origin], both[origin], moved=moved
        )
        self.counts[stream] += moved or Moved.whole(arenas[to], both[to], both[origin])


@pytest.mark.parametrize("number", range(3))
def test_random_copies_end_as_if_one_by_one(world: World, number: int, seed: int) -> None:
    programme = Programme(world, seed + number)
    for _ in range(40):
        programme.step()
    world.finish()
    for arena, wanted in zip(world.arenas, programme.wanted, strict=True):
        assert np.array_equal(world.bytes(arena), wanted), arena.name
    for stream in BOTH:
        assert world.device.moved(stream) == programme.counts[stream]
    assert not world.device.failed


# --- fences --------------------------------------------------------------------------------------


def test_a_fence_is_reached_when_its_stream_came_there(queued: World) -> None:
    device = queued.device
    fence = device.new_fence("x")
    assert not device.query(fence)
    device.hold(IN)
    queued.copy(IN, ids(1), ids(1))
    device.record(IN, fence)
    assert not any(device.query(fence) for _ in range(50))
    assert device.moved(IN) == Moved(0, 0, 0), "counted before it moved (case 35)"
    assert not device.synchronize(fence, 0)
    device.release(IN)
    assert device.synchronize(fence)
    assert all(device.query(fence) for _ in range(5)), "what was told stays true"
    assert device.synchronize(fence, 0)
    assert device.moved(IN) == Moved(1, FRAME_BYTES, 1)
    assert device.moved(OUT) == device.moved(COMPUTE) == Moved(0, 0, 0)


def test_who_waits_goes_on_when_another_thread_lets_it(queued: World) -> None:
    device = queued.device
    device.hold(OUT)
    queued.copy(OUT, ids(1), ids(1))
    fence = queued.fence(OUT)
    thread = threading.Timer(0.02, device.release, [OUT])
    thread.start()
    assert device.synchronize(fence)
    thread.join()


def test_a_fence_of_another_device_is_refused(world: World, seed: int) -> None:
    class Other(Fence):
        pass

    for call in (world.device.wait, world.device.record):
        with pytest.raises(TypeError, match="fence x is of another device"):
            call(OUT, Other("x"))


def test_work_that_is_timed_is_told_once(world: World) -> None:
    told: list[float] = []
    world.device.timed(OUT, lambda: world.copy(OUT, ids(1, 2), ids(1, 2)), told.append)
    assert world.device.synchronize(world.fence(OUT), 60)
    for _ in range(100):
        world.device.moved(OUT)
    world.finish()
    for _ in range(100):
        world.device.moved(OUT)
    assert len(told) == 1
    assert told[0] >= 0
    assert np.array_equal(world.bytes(world.arenas[1])[1:3], content([1, 2]))


def test_reading_back_and_settling_break_nothing(world: World) -> None:
    world.copy(OUT, ids(1), ids(1))
    world.finish()
    for arena in world.arenas:
        world.device.read_back(arena, ids(1))
    world.device.settle(COMPUTE)


def test_a_launch_runs_behind_what_came_before(world: World) -> None:
    seen: list[int] = []
    for number in range(5):
        world.device.launch(COMPUTE, lambda n=number: seen.append(n), moved=Moved(1, 2, 3))
    fence = world.fence(COMPUTE)
    assert world.device.synchronize(fence, 60)
    assert seen == list(range(5))
    assert world.device.moved(COMPUTE) == Moved(5, 10, 15)


# --- threads -------------------------------------------------------------------------------------


def test_threads_copy_at_once(world: World) -> None:
    """Each on frames of its own, out and back."""
    errors: list[BaseException] = []

    def work(frame: int) -> None:
        try:
            for _ in range(10):
                world.copy(OUT, ids(frame), ids(frame))
                world.device.wait(IN, world.fence(OUT))
                world.copy(IN, ids(frame + 6), ids(frame))
                fence = world.fence(IN)
                assert world.device.synchronize(fence, 60)
                world.device.wait(OUT, fence)
                world.device.moved(OUT)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[frame]) for frame in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    world.finish()
    assert np.array_equal(world.bytes(world.arenas[0])[6:], content(range(6)))
    for stream in BOTH:
        assert world.device.moved(stream) == Moved(60, 60 * FRAME_BYTES, 60)


# --- failures ------------------------------------------------------------------------------------


def test_a_refused_copy_is_told_in_its_ticket_and_the_stream_goes_on(world: World) -> None:
    device = world.device
    refused = OSError("refused")
    bad, good = ticket(OUT, 1), ticket(OUT, 2)
    world.fail_next(refused)
    world.copy(OUT, ids(1), ids(1), ticket=bad)
    assert device.synchronize(world.fence(OUT), 60)
    assert bad.error is refused
    assert device.failed == [bad]
    world.copy(OUT, ids(2), ids(2), ticket=good)
    assert device.synchronize(world.fence(OUT), 60)
    assert good.error is None
    assert device.failed == [bad]
    assert device.error is None
    assert device.moved(OUT) == Moved(1, FRAME_BYTES, 1), "a failed copy counts for nothing"
    assert np.array_equal(world.bytes(world.arenas[1])[2], content([2])[0])


def test_a_ticket_is_listed_once(world: World) -> None:
    both = ticket(IN)
    for frame in (1, 2):
        world.fail_next(MemoryError("refused"))
        world.copy(IN, ids(frame), ids(frame), ticket=both)
        world.finish()
    assert world.device.failed == [both]


def fail(world: World, error: BaseException, of: Ticket | None) -> None:
    """A copy that fails the device, told by whichever call is the first to hear of it."""
    world.fail_next(error)
    with pytest.raises(DeviceUnavailable, match=f"device {world.name} failed"):
        world.copy(OUT, ids(1), ids(1), ticket=of)
        world.device.synchronize(world.fence(OUT), 60)


@pytest.mark.parametrize("lasting", [False, True], ids=["no ticket", "a mistake"])
def test_a_failure_stays(world: World, lasting: bool) -> None:
    """An error without a ticket, or one that recovering would hide, fails the device (R8)."""
    device = world.device
    error = ValueError("a mistake") if lasting else OSError("nobody to tell")
    before = device.new_fence("never recorded")
    step = device.new_fence("a step")
    fail(world, error, ticket(OUT) if lasting else None)
    assert device.error is error
    assert not device.query(before)
    assert device.moved(OUT) == Moved(0, 0, 0)
    device.record(COMPUTE, step)  # so that a step can end
    assert not device.query(step)
    for act in (
        lambda: world.copy(IN, ids(1), ids(1)),
        lambda: world.copy(OUT, ids(1), ids(1), ticket=ticket(OUT, 3)),
        lambda: device.wait(IN, before),
        lambda: device.synchronize(before, 60),
        lambda: device.launch(OUT, lambda: None),
    ):
        with pytest.raises(DeviceUnavailable):
            act()
    device.close()
    device.close()
    assert device.error is error


# --- ends ----------------------------------------------------------------------------------------


def test_nothing_is_taken_after_close(world: World) -> None:
    device = world.device
    reached = world.fence(OUT)
    assert device.synchronize(reached, 60)
    never, step = device.new_fence("never"), device.new_fence("a step")
    device.close()
    device.close()
    for act in (
        lambda: world.copy(OUT, ids(1), ids(1)),
        lambda: device.synchronize(never, 60),
        lambda: device.launch(IN, lambda: None),
    ):
        with pytest.raises(ManagerClosed, match=f"device {world.name} is closed"):
            act()
    if world.kind != "cpu sync":  # which has no stream that could wait
        with pytest.raises(ManagerClosed):
            device.wait(OUT, never)
    device.record(COMPUTE, step)  # a step may end after it
    assert device.error is None
    assert device.moved(OUT) == Moved(0, 0, 0)


def test_who_waits_is_told_of_the_close(queued: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmem.store.cuda.device.CLOSE_SECONDS", 0.02)
    device = queued.device
    device.hold(OUT)
    queued.copy(OUT, ids(1), ids(1))
    fence = queued.fence(OUT)
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
    if queued.double is not None:  # the memory of what is under way stays
        for arena in queued.arenas:
            arena.close()
        assert queued.double.memory.registered
        device.release(OUT)
        queued.double.check()
        queued.double.memory.registered.clear()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork, with the workers of a CPU device
@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_is_refused(kind: str, seed: int) -> None:
    with opened(kind, seed) as world:
        device = world.device
        fence, new = world.fence(OUT), device.new_fence("new")
        assert device.synchronize(fence, 60)
        child = os.fork()
        if child == 0:
            os._exit(_refusals(world, new))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 5
        world.copy(OUT, ids(1), ids(1))
        world.finish()
        assert np.array_equal(world.bytes(world.arenas[1])[1], content([1])[0])


def _refusals(world: World, new: Fence) -> int:
    """In the child: how many calls were refused."""
    refused = 0
    for act in (
        lambda: world.copy(OUT, ids(1), ids(1)),
        lambda: world.copy(IN, ids(1), ids(1)),
        lambda: world.device.synchronize(new, 1),
        lambda: world.device.launch(OUT, lambda: None),
        lambda: world.device.close() or world.copy(OUT, ids(1), ids(1)),
    ):
        try:
            act()
        except ManagerClosed:
            refused += 1
        except BaseException:
            return 99
    return refused


# --- memory --------------------------------------------------------------------------------------


def test_arenas_are_zeroed_and_exact(world: World) -> None:
    for host in (False, True):
        arena = world.device.new_arena("one", 5, 4160, host=host)
        try:
            assert arena.num_bytes == 5 * 4160
            assert tuple(arena.tensor.shape) == (5, 4160)
            assert not world.bytes(arena).any()
            cut = arena.pieces(5)
            assert (cut.num_frames, cut.frame_bytes) == (25, 832)
            assert cut.address == arena.address
            assert not arena.closed
        finally:
            arena.close()
            arena.close()
        assert arena.closed
        with pytest.raises(ManagerClosed, match="one arena is closed"):
            _ = arena.tensor


@pytest.mark.parametrize("host", [False, True])
def test_memory_that_is_not_there_is_refused_with_numbers(world: World, host: bool) -> None:
    with pytest.raises(ConfigError, match=rf"much arena: {1 << 30} frames of {1 << 26} bytes"):
        world.device.new_arena("much", 1 << 30, 1 << 26, host=host)
    world.copy(OUT, ids(1), ids(1))
    world.finish()


def test_a_device_that_was_never_used_closes(seed: int) -> None:
    for kind in KINDS:
        world = new_world(kind, seed)
        world.device.close()
        for arena in world.arenas:
            arena.close()
