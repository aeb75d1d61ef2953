"""What runs on a machine with a GPU, tried without one: `make gpu`, its tests' device, its figures.

Kernels run in the interpreter of `tests/ptx` on the memory of CPU tensors; times are those of a
clock that counts calls. All figures in here are made up, and no file keeps them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cuda_kernels
from cuda_kernels.frames.spec import SPEC as MOVE
from tests.gpu.device import TorchDevice
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.machine import Buffer
from tools import bench_gpu
from tools.gpu import (
    attention,
    correctness,
    kv,
    limits,
    machine,
    moves,
    overlap,
    serving,
    swaps,
)
from tools.gpu.clock import Budget, CudaClock, Spread, Timing, measure
from tools.gpu.correctness import Check
from tools.gpu.kv import Case
from tools.gpu.machine import Driver, find_missing, read_driver
from tools.gpu.record import Bench, Record, Row
from tools.gpu.report import make_page

MADE_UP = "These figures are made up, for a test of the page. Nothing was measured."


class CountingClock:
    """Each call takes as long as its side says; nothing is waited for."""

    def __init__(self, seconds: float = 1e-3) -> None:
        self.seconds, self.seen = seconds, []

    def time(self, run: Any, first: int, calls: int) -> Timing:
        self.seen.append((run, first, calls))
        for i in range(calls):
            run(first + i)
        return Timing(self.seconds, True)

    def wait(self) -> None:
        pass


class StandIn(Bench):
    """On CPU tensors; kernels are interpreted on their very memory."""

    def array(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if all(buffer.address != storage.data_ptr() for buffer in self.device.buffers):
            whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            name = f"tensor {len(self.device.buffers)}"
            self.device.buffers.append(Buffer(name, storage.data_ptr(), whole, writable=True))
        return super().array(tensor)


@pytest.fixture
def rows() -> list[Row]:
    return []


@pytest.fixture
def bench(rows: list[Row]) -> StandIn:
    return StandIn(
        torch, InterpretedDevice((9, 0)), "cpu", CountingClock(), quick=True, l2_bytes=1,
        free_bytes=lambda: 8 << 30, case_seconds=0.0, read_rate=1e9, copy_rate=2e9,
        keep=rows.append,
    )  # fmt: skip


# -- what is missing ------------------------------------------------------------------------------


def absent(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_bare_machine_is_told_everything() -> None:
    found = find_missing(Driver(), absent, lambda: "no torch", lambda name: "is gone")
    assert found.no_gpu
    text = "\n".join(found.lines)
    names = ["numba", "numba-cuda", "cuda-core", "pytest", "nvidia-nvvm", "nvidia-nvjitlink"]
    for word in ("no NVIDIA driver", "no torch", "nvidia-cuda-nvrtc", "kvmem[cuda13]", *names):
        assert word in text, word


def test_the_driver_decides_which_packages() -> None:
    old = Driver(1, (12, 8), "")
    lines = find_missing(old, absent, lambda: "", lambda name: "is gone").lines
    assert any("nvidia-cuda-nvcc-cu12" in line and "kvmem[cuda12]" in line for line in lines)
    assert not any("cuda13" in line for line in lines)
    new = Driver(1, (13, 0), "")
    complete = find_missing(new, lambda name: "0.68.5", lambda: "", lambda name: "")
    assert not complete
    assert not complete.no_gpu
    assert any(line.startswith("numba-cuda 0.68.5 is not >=0.30.4") for line in complete.warnings)
    assert not any(line.startswith("numba 0.68.5") for line in complete.warnings)


def test_a_driver_that_does_not_start() -> None:
    class Library:
        def cuInit(self, flags: int) -> int:
            return 999

    def refuse(name: str) -> Any:
        raise OSError(name)

    assert "error 999" in read_driver(lambda name: Library()).problem
    assert "libcuda.so.1" in read_driver(refuse).problem


def test_facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, multi_processor_count, L2_cache_size = "made up", 9, 0, 7, 8

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda ordinal: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 4))
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    found = machine.facts()
    json.dumps(found)
    assert (found["name"], found["compute_capability"], found["l2_bytes"]) == ("made up", "9.0", 8)
    assert (found["free_bytes"], found["memory_bytes"], found["driver"]) == (3, 4, "unknown")
    assert found["software"]["numba"] == importlib.metadata.version("numba")


@pytest.mark.parametrize(("no_gpu", "status"), [(True, 0), (False, 2)])
def test_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    no_gpu: bool, status: int,
) -> None:  # fmt: skip
    driver = Driver() if no_gpu else Driver(1, (13, 0), "")
    found = find_missing(driver, absent, lambda: "", lambda name: "")
    monkeypatch.setattr(bench_gpu, "find_missing", lambda: found)
    file = tmp_path / "figures.json"
    assert bench_gpu.main(["--quick", "--json", str(file)]) == status
    out = capsys.readouterr().out
    assert ("skipped" in out) == no_gpu
    assert "numba-cuda is not installed" in out
    for name in (*bench_gpu.SECTIONS, *bench_gpu.CHECKS):
        assert name in out
    assert not file.exists()


def test_each_section_exists_and_all_fit_their_minutes() -> None:
    modules = {"limits": limits, "attention": attention, "moves": moves, "swaps": swaps,
               "overlap": overlap, "serving": serving}  # fmt: skip
    for name, plan in bench_gpu.SECTIONS.items():
        assert callable(getattr(modules[plan.where], name))
    for quick, minutes in ((True, 10), (False, 45)):
        plans = [*bench_gpu.SECTIONS.values(), *bench_gpu.CHECKS.values()]
        assert sum(plan.seconds(quick) for plan in plans) <= 60 * minutes - 60  # compiling


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_gpu.main(["decoding"])
    assert "allowed: bandwidth" in capsys.readouterr().err


# -- the tests' device ----------------------------------------------------------------------------


class InterpretedGpu:
    """In place of GpuDevice: launches are interpreted on the buffers of a TorchDevice."""

    capability = (9, 0)

    def __init__(self) -> None:
        self.device, self.spoil = InterpretedDevice((9, 0)), lambda: None

    def launch(self, launch: Any, stream: int) -> None:
        self.device.buffers = [
            Buffer("buffer", m.buffer.data_ptr(), m.buffer.numpy(), writable=True)
            for m in self.owner.buffers
        ]
        self.device.launch(launch, stream)
        self.spoil()


@pytest.fixture
def gpu() -> Iterator[InterpretedGpu]:
    gpu = InterpretedGpu()
    gpu.owner = TorchDevice(gpu, place="cpu")
    return gpu


def move(device: TorchDevice, seed: int) -> None:
    a = MOVE.make_inputs(np.random.default_rng(seed), num_frames=5, frame_bytes=40, num_moves=3)
    expected = MOVE.reference(a)
    given = {
        name: device.array(value, writable=name == "target_arena", misaligned=8)
        for name, value in a.items()
    }
    cuda_kernels.move_frames(**given)
    assert np.array_equal(a["target_arena"], expected)


@needs_compiler
def test_results_come_back(gpu: InterpretedGpu, seed: int) -> None:
    move(gpu.owner, seed)
    assert len(gpu.owner.launched) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("place", "words"), [(4, "before a buffer"), (-4, "behind a buffer"), (4096 + 9, "an input")]
)
def test_a_stray_write_is_noticed(gpu: InterpretedGpu, seed: int, place: int, words: str) -> None:
    def spoil() -> None:
        gpu.owner.buffers[1].buffer[place] ^= 1

    gpu.spoil = spoil
    with pytest.raises(AssertionError, match=words):
        move(gpu.owner, seed)


# -- sections -------------------------------------------------------------------------------------

SMALL = [
    Case(2, 32, 16, 4, kv_heads=1, dims=64),
    Case(1, 1088, 64, 8, kv_heads=2, dims=64),
    Case(1, 48, 16, 4, kv_heads=1, dims=64, new=5),
    Case(1, 16, 16, 4, kv_heads=1, dims=64, new=16),
]


@needs_compiler
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_attention_agrees_with_sdpa(bench: StandIn, rows: list[Row], case: Case) -> None:
    """The very kernels on the memory that a GPU would get; two layers in turn."""
    bench.l2_bytes = case.layer_bytes // 4 + 1
    attention.run_cases(bench, Budget(60).start(), [case])
    (row,) = rows
    assert row.facts["layers"] == 2
    assert row.error is not None
    assert 0 < row.error <= row.allowed_error / 2
    assert not row.failed
    assert row.others["flashinfer"] == row.others["vllm"] == "absent"
    assert isinstance(row.others["SDPA" if case.new > 1 else "SDPA, enable_gqa"], Spread)
    assert isinstance(row.ours, Spread)
    if case.new == 1:
        assert row.share == pytest.approx(case.moved_bytes / 1e-3 / 1e9)


@needs_compiler
def test_a_wrong_result_fails_the_row(bench: StandIn, rows: list[Row]) -> None:
    made = kv.PagedBatch.__init__

    def spoilt(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.arena[1].zero_()  # one block of four

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv.PagedBatch, "__init__", spoilt)
        attention.run_cases(bench, Budget(60).start(), SMALL[:1])
    assert rows[0].failed
    assert "WRONG" in str(rows[0])


def test_what_does_not_fit_is_named(bench: StandIn, rows: list[Row]) -> None:
    budget = Budget(60).start()
    attention.run_cases(bench, budget, [Case(256, 131072, 16, 32)])
    assert not rows
    assert "GiB, 7 are free" in budget.left_out[0]
    clock = itertools.count()
    budget = Budget(0.5, now=lambda: float(next(clock))).start()
    attention.run_cases(bench, budget, SMALL)
    assert not rows
    assert len(budget.left_out) == len(SMALL)


@needs_compiler
def test_fp8_is_probed(bench: StandIn, rows: list[Row]) -> None:
    """Measured once kernels take it; until then the section says so."""
    note = attention.probe_fp8(bench)
    assert note == "" or "not in the CUDA kernels of this version" in note


@needs_compiler
def test_limits_and_moves(bench: StandIn, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs to its end; the interpreter would tell an access outside a tensor."""
    bench.free_bytes = lambda: 1 << 20
    note = limits.bandwidth(bench, Budget(60).start())
    assert bench.read_rate >= bench.copy_rate > 0
    assert "GB/s" in note
    made = [
        moves.write_kv(bench, 5),
        moves.copy_blocks(bench, 3, layers=2, pairs=3),
        *(
            moves.pieces(bench, (f"{name}_frames", 2), count=3, size=64)
            for name in ("gather", "scatter", "move")
        ),
    ]
    for moved, ours, others, _ in made:
        assert moved > 0
        ours(0)
        for run in others.values():
            run(0)
    limits.launch(bench, Budget(60).start())
    names = [row.name for row in rows]
    assert "one launch, 19 arguments" in names
    assert all(isinstance(row.ours, Spread) for row in rows)


