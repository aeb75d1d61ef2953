"""Mistakes planted in the CUDA store, each a line of one function, and what is to notice them.

A function with a mistake is compiled in its module and put in its place while a scene runs: the
double has to object, bytes have to be wrong, or something has to be left behind.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import random
import textwrap
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from kvmem import runtime
from kvmem.store.cuda import (
    api,
    arena,
    compute,
    copies,
    cost_model,
    device,
    events,
    failing,
    guards,
    host_arena,
    timing,
    uploads,
)
from kvmem.store.cuda.pinning import pin
from kvmem.store.device import Stream
from tests.cuda_double.faults import Error
from tests.cuda_double.opening import Double, install
from tests.driver import SMALL, Driver, GoodWork
from tests.store.conformance.worlds import ticket
from tests.store.cuda.test_copies import Bench
from tests.store.fakes import ids

OUT, IN, COMPUTE = Stream.OUT, Stream.IN, Stream.COMPUTE
Patch = pytest.MonkeyPatch
Scene = Callable[[Patch, int], None]


# --- scenes --------------------------------------------------------------------------------------


def engine(patch: Patch, seed: int, **settings: Any) -> None:
    """Random good work under several current streams, with content checks, to the end."""
    made = install(patch, seed, ("late", "random")[seed % 2])
    rng = random.Random(seed)
    with Driver(device="cuda", **settings) as d:
        (double,) = made
        streams = [double.torch.Stream(device=double.torch.ordinal) for _ in range(2)]
        work = GoodWork(d, seed)
        for _ in range(50):
            current = rng.choice([*streams, None])
            with nullcontext() if current is None else double.torch.stream(current):
                work.run(1)
        d.check_content()
    nothing_left(made, d)


def nothing_left(made: list[Double], d: Driver) -> None:
    for name in ("manager", "live", "pins"):
        delattr(d, name)
    gc.collect()
    for double in made:
        double.check()
        assert not double.memory.registered, "still page-locked"
        assert not double.memory.in_use(), "memory is left"
        assert double.torch.current_device() == 0, "another GPU is current"


zeroing: Scene = partial(engine, debug=False, zero_on_free="always")
plain: Scene = partial(engine, debug=False)


def transfers(patch: Patch, seed: int, part: str = "four chunks") -> None:
    """Transfers by each way, back and forth, staged in several rounds."""
    patch.setattr(copies, "STAGING_BYTES", 5 * 448)
    for way in ("copies", "batch", "staged"):
        bench = Bench(seed, ("late", "random")[seed % 2], way, part, patch)  # type: ignore[arg-type]
        last = OUT
        for _ in range(20):
            stream = bench.random.choice((OUT, IN))
            if stream is not last:
                bench.turn(last, stream)
                last = stream
            bench.move(stream, bench.random.choice((1, 7)))
        bench.finish()
        bench.close()


def two_current_streams(patch: Patch, seed: int) -> None:
    """Fills of one memory, under one current stream and another whose work is late."""
    double = Double.new(seed, "late")
    made = device.CudaDevice(double.cuda)
    streams = [double.torch.Stream(device=double.torch.ordinal, priority=-1) for _ in range(2)]
    memory = made.new_arena("device", 4, 64, host=False)
    for i in range(8):
        with double.torch.stream(streams[i % 2]):
            memory.fill(0, 256, i, made.handle(COMPUTE))
    fence = made.new_fence("end")
    made.record(COMPUTE, fence)
    assert made.synchronize(fence, 10)
    assert (memory.read(ids(0, 3)) == 7).all()
    with double.torch.stream(streams[1]):
        double.torch.capturing = True
        made.stream(COMPUTE)
        double.torch.capturing = False
    with double.torch.stream(streams[0]):
        made.settle(COMPUTE)
    assert double.streams.log[-1] == f"{streams[0].cuda_stream:#x} wait", "settled nothing"
    double.check()


def forks(patch: Patch, seed: int) -> None:
    """Copies on write under torch's default stream, while another GPU is current."""
    made = install(patch, seed, "random")
    with Driver(device="cuda", debug=False) as d:
        parent = d.create([1, 2, 3, 4, 5, 6])
        d.step([parent])
        for seq in (*d.fork(parent), parent):
            d.manager.append([seq], [9])
            d.step([seq])
        assert d.manager.stats().blocks_copied_on_write
    made[0].check()


