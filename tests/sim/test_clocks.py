"""The happens-before checker: what it has to tell, and what it must not (R6).

Each scenario runs in each mode, and with either stream forced first: what is unordered is told in
every schedule, not only in an unlucky one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvmem.errors import RaceError
from kvmem.sim_options import MODES, SimOptions
from kvmem.store.arena import Arena
from kvmem.store.device import Stream
from kvmem.store.sim import SimDevice
from tests.store.fakes import ids

OUT, IN, COMPUTE = Stream.OUT, Stream.IN, Stream.COMPUTE


class Bench:
    """Short words for accesses."""

    def __init__(self, mode: str, seed: int) -> None:
        self.device = SimDevice(SimOptions(mode=mode, seed=seed, not_yet=0.0))
        self.here = self.device.new_arena("device", 8, 64, host=False)
        self.there = self.device.new_arena("host", 8, 64, host=True)

    def kernel(self, *, reads: int = 0, writes: int = 0, on: Stream = COMPUTE) -> None:
        """0: none."""
        self.device.launch(
            on,
            lambda: None,
            reads=((self.here, ids(reads)),) if reads else (),
            writes=((self.here, ids(writes)),) if writes else (),
        )

    def out(self, frame: int, host: int) -> None:
        self.device.copy_async(OUT, self.there, ids(host), self.here, ids(frame))

    def into(self, host: int, frame: int) -> None:
        self.device.copy_async(IN, self.here, ids(frame), self.there, ids(host))

    def order(self, first: Stream, then: Stream) -> None:
        fence = self.device.new_fence(f"{first.name} before {then.name}")
        self.device.record(first, fence)
        self.device.wait(then, fence)


def out_before_the_write_has_run(b: Bench) -> None:
    b.kernel(writes=1)
    b.out(1, 1)


def write_under_a_copy_out(b: Bench) -> None:
    b.out(1, 1)
    b.kernel(writes=1)


def copy_in_over_a_reader(b: Bench) -> None:
    b.kernel(reads=1)
    b.into(1, 1)


def read_before_arrival(b: Bench) -> None:
    b.into(1, 1)
    b.kernel(reads=1)


def back_before_it_is_out(b: Bench) -> None:
    b.out(1, 1)
    b.into(1, 2)


def host_frame_reused_while_read(b: Bench) -> None:
    b.into(1, 1)
    b.out(2, 1)


def fence_recorded_too_early(b: Bench) -> None:
    fence = b.device.new_fence("early")
    b.device.record(COMPUTE, fence)
    b.kernel(writes=1)
    b.device.wait(OUT, fence)
    b.out(1, 1)


def one_of_two_readers_not_waited_for(b: Bench) -> None:
    """The second owner of a frame must be waited for too (case 39: inherited dependencies)."""
    b.kernel(reads=1)
    b.order(COMPUTE, IN)
    b.kernel(reads=1)
    b.into(1, 1)


def poison_without_a_wait(b: Bench) -> None:
    b.kernel(reads=3)
    b.kernel(writes=3, on=OUT)


def one_batch_writes_a_frame_twice(b: Bench) -> None:
    """The copies of a batch have no order (case 3)."""
    b.device.copy_async(OUT, b.there, ids(4, 4), b.here, ids(1, 2))


def one_kernel_reads_what_it_writes(b: Bench) -> None:
    b.device.launch(
        COMPUTE, lambda: None, reads=((b.here, ids(1, 2)),), writes=((b.here, ids(2, 3)),)
    )


RACES = [
    one_batch_writes_a_frame_twice, one_kernel_reads_what_it_writes,
    out_before_the_write_has_run, write_under_a_copy_out, copy_in_over_a_reader,
    read_before_arrival, back_before_it_is_out, host_frame_reused_while_read,
    fence_recorded_too_early, one_of_two_readers_not_waited_for, poison_without_a_wait,
]  # fmt: skip


@pytest.mark.parametrize("first", [*MODES, *Stream], ids=str)
@pytest.mark.parametrize("scene", RACES, ids=lambda scene: scene.__name__)
def test_what_nothing_orders_is_told_in_every_schedule(
    scene: Callable[[Bench], None], first: str | Stream
) -> None:
    for seed in range(3):
        b = Bench("late" if isinstance(first, Stream) else first, seed)
        with pytest.raises(RaceError) as caught:
            scene(b)
            if isinstance(first, Stream):
                b.device.run(first)
            b.device.drain()
        error = caught.value
        assert f"in {scene.__name__}" not in str(error)
        for told in (error.first, error.second):
            assert scene.__name__ in told, f"the call site is missing: {told}"
        assert len(str(error)) <= 300
        assert "(R6)" in str(error)


def ordered_by_fences(b: Bench) -> None:
    b.kernel(writes=1)
    b.order(COMPUTE, OUT)
    b.out(1, 1)
    b.order(OUT, IN)
    b.into(1, 2)
    b.order(IN, COMPUTE)
    b.kernel(reads=2, writes=1)  # the copy out came before the copy in: inherited (case 39)


def ordered_by_the_host(b: Bench) -> None:
    fence = b.device.new_fence("out")
    b.out(1, 1)
    b.device.record(OUT, fence)
    assert b.device.synchronize(fence)
    b.kernel(writes=1)
    b.into(1, 2)


def ordered_by_a_query(b: Bench) -> None:
    fence = b.device.new_fence("out")
    b.out(1, 1)
    b.device.record(OUT, fence)
    for _ in range(2000):
        if b.device.query(fence):
            break
    b.kernel(writes=1)


def two_readers_need_no_order(b: Bench) -> None:
    b.out(1, 1)
    b.kernel(reads=1)
    b.out(1, 2)


def one_stream_is_an_order(b: Bench) -> None:
    b.out(1, 1)
    b.out(2, 1)
    b.kernel(writes=1, on=OUT)


SOUND = [
    ordered_by_fences, ordered_by_the_host, ordered_by_a_query, two_readers_need_no_order,
    one_stream_is_an_order,
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scene", SOUND, ids=lambda scene: scene.__name__)
def test_what_is_ordered_is_not_told(scene: Callable[[Bench], None], mode: str) -> None:
    for seed in range(5):
        b = Bench(mode, seed)
        scene(b)
        b.device.drain()
        assert b.device.error is None


@pytest.mark.parametrize("mode", MODES)
def test_forcing_a_result_orders_nothing(mode: str) -> None:
    """On a real device `attend` doesn't wait: that its result is there already proves nothing."""
    b = Bench(mode, 1)
    b.kernel(reads=1)
    b.device.settle(COMPUTE)
    b.into(1, 1)
    with pytest.raises(RaceError):
        b.device.drain()


