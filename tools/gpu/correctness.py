"""Runs the tests on the GPU, plainly and under compute-sanitizer, before anything is timed."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cuda_kernels.cuda.compile import compile_kernel
from cuda_kernels.cuda.registry import shipped_kernels

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/gpu"
MANAGER = f"{TESTS}/test_manager.py"  # its failure says nothing of the kernels' figures
#: What runs under the sanitizer, which is slow: one or two shapes of each kind of kernel.
REDUCED = "write_kv or copy_blocks or move_frames or pieces or few"
SANITIZER, SANITIZER_TOOLS = "compute-sanitizer", ("memcheck", "racecheck")
_FOUND = 86  # the sanitizer's exit status where it found something
_FAULT = re.compile(r"Invalid __\w+__|\bhazards?\b.*\b[1-9]|Race reported|out of bounds|misaligned")


@dataclass(frozen=True, slots=True)
class Check:
    """One run of tests. ``passed`` is None where it says nothing: absent, or out of time."""

    name: str
    passed: bool | None
    summary: str
    seconds: float
    command: str


def compile_all(
    capability: tuple[int, int], say: Callable[[str], None], jobs: int | None = None
) -> Check:
    """Compile every kernel into the cache, in several processes, so that no test waits for it."""
    begin, failed = time.monotonic(), []
    jobs = jobs or max(1, min(8, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {
            pool.submit(compile_kernel, source, capability): source for source in shipped_kernels()
        }
        for done in as_completed(waiting):
            error = done.exception()
            if error is not None:
                failed.append(f"{waiting[done].name}: {type(error).__name__}: {str(error)[:200]}")
    for line in failed:
        say(f"  {line}")
    arch = f"sm_{capability[0]}{capability[1]}"
    summary = f"{len(waiting)} kernels for {arch}, {len(failed)} failed"
    return Check("compile", not failed, summary, round(time.monotonic() - begin, 1), "")


def run_checks(
    seconds: dict[str, float], shapes: int, say: Callable[[str], None], logs: Path | None = None
) -> list[Check]:
    """Tests of the kernels, then of a Manager, then some under memcheck and racecheck.

    After a failure of the first nothing else runs.

    ``seconds`` limits each by name; ``shapes`` multiplies the generated shapes; what each printed
    goes to a file of ``logs``.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "KVMEM_SEED": os.environ.get("KVMEM_SEED") or str(random.SystemRandom().randrange(2**31)),
        "KVMEM_GPU_SHAPES": str(shapes),
        "KVMEM_CUDA_CACHE_DIR": os.environ.get(
            "KVMEM_CUDA_CACHE_DIR", str(ROOT / ".cache" / "cuda")
        ),
    }
    say(f"KVMEM_SEED={environment['KVMEM_SEED']}")
    kernels = pytest_command("--ignore", MANAGER, TESTS)
    checks = [run_check("tests", kernels, environment, seconds["tests"], say, logs)]
    if checks[0].passed is not True:
        return checks
    manager = pytest_command(MANAGER)
    checks.append(run_check("manager", manager, environment, seconds["manager"], say, logs))
    program = shutil.which(SANITIZER)
    # Each tensor in an allocation of its own: else the sanitizer sees one large one.
    alone = environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "KVMEM_GPU_SHAPES": "1",
                           "KVMEM_GPU_SANITIZER": "1"}  # fmt: skip
    for tool in SANITIZER_TOOLS:
        if program is None:
            checks.append(Check(tool, None, f"absent: no {SANITIZER} on PATH", 0.0, ""))
            continue
        command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), *kernels]
        checks.append(run_check(tool, [*command, "-k", REDUCED], alone, seconds[tool], say, logs))
    return checks


def pytest_command(*more: str) -> list[str]:
    """pytest with settings that need no plugin and no package but those named."""
    return [
        sys.executable, "-m", "pytest", "-q", "--maxfail", "8", "-m", "gpu",
        "-c", f"{TESTS}/pytest.ini", "--rootdir", str(ROOT), "--confcutdir", TESTS,
        "-p", "no:cacheprovider", *more,
    ]  # fmt: skip


def run_check(
    name: str,
    command: list[str],
    environment: dict[str, str],
    seconds: float,
    say: Callable[[str], None],
    logs: Path | None = None,
) -> Check:
    """Run one command; of a failure the end is shown. Out of time is no failure, and no pass."""
    say(f"{name} (at most {seconds:.0f} s) ...")
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Check(name, None, f"out of time after {seconds:.0f} s", seconds, _shown(command))
    finally:
        if process.poll() is None:  # out of time, or Ctrl-C: the sanitizer's own children, too
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines, status = output.strip().splitlines(), process.returncode
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name}.log").write_text(output, encoding="utf-8")
    if status:
        say("\n".join(lines[-60:]))
    passed: bool | None = status == 0
    summary = judge(name, lines)
    if name in SANITIZER_TOOLS and status and not is_fault(lines):
        passed = None  # the sanitizer itself could not run here
    if status == 0 and not any(" passed" in line for line in lines):
        # A Manager's may be skipped; kernels are there to be tested.
        passed, summary = (False if name == "tests" else None), f"no test ran: {summary}"
    return Check(name, passed, summary, round(time.monotonic() - begin, 1), _shown(command))


def judge(name: str, lines: list[str]) -> str:
    """The line that says most: pytest's last one, and the sanitizer's count."""
    found = [line for line in lines if " passed" in line or " failed" in line or " skipped" in line]
    found = found[-1:]
    if name in SANITIZER_TOOLS:
        found += [line.strip("= ") for line in lines if "SUMMARY" in line][-1:]
    return "; ".join(line.strip("= ") for line in found) or " ".join(lines[-1:])[:200]


def is_fault(lines: list[str]) -> bool:
    """Whether a failed run under the sanitizer tells of a kernel, not of a machine without it.

    Where no test passed at all, and no access or race is named, the sanitizer failed.
    """
    named = any(_FAULT.search(line) for line in lines)
    return named or any(" failed" in line and " passed" in line for line in lines)


def acceptable(checks: list[Check]) -> bool:
    """Whether to measure: the kernels' tests passed, and no check of kernels found a fault."""
    kernels = [check for check in checks if check.name != "manager"]
    passed = any(check.name == "tests" and check.passed for check in kernels)
    return passed and all(check.passed is not False for check in kernels)


def as_data(checks: list[Check]) -> list[dict[str, Any]]:
    """For the record."""
    return [asdict(check) for check in checks]


def _shown(command: list[str]) -> str:
    """A command without this machine's paths."""
    return " ".join(Path(word).name if word.startswith("/") else word for word in command)