def small_uploads(patch: Patch, seed: int) -> None:
    """Arrays on their way under a stream that is slow: none may be overwritten, none lost."""
    double = Double.new(seed, "late")
    made = device.CudaDevice(double.cuda)
    slow = double.torch.Stream(device=double.torch.ordinal, priority=-1)
    for i in range(12):
        upload = made.uploads.upload(slow, [np.full(100, i)])
        slow_copy = upload.tensor(0, torch.int64)
        upload.release(slow)
        if i % 4 == 3:
            slow.synchronize()
            assert (slow_copy.numpy() == i).all()
    slow.synchronize()
    made.uploads.upload(slow, [np.full(100, 1)])
    slow.synchronize()
    assert made.uploads.num_buffers <= 6, "buffers are not used again"
    for i in range(24):
        if i % 2:
            double.runtime.fail("cudaMemcpyAsync", 1, Error.cudaErrorInvalidValue)
        try:
            made.uploads.upload(slow, [np.full(100, 1)])  # and dropped
        except RuntimeError:
            assert i % 2
        slow.synchronize()
    assert made.uploads.num_buffers <= 8, "an upload that is refused or dropped loses its buffer"
    made.close()
    double.check()


def ends(patch: Patch, seed: int) -> None:
    """A close with copies under way, of a device that lives and of one that failed."""
    for failed in (False, True):
        made = install(patch, seed, "late")
        d = Driver(device="cuda", debug=False)
        seqs = [d.create([i, 2, 3, 4, 5, 6]) for i in range(3)]
        d.step(seqs)
        d.manager.swap_out(seqs)
        d.manager.evict(100)
        d.manager.prefetch(seqs)
        if failed:
            d.store.device._fail(RuntimeError("one call"))
        d.manager.close()
        del seqs
        nothing_left(made, d)


def late_end(patch: Patch, seed: int) -> None:
    """A GPU that is not done when the time of `close` is up."""
    patch.setattr(device, "CLOSE_SECONDS", 0.01)
    made = install(patch, seed, "late")
    d = Driver(device="cuda", debug=False)
    d.hold("out")
    seqs = [d.create([i, 2, 3, 4, 5, 6]) for i in range(3)]
    d.step(seqs)
    d.manager.swap_out(seqs)
    d.manager.close()
    gc.collect()
    for double in made:
        double.check()


def fences(patch: Patch, seed: int) -> None:
    """Each promise of a fence, on copies that are held."""
    double = Double.new(seed, "late")
    for sync in (False, True):
        made = double.device(sync=sync)
        here = made.new_arena("device", 4, 64, host=False)
        there = made.new_arena("host", 4, 64, host=True)
        if not sync:
            made.hold(OUT)
        made.copy_async(OUT, there, ids(1), here, ids(1))
        fence = made.new_fence("one")
        made.record(OUT, fence)
        if sync:
            assert not double.streams.queues[made.stream(OUT).cuda_stream], "sync did not wait"
        else:
            assert made.moved(OUT).frames == 0, "counted too early"
            assert not made.query(fence), "reached too early"
            made.release(OUT)
        assert made.synchronize(fence, 10)
        assert made.moved(OUT).frames == 1
        with pytest.raises(RuntimeError, match="not recorded"):
            made.wait(IN, made.new_fence("never"))
        counts = set()
        for i in range(40):
            made.copy_async(OUT, there, ids(1), here, ids(1))
            again = made.new_fence(str(i))
            made.record(OUT, again)
            assert made.synchronize(again, 10)
            counts.add(double.torch.num_events)
            del again
        assert len(counts) < 10, "an event is made for each transfer"
        if not sync:
            made.hold(OUT)
            made.copy_async(OUT, there, ids(3), here, ids(3))
        double.runtime.fail("cudaMemcpyAsync", 1, Error.cudaErrorInvalidValue)
        made.copy_async(OUT, there, ids(2), here, ids(2), ticket(OUT))
        assert not double.runtime.faults.last_error, "an error that the next launch would tell"
        made.release(OUT)
        made.close()
        there.close()
        here.close()
        double.check()


