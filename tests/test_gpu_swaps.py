"""The sections of `make gpu` that measure a Manager, run without a GPU.

A double of one (tests/cuda_double) stands behind `device="cuda"`, its tensors on the CPU; time is
a counter. All figures in here are made up, and no file keeps them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import kvmem
from kvmem.stress import StressOptions, run_stress
from tests.cuda_double.opening import Double, install
from tests.test_gpu_ready import CountingClock
from tools import bench_gpu
from tools.gpu import machine, managers, overlap, serving, swaps
from tools.gpu.clock import Budget, Spread
from tools.gpu.managers import Shape
from tools.gpu.overlap import Load
from tools.gpu.record import Bench, Record, Row
from tools.gpu.report import make_page
from tools.gpu.serving import Done, Work
from tools.gpu.swaps import BOTH, IN, OUT, Case

SMALL = Shape(layers=2, kv_heads=1, dims=8, heads=2, block=4)
WORK = Work(
    Shape(layers=2, kv_heads=2, dims=16, heads=2, block=4, dtype="float32"), 5, 8, 6, max_tokens=12,
    vocabulary=50,
)  # fmt: skip


@pytest.fixture
def rows() -> list[Row]:
    return []


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[Double]:
    return install(monkeypatch, seed, "random")


@pytest.fixture
def bench(rows: list[Row], doubles: list[Double]) -> Bench:
    ticks = itertools.count(1)
    return Bench(
        torch, None, "cpu", CountingClock(), quick=True, l2_bytes=1,
        free_bytes=lambda: 8 << 30, case_seconds=0.0, keep=rows.append,
        now=lambda: next(ticks) * 1e-3,
    )  # fmt: skip


def budget() -> Budget:
    return Budget(600).start()


def right(rows: list[Row]) -> None:
    for row in rows:
        print(row)
        assert not row.failed, row
        assert isinstance(row.ours, Spread)


# -- turns -----------------------------------------------------------------------------------------


def test_sides_take_turns_and_one_that_fails_stops(bench: Bench) -> None:
    seen: list[str] = []

    def side(name: str, seconds: float) -> Any:
        def run() -> float:
            seen.append(name)
            if name == "bad" and len(seen) > 4:
                raise RuntimeError("no more")
            return seconds

        return run

    sides = {"a": side("a", 1.0), "bad": side("bad", 2.0), "b": side("b", 3.0)}
    found = managers.in_turns(bench, sides, 99, most_turns=4)
    assert found["bad"] == "failed: RuntimeError: no more"
    assert (found["a"].median, found["b"].median) == (1.0, 3.0)  # type: ignore[union-attr]
    assert found["a"].turns == 4  # type: ignore[union-attr]  # the first doesn't count
    assert seen == ["a", "bad", "b", "a", "bad", "b", *["a", "b"] * 3]
    assert managers.in_turns(bench, {"a": lambda: 1.0}, 0)["a"].turns == 3  # type: ignore[union-attr]


def test_a_case_that_fails_is_a_row_and_one_without_memory_is_named(
    bench: Bench, rows: list[Row]
) -> None:
    spent = budget()

    def fails(error: Exception) -> Any:
        def run() -> None:
            raise error

        return run

    managers.run_case(bench, spent, "one", fails(RuntimeError("out of order")))
    managers.run_case(bench, spent, "two", fails(kvmem.ConfigError("too large")))
    managers.run_case(bench, spent, "three", fails(torch.OutOfMemoryError("no")))
    assert [str(row) for row in rows] == ["one: failed: RuntimeError: out of order"]
    assert rows[0].failed
    assert [line.split(":")[0] for line in spent.left_out] == ["two", "three"]
    managers.run_case(bench, Budget(0).start(), "late", lambda: pytest.fail("no time"))
    assert managers.lacks_room(bench, spent, "large", 7 << 30)
    assert "6 GiB are free" in spent.left_out[-1]
    assert not managers.lacks_room(bench, spent, "small", 6 << 30)


def test_without_what_a_manager_needs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sections say so and are no failure: the kernels were measured."""

    def version_of(name: str) -> str:
        if name == "nvidia-ml-py":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"numba": "0.68.5", "psutil": "5.9", "proclimits": "0.2.1"}.get(name, "13.0")

    reason = machine.manager_lacks(version_of)
    for words in ("psutil 5.9 is not >=6", "nvidia-ml-py is not installed"):
        assert words in reason
    assert "numba" not in reason
    monkeypatch.setattr(bench_gpu, "manager_lacks", lambda: reason)
    names = [name for name, plan in bench_gpu.SECTIONS.items() if plan.of_manager]
    assert names == ["swap", "beside", "layers", "graph", "engine", "stress"]
    record = Record(None, {})
    assert bench_gpu.run_sections(bench, record, names, True, lambda line: None)
    for name in names:
        assert record.data["sections"][name]["note"] == reason
        assert not record.data["sections"][name]["rows"]