# -- time ------------------------------------------------------------------------------------------


def test_sides_are_measured_in_turns() -> None:
    clock, seen = CountingClock(), []

    def broken(turn: int) -> None:
        raise RuntimeError("can't do this")

    sides = {"a": lambda turn: seen.append(("a", turn)), "b": lambda turn: None, "c": broken}
    found = measure(clock, sides, seconds=9, most_turns=5)
    assert found["c"] == "failed: RuntimeError: can't do this"
    assert isinstance(found["a"], Spread)
    assert found["a"].turns == 5
    order = [name for run, _, _ in clock.seen for name, side in sides.items() if side is run]
    assert order[-10:] == ["a", "b"] * 5
    turns = [turn for _, turn in seen]
    assert turns[4:] == list(range(4, 4 + len(turns) - 4))  # another layer at each call


def test_a_slow_side_gets_its_least_turns() -> None:
    clock = itertools.count(0, 10)
    found = measure(
        CountingClock(5.0), {"a": lambda turn: None}, seconds=1, now=lambda: next(clock)
    )
    assert isinstance(found["a"], Spread)
    assert found["a"].turns == 3


def test_the_clock_tells_when_the_device_waited_for_the_host() -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        record = synchronize = lambda self: None

        def query(self) -> bool:
            return True  # it has passed although calls are still being queued

        def elapsed_time(self, other: Any) -> float:
            return 8.0

    class Cuda:
        def __init__(self) -> None:
            self.Event, self.slept = Event, []

        def synchronize(self) -> None:
            pass

        def _sleep(self, cycles: int) -> None:
            self.slept.append(cycles)

    cuda = Cuda()
    clock = CudaClock(type("Torch", (), {"cuda": cuda}))
    timing = clock.time(lambda turn: None, 0, 4)
    assert timing == Timing(0.002, False)
    assert len(cuda.slept) == 2 + 3  # three tries


