"""Page-locked memory: exact chunks, refusals that keep what they have, ends in the right order."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem.errors import DeviceUnavailable, TierError
from kvmem.store.arena import Arena
from kvmem.store.cuda import pinning
from kvmem.store.cuda.pinning import REFUSALS, numa_node_of, pin, prefer_node
from tests.store.cuda.fake_cudart import Error, FakeCudart, is_mapped

PAGE = mmap.PAGESIZE
#: Of the arena below, in chunks of CHUNK.
NUM_CHUNKS = 12
CHUNK = 256 << 10


@pytest.fixture
def arena() -> Iterator[Arena]:
    """1,000 frames of 3,136 bytes: 12 chunks, the last one short and no whole number of pages."""
    made = Arena("host", 1000, 3136)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def memlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 8 MiB, whatever the machine has."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_all_is_registered_to_the_byte(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    cudart, seen = FakeCudart(), list[tuple[int, int]]()
    pinned = pin(cudart, arena.bytes, chunk_bytes=CHUNK, progress=lambda *at: seen.append(at))
    total = arena.num_bytes
    assert total % CHUNK
    assert total % PAGE
    assert (pinned.num_bytes, pinned.reason, pinned.error) == (total, None, None)
    start = arena.bytes.ctypes.data
    sizes = [CHUNK] * (total // CHUNK) + [total % CHUNK]
    places = [start + i * CHUNK for i in range(len(sizes))]
    assert cudart.registered() == list(zip(places, sizes, strict=True))
    assert seen == [(min(total, (i + 1) * CHUNK), total) for i in range(len(sizes))]
    assert pinned.unpin()
    assert cudart.unregistered() == places[::-1]
    assert not cudart.live
    assert not warnings(caplog)


def test_a_second_end_does_nothing(arena: Arena) -> None:
    cudart = FakeCudart()
    pinned = pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert pinned.unpin()
    calls = list(cudart.calls)
    assert pinned.unpin()
    assert cudart.calls == calls
    assert pinned.num_bytes == 0
    assert not pinned.is_pinned(0, 1)


def test_threads_that_end_it_at_once_unregister_each_chunk_once(arena: Arena) -> None:
    cudart = FakeCudart()
    pinned = pin(cudart, arena.bytes, chunk_bytes=8 * PAGE)
    count = len(cudart.live)
    barrier = threading.Barrier(4)

    def end() -> None:
        barrier.wait()
        pinned.unpin()
        assert not cudart.live, "returned before the memory may be unmapped"

    threads = [threading.Thread(target=end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cudart.unregistered()) == len(set(cudart.unregistered())) == count


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSALS))
@pytest.mark.parametrize("chunk", [0, 1, 5, 11])
def test_what_was_registered_before_a_refusal_stays(
    arena: Arena, caplog: pytest.LogCaptureFixture, name: str, chunk: int
) -> None:
    cudart = FakeCudart(fail_at={chunk: Error[name]})
    pinned = pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert pinned.num_bytes == chunk * CHUNK == sum(cudart.live.values())
    assert pinned.error == name
    assert pinned.reason is not None
    assert name in pinned.reason
    assert warnings(caplog) == [pinned.reason], "said once"
    assert cudart.last == 0, "a later launch would report the refusal as its own"
    assert len(cudart.calls) == chunk + 1, "one refusal is enough"
    assert pinned.unpin()
    assert len(cudart.unregistered()) == chunk, "the refused chunk is not ours to unregister"
    assert not cudart.live


def test_a_limit_of_locked_memory_is_told_with_its_cure(
    arena: Arena, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = FakeCudart(budget=1 << 20)
    pinned = pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert pinned.num_bytes == 1 << 20
    (said,) = warnings(caplog)
    for part in ("1.00 MiB of 2.99 MiB", "8.00 MiB (RLIMIT_MEMLOCK)", "ulimit -l unlimited",
                 "--ulimit memlock=-1", "LimitMEMLOCK=infinity", "WSL"):  # fmt: skip
        assert part in said
    pinned.unpin()

    no_limit = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (no_limit, no_limit))
    reason = pin(FakeCudart(budget=0), arena.bytes).reason
    assert reason is not None
    assert "ulimit" not in reason, "not a cure where there is no limit"
    assert "WSL" in reason


def test_memory_that_someone_else_registered_is_left_to_them(arena: Arena) -> None:
    """lattice/quda PR 1639: a library had registered addresses and not let go of them."""
    cudart = FakeCudart()
    theirs = arena.bytes.ctypes.data + 3 * CHUNK + PAGE
    cudart.cudaHostRegister(theirs, PAGE, 1)
    pinned = pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert pinned.num_bytes == 3 * CHUNK
    assert pinned.error == "cudaErrorHostMemoryAlreadyRegistered"
    assert "never let go" in str(pinned.reason)
    assert "ulimit" not in str(pinned.reason)
    assert cudart.last == 0
    pinned.unpin()
    assert list(cudart.live) == [theirs]


@pytest.mark.parametrize(
    "error", [Error.cudaErrorECCUncorrectable, Error.cudaErrorLaunchFailure, Error.cudaErrorUnknown]
)
@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_a_lost_device_raises_and_leaves_nothing(arena: Arena, error: Error, chunk: int) -> None:
    cudart = FakeCudart(fail_at={chunk: error})
    with pytest.raises(DeviceUnavailable, match=error.name):
        pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert len(cudart.unregistered()) == chunk
    assert not cudart.live
    assert cudart.last == 0


def test_a_code_without_a_name_is_told_by_its_number(arena: Arena) -> None:
    with pytest.raises(DeviceUnavailable, match="12345"):
        pin(FakeCudart(fail_at={0: 12345}), arena.bytes)


def test_a_refusal_behind_which_a_lost_context_shows_raises(arena: Arena) -> None:
    """An error that stays although it was taken is no refusal, whatever the call answered."""
    cudart = FakeCudart(budget=CHUNK, sticky=Error.cudaErrorIllegalAddress)
    with pytest.raises(DeviceUnavailable, match="IllegalAddress"):
        pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert not cudart.live


def test_an_exception_of_the_bindings_leaves_nothing(arena: Arena) -> None:
    cudart = FakeCudart(fail_at={3: RuntimeError("no driver")})
    with pytest.raises(RuntimeError, match="no driver"):
        pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert not cudart.live
    assert cudart.last == 0


def test_an_interrupt_right_after_a_call_loses_no_chunk(arena: Arena) -> None:
    cudart = FakeCudart()

    def interrupt() -> None:
        if len(cudart.live) == 4:
            raise KeyboardInterrupt

    cudart.after_register = interrupt
    with pytest.raises(KeyboardInterrupt):
        pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert len(cudart.unregistered()) == 4
    assert not cudart.live


# -- progress and cancelling -----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_cancelling_before_any_chunk_unregisters_the_others(arena: Arena, chunk: int) -> None:
    cudart, stop = FakeCudart(), threading.Event()
    if chunk == 0:
        stop.set()

    def progress(done: int, total: int) -> None:
        if done == chunk * CHUNK:
            stop.set()

    with pytest.raises(TierError, match=r"cancelled after .* of 2\.99 MiB"):
        pin(cudart, arena.bytes, chunk_bytes=CHUNK, progress=progress, cancelled=stop.is_set)
    assert len(cudart.registered()) == chunk
    assert cudart.unregistered() == [address for address, _ in cudart.registered()][::-1]
    assert not cudart.live


def test_cancelling_after_the_last_chunk_is_too_late(arena: Arena) -> None:
    stop = threading.Event()

    def progress(done: int, total: int) -> None:
        if done == total:
            stop.set()

    pinned = pin(
        FakeCudart(), arena.bytes, chunk_bytes=CHUNK, progress=progress, cancelled=stop.is_set
    )
    assert pinned.num_bytes == arena.num_bytes
    pinned.unpin()


def test_an_error_of_the_progress_comes_out_and_leaves_nothing(arena: Arena) -> None:
    cudart = FakeCudart()

    def progress(done: int, total: int) -> None:
        if done > 5 * CHUNK:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pin(cudart, arena.bytes, chunk_bytes=CHUNK, progress=progress)
    assert len(cudart.unregistered()) == 6
    assert not cudart.live


# -- ends ------------------------------------------------------------------------------------------


def test_the_arena_is_still_there_when_its_memory_is_unregistered(arena: Arena) -> None:
    """The order of an owner's close; the double asserts that what it unregisters is mapped."""
    arena.bytes[:] = 7
    cudart = FakeCudart()
    cudart.before_unregister = lambda: np.testing.assert_array_equal(arena.bytes[-1], 7)
    pinned = pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    assert pinned.unpin()
    arena.close()
    assert cudart.unregistered()


