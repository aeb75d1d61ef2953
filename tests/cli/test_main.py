"""The frame of the ``kvmem`` command: status, one line for every mistake, all kinds of output."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import kvmem
from kvmem.cli import main as cli
from kvmem.cli import plan as cli_plan
from kvmem.cli.output import Table, live_view, plain, print_tables
from tests.cli.commands import ROOT, process, run

MODEL = ["--layers", "30", "--kv-heads", "3", "--head-dim", "64"]
PLAN = ["plan", *MODEL, "--device-blocks", "12"]
FILE = ["plan", "--hf-config"]

# Words of the command line, and what its one line on stderr must say. Status 2 unless told.
MISTAKES: list[tuple[list[str], str]] = [
    # commands
    ([], r"kvmem: no command given; commands: doctor, plan, report"),
    (["pan"], r"unknown command 'pan'; did you mean plan\?"),
    (["Doctor"], r"unknown command 'Doctor'; did you mean doctor\?"),
    (["reprot"], r"did you mean report\?"),
    (["xyzzy"], r"unknown command 'xyzzy' \(kvmem --help\)"),
    ([""], r"unknown command ''"),
    (["plan\x1b[31m"], r"\\x1b\[31m"),
    (["p" * 5000], r"unknown command"),
    (["--versoin"], r"unknown flag --versoin; did you mean --version\?"),
    (["--verbose"], r"unknown flag --verbose"),
    (["--version=1"], r"--version"),
    (["--json"], r"no command given"),
    (["--"], r"no command given|unknown"),
    (["help"], r"unknown command 'help'"),
    # flags of all commands
    (["doctor", "--jsn"], r"kvmem doctor: unknown flag --jsn; did you mean --json\?"),
    (["report", "--Json"], r"did you mean --json\?"),
    (["report", "--json=yes"], r"--json"),
    (["doctor", "stray"], r"unknown argument stray"),
    (["report", "one", "two"], r"unknown argument one"),
    (["--version", "plan", *MODEL], r"unknown flag --version"),
    (["plan", "plan"], r"missing|unknown argument plan"),
    # plan: the model
    (["plan"], r"missing: --layers, --kv-heads, --head-dim \(or --hf-config FILE\)"),
    (["plan", "--layers", "3"], r"missing: --kv-heads, --head-dim"),
    (["plan", "--kv-head", "3"], r"unknown flag --kv-head; did you mean --kv-heads\?"),
    (["plan", "--layer", "3"], r"did you mean --layers\?"),
    (["plan", "--layers", "three"], r"argument --layers: 'three' is not a whole number"),
    (["plan", "--layers", "3.5"], r"'3.5' is not a whole number"),
    (["plan", "--layers", ""], r"'' is not a whole number"),
    (["plan", "--layers"], r"argument --layers: expected one argument"),
    (["plan", "--layers", "9" * 4000], r"--layers"),
    (["plan", "--layers", "9" * 30], r"is too large"),
    (["plan", *MODEL[2:], "--layers", "0"], r"--layers=0 is out of range"),
    (["plan", *MODEL[2:], "--layers", "-2"], r"--layers=-2 is out of range"),
    (["plan", *MODEL[2:], "--layers", "5000"], r"--layers=5000 is out of range"),
    ([*PLAN, "--kv-heads", "0"], r"--kv-heads=0 is out of range"),
    ([*PLAN, "--head-dim", "0"], r"--head-dim=0 is out of range"),
    ([*PLAN, "--head-dim", "100000"], r"--head-dim=100000 is out of range"),
    ([*PLAN, "--v-head-dim", "-1"], r"--v-head-dim=-1 is out of range"),
    ([*PLAN, "--dtype", "bfloat"], r"--dtype='bfloat'.*did you mean 'bfloat16'"),
    ([*PLAN, "--dtype", "fp8"], r"--dtype='fp8' is not in this version"),
    ([*PLAN, "--dtype"], r"argument --dtype: expected one argument"),
    ([*PLAN, "--hf-config", "x"], r"--hf-config and --layers both describe the model"),
    ([*FILE, "x", "--head-dim", "3"], r"--hf-config and --head-dim both describe"),
    (FILE, r"argument --hf-config: expected one argument"),
    # plan: tiers
    ([*PLAN, "stray"], r"unknown argument stray"),
    ([*PLAN, "--device-memory", "1GiB"], r"--device-blocks=12 and --device-memory='1GiB'"),
    ([*PLAN, "--block-size", "48"], r"--block-size=48 must be a power of two"),
    ([*PLAN, "--block-size", "0"], r"--block-size=0 must be a power of two"),
    ([*PLAN, "--block-size", "2048"], r"--block-size=2048 must be a power of two"),
    ([*PLAN, "--host-blocks", "-1"], r"--host-blocks=-1 is out of range"),
    ([*PLAN, "--host-memory", "1.5"], r"--host-memory=1\.5 is no share"),
    ([*PLAN, "--host-memory", "nan"], r"--host-memory=nan is no share"),
    ([*PLAN, "--host-memory", "many"], r"--host-memory='many' is no size"),
    ([*PLAN, "--host-memory", "10"], r"--host-memory=10 .*holds no block"),
    ([*PLAN, "--host-memory", "-5"], r"--host-memory"),
    ([*PLAN, "--host-memory", "1GiB", "--host-blocks", "3"], r"say the same thing twice"),
    (["plan", *MODEL, "--device-blocks", "0"], r"--device-blocks=0 is out of range"),
    (["plan", *MODEL, "--device-blocks", "9" * 4000], r"--device-blocks"),
    (["plan", *MODEL, "--device-memory", "0"], r"--device-memory"),
    (["plan", *MODEL, "--host-blocks", "3"], r"a host tier needs a device tier"),
    (["plan", *MODEL, "--host-memory", "1GiB"], r"a host tier needs a device tier"),
    # plan: load
    ([*PLAN, "--context", "0"], r"--context: '0' is too small"),
    ([*PLAN, "--context", "-7"], r"--context: '-7' is too small"),
    ([*PLAN, "--context", "many"], r"--context: 'many' is not a whole number"),
    ([*PLAN, "--sequences", "4"], r"--sequences needs --context"),
    (["plan", *MODEL, "--context", "9", "--sequences", "4"], r"needs --device-blocks or"),
    ([*PLAN, "--context", "9", "--sequences", "0"], r"--sequences: '0' is too small"),
    ([*PLAN, "--bandwidth", "0"], r"--bandwidth: '0' is no size"),
    ([*PLAN, "--bandwidth", "fast"], r"--bandwidth: 'fast' is no size; give a number and B"),
    ([*PLAN, "--bandwidth", "-25GB"], r"--bandwidth"),
    ([*PLAN, "--bandwidth", "1GB", "--measure"], r"not allowed with argument --bandwidth"),
    # report
    (["report", "--watch"], r"argument --watch: expected one argument"),
    (["report", "--watch", "0"], r"'0' is no duration; give seconds from 0.1 to 86400"),
    (["report", "--watch", "-1"], r"--watch"),
    (["report", "--watch", "nan"], r"'nan' is no duration"),
    (["report", "--watch", "inf"], r"'inf' is no duration"),
    (["report", "--watch", "soon"], r"'soon' is no duration"),
    (["report", "--count", "3"], r"--count needs --watch SECONDS"),
    (["report", "--watch", "1", "--count", "0"], r"--count: '0' is too small"),
    (["report", "--watch", "1", "--count", "x"], r"'x' is not a whole number"),
    (["report", "--pid", "0"], r"--pid=0: there is no such process"),
    (["report", "--pid", "-4"], r"--pid=-4: there is no such process|--pid"),
    (["report", "--pid", "2147483646"], r"there is no such process"),
    (["report", "--pid", "99999999999999"], r"there is no such process"),
    (["report", "--pid", "self"], r"'self' is not a whole number"),
    # doctor
    (["doctor", "--pin", "0"], r"--pin: '0' is no size"),
    (["doctor", "--pin", "1XiB"], r"--pin: '1XiB' is no size"),
    (["doctor", "--pin"], r"argument --pin: expected one argument"),
    # stress
    (["stress", "--second", "3"], r"unknown flag --second; did you mean --seconds\?"),
    (["stress", "--seconds", "0"], r"'0' is no duration; give seconds from 0.1 to 86400"),
    (["stress", "--seconds", "long"], r"'long' is no duration"),
    (["stress", "--ops", "0"], r"--ops: '0' is too small"),
    (["stress", "--ops", "many"], r"'many' is not a whole number"),
    (["stress", "--seed", "-1"], r"--seed=-1 is out of range"),
    (["stress", "--seed", "x"], r"--seed: 'x' is not a whole number"),
    (["stress", "--threads", "0"], r"--threads=0 is out of range"),
    (["stress", "--threads", "99"], r"--threads=99 work on sequences .* --sequences=16: give"),
    (["stress", "--sequences", "0"], r"--sequences=0 is out of range"),
    (["stress", "--sequence-blocks", "0"], r"--sequence-blocks=0 is out of range"),
    (["stress", "--pressure", "0"], r"--pressure=0.0 is out of range: give a number 0.1 to 1000"),
    (["stress", "--pressure", "high"], r"--pressure: 'high' is no number"),
    (["stress", "--pressure", "nan"], r"'nan' is no number"),
    (["stress", "--faults", "0.1"], r"--faults=0.1 needs --device='sim'"),
    (["stress", "--device", "sim", "--faults", "2"], r"--faults=2.0 .*give a share 0 to 0.5"),
    (["stress", "--switch-interval", "0"], r"--switch-interval=0.0 is out of range"),
    (["stress", "--device", "cuda:x"], r"--device='cuda:x' is unknown; known: 'cpu'"),
    (["stress", "--device", "gpu"], r"--device='gpu' is unknown"),
    (["stress", "--dtype", "fp8"], r"--dtype='fp8' is not in this version"),
    (["stress", "--block-size", "48"], r"--block-size=48 must be a power of two"),
    (["stress", "--layers", "0"], r"--layers=0 is out of range"),
    (["stress", "--kv-heads", "0"], r"--kv-heads=0 is out of range"),
    (["stress", "--head-dim", "0"], r"--head-dim=0 is out of range"),
    (["stress", "stray"], r"unknown argument stray"),
]  # fmt: skip


def test_the_table_is_long_enough() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=lambda x: str(x)[-40:])
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert re.search(message, err), err
    assert err.count("\n") == 1
    assert err.isprintable() or err[:-1].isprintable()
    assert len(err) <= 320


def test_every_mistake_says_where_help_is_or_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["pan"], ["report", "--watch", "0"], ["plan"]):
        assert "--help)" in run(capsys, *words)[2]


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_has_an_example_that_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, name, "--help")
    assert (status, err) == (0, "")
    examples = re.findall(rf"^  kvmem {name}\b(.*)$", out, re.MULTILINE)
    assert examples
    module = __import__(f"kvmem.cli.{name}", fromlist=["EXAMPLE"])
    for line in examples:
        words = line.split("#")[0].split("|")[0].split()
        cli.command_parser(name, module).parse_args(words)


@pytest.mark.parametrize("words", [["--version"], ["--json", "--version"], ["--help"]])
def test_without_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    if "--json" in words:
        assert json.loads(out) == {"schema": "kvmem.version/1", "version": kvmem.__version__}
    elif "--version" in words:
        assert out == f"kvmem {kvmem.__version__}\n"
    else:
        assert all(name in out for name in cli.COMMANDS)


JSON = [
    PLAN, ["report"], ["doctor"], ["report", "--watch", "0.1", "--count", "1"],
    ["stress", "--ops", "20"],
]  # fmt: skip


@pytest.mark.parametrize("words", JSON, ids=lambda x: " ".join(x)[:20])
def test_json_is_one_object_with_its_schema(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for order in ([*words, "--json"], ["--json", *words]):
        status, out, err = run(capsys, *order)
        assert (status, err) == (0, "")
        found = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
        assert next(iter(found)) == "schema"
        assert re.fullmatch(rf"kvmem\.{words[0]}/\d+", found["schema"])


def test_watching_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Reports one after the other on stdout; with --json one object a line."""
    watch = ["report", "--watch", "0.1", "--count", "3"]
    status, out, err = run(capsys, *watch, "--json")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 3
    times = [json.loads(line)["time"] for line in lines]
    assert times == sorted(times)
    status, out, err = run(capsys, *watch)
    assert (status, err) == (0, "")
    assert out.count("\nhost\n") == 3
    assert "\x1b" not in out