# -- the record, the page --------------------------------------------------------------------------


def made_up() -> dict[str, Any]:
    """A record with invented figures."""
    record = Record(None, {"commit": "0" * 7, "quick": True, "device": {"name": "no <such> GPU"},
                           "checks": [{"name": "tests", "passed": True, "summary": "9 passed",
                                       "seconds": 1.0, "command": ""}]})  # fmt: skip
    spread = Spread(1e-4, 0.9e-4, 1.2e-4, 0.8e-4, 9, True)
    record.begin("decode", 60)
    record.add("decode", Row("made-up case", {}, 1000, spread, {"SDPA": spread, "vllm": "absent"},
                             "reading", 0.5, error=0.1, allowed_error=0.2))  # fmt: skip
    record.add("decode", Row("off", {}, 1000, spread, {}, error=0.3, allowed_error=0.2))
    record.add("decode", Row("none", {}, 1000, "failed: <reason>"))
    return json.loads(json.dumps(record.data))


def test_the_page_says_what_it_is() -> None:
    data = made_up()
    page = make_page(data, MADE_UP)
    assert page.index(MADE_UP) < page.index("made-up case")
    for word in ("no &lt;such&gt; GPU", "0000000", "short run", data["date"], "9 passed",
                 "50% of reading", "1.00x", "vllm: absent", "<svg", "interrupted",
                 "failed: &lt;reason&gt;", "Not run"):  # fmt: skip
        assert word in page, word
    assert page.count("WRONG") == 2
    assert "<such>" not in page
    with pytest.raises(ValueError, match="schema"):
        make_page({"schema": "kvmem.bench/2"})


