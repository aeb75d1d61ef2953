"""``kvmem stress``: exit status, output, and Ctrl-C in the middle."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

import kvmem
from kvmem.stress import StressOptions, run_stress
from tests.cli.commands import ROOT, run
from tests.stress.planting import FlippedBytes, around

SHORT = ("stress", "--ops", "300", "--sequences", "8")


def test_a_run_that_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *SHORT, "--device", "sim", "--faults", "0.02", "--seed", "5")
    assert (status, err) == (0, "")
    assert "device sim, seed 5" in out
    assert re.search(r"checked +\d+ rows of K/V, \d+ attentions", out)
    assert "result\n  no breach, no leak\n" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *SHORT, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "kvmem.stress/1"
    assert found["ok"] is True
    assert found["options"]["sequences"] == 8
    assert sum(found["operations"].values()) == 300
    assert found["replay"].startswith("kvmem stress --device cpu --ops 300 --sequences 8 --seed ")
    assert str(found["seed"]) in found["replay"]  # drawn
    assert found["leaks"]["managers_drained"] == 1
    for name in ("refusals", "faults", "swap_outs", "swap_ins", "gb_per_second_out",
                 "gb_per_second_in", "breaches", "pressure", "tokens"):  # fmt: skip
        assert name in found


@pytest.mark.parametrize("as_json", [False, True])
def test_a_flipped_byte(
    as_json: bool, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, and one line with the sequence, the position and what replays it."""
    flipped = FlippedBytes(monkeypatch)
    words = ("stress", "--ops", "2000", "--sequences", "8", "--seed", str(seed))
    status, out, err = run(capsys, *words, *(["--json"] if as_json else []))
    assert status == 1
    assert err.count("\n") == 1
    told = re.fullmatch(
        r"kvmem stress: content: K of sequence (\d+) position (\d+) layer 1 is not its stamp "
        r"\(expected .*, found .*\); replay: kvmem stress --device cpu --ops (\d+) --sequences 8 "
        rf"--seed {seed}\n",
        err,
    )
    assert told, err
    assert flipped.planted[int(told[1])] == int(told[2])
    assert int(told[3]) <= 2000
    if as_json:
        (breach,) = json.loads(out)["breaches"]
        assert (breach["sequence"], breach["position"]) == (int(told[1]), int(told[2]))
    else:
        assert f"replay: kvmem stress --device cpu --ops {told[3]}" in out


def test_a_leak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[Any] = []

    def free(original: Any, m: kvmem.Manager, seqs: list[Any]) -> None:
        if kept or not seqs[0].num_computed:
            original(m, seqs)
        else:
            kept.extend(seqs)

    around(monkeypatch, kvmem.Manager, "free", free)
    monkeypatch.setattr("kvmem.stress.ending._DRAIN_WITHIN", 0.5)
    status, out, err = run(capsys, *SHORT)
    assert status == 1
    assert re.match(r"kvmem stress: leak: \d+ device frames, .* 1 sequences are left", err), err
    assert "leak: " in out


def interrupted(*words: str) -> tuple[int, float, str]:
    """Run on a terminal, Ctrl-C when it works: status, seconds until it ended, what was seen."""
    outer, inner = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "kvmem.cli", "stress", "--seconds", "600", *words],
        stdout=inner, stderr=inner, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"},
        # a job in the background has SIGINT ignored, and its children with it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(inner)
    seen, sent = "", 0.0
    deadline = time.monotonic() + 300  # it may have to compile first
    try:
        while time.monotonic() < deadline:
            if select.select([outer], [], [], 0.1)[0]:
                try:
                    seen += os.read(outer, 65536).decode()
                except OSError:  # the other end is closed
                    break
            if not sent and re.search(r"kvmem: [12] s  [1-9]\d* operations", seen):
                sent = time.monotonic()
                child.send_signal(signal.SIGINT)
        status = child.wait(60)
        return status, time.monotonic() - sent, seen
    finally:
        os.close(outer)
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    "words",
    [
        ("--threads", "4", "--switch-interval", "1e-6"),
        ("--threads", "4", "--switch-interval", "1e-6", "--device", "sim", "--faults", "0.01"),
    ],
    ids=["cpu", "sim"],
)
def test_ctrl_c(words: tuple[str, ...]) -> None:
    status, seconds, seen = interrupted(*words)
    assert status == 130, seen
    assert seconds < 30  # it takes a second or two; nobody hangs
    assert "Traceback" not in seen
    assert re.search(r"kvmem: seed \d+", seen)
    assert re.search(
        r"operations \(\d+/s\)  \d+ swaps  \S+ GB/s out  \S+ GB/s in  \d+ faults", seen
    )


def test_ctrl_c_while_it_waits() -> None:
    """No thread is left behind: the interpreter would end under it, or abort."""
    options = StressOptions(device="sim", seconds=60.0, seed=5, threads=4, switch_interval=1e-6)
    main = threading.get_ident()
    # What it compiles or loads first: a Ctrl-C that comes in a callback of LLVM is lost there.
    run_stress(replace(options, seconds=0.01))
    for delay in (0.25, 0.31, 0.37):
        before = len(sys._current_frames())  # what is_alive() says is what went wrong
        timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_stress(options)
        timer.join()
        assert len(sys._current_frames()) == before
