"""The three ways of a transfer, over every kind of page-locked memory: equal bytes, any order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvmem.errors import DeviceUnavailable
from kvmem.store.arena import ArenaBase
from kvmem.store.cuda import copies, cost_model, host_arena, timing
from kvmem.store.cuda.cost_figures import WAYS, Way
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.cuda.pinning import pin
from kvmem.store.device import Moved, Stream, num_runs
from tests.cuda_double.faults import Error
from tests.cuda_double.kernels import double_kernels
from tests.cuda_double.memory import bytes_at
from tests.cuda_double.opening import MODES, Double, HeldDevice
from tests.store.conformance.worlds import ticket
from tests.store.fakes import ids

OUT, IN = Stream.OUT, Stream.IN
FRAMES, FRAME_BYTES, CHUNK = 60, 448, 8192
#: How much of the host's 26,880 bytes is page-locked, by the registration that is refused.
PARTS = {"all in one": None, "four chunks": 0, "two chunks": 3, "nothing": 1}


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    double_kernels(monkeypatch)


class Always:
    """A model that has one opinion."""

    def __init__(self, way: Way) -> None:
        self.way = way

    def choose(self, *_: Any, **__: Any) -> Way:
        return self.way


class Bench:
    """A device over a double, its tiers, and what they have to hold."""

    def __init__(
        self, seed: int, mode: str, way: Way, part: str, patch: pytest.MonkeyPatch
    ) -> None:
        self.random = random.Random(seed)
        self.double = Double.new(seed, mode)
        refused = PARTS[part]
        if refused is not None:
            patch.setattr(host_arena, "pin", partial(pin, chunk_bytes=CHUNK))
            if refused:
                self.double.runtime.fail(
                    "cudaHostRegister", refused, Error.cudaErrorMemoryAllocation
                )
        self.device = HeldDevice(self.double.cuda)
        self.arenas = [
            self.device.new_arena(name, FRAMES, FRAME_BYTES, host=name == "host")
            for name in ("device", "host")
        ]
        self.device.copies.model = Always(way)  # type: ignore[assignment]
        numbers = np.random.default_rng(seed)
        self.wanted = [self.bytes(arena).copy() for arena in self.arenas]
        for arena, wanted in zip(self.arenas, self.wanted, strict=True):
            wanted[:] = numbers.integers(0, 256, wanted.shape, np.uint8)
            self.bytes(arena)[:] = wanted

    def bytes(self, arena: ArenaBase) -> NDArray[np.uint8]:
        return bytes_at(arena.address, arena.num_bytes).reshape(FRAMES, FRAME_BYTES)

    def drawn(self) -> NDArray[np.int32]:
        """Some frames: side by side, by twos, or anywhere."""
        count = self.random.randint(1, 24)
        kind = self.random.choice(("together", "pairs", "apart", "backwards"))
        if kind == "apart":
            return np.array(self.random.sample(range(FRAMES), count), np.int32)
        if kind == "pairs":
            first = self.random.sample(range(0, FRAMES, 2), -(-count // 2))
            return np.array([f + i for f in first for i in (0, 1)][:count], np.int32)
        first_of_all = self.random.randrange(FRAMES - count)
        run = np.arange(first_of_all, first_of_all + count, dtype=np.int32)
        return run[::-1].copy() if kind == "backwards" else run

    def move(self, stream: Stream, pieces: int = 1) -> Moved:
        """A transfer of drawn frames (or of one piece of each); what it has to count as."""
        here, there = self.drawn(), self.drawn()
        count = min(len(here), len(there))
        both = [here[:count], there[:count]]
        arenas: list[Any] = list(self.arenas)
        wanted = self.wanted
        if pieces > 1:
            which = self.random.randrange(pieces)
            arenas = [arena.pieces(pieces) for arena in arenas]
            wanted = [w.reshape(FRAMES * pieces, -1) for w in wanted]
            both = [np.asarray(f * pieces + which, np.int32) for f in both]
        to, origin = (1, 0) if stream is OUT else (0, 1)
        wanted[to][both[to]] = wanted[origin][both[origin]]
        self.device.copy_async(stream, arenas[to], both[to], arenas[origin], both[origin])
        return Moved(count, count * arenas[0].frame_bytes, num_runs(both[0], both[1]))

    def turn(self, behind: Stream, stream: Stream) -> None:
        """What one stream is given from now on comes after all of the other."""
        fence = self.device.new_fence("turn")
        self.device.record(behind, fence)
        self.device.wait(stream, fence)

    def finish(self) -> None:
        for stream in (OUT, IN):
            fence = self.device.new_fence("end")
            self.device.record(stream, fence)
            assert self.device.synchronize(fence, 60)
        for arena, wanted in zip(self.arenas, self.wanted, strict=True):
            assert np.array_equal(self.bytes(arena), wanted), arena.name

    def close(self) -> None:
        self.device.close()
        for arena in self.arenas:
            arena.close()
        if not self.double.runtime.faults.lost:
            assert not self.double.memory.registered
        self.double.check()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Any]:
    made: list[Bench] = []

    def new(way: Way, part: str = "all in one", mode: str = "random") -> Bench:
        made.append(Bench(seed, mode, way, part, monkeypatch))
        return made[-1]

    yield new
    for bench in made:
        bench.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_moves_the_same_bytes(make: Any, way: Way, part: str, mode: str) -> None:
    """Out and in at random, in whole frames and in pieces, counted as they were asked for."""
    bench = make(way, part, mode)
    counts = dict.fromkeys((OUT, IN), Moved(0, 0, 0))
    last = OUT
    for _ in range(30):
        stream = bench.random.choice((OUT, IN))
        if stream is not last:
            bench.turn(last, stream)
            last = stream
        counts[stream] += bench.move(stream, bench.random.choice((1, 1, 7)))
    bench.finish()
    for stream, wanted in counts.items():
        assert bench.device.moved(stream) == wanted
    assert bench.device.copies.num_chosen[way] >= 12  # a single run is one copy anyway
    locked = bench.arenas[1].pinned.num_bytes
    total = FRAMES * FRAME_BYTES
    assert locked == {"two chunks": 2 * CHUNK, "nothing": 0}.get(part, total)


def test_staging_goes_round_by_round(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of three frames for transfers of up to 24: each round overwrites the last."""
    monkeypatch.setattr(copies, "STAGING_BYTES", 3 * FRAME_BYTES + 1)
    bench = make("staged", "four chunks")
    for _ in range(12):
        bench.move(OUT)
    bench.turn(OUT, IN)
    for _ in range(12):
        bench.move(IN)
    bench.finish()
    kernels = [line for line in bench.double.streams.log if line.endswith("move kernel")]
    assert len(kernels) > 40
    assert bench.device.uploads.num_buffers < 60


