"""The ``kvmem`` command: exit status, one line on stderr for every mistake, JSON that parses."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import kvmem
from kvmem.cli import main as cli
from kvmem.cli import plan as cli_plan

MODEL = ["--layers", "30", "--kv-heads", "3", "--head-dim", "64"]
PLAN = ["plan", *MODEL, "--device-blocks", "12"]


def process(*words: str, shell_tail: str = "") -> subprocess.CompletedProcess[str]:
    """Run the real command; ``shell_tail`` redirects or pipes its output."""
    command = [sys.executable, "-m", "kvmem.cli", *words]
    if shell_tail:
        line = " ".join(command) + shell_tail
        command = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command in this process: (status, stdout, stderr)."""
    try:
        status = cli.main(words)
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_plan_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    expected = kvmem.Config(
        num_layers=30, num_kv_heads=3, head_dim=64, device_blocks=12, host_memory="1.5GiB"
    ).plan()
    status, out, err = run(capsys, *PLAN, "--host-memory", "1.5GiB")
    assert (status, out, err) == (0, f"{expected}\n", "")
    status, out, err = run(capsys, *PLAN, "--host-memory", str(3 * 2**29), "--json")
    assert (status, json.loads(out), err) == (0, expected.to_dict(), "")
    share = run(capsys, "plan", *MODEL, "--device-memory", "0.001", "--dtype", "float16")
    assert share[0] == 0


MISTAKES = [
    ([], r"kvmem: no command given; commands: plan"),
    (["pan"], r"unknown command 'pan'; did you mean plan\?"),
    (["--versoin"], r"unknown flag --versoin; did you mean --version\?"),
    (["plan", "--kv-head", "3"], r"unknown flag --kv-head; did you mean --kv-heads\?"),
    (["plan"], r"missing: --layers, --kv-heads, --head-dim"),
    (["plan", "--layers", "three"], r"argument --layers: 'three' is not a whole number"),
    (["plan", "--layers"], r"argument --layers: expected one argument"),
    ([*PLAN, "stray"], r"unknown argument stray"),
    (["plan", *MODEL], r"device tier is missing: give --device-blocks .*--device-memory"),
    ([*PLAN, "--device-memory", "1GiB"], r"--device-blocks=12 and --device-memory='1GiB'"),
    ([*PLAN, "--block-size", "48"], r"--block-size=48 must be a power of two"),
    ([*PLAN, "--dtype", "bfloat"], r"--dtype='bfloat'.*did you mean 'bfloat16'"),
    ([*PLAN, "--host-memory", "1.5"], r"--host-memory=1\.5 is no share"),
    ([*PLAN, "--host-memory", "many"], r"--host-memory='many' is no size"),
    ([*PLAN, "--head-dim", "0"], r"--head-dim=0 is out of range"),
    (["plan", *MODEL, "--device-blocks", "9" * 4000], r"--device-blocks"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=lambda x: str(x)[-40:])
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert re.search(message, err)
    assert err.count("\n") == 1
    assert len(err) <= 320


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(kvmem.ConfigError, match="--block-size=3"):
        cli.main(["--debug", *PLAN, "--block-size", "3"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_plan, "run", interrupted)
    assert run(capsys, *PLAN) == (130, "", "")


def test_the_real_process() -> None:
    version = process("--version")
    assert (version.returncode, version.stdout) == (0, f"kvmem {kvmem.__version__}\n")
    assert "plan" in process("--help").stdout
    wrong = process("plan", "--layer", "3")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("\n") == 1


@pytest.mark.parametrize("tail", [" | true", " >&-", " >/dev/full"])
def test_output_that_nobody_takes(tail: str) -> None:
    done = process(*PLAN, shell_tail=tail)
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 1