# --- errors of other kinds ------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    def run_it(_: object) -> int:
        raise error

    return run_it


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ZeroDivisionError("odd\nthing"), 1, "kvmem: ZeroDivisionError: odd thing (--debug shows"),
        (MemoryError(), 1, "kvmem: MemoryError"),
        (kvmem.DeviceUnavailable("gone"), 1, "kvmem: gone"),
        (kvmem.ConfigError("dtype is odd"), 2, "kvmem: dtype is odd"),
        (kvmem.FormatError("x:1: odd"), 3, "kvmem: x:1: odd"),
        (OSError(28, "No space left on device"), 1, "output could not be written: .*No space"),
        (OSError(13, "Permission denied"), 1, "kvmem: PermissionError: .*Permission denied"),
        (RuntimeError("x" * 5000), 1, "xxx"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_errors_of_a_command(
    error: Exception, status: int, message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(cli_plan, "run", raising(error))
    monkeypatch.setattr(cli, "_silence_stdout", lambda: None)
    found, out, err = run(capsys, *PLAN)
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert re.search(message.replace("(", r"\("), err), err
    assert len(err) <= 308
    found, _, err = run(capsys, "--debug", *PLAN)
    assert found == status
    assert "Traceback" in err


def test_debug_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [*PLAN, "--block-size", "3"]
    assert "Traceback" not in run(capsys, *wrong)[2]
    for words in (["--debug", *wrong], [*wrong, "--debug"], ["plan", "--debug", *wrong[1:]]):
        status, _, err = run(capsys, *words)
        assert (status, "Traceback" in err) == (2, True)


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli_plan, "run", raising(KeyboardInterrupt()))
    assert run(capsys, *PLAN) == (130, "", "")


# --- the real process -----------------------------------------------------------------------------


def test_the_real_process() -> None:
    wrong = process("plan", "--layer", "3")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("\n") == 1
    missing = process("plan", "--hf-config", "no-such-file.json")
    assert (missing.returncode, missing.stdout) == (3, "")


@pytest.mark.parametrize(
    "words", [["report"], ["--help"], ["report", "--watch", "0.1", "--json"]], ids=" ".join
)
@pytest.mark.parametrize("reader", ["head -1", "true"])
def test_a_reader_that_leaves(words: list[str], reader: str) -> None:
    done = process(*words, shell_tail=f" | {reader}")
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count("\n") == (1 if reader == "head -1" else 0)


@pytest.mark.parametrize(("tail", "status"), [(" >&-", 0), (" >/dev/full", 1), (" 2>&- | cat", 0)])
def test_output_that_nobody_takes(tail: str, status: int) -> None:
    done = process("report", shell_tail=tail)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (1 if status else 0)


def test_ctrl_c_while_watching() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "kvmem.cli", "report", "--watch", "0.2", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # a job in the background has SIGINT ignored, and its children with it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert child.stdout is not None
        json.loads(child.stdout.readline())
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
        assert (child.returncode, err) == (130, "")
    finally:
        child.kill()
        child.wait()


def on_a_terminal(*words: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the real command with stderr, and stdout too unless told, on a terminal of its own."""
    outer, inner = pty.openpty()
    keep_stdout = (environment or {}).pop("STDOUT_IS_A_PIPE", "")
    child = subprocess.Popen(
        [sys.executable, "-m", "kvmem.cli", *words], cwd=ROOT, stderr=inner,
        stdout=subprocess.PIPE if keep_stdout else inner,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200",
             **(environment or {})},
    )  # fmt: skip
    os.close(inner)
    seen, piped = b"", b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([outer], [], [], 0.1)
        if ready:
            try:
                part = os.read(outer, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
    if child.stdout is not None:
        piped = child.stdout.read()
        child.stdout.close()
    os.close(outer)
    return child.wait(30), seen.decode(), piped.decode()


def test_a_live_view_is_on_stderr_and_stdout_gets_the_last() -> None:
    status, seen, piped = on_a_terminal(
        "report", "--watch", "0.2", "--count", "3", environment={"STDOUT_IS_A_PIPE": "1"}
    )
    assert status == 0
    assert seen.count("may take") >= 3
    assert "\x1b[" in seen
    assert piped.count("\nhost\n") == 1
    assert "\x1b" not in piped


COLOURS = re.compile(r"\x1b\[[0-9;]*3[0-9](?:;[0-9]+)*m")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("where", ["terminal", "pipe"])
def test_colours_and_progress(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMEM_HOST_LIMIT", "plenty")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, err = (Terminal(), Terminal()) if where == "terminal" else (io.StringIO(), io.StringIO())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert cli.main(["doctor"]) == 1
    assert bool(COLOURS.search(out.getvalue())) == (where == "terminal")
    assert ("kvmem: checking python\n" in err.getvalue()) == (where == "terminal")
    assert "checking" not in out.getvalue()


TABLE = Table("things [bold]", ("name", "size"), [("[red]x", "1"), ("y", "200")], {1: "red"}, (1,))


@pytest.mark.parametrize("switch", ["", "NO_COLOR", "dumb", "without rich", "a file"])
def test_tables_for_each_reader(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb" if switch == "dumb" else "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if switch == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    if switch == "without rich":
        for name in [m for m in sys.modules if m.partition(".")[0] == "rich"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "rich", None)
    stream = io.StringIO() if switch == "a file" else Terminal()
    print_tables([TABLE], stream)
    text = stream.getvalue()
    assert "[red]x" in text  # a bracket in a name is no markup
    assert bool(COLOURS.search(text)) == (switch == "")
    if switch in ("dumb", "without rich", "a file"):
        assert text == "things [bold]\n  name    size\n  [red]x     1\n  y        200\n"


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_live_view_without_and_with_rich(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if not has_rich:
        monkeypatch.setattr("kvmem.cli.output.rich_console", lambda stream: None)
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    live_view(lambda: [TABLE], iter(range(2)))
    assert capsys.readouterr().out == plain([TABLE])
    assert stderr.getvalue().count("[red]x") >= 2
    assert "\x1b[" in stderr.getvalue()
