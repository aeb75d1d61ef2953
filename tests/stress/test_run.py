"""Stress runs: those that must find nothing, and each kind of check with a mistake planted."""

from __future__ import annotations

import os
import random
import shlex
import sys
import threading
from typing import Any

import pytest
import torch

import kvmem
from kvmem.cli import main as cli
from kvmem.cli import stress as cli_stress
from kvmem.step import Step
from kvmem.store.cuda import api
from kvmem.store.device import Stream
from kvmem.store.order import StepFences
from kvmem.stress import StressOptions, StressReport, run_stress
from kvmem.stress.ending import Ending
from kvmem.stress.workload import Worker
from tests.cuda_double.opening import install
from tests.stress.planting import FlippedBytes, around, stressed

RUNS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "sim": {"device": "sim"},
    "cpu, debug": {"debug": True},
    "sim, debug": {"device": "sim", "debug": True},
    "bfloat16": {"dtype": "bfloat16", "num_kv_heads": 1},
    "float16": {"dtype": "float16", "num_layers": 1},
    "one token a block": {"block_size": 1, "sequence_blocks": 12},
    "one sequence": {"sequences": 1, "sequence_blocks": 1},
    "hardly any pressure": {"pressure": 0.2},
    "much pressure": {"pressure": 50.0, "sequences": 40},
    "4 threads on cpu": {"threads": 4, "switch_interval": 1e-6},
    "4 threads on sim": {"threads": 4, "switch_interval": 1e-6, "device": "sim"},
}  # fmt: skip


def counts(report: StressReport) -> dict[str, Any]:
    """What hangs on the seed alone."""
    found = report.to_dict()
    timed = ("seconds", "gb_per_second_out", "gb_per_second_in", "leaks")
    return {name: value for name, value in found.items() if name not in timed}


@pytest.mark.parametrize("name", RUNS)
def test_runs_without_a_breach(name: str, seed: int) -> None:
    before = sys.getswitchinterval()
    report = stressed(seed=seed, **RUNS[name])
    assert report.breaches == []
    assert report.leaks.findings() == []
    assert report.ok
    assert report.num_operations == 400
    assert report.leaks.managers_drained == report.managers == 1
    assert report.rows_checked > report.attentions_checked > 0
    assert report.replay == report.options.command()
    assert sys.getswitchinterval() == before
    if name in ("cpu", "sim"):
        assert len(report.operations) >= 15  # of 19 kinds; some are rare
        assert report.counted["swap_outs"] > 20
        assert report.counted["bytes_in_done"] > 0
        assert report.counted["prefix_hit_tokens"] > 0