def test_the_host_reads_host_frames_only_after_a_wait() -> None:
    b = Bench("late", 0)
    b.out(1, 1)
    fence = b.device.new_fence("out")
    b.device.record(OUT, fence)
    b.device.run(OUT)
    with pytest.raises(RaceError, match="frame 1 of the host arena"):
        b.device.read_back(b.there, ids(1))
    assert b.device.error is None, "a reader's mistake breaks nothing"
    assert b.device.synchronize(fence)
    b.device.read_back(b.there, ids(1))


def test_the_host_reads_device_frames_in_the_order_of_the_compute_stream() -> None:
    b = Bench("late", 0)
    b.kernel(writes=1)
    b.device.read_back(b.here, ids(1))
    b.out(1, 1)  # ordered: the host has waited for the write
    b.device.drain()
    b.into(1, 2)
    with pytest.raises(RaceError):
        b.device.read_back(b.here, ids(2))
        b.device.drain()  # the read came first in this mode: it is told when the copy runs


class Buffer:
    """A staging buffer of the host, reused from step to step."""

    name = "staging"


@pytest.mark.parametrize("fenced", [True, False])
def test_a_reused_staging_buffer_is_told(fenced: bool) -> None:
    """Case 41: the table of step n + 1 is written where step n still reads its own."""
    b = Bench("late", 0)
    buffer = Buffer()
    b.device.host_access(buffer, ids(0), write=True)
    b.device.launch(COMPUTE, lambda: None, reads=((buffer, ids(0)),))
    fence = b.device.new_fence("step")
    b.device.record(COMPUTE, fence)
    b.device.run(COMPUTE)
    if fenced:
        assert b.device.synchronize(fence)
        b.device.host_access(buffer, ids(0), write=True)
    else:
        with pytest.raises(RaceError, match="staging"):
            b.device.host_access(buffer, ids(0), write=True)


def test_what_an_arena_holds_does_not_matter() -> None:
    """Cells are frames, not bytes: an arena closed and gone is no excuse for a race."""
    b = Bench("late", 0)
    arena = Arena("device", 2, 64)
    b.device.launch(OUT, lambda: None, writes=((arena, ids(1)),))
    b.device.launch(IN, lambda: None, reads=((arena, np.array([1], np.int32)),))
    with pytest.raises(RaceError):
        b.device.drain()