# -- swaps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_frames_have_the_sizes_they_are_said_to_have(quick: bool) -> None:
    sizes = set()
    for case in swaps.cases(quick):
        shape = case.shape
        config = kvmem.Config(
            num_layers=shape.layers, num_kv_heads=shape.kv_heads, head_dim=shape.dims,
            dtype=shape.dtype, block_size=shape.block, device_blocks=1,
        )  # fmt: skip
        assert config.geometry.frame_bytes == shape.block_bytes
        assert case.blocks % case.rows == 0
        assert case.moved_bytes <= 1 << 30
        sizes.add(shape.block_bytes)
    assert (min(sizes), max(sizes)) == (16 << 10, 8 << 20)
    assert len(sizes) == (4 if quick else 10)


def test_the_link_has_a_stream_each_way_and_waits_for_both(bench: Bench) -> None:
    """The path of a GPU, with a torch that notes what is asked of it."""
    log: list[str] = []
    names = itertools.count()

    class Stream:
        def __init__(self) -> None:
            self.name = f"stream {next(names)}"

        def __enter__(self) -> None:
            log.append(self.name)

        def __exit__(self, *error: object) -> None:
            pass

        def synchronize(self) -> None:
            log.append(f"wait for {self.name}")

    class Tensor:
        def __init__(self, where: str) -> None:
            self.where = where

        def __getitem__(self, some: slice) -> Tensor:
            return Tensor(f"{self.where}[{some.stop}]")

        def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            log.append(f"{source.where} to {self.where}")

    class Torch:
        uint8 = torch.uint8
        cuda = type("Cuda", (), {"Stream": Stream, "stream": staticmethod(lambda given: given)})

        @staticmethod
        def zeros(size: int, *, dtype: Any, pin_memory: bool = False, device: str = "") -> Tensor:
            return Tensor("pinned" if pin_memory else device)

    bench.place, bench.torch = "cuda", Torch
    link = swaps.Link(bench, 9)
    waits = ["wait for stream 0", "wait for stream 1"]
    link.run((OUT,), 7)
    assert log == ["stream 0", "cuda[7] to pinned[7]", *waits]
    log.clear()
    link.run((OUT, IN), 8)
    both = ["stream 0", "cuda[8] to pinned[8]", "stream 1", "pinned[8] to cuda[8]"]
    assert log == [*both, *waits]


@pytest.mark.parametrize("scattered", [True, False])
def test_swaps(
    bench: Bench, rows: list[Row], doubles: list[Double], monkeypatch: pytest.MonkeyPatch,
    scattered: bool,
) -> None:  # fmt: skip
    case = Case(SMALL, 12, 3, scattered)
    monkeypatch.setattr(swaps, "cases", lambda quick: [case])
    note = swaps.swap(bench, budget())
    assert note.startswith("the link: out ")
    assert "cost model (made up): out copies 0 us a call, 2 us a run, 100 GB/s; out batch" in note
    right(rows)
    assert [row.name.split(":")[0] for row in rows] == ["link"] * 3 + [OUT, IN, BOTH]
    for row, way in zip(rows[3:], (OUT, IN, BOTH), strict=True):
        assert row.moved_bytes == (2 if way == BOTH else 1) * 12 * SMALL.block_bytes
        assert row.limit == f"the link {way}"
        assert row.share == pytest.approx(row.others["one copy"].median / row.ours.median)  # type: ignore[union-attr]
        assert row.error == 0
        assert sum(row.facts[name] for name in swaps.WAYS) > 0
        assert row.facts["cost_model"]["source"] == "made up"
        assert "host_locked_bytes" in row.facts
        assert ("device_seconds" in row.facts) == (way != BOTH)
    # Frames of sequences that grew together are apart from each other; others are not.
    runs = rows[3].facts["frames_a_run"]
    assert all(1 <= frames <= 12 for frames in runs.values())
    assert (runs[OUT] < 1.5) == scattered
    copied = doubles[0].runtime.calls
    assert copied["cudaMemcpyAsync"] + copied["cudaMemcpyBatchAsync"] > 0
    json.dumps(rows[3].facts)