def test_what_a_gpu_opens_once_is_no_leak(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A context of CUDA opens files that stay open, as its first Manager does here."""
    install(monkeypatch, seed, "eager")
    open_double, opened = api.open_cuda, list[int]()

    def opening(name: str) -> Any:
        if not opened:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        return open_double(name)

    monkeypatch.setattr(api, "open_cuda", opening)
    report = stressed(seed=seed, device="cuda", ops=40, sequences=4)
    os.close(opened[0])
    assert report.leaks.findings() == []
    assert report.ok


@pytest.mark.parametrize("threads", [1, 4])
def test_injected_faults_are_worked_through(threads: int, seed: int) -> None:
    report = stressed(seed=seed, device="sim", faults=0.05, threads=threads)
    assert report.breaches == []
    assert report.leaks.findings() == []
    assert sum(report.faults.values()) > 0
    assert set(report.faults) <= {"copy_before", "copy_after", "event", "sticky", "transfer"}
    assert report.num_operations == 400


def test_a_step_that_lost_its_kv_is_computed_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its body read is no breach where leaving it says that a copy had failed."""
    rng, lost = random.Random(seed), set()

    def attend(original: Any, step: Step, layer: int, q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = original(step, layer, q)
        if rng.random() < 0.1:
            lost.add(id(step))
            out += 1
        return out

    def leave(original: Any, step: Step, kind: Any, error: Any, traceback: Any) -> None:
        if id(step) in lost:
            lost.discard(id(step))
            step.cancel()
            if kind is None:
                told = kvmem.TransferError("injected fault copy_after at in 7")
                told.lost = tuple((seq.id, 0) for seq in step.seqs)  # type: ignore[attr-defined]
                raise told
        original(step, kind, error, traceback)

    around(monkeypatch, Step, "attend", attend)
    around(monkeypatch, Step, "__exit__", leave)
    report = stressed(seed=seed, device="sim", faults=1e-9)
    assert report.breaches == []
    assert report.ok
    assert report.faults["copy_after"] > 5
    assert report.sequences_lost > 5
    assert report.managers == 1


def test_a_run_is_repeated_by_its_seed(seed: int) -> None:
    options = {"device": "sim", "faults": 0.02, "ops": 300}
    first, second = (stressed(seed=seed, **options) for _ in range(2))
    assert counts(first) == counts(second)
    assert counts(first) != counts(stressed(seed=seed + 1, **options))


def test_a_simulated_device_is_changed_now_and_then(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmem.stress.run.SIM_OPERATIONS", 40)
    for threads in (1, 3):
        report = stressed(seed=seed, device="sim", threads=threads, ops=130)
        assert report.ok
        assert report.num_operations == 130
        assert report.managers == report.leaks.managers_drained == 4
    assert stressed(seed=seed, ops=130).managers == 1


def test_a_run_ends_with_its_seconds() -> None:
    told: list[Any] = []
    report = run_stress(StressOptions(seconds=2.2, seed=1), progress=told.append)
    assert report.ok
    assert report.seconds >= 2.2
    assert len(told) >= 2
    assert told[-1].operations > told[0].operations > 0
    assert told[-1].swaps > 0
    assert report.leaks.rss_slope_mib_per_minute is None  # too short


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_flipped_byte_is_found_where_it_is(
    device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped = FlippedBytes(monkeypatch)
    report = stressed(ops=2000, seed=seed, device=device, sequences=8)
    (breach,) = report.breaches
    assert breach.kind == "content"
    assert breach.sequence in flipped.planted
    assert breach.position == flipped.planted[breach.sequence]
    assert breach.layer == 1
    assert breach.expected != breach.found
    assert not report.ok
    if device == "cpu":  # its copies end when they end
        return
    # the command it names finds the same
    flipped.planted.clear()
    words = shlex.split(report.replay)[2:]
    arguments = cli.command_parser("stress", cli_stress).parse_args(words)
    again = run_stress(cli_stress._options(arguments))
    assert again.breaches == report.breaches


def test_a_row_in_a_wrong_slot(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new rows of one step change places in one layer."""
    planted: list[tuple[int, int]] = []

    def write(original: Any, step: Step, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer == 1 and step.num_tokens > 20 and step.host.num_tokens[0] > 1 and not planted:
            planted.append((step.seqs[0].id, int(step.positions[0])))
            k = k.clone()
            k[:2] = k[:2].flip(0)
        original(step, layer, k, v)

    around(monkeypatch, Step, "write", write)
    (breach,) = stressed(seed=seed).breaches
    assert planted == [(breach.sequence, breach.position)]
    assert breach.message.startswith("K of sequence")


def test_attention_over_another_row(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel leaves out the first token of one row; what lies in the blocks is right."""
    planted: list[int] = []

    def attend(original: Any, step: Step, layer: int, q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = original(step, layer, q)
        if step.num_tokens > 1 and int(step.seq_lens[0]) > 20 and not planted:
            planted.append(step.seqs[0].id)
            out[0] += 0.01
        return out

    around(monkeypatch, Step, "attend", attend)
    (breach,) = stressed(seed=seed).breaches
    assert planted == [breach.sequence]
    assert breach.kind == "content"
    assert breach.message.startswith("attention")


def test_a_step_that_computes_another_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(original: Any, m: kvmem.Manager, seqs: Any, tokens: Any, **options: Any) -> None:
        original(m, seqs, tokens ^ 1, **options)

    around(monkeypatch, kvmem.Manager, "append", append)
    monkeypatch.setattr(Worker, "_look", lambda _: None)  # it compares tokens too
    (breach,) = stressed(seed=seed).breaches
    assert breach.kind == "content"
    assert breach.message.startswith("the step's token of sequence")


def test_what_nobody_reads_again_is_read_at_the_end(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted: list[int] = []

    def run(original: Any, ending: Ending) -> None:
        live = [t for t in ending._workers[0].live.values() if t.seq.state == "RESIDENT"]
        at = next(t for t in live if t.seq.num_computed)
        ending._m.kv(0)[1][ending._m.block(at.seq.block_ids[0]).frame_ids[0], 0] += 1
        everyone = ending._workers[0].live.values()  # who shares its prefix finds it too
        planted.extend(t.seq.id for t in everyone if t.chain[0] == at.chain[0])
        original(ending)

    around(monkeypatch, Ending, "run", run)
    (breach,) = stressed(seed=seed).breaches
    assert (breach.sequence in planted, breach.position) == (True, 0)
    assert breach.message.startswith("V of sequence")


def test_a_sequence_that_is_never_freed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def free(original: Any, m: kvmem.Manager, seqs: list[Any]) -> None:
        if not kept and seqs[0].num_computed > 20 and seqs[0].state == "RESIDENT":
            kept.extend(seqs)
            return
        original(m, seqs)

    around(monkeypatch, kvmem.Manager, "free", free)
    monkeypatch.setattr("kvmem.stress.ending._DRAIN_WITHIN", 0.5)
    report = stressed(seed=seed)
    assert report.breaches == []
    assert not report.ok
    assert report.leaks.device_frames + report.leaks.host_frames > 0
    assert "1 sequences are left" in report.leaks.findings()[0]


def test_a_thread_and_a_file_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmem.stress.leaks._THREADS_END_WITHIN", 0.1)
    end, opened = threading.Event(), []

    def create(original: Any, *arguments: Any, **options: Any) -> Any:
        if not opened:
            threading.Thread(target=end.wait, daemon=True).start()
            opened.append(os.open(os.devnull, os.O_RDONLY))
        return original(*arguments, **options)

    around(monkeypatch, kvmem.Manager, "create", create)
    try:
        report = stressed(ops=20)
        assert (report.leaks.threads, report.leaks.fds) == (1, 1)
        assert len(report.leaks.findings()) == 2
        assert not report.ok
    finally:
        end.set()
        os.close(opened[0])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_wait_left_out_is_a_race(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies don't wait for the steps before them; the simulated device tells. Of 25 seeds 20 do
    within 400 operations: some devices are so quick that the host always sees the end of a step."""
    around(monkeypatch, StepFences, "after", lambda original, fences, epoch: ())
    report = stressed(seed=4, device="sim", threads=threads)
    assert report.breaches[0].kind == "race"
    assert "first: " in report.breaches[0].detail


def test_a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(original: Any, m: kvmem.Manager) -> None:
        raise AssertionError("frame 3 is free twice (R1)")

    around(monkeypatch, kvmem.Manager, "verify", verify)
    breach = stressed(ops=50).breaches[0]  # at the end at the latest
    assert (breach.kind, breach.message) == ("verify", "frame 3 is free twice (R1)")


def test_an_error_that_nobody_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(original: Any, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("odd")

    around(monkeypatch, kvmem.Manager, "create", create)
    report = stressed(threads=3)
    breach = report.breaches[0]
    assert (breach.kind, breach.message) == ("error", "ZeroDivisionError: odd")
    assert "Traceback" in breach.detail
    assert report.num_operations <= 30  # the others stop


def test_a_device_that_fails_without_an_injected_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(*_: object) -> None:
        raise OSError("bus error")

    def create(original: Any, m: kvmem.Manager, *arguments: Any, **options: Any) -> Any:
        m._runtime.store.device.hook = hook  # type: ignore[attr-defined]
        return original(m, *arguments, **options)

    around(monkeypatch, kvmem.Manager, "create", create)
    assert stressed().breaches[0].kind == "device"


def test_a_copy_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog tells who hangs and where; closing wakes it, no thread is left."""

    def create(original: Any, m: kvmem.Manager, *arguments: Any, **options: Any) -> Any:
        m._runtime.store.device.hold(Stream.IN)
        return original(m, *arguments, **options)

    around(monkeypatch, kvmem.Manager, "create", create)
    report = stressed(hang_seconds=1, threads=2)
    breach = report.breaches[0]
    assert breach.kind == "hang"
    assert "stress-" in breach.detail or "not done after" in breach.message
    assert report.leaks.threads == 0


def test_an_interrupt_ends_all_threads() -> None:
    before = threading.active_count()

    def progress(_: object) -> None:
        raise KeyboardInterrupt

    for device in ("cpu", "sim"):
        with pytest.raises(KeyboardInterrupt):
            run_stress(
                StressOptions(device=device, seconds=600, threads=3, switch_interval=1e-6),
                progress=progress,
            )
    assert threading.active_count() == before