def test_an_interrupted_run_keeps_what_it_has(
    bench: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moves_once(bench: Bench, budget: Budget) -> str:
        bench.keep(Row("first", {}, 0, Spread(1, 1, 1, 1, 1, True)))
        raise KeyboardInterrupt

    def broken(bench: Bench, budget: Budget) -> str:
        raise RuntimeError("out of order")

    monkeypatch.setattr(moves, "moves", moves_once)
    monkeypatch.setattr(limits, "launch", broken)
    file = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        bench_gpu.run_sections(
            bench, Record(file, {}), ["launch", "moves", "fp8"], True, lambda line: None
        )
    sections = json.loads(file.read_text())["sections"]
    assert sections["launch"]["status"] == "failed: RuntimeError: out of order"
    assert sections["moves"]["status"] == "interrupted"
    assert [row["name"] for row in sections["moves"]["rows"]] == ["first"]
    assert "fp8" not in sections


# -- correctness first -----------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [False, None])
def test_nothing_is_measured_if_the_tests_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passed: bool | None
) -> None:
    device = {"name": "x", "driver": "1", "compute_capability": "9.0", "l2_bytes": 0,
              "software": {"torch": "2"}}  # fmt: skip
    monkeypatch.setattr(bench_gpu, "facts", lambda: device)
    monkeypatch.setattr(correctness, "compile_all", lambda *_: Check("compile", True, "", 0.0, ""))
    tests = Check("tests", passed, "1 failed", 1.0, "pytest")
    monkeypatch.setattr(correctness, "run_checks", lambda *_: [tests])
    monkeypatch.setattr(bench_gpu, "open_bench", lambda *_: pytest.fail("measured"))
    file, page = tmp_path / "f.json", tmp_path / "f.html"
    asked = bench_gpu.parse(["--json", str(file), "--html", str(page)])
    assert bench_gpu.check_and_measure(asked, ["decode"]) == 1
    assert json.loads(file.read_text())["checks"][1]["passed"] is passed
    assert "1 failed" in page.read_text()