def test_a_swap_that_loses_bytes_fails_its_rows(
    bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(SMALL, 12, 3, True)
    monkeypatch.setattr(swaps, "cases", lambda quick: [case])
    marks = swaps.Sets.marks
    calls = itertools.count()

    def spoilt(self: swaps.Sets) -> Any:
        if next(calls):
            self.manager.kv(SMALL.layers - 1)[0].zero_()
        return marks(self)

    monkeypatch.setattr(swaps.Sets, "marks", spoilt)
    swaps.swap(bench, budget())
    assert [row.failed for row in rows] == [False] * 3 + [True] * 3
    assert "WRONG" in str(rows[-1])


def test_a_frame_that_comes_back_without_a_copy_is_no_figure(
    bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was swapped out keeps its frame on the GPU until another needs it."""
    monkeypatch.setattr(swaps, "vacate", lambda manager: None)
    monkeypatch.setattr(swaps, "cases", lambda quick: [Case(SMALL, 12, 3, True)])
    swaps.swap(bench, budget())
    assert [row.failed for row in rows] == [False] * 3 + [True] * 3
    assert "[0] blocks moved; 12 each way were to" in str(rows[4])


def test_swaps_without_room(bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swaps, "cases", lambda quick: [Case(SMALL, 12, 3, True)])
    bench.free_bytes = lambda: 1 << 30
    spent = budget()
    swaps.swap(bench, spent)
    assert len(rows) == 3
    assert "0 KiB are free" in spent.left_out[0]


# -- at the same time ------------------------------------------------------------------------------


@pytest.fixture
def small_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Load(SMALL, 2, 10)
    found = {"beside": small._replace(moved_blocks=8), "layers": small, "graph": small,
             "graph, small": small}  # fmt: skip
    monkeypatch.setattr(overlap, "loads", lambda quick: found)


def test_loads_fit_what_is_free() -> None:
    for quick in (True, False):
        for load in overlap.loads(quick).values():
            assert load.fitted(1 << 40) == load
            few = load.fitted((12 << 30) + managers.ROOM)
            assert 1 <= few.batch <= load.batch
            held = few.batch * few.row_blocks * few.shape.block_bytes
            assert held <= 12 << 30
            assert load.fitted(0).batch == 1


@pytest.mark.usefixtures("small_loads")
def test_decode_beside_swaps(bench: Bench, rows: list[Row], doubles: list[Double]) -> None:
    note = overlap.beside(bench, budget())
    right(rows)
    (row,) = rows
    assert "as an engine has it" in note
    assert row.facts["bytes_out"] > 0
    assert row.facts["bytes_in"] > 0
    assert row.facts["exchanges"] >= 3
    assert row.facts["looks"] >= row.facts["exchanges"]
    alone = row.others["alone"]
    assert row.share == pytest.approx(alone.median / row.ours.median)  # type: ignore[union-attr]
    assert row.note.startswith("slower by ")


@pytest.mark.usefixtures("small_loads")
def test_layers_that_arrive(bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    made = overlap.Layered.__init__
    monkeypatch.setattr(
        overlap.Layered, "__init__", lambda self, *given: made(self, *given, width=8, tokens=4)
    )
    asked: list[int | None] = []
    swap_in = kvmem.Manager.swap_in

    def noted(self: Any, seqs: Any, *, by_layer: int | None = None) -> Any:
        asked.append(by_layer)
        transfer = swap_in(self, seqs, by_layer=by_layer)
        assert transfer.num_blocks > 0  # else nothing arrived
        return transfer

    monkeypatch.setattr(kvmem.Manager, "swap_in", noted)
    overlap.layers(bench, budget())
    right(rows)
    assert [row.name.split(",")[0] for row in rows] == ["swap_in by 1 layers", "swap_in as a whole"]
    assert asked.count(1) >= 3
    for row in rows:
        assert row.limit == "the larger of both"
        larger = max(row.others[f"{one} alone"].median for one in ("arrival", "computing"))  # type: ignore[union-attr]
        assert row.share == pytest.approx(larger / row.ours.median)  # type: ignore[union-attr]


class Buffers:
    """In place of `GraphBuffers`, for a version that has none."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes


@pytest.mark.usefixtures("small_loads")
def test_a_step_as_a_graph(bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Manager's own buffers where it has them, else with ones that change nothing."""
    used: list[Any] = []
    if not hasattr(kvmem.Manager, "graph_buffers"):
        assert "not in this version" in overlap.graph(bench, budget())
        assert not rows
        plan = kvmem.Manager.step

        def step(self: Any, seqs: Any, *, into: Any = None, **options: Any) -> Any:
            used.append(into)
            return plan(self, seqs, **options)

        monkeypatch.setattr(kvmem.Manager, "step", step)
        monkeypatch.setattr(
            kvmem.Manager, "graph_buffers", lambda self, *sizes: Buffers(*sizes), raising=False
        )
    overlap.graph(bench, budget())
    right(rows)
    assert len(rows) == 2
    for row in rows:
        assert row.error is not None
        assert row.allowed_error is not None
        assert row.error <= row.allowed_error / 2
        assert isinstance(row.others["plain launches"], Spread)
    if used:
        (sizes,) = {one.sizes for one in used if one}
        assert sizes == (2, 2, 44)  # rows, tokens, what they can grow to


def test_a_graph_is_captured_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, with a torch.cuda that notes what is asked of it."""
    log: list[str] = []

    class Note:
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> None:
            log.append(f"in {self.what}")

        def __exit__(self, *error: object) -> None:
            log.append(f"out {self.what}")

        def wait_stream(self, other: Any) -> None:
            log.append(f"{self.what} after {other.what}")

        def synchronize(self) -> None:
            log.append(f"wait for {self.what}")

        def replay(self) -> None:
            log.append("replay")

    class Cuda:
        Stream = staticmethod(lambda: Note("side"))
        CUDAGraph = staticmethod(lambda: Note("graph"))
        current_stream = staticmethod(lambda: Note("current"))
        stream = graph = staticmethod(lambda given: given)

    class Steps:
        """A Manager and its decoder in one."""

        seqs = (1, 2)

        def graph_buffers(self, *sizes: int) -> Buffers:
            return Buffers(*sizes)

        def step(self, seqs: Any, into: Any) -> Note:
            return Note("step")

        def append(self) -> None:
            pass

        def layers(self, step: Any) -> None:
            log.append("layers")

    decoder: Any = Steps()
    decoder.manager = decoder
    bench.place, bench.torch = "cuda", type("Torch", (), {"cuda": Cuda})
    graphed = overlap.Graphed(bench, decoder, 9)
    graphed.step()
    first = ["side after current", "in side", "layers", "out side", "current after side",
             "in graph", "layers", "out graph"]  # fmt: skip
    again = ["in step", "replay", "out step", "wait for current"]
    assert log == [again[0], *first, *again[1:]]
    log.clear()
    graphed.step()
    assert log == again


# -- whole runs ------------------------------------------------------------------------------------


def test_the_engine_answers_the_same_under_pressure(
    bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "work", lambda quick: WORK)
    serving.engine(bench, budget())
    right(rows)
    names = ["engine", "engine", "sampled tokens stay on the GPU"]
    assert [row.name.split(",")[0] for row in rows] == names
    assert rows[1].facts["swap_outs"] > 0
    assert "the same answers" in rows[1].note
    assert all(row.error == 0 for row in rows[1:])
    assert "tokens/s" in rows[0].note


def test_sampled_tokens_stay_on_the_gpu(
    bench: Bench, rows: list[Row], doubles: list[Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors count as the double's here, so that they go the way of a GPU."""
    opened = managers.open_manager

    def owning(*arguments: Any, **options: Any) -> kvmem.Manager:
        manager = opened(*arguments, **options)
        doubles[-1].owns_tensors = True
        return manager

    taken: list[object] = []
    append = kvmem.manager.append_sampled

    def noted(runtime: Any, seqs: Any, tokens: Any, counts: Any) -> bool:
        found = append(runtime, seqs, tokens, counts)
        if found:
            taken.append(tokens)
        return found

    monkeypatch.setattr(serving, "open_manager", owning)
    monkeypatch.setattr(kvmem.manager, "append_sampled", noted)
    serving.sampled_case(bench, WORK)
    right(rows)
    assert rows[0].error == 0
    assert len(taken) >= 3 * WORK.answer  # a warm-up and two turns


def test_another_answer_fails_the_row(
    bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serving.serve
    monkeypatch.setattr(serving, "work", lambda quick: WORK)

    def spoilt(bench: Bench, some: Work, device_blocks: int, host_blocks: int) -> Any:
        seconds, answers, stats = served(bench, some, device_blocks, host_blocks)
        if host_blocks:
            answers[3][-1] += 1
        return seconds, answers, stats

    monkeypatch.setattr(serving, "serve", spoilt)
    serving.engine_case(bench, WORK)
    assert [row.failed for row in rows] == [False, True]
    assert "other answers: requests [3]" in rows[1].note


def stressed(words: list[str], environment: dict[str, str], seconds: float) -> Done:
    """`kvmem stress` in this process, on the double, for a few operations."""
    assert words[1:6] == ["-m", "kvmem.cli", "stress", "--device", "cuda"]
    assert float(words[words.index("--seconds") + 1]) < seconds
    options = StressOptions(device="cuda", ops=150, sequences=4, seed=3)
    report = run_stress(options)
    return Done(int(not report.ok), json.dumps(report.to_dict()), "")


def test_stress(bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def run(words: list[str], environment: dict[str, str], seconds: float) -> Done:
        asked.append(environment)
        return stressed(words, environment, seconds)

    monkeypatch.setattr(serving, "run_command", run)
    serving.stress(bench, budget())
    right(rows)
    assert len(rows) == 3 * len(asked)
    assert "no breach, no leak" in rows[0].note
    assert rows[1].moved_bytes > 0
    if importlib.util.find_spec("torch.cuda._sanitizer"):
        assert [one.get("TORCH_CUDA_SANITIZER") for one in asked] == [None, "1"]


@pytest.mark.parametrize(
    ("change", "done", "words"),
    [
        ({"breaches": [{"kind": "content", "message": "row 3"}]}, 1, "content: row 3"),
        ({"leaks": {"findings": ["2 threads"]}}, 1, "leak: 2 threads"),
        ({}, 3, "status 3"),
        (None, 3, "failed: status 3: it broke"),
        (None, None, "failed: status None: it broke"),
    ],
)
def test_a_breach_fails_the_row(
    bench: Bench, rows: list[Row], monkeypatch: pytest.MonkeyPatch, change: Any, done: int | None,
    words: str,
) -> None:  # fmt: skip
    report = {"breaches": [], "leaks": {"findings": []}, "operations": {"step": 5}, "seconds": 1.0,
              "rows_checked": 1, "attentions_checked": 1, "swap_outs": 1, "swap_ins": 1,
              "bytes_out_done": 1, "bytes_in_done": 1}  # fmt: skip
    out = "no JSON" if change is None else json.dumps(report | change)
    monkeypatch.setattr(serving, "run_command", lambda *_: Done(done, out, "it broke"))
    serving.stress_case(bench, 1.0, {})
    assert rows[0].failed
    assert words in str(rows[0])


def test_a_command_out_of_time_is_ended() -> None:
    began = time.monotonic()
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = f"import subprocess, sys; subprocess.run({sleep})"
    done = serving.run_command([sys.executable, "-c", code], dict(os.environ), 1.0)
    assert done.status is None
    assert time.monotonic() - began < 50
    done = serving.run_command([sys.executable, "-c", "print(1)"], dict(os.environ), 60.0)
    assert (done.status, done.out) == (0, "1\n")


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_loads")
def test_the_page_has_all_of_it_and_a_picture_each(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One after the other; one that breaks ends itself only."""
    monkeypatch.setattr(swaps, "cases", lambda quick: [Case(SMALL, 12, 3, True)])
    monkeypatch.setattr(serving, "work", lambda quick: WORK)
    monkeypatch.setattr(serving, "run_command", stressed)

    def broken(bench: Bench, budget: Budget) -> str:
        raise RuntimeError("out of order")

    monkeypatch.setattr(overlap, "layers", broken)
    monkeypatch.setattr(bench_gpu, "manager_lacks", lambda: "")
    names = ["swap", "beside", "layers", "graph", "engine", "stress"]
    file = tmp_path / "figures.json"
    record = Record(file, {"quick": True, "device": {}, "checks": []})
    assert not bench_gpu.run_sections(bench, record, names, True, lambda line: None)
    data = json.loads(file.read_text())
    status = {name: entry["status"] for name, entry in data["sections"].items()}
    assert status.pop("layers") == "failed: RuntimeError: out of order"
    assert set(status.values()) == {"done"}
    page = make_page(data, "These figures are made up. Nothing was measured.")
    for word in ("share of the link", "the same answers", "no breach, no leak", "slower by"):
        assert word in page, word
    assert page.count("<svg") >= 5
    assert "WRONG" not in page