def test_the_mapping_outlives_a_forgotten_arena(arena: Arena) -> None:
    """A registration must never name addresses that are mapped to something else by now."""
    mine = Arena("host", 64, PAGE)
    address, size = mine.bytes.ctypes.data, mine.num_bytes
    pinned = pin(FakeCudart(), mine.bytes)
    del mine
    gc.collect()
    assert is_mapped(address, size)
    assert pinned.unpin()


@pytest.mark.parametrize("failed", [[0], [11], [3, 4, 9], list(range(NUM_CHUNKS))])
def test_chunks_that_stay_registered_keep_their_addresses(
    caplog: pytest.LogCaptureFixture, failed: list[int]
) -> None:
    """LMCache PR 5177: an unregister that failed, then munmap, left the driver with stale pages."""
    mine = Arena("host", 1000, 3136)
    address, size = mine.bytes.ctypes.data, mine.num_bytes
    cudart = FakeCudart(fail_unregister=dict.fromkeys(failed, Error.cudaErrorIllegalAddress))
    pinned = pin(cudart, mine.bytes, chunk_bytes=CHUNK)
    assert not pinned.unpin()
    assert len(cudart.unregistered()) == NUM_CHUNKS, "one that fails stops no other"
    assert len(cudart.live) == len(failed)
    (said,) = warnings(caplog)
    assert said.startswith(f"{len(failed)} chunks")
    assert "cudaErrorIllegalAddress" in said
    mine.close()
    del pinned
    gc.collect()
    assert is_mapped(address, size)
    held = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
    assert not held.any(), "close gave the pages back"