def test_acceptable() -> None:
    def checks(*passed: bool | None) -> list[Check]:
        names = ("tests", "memcheck", "racecheck")
        return [Check(n, p, "", 0.0, "") for n, p in zip(names, passed, strict=False)]

    assert correctness.acceptable(checks(True, True, True))
    assert correctness.acceptable(checks(True, None, None))
    assert not correctness.acceptable(checks(True, False, None))
    assert not correctness.acceptable(checks(None))
    assert not correctness.acceptable([])
    # A Manager's fault is told, and the figures of the kernels are still figures.
    manager = Check("manager", False, "", 0.0, "")
    assert correctness.acceptable([*checks(True), manager])
    assert not correctness.acceptable([manager])


def test_what_the_sanitizer_says() -> None:
    assert correctness.is_fault(["========= Invalid __global__ write of size 4 bytes"])
    assert correctness.is_fault(["========= RACECHECK SUMMARY: 2 hazards displayed (1 error)"])
    assert not correctness.is_fault(["========= RACECHECK SUMMARY: 0 hazards displayed"])
    assert correctness.is_fault(["1 failed, 3 passed in 2.0s"])
    assert not correctness.is_fault(["========= Error: Device not supported", "1 failed in 2.0s"])


@pytest.mark.parametrize(
    ("code", "seconds", "passed", "summary"),
    [
        ("print('3 passed in 1s')", 60, True, "3 passed in 1s"),
        ("print('1 failed, 3 passed'); raise SystemExit(1)", 60, False, "1 failed, 3 passed"),
        ("print('4 skipped in 1s')", 60, False, "no test ran: 4 skipped in 1s"),
        ("import time; time.sleep(99)", 0.5, None, "out of time after 0 s"),
    ],
)
def test_a_check(
    tmp_path: Path, code: str, seconds: float, passed: bool | None, summary: str
) -> None:
    command = [sys.executable, "-c", code]
    found = correctness.run_check("tests", command, {}, seconds, lambda line: None, tmp_path)
    assert (tmp_path / "tests.log").exists() == (passed is not None)
    assert found.passed is passed
    assert found.summary == summary


def test_the_command_of_the_tests_finds_them() -> None:
    """It collects every test of tests/gpu with its own settings, those for the sanitizer, too."""
    import subprocess

    kernels = ["--ignore", correctness.MANAGER, correctness.TESTS]
    for more, least in (
        (kernels, 40), ([*kernels, "-k", correctness.REDUCED], 8), ([correctness.MANAGER], 4),
    ):  # fmt: skip
        done = subprocess.run(
            [*correctness.pytest_command(*more), "--collect-only"], capture_output=True,
            text=True, cwd=correctness.ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("tests/gpu/test_") >= least