def lost(patch: Patch, seed: int) -> None:
    """A context that is lost, found out by a query of a fence, of a timing, and by a kernel."""
    for find in ("query", "moved", "working", "launch"):
        double = Double.new(seed, "late")
        made = double.device()
        fence = made.new_fence("x")
        made.record(OUT, fence)
        made.timed(OUT, lambda: None, lambda _: None)
        double.runtime.fail("Event.query", 1, Error.cudaErrorIllegalAddress)
        if find == "query":
            assert not made.query(fence)
        elif find == "moved":
            made.moved(OUT)
        elif find == "launch":
            with pytest.raises(kvmem.DeviceUnavailable):
                made.launch(OUT, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        else:
            with pytest.raises(kvmem.DeviceUnavailable), made.working("x"):
                made.uploads.upload(made.stream(COMPUTE), [np.zeros(4)])
                made.query(fence)
                made.uploads.upload(made.stream(COMPUTE), [np.zeros(4)])
        assert made.error is not None, "the device did not fail"
        made.close()


def starts(patch: Patch, seed: int) -> None:
    """Starts that fail half way."""
    for where in ("kvmem.store.cuda.compute.CudaCompute.__init__", "kvmem.runtime.Ledger",
                  "kvmem.store.cuda.host_arena.pin"):  # fmt: skip
        with pytest.MonkeyPatch.context() as inner:
            made = install(inner, seed, "late")

            def refuse(*_: Any, **__: Any) -> None:
                raise MemoryError("refused")

            inner.setattr(where, refuse)
            with pytest.raises(MemoryError) as told:
                kvmem.Manager(kvmem.Config(**SMALL, device="cuda"))
            double = made[0]
            assert not double.memory.registered, "still page-locked"
            assert not double.streams.pending(), "work is under way"
            frames = [entry.frame.f_locals for entry in told.traceback]
            kept = [f["made"] for f in frames if isinstance(f.get("made"), device.CudaDevice)]
            kept += [f["self"].store.device for f in frames if hasattr(f.get("self"), "store")]
            assert all(one._closed for one in kept), "the device is open"


def refused_chunk(patch: Patch, seed: int) -> None:
    """The device is lost while host memory is page-locked: the mapping goes."""
    patch.setattr(host_arena, "pin", partial(pin, chunk_bytes=4096))
    double = Double.new(seed, "late")
    made = double.device()
    double.runtime.fail("cudaHostRegister", 2, Error.cudaErrorIllegalAddress)
    closed = []
    original = host_arena.Arena.close
    patch.setattr(host_arena.Arena, "close", lambda self: closed.append(1) or original(self))
    with pytest.raises(kvmem.DeviceUnavailable):
        made.new_arena("host", 100, 448, host=True)
    assert closed, "the mapping stays"


def measuring(patch: Patch, seed: int) -> None:
    """A copy that is refused while the ways are measured, with others of it under way."""
    patch.setattr(cost_model, "POINTS", (cost_model.Point(4096, 4),))
    patch.setattr(timing, "MEASURED_BYTES", 16 << 10)
    patch.setattr(timing, "open_model", lambda key, time_copy: time_copy("copies", "out", 4096, 4))
    double = Double.new(seed, "late")
    made = device.CudaDevice(double.cuda)
    double.runtime.fail("cudaMemcpyAsync", 3, Error.cudaErrorInvalidValue)
    with pytest.raises(RuntimeError):
        made.measure()
    assert not double.streams.pending(), "copies of memory that is gone"
    double.check()


# --- mistakes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """Whose function, what of its text is replaced by what, and the scenes that may notice."""

    owner: Any
    name: str
    right: str
    wrong: str
    scenes: tuple[Scene, ...]


STORE = importlib.import_module("kvmem.store.store")  # who calls `make_parts`
CudaDevice, CudaArena = device.CudaDevice, arena.CudaArena
_HERE = "with self._cuda.here():"
MISTAKES: dict[str, Mistake] = {
    # waits and records
    "compute_switch_waits_not": Mistake(
        CudaDevice, "stream", "now.wait_event(event)", "pass", (two_current_streams,)
    ),
    "compute_switch_records_not": Mistake(
        CudaDevice, "stream", "event.record(last)", "pass", (two_current_streams,)
    ),
    "compute_switch_in_a_capture": Mistake(
        CudaDevice, "stream", "elif not self.cuda.is_capturing():", "else:", (two_current_streams,)
    ),
    "compute_switch_forgets_the_last": Mistake(
        CudaDevice,
        "stream",
        "self._last_compute = now\n    return",
        "pass\n    return",
        (two_current_streams,),
    ),
    "wait_waits_not": Mistake(
        CudaDevice, "wait", "self.stream(stream).wait_event(own.event)", "pass", (transfers,)
    ),
    "wait_for_what_was_not_recorded": Mistake(
        CudaDevice, "wait", "if own.event is None:", "if False:", (fences,)
    ),
    "record_records_not": Mistake(
        CudaDevice, "record", "event.record(queue)", "pass", (transfers, fences)
    ),
    "record_on_the_other_stream": Mistake(
        CudaDevice,
        "record",
        "event.record(queue)",
        "event.record(self._streams[Stream.IN])",
        (transfers, fences),
    ),
    "record_of_sync_waits_not": Mistake(
        CudaDevice, "record", "queue.synchronize()", "pass", (fences,)
    ),
    "query_says_yes": Mistake(
        CudaDevice, "query", "bool(own.event.query())", "True", (fences, transfers)
    ),
    "query_swallows_errors": Mistake(CudaDevice, "query", "self._fail(error)", "pass", (lost,)),
    "settle_orders_nothing": Mistake(
        CudaDevice, "settle", "self.stream(stream)", "pass", (two_current_streams,)
    ),
    # host synchronisation
    "zeros_are_not_waited_for": Mistake(
        CudaArena,
        "__init__",
        "cuda.current_stream().synchronize()",
        "pass",
        (two_current_streams, transfers, plain),
    ),
    "memory_is_not_zeroed": Mistake(
        CudaArena,
        "__init__",
        "self.fill(0, self.num_bytes, 0, cuda.current_stream().cuda_stream)",
        "pass",
        (engine, plain),
    ),
    "poison_is_not_waited_for": Mistake(
        guards.CudaGuards, "__init__", "device.stream(Stream.OUT).synchronize()", "pass", (engine,)
    ),
    "fills_on_the_wrong_stream": Mistake(
        guards.CudaFiller, "fill", "Stream.OUT", "Stream.IN", (zeroing, engine)
    ),
    "measuring_waits_not": Mistake(
        timing.Bench, "close", "queue.synchronize()", "pass", (measuring,)
    ),
    # uploads
    "upload_buffers_are_not_asked": Mistake(
        uploads.Uploads,
        "take",
        "if free and free[0].event.query():",
        "if free:",
        (small_uploads, engine),
    ),
    "upload_buffers_are_not_recorded": Mistake(
        uploads.Uploads, "give_back", "buffer.event.record(stream)", "pass", (small_uploads, engine)
    ),
    "upload_loses_a_refused_buffer": Mistake(
        uploads.Uploads,
        "upload",
        "self._free[len(buffer.host_bytes)].appendleft(buffer)",
        "pass",
        (small_uploads,),
    ),
    "upload_forgets_dropped_ones": Mistake(
        uploads.Upload, "__del__", "if self._buffer is not None:", "if False:", (small_uploads,)
    ),
    "uploads_keep_their_memory": Mistake(
        uploads.Uploads, "close", "self._made.clear()", "keep_for_good(*self._made)", (ends,)
    ),
    "memory_of_another_stream": Mistake(
        api.Cuda, "empty_on", "with self.torch.stream(queue):", "if True:", (transfers, plain)
    ),
    # copies
    "copies_span_registrations": Mistake(
        copies.Copies,
        "_runs",
        "if self._pinned is not None and len(self._pinned.cuts):",
        "if False:",
        (transfers,),
    ),
    "scatter_without_the_copy": Mistake(
        copies.Copies,
        "_stage",
        "self._copy_each(direction, handle, runs)\n                scatter_frames(",
        "scatter_frames(",
        (transfers,),
    ),
    "staged_on_the_legacy_stream": Mistake(
        copies.Copies,
        "_stage",
        "gather_frames(rows, frames, upload.arrays[0], check=False, stream=handle)",
        "gather_frames(rows, frames, upload.arrays[0], check=False, stream=0)",
        (transfers,),
    ),
    # the GPU that is current
    "upload_on_another_gpu": Mistake(
        api.Cuda, "copy_async", "with self.here():", "if True:", (small_uploads,)
    ),
    "copy_on_another_gpu": Mistake(
        CudaDevice, "copy_async", "with self.cuda.here():", "if True:", (transfers,)
    ),
    "launch_on_another_gpu": Mistake(
        CudaDevice,
        "launch",
        "with self.cuda.here():",
        "if True:",
        (forks,),
    ),
    "fill_on_another_gpu": Mistake(CudaArena, "fill", _HERE, "if True:", (two_current_streams,)),
    "read_on_another_gpu": Mistake(CudaArena, "read", _HERE, "if True:", (two_current_streams,)),
    "write_on_another_gpu": Mistake(
        compute.CudaCompute, "write", "with self._device.cuda.here():", "if True:", (plain,)
    ),
    "attend_on_another_gpu": Mistake(
        compute.CudaCompute, "attend", "with cuda.here():", "if True:", (plain,)
    ),
    "pin_on_another_gpu": Mistake(
        host_arena.HostArena, "__init__", "with cuda.here():", "if True:", (transfers,)
    ),
    # ends
    "close_waits_not": Mistake(
        CudaDevice, "close", "while not self._is_idle(stream):", "while False:", (ends,)
    ),
    "close_leaves_one_stream": Mistake(
        CudaDevice,
        "close",
        "[*self._streams.values(), self._last_compute]",
        "[self._last_compute]",
        (ends,),
    ),
    "close_waits_for_no_failed_device": Mistake(
        CudaDevice,
        "close",
        "while not self._is_idle(stream):",
        "while self._error is None and not self._is_idle(stream):",
        (ends,),
    ),
    "close_frees_what_is_in_use": Mistake(
        CudaDevice, "close", "self._abandon()", "pass", (late_end,)
    ),
    "unmapped_while_page_locked": Mistake(
        host_arena.HostArena, "close", "self.pinned.unpin()", "pass", (transfers, ends)
    ),
    "a_refused_start_keeps_its_mapping": Mistake(
        host_arena.HostArena, "__init__", "super().close()", "pass", (refused_chunk,)
    ),
    "a_failed_start_stays_open": Mistake(
        STORE, "make_parts", "    made.close()", "    pass", (starts,)
    ),
    "a_failed_start_keeps_its_arenas": Mistake(
        STORE, "make_parts", "arena.close()", "pass", (starts,)
    ),
    "a_failed_ledger_keeps_the_store": Mistake(
        runtime.Runtime, "__init__", "self.store.close()", "pass", (starts,)
    ),
    # errors and counts
    "an_error_is_left_for_the_next_launch": Mistake(
        api.Cuda,
        "call",
        "self.runtime.cudaGetLastError()",
        "pass",
        (small_uploads,),
    ),
    "not_ready_is_left_for_the_next_launch": Mistake(
        api.Cuda,
        "is_lost",
        "self.runtime.cudaGetLastError()",
        "pass",
        (fences,),
    ),
    "a_lasting_error_is_survived": Mistake(
        failing.Guard, "__exit__", "or self._device.is_lost()", "or False", (lost,)
    ),
    "a_launch_that_raises_is_survived": Mistake(
        CudaDevice, "launch", "self._fail(error)", "return", (lost,)
    ),
    "a_timing_swallows_errors": Mistake(
        CudaDevice, "_has_passed", "self._fail(error)", "pass", (lost,)
    ),
    "moved_counts_too_early": Mistake(
        CudaDevice, "_count_reached", "self.query(counting[0][0])", "True", (fences,)
    ),
    "events_pile_up": Mistake(
        CudaDevice, "record", "self._count_reached(stream)", "pass", (fences,)
    ),
    "events_are_not_given_back": Mistake(
        events.CudaFence, "__del__", "self._pool.give(event)", "pass", (fences,)
    ),
}


@contextmanager
def planted(one: Mistake) -> Any:
    """The function with its mistake, while inside."""
    original = inspect.getattr_static(one.owner, one.name)
    text = textwrap.dedent(inspect.getsource(original))
    assert text.count(one.right) == 1, f"{one.name}: {text.count(one.right)} times {one.right!r}"
    text = text.replace(one.right, one.wrong)
    body = "def make(__class__):\n" + textwrap.indent(text, "    ") + f"    return {one.name}\n"
    module = inspect.getmodule(original)
    found: dict[str, Any] = {}
    exec(compile(body, "<mistake>", "exec"), vars(module), found)  # noqa: S102 - ours, edited
    setattr(one.owner, one.name, found["make"](one.owner))
    try:
        yield
    finally:
        setattr(one.owner, one.name, original)


def outcome(one: Mistake, seeds: range, plant: bool = True) -> str | None:
    """How the mistake showed first, or None."""
    with planted(one) if plant else nullcontext():
        for seed in seeds:
            for scene in one.scenes:
                with pytest.MonkeyPatch.context() as patch:
                    try:
                        scene(patch, seed)
                    except (Exception, pytest.fail.Exception) as error:
                        return f"{type(error).__name__}: {error}".split("\n")[0][:110]
    return None