def test_a_frame_larger_than_the_buffer_is_never_staged(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model made for it; a frame would run over the buffer's end."""
    monkeypatch.setattr(copies, "STAGING_BYTES", FRAME_BYTES - 64)
    bench = make("copies")
    bench.device.copies.model = bench.device.measure()
    for _ in range(12):
        bench.move(OUT)
    bench.finish()
    chosen = bench.device.copies.num_chosen
    assert chosen["staged"] == 0
    assert chosen["batch"]


def test_copies_where_the_gpu_has_no_room_to_gather(make: Any) -> None:
    bench = make("staged")
    bench.double.memory.capacity = bench.double.memory.used
    for _ in range(5):
        bench.move(OUT)
    bench.finish()
    assert bench.device.copies.num_chosen["staged"] == 0
    assert bench.device.error is None


def test_a_runtime_without_batches_is_told(make: Any) -> None:
    """The model never chooses what it found missing; asked for all the same, it is no refusal of
    one copy that the next could survive... but one that the ticket tells."""
    bench = make("batch")
    bench.double.runtime.fail("cudaMemcpyBatchAsync", 1, Error.cudaErrorNotSupported)
    told = ticket(OUT)
    here, there = bench.arenas
    bench.device.copy_async(OUT, there, ids(1, 3), here, ids(5, 2), told)
    assert isinstance(told.error, NotImplementedError)
    assert bench.device.error is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lasting", [False, True])
def test_a_call_that_fails(make: Any, way: Way, lasting: bool) -> None:
    """The second call of a transfer: told in the ticket where the stream lives on, else for good;
    the buffers that it used are used again."""
    bench = make(way)
    here, there = bench.arenas
    name = "cudaMemcpyBatchAsync" if way == "batch" else "cudaMemcpyAsync"
    nth = 1 if way == "batch" else 2
    error = Error.cudaErrorIllegalAddress if lasting else Error.cudaErrorInvalidValue
    bench.double.runtime.fail(name, nth, error)
    told = ticket(OUT)
    apart = ids(*range(1, 40, 3))
    if lasting:
        with pytest.raises(DeviceUnavailable, match="IllegalAddress"):
            bench.device.copy_async(OUT, there, apart, here, apart[::-1].copy(), told)
        assert bench.device.error is not None
        return
    bench.device.copy_async(OUT, there, apart, here, apart[::-1].copy(), told)
    assert told.error is not None
    assert bench.device.error is None
    buffers = bench.device.uploads.num_buffers
    bench.wanted[1][apart] = bench.wanted[0][apart[::-1]]
    bench.device.copy_async(OUT, there, apart, here, apart[::-1].copy(), ticket(OUT, 2))
    bench.finish()
    assert bench.device.moved(OUT).frames == len(apart)
    assert bench.device.uploads.num_buffers <= max(buffers, 2)
    assert not bench.double.runtime.faults.last_error


def test_the_id_arrays_are_read_before_the_call_returns(make: Any) -> None:
    for way in WAYS:
        bench = make(way, mode="late")
        here, there = bench.arenas
        to, origin = ids(1, 5, 9), ids(2, 6, 4)
        bench.wanted[1][to] = bench.wanted[0][origin]
        bench.device.copy_async(OUT, there, to, here, origin)
        to[:], origin[:] = 0, 0
        bench.finish()


def test_a_copy_of_nothing_is_nothing(make: Any) -> None:
    bench = make("staged")
    here, there = bench.arenas
    bench.device.copy_async(OUT, there, ids(), here, ids())
    bench.finish()
    assert bench.device.moved(OUT) == Moved(0, 0, 0)


def test_the_measurement_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, seed: int) -> None:
    """What `HeldDevice` leaves out: ways are timed on the double, and all memory comes back, also
    where a copy fails in the middle."""
    monkeypatch.setenv("KVMEM_CUDA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cost_model, "POINTS", cost_model.POINTS[:2])
    monkeypatch.setattr(timing, "MEASURED_BYTES", 64 << 10)  # the double is slow
    double = Double.new(seed, "late")
    device = CudaDevice(double.cuda)
    assert device.measure().source in ("measured", "partly measured")
    for path in tmp_path.rglob("*.json"):
        path.unlink()
    assert double.runtime.calls["cudaMemcpyAsync"] > 4
    double.runtime.fail("cudaMemcpyAsync", 4, Error.cudaErrorInvalidValue)
    with pytest.raises(RuntimeError):
        device.measure()
    assert not double.memory.registered
    assert double.torch.current_device() == 0
    device.close()
    double.check()