@pytest.mark.parametrize(
    "gone", [Error.cudaErrorCudartUnloading, Error.cudaErrorContextIsDestroyed]
)
def test_an_end_after_the_drivers_own_is_quiet(
    arena: Arena, caplog: pytest.LogCaptureFixture, gone: Error
) -> None:
    cudart = FakeCudart(fail_unregister=dict.fromkeys(range(NUM_CHUNKS), gone))
    assert pin(cudart, arena.bytes, chunk_bytes=CHUNK).unpin()
    assert not warnings(caplog)


def test_an_end_never_raises(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    gone = dict.fromkeys(range(NUM_CHUNKS), TypeError("'NoneType' object is not callable"))
    cudart = FakeCudart(fail_unregister=gone)
    assert not pin(cudart, arena.bytes, chunk_bytes=CHUNK).unpin()
    assert warnings(caplog)[0].startswith(f"{NUM_CHUNKS} chunks")


def test_memory_that_someone_unregistered_is_told_but_not_kept(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = FakeCudart()
    pinned = pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    cudart.live.clear()  # a reset of the device by the engine, say
    assert pinned.unpin()
    assert "cudaErrorHostMemoryNotRegistered" in warnings(caplog)[0]
    assert cudart.last == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_unregisters_nothing(arena: Arena) -> None:
    cudart = FakeCudart()
    pinned = pin(cudart, arena.bytes, chunk_bytes=CHUNK)
    with pinned._lock:  # for ever held in the child
        child = os.fork()
        if child == 0:
            cudart.calls.clear()
            os._exit(0 if pinned.unpin() and not cudart.calls else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pinned.num_bytes == arena.num_bytes
    pinned.unpin()


# -- where copies are cut --------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(40))
def test_pieces_of_copies_lie_in_one_registration_or_in_none(case: int, seed: int) -> None:
    """sgl-project/sglang PR 36798: one copy across two registered ranges is an invalid argument."""
    print("seed", seed)
    rng = random.Random(seed)
    arena = Arena("host", rng.randint(1, 60), 64 * rng.randint(1, 200))
    chunk = PAGE * rng.choice([1, 2, 3, 7, 1000])
    budget = rng.choice([None, rng.randint(0, arena.num_bytes)])
    cudart = FakeCudart(budget=budget)
    pinned = pin(cudart, arena.bytes, chunk_bytes=chunk)
    assert pinned.num_bytes == sum(cudart.live.values())
    assert (pinned.reason is None) == (pinned.num_bytes == arena.num_bytes)
    base = arena.bytes.ctypes.data
    ranges = [(address - base, address - base + size) for address, size in cudart.live.items()]
    edges = [0, arena.num_bytes, *(edge for both in ranges for edge in both)]
    offsets, sizes = [], []
    for _ in range(rng.randint(0, 12)):
        ends = [rng.choice([rng.randint(0, arena.num_bytes), rng.choice(edges)]) for _ in "12"]
        offsets.append(min(ends))
        sizes.append(max(ends) - min(ends) if rng.random() < 0.9 else 0)
        inside = [low <= offsets[-1] and offsets[-1] + sizes[-1] <= high for low, high in ranges]
        if any(inside):
            assert pinned.is_pinned(offsets[-1], sizes[-1])
    runs, starts, pieces = pinned.split(np.array(offsets, np.int64), np.array(sizes, np.int64))
    at = list(offsets)
    for run, start, size in zip(runs, starts, pieces, strict=True):
        assert start == at[run], "in order, without gaps"
        at[run] += size
        assert size or not sizes[run], "no empty pieces of a run that is not"
        touched = [(low, high) for low, high in ranges if start < high and low < start + size]
        assert len(touched) <= 1
        assert all(low <= start and start + size <= high for low, high in touched)
        assert not size or pinned.is_pinned(int(start), int(size)) == bool(touched)
    assert at == [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert list(runs) == sorted(runs)
    pinned.unpin()
    assert not cudart.live
    assert not len(pinned.cuts)
    arena.close()


def test_what_is_page_locked_is_told_to_the_byte(arena: Arena) -> None:
    pinned = pin(FakeCudart(budget=2 * CHUNK), arena.bytes, chunk_bytes=CHUNK)
    assert pinned.is_pinned(0, 2 * CHUNK)
    assert pinned.is_pinned(2 * CHUNK - 1, 1)
    assert not pinned.is_pinned(2 * CHUNK - 1, 2)
    assert not pinned.is_pinned(2 * CHUNK, 1)
    assert not pinned.is_pinned(-1, 1)
    assert pinned.cuts.tolist() == [CHUNK, 2 * CHUNK]
    pinned.unpin()


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [0, -PAGE, PAGE - 1, PAGE + 1])
def test_chunks_are_whole_pages(arena: Arena, chunk_bytes: int) -> None:
    cudart = FakeCudart()
    with pytest.raises(ValueError, match=rf"chunk_bytes={chunk_bytes}; allowed: .*{PAGE}"):
        pin(cudart, arena.bytes, chunk_bytes=chunk_bytes)
    assert not cudart.calls


def test_memory_is_whole_and_starts_on_a_page(arena: Arena) -> None:
    with pytest.raises(ValueError, match="whole page"):
        pin(FakeCudart(), arena.bytes[1:])
    with pytest.raises(ValueError, match="C-contiguous"):
        pin(FakeCudart(), arena.bytes[::2])


def test_no_memory_is_no_call() -> None:
    """FreeToken PR 56: the runtime refuses to register 0 bytes."""
    cudart = FakeCudart()
    memory = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)[:0]
    pinned = pin(cudart, memory)
    assert (pinned.num_bytes, pinned.reason, cudart.calls) == (0, None, [])
    assert pinned.unpin()


def test_a_default_chunk_is_far_below_what_one_call_can_take() -> None:
    """vllm-project/vllm 51080: one registration of 512 GiB or more fails, whatever is free."""
    assert 256 << 20 <= pinning.CHUNK_BYTES <= 1 << 30


def test_the_names_are_those_of_the_runtime() -> None:
    cudart = pytest.importorskip("cuda.bindings.runtime")
    known = {error.name: int(error) for error in cudart.cudaError_t}
    names = REFUSALS | pinning._GONE | {pinning._NOT_REGISTERED}
    assert names <= set(known)
    assert {error.name: int(error) for error in Error} == {e.name: known[e.name] for e in Error}
    assert int(cudart.cudaHostRegisterPortable) == FakeCudart.cudaHostRegisterPortable
    for name in ("cudaHostRegister", "cudaHostUnregister", "cudaGetLastError"):
        assert callable(getattr(cudart, name))


# -- NUMA ------------------------------------------------------------------------------------------


def test_memory_is_not_bound_unless_asked(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "_mbind", lambda *_: pytest.fail("bound"))
    pinned = pin(FakeCudart(), arena.bytes)
    assert pinned.numa_reason is None
    pinned.unpin()


def test_the_kernel_takes_the_node(arena: Arena) -> None:
    if not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("a kernel without NUMA")
    start = arena.bytes.ctypes.data
    if prefer_node(arena.bytes, 0) is not None:
        pytest.skip("mbind is not allowed here")
    arena.bytes[:] = 1
    policies = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    mine = {int(words[0], 16): words[1] for words in policies}
    assert mine[start].startswith("prefer")


@pytest.mark.parametrize(("number", "name"), [(1, "EPERM"), (22, "EINVAL"), (38, "ENOSYS")])
def test_a_refused_node_is_told_and_the_memory_page_locked_all_the_same(
    arena: Arena,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    name: str,
) -> None:
    order: list[str] = []
    cudart = FakeCudart(after_register=lambda: order.append("register"))

    def refuse(address: int, num_bytes: int, node: int) -> int:
        assert (address, num_bytes, node) == (arena.bytes.ctypes.data, arena.num_bytes, 5)
        order.append("mbind")
        return number

    monkeypatch.setattr(pinning, "_mbind", refuse)
    pinned = pin(cudart, arena.bytes, numa_node=5)
    assert order == ["mbind", "register"], "pages that are page-locked can't move any more"
    assert pinned.num_bytes == arena.num_bytes
    assert warnings(caplog) == [pinned.numa_reason]
    assert f"node 5: mbind gave {name}" in str(pinned.numa_reason)
    assert ("SYS_NICE" in str(pinned.numa_reason)) == (name == "EPERM")
    pinned.unpin()


def test_a_node_that_the_machine_lacks_is_a_refusal(arena: Arena) -> None:
    assert "node 1023" in str(prefer_node(arena.bytes, 1023))
    for node in (-1, 1024):
        with pytest.raises(ValueError, match=f"numa_node={node}; allowed: 0 to 1023"):
            prefer_node(arena.bytes, node)


@pytest.mark.parametrize(
    ("text", "node"),
    [("0\n", 0), ("1\n", 1), ("17", 17), ("-1\n", None), ("", None), ("none", None)],
)
@pytest.mark.parametrize("form", ["0000:65:00.0", "00000000:65:00.0", "65:00.0", " 0000:65:00.0\n"])
def test_the_node_of_a_pci_address(tmp_path: Path, text: str, node: Any, form: str) -> None:
    (tmp_path / "0000:65:00.0").mkdir()
    (tmp_path / "0000:65:00.0" / "numa_node").write_text(text)
    assert numa_node_of(form, tmp_path) == node


def test_the_node_of_a_pci_address_in_capitals_and_in_another_domain(tmp_path: Path) -> None:
    (tmp_path / "000a:ce:1f.1").mkdir()
    (tmp_path / "000a:ce:1f.1" / "numa_node").write_text("3\n")
    assert numa_node_of("0000000A:CE:1F.1", tmp_path) == 3
    assert numa_node_of("0000:CE:1F.1", tmp_path) is None


@pytest.mark.parametrize("text", ["", "../../secret", "0000:65:00", "0000:65:00.9", "65", "x" * 99])
def test_what_is_no_pci_address_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"pci_address='.{0,40}'; allowed:"):
        numa_node_of(text, tmp_path)
