"""Measures kvmem on an NVIDIA GPU, kernels and a Manager: tests first, then figures, then a page.

    make gpu                                        all of it, about 45 minutes at most
    make gpu QUICK=1                                the short form, about 10 minutes at most
    make gpu ARGS="decode moves"                    some sections, after the tests

Nothing is measured if a test of the kernels fails. Figures are medians beside a limit or another
implementation that was measured in the same run. The record is rewritten after each figure; what
ran out of time or memory is named. Without a GPU it says what is missing and ends with status 0.
Status 1: a test failed, or a result was wrong; 2: there is a GPU, but something else is missing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.gpu.clock import Budget, CudaClock  # noqa: E402
from tools.gpu.machine import Missing, facts, find_missing, manager_lacks  # noqa: E402

# The rest is imported where it runs: it needs packages that may be what is missing.
if TYPE_CHECKING:
    from tools.gpu.record import Bench, Record, Row


class Plan(NamedTuple):
    """Where a section or a check comes from, and the seconds of the short form and of the whole."""

    where: str
    about: str
    short: float
    whole: float
    of_manager: bool = False

    def seconds(self, quick: bool) -> float:
        """What it may take."""
        return self.short if quick else self.whole


SECTIONS = {
    "bandwidth": Plan("limits", "how fast the device copies and reads", 15, 60),
    "decode": Plan("attention", "decode in bfloat16, beside SDPA and paged peers", 60, 440),
    "prompt": Plan("attention", "a chunk of a prompt over cached tokens, beside SDPA", 35, 200),
    "moves": Plan("moves", "write_kv, copy_blocks, frames and swaps, beside torch", 20, 120),
    "launch": Plan("limits", "what a call costs the host", 10, 60),
    "fp8": Plan("attention", "decode with K and V in fp8_e4m3", 20, 200),
    "swap": Plan(
        "swaps", "a Manager's swaps by size of frame, beside the link", 30, 110, of_manager=True
    ),
    "beside": Plan(
        "overlap", "a decode step while blocks go out and come in", 15, 50, of_manager=True
    ),
    "layers": Plan("overlap", "layers that arrive while others compute", 10, 40, of_manager=True),
    "graph": Plan(
        "overlap", "a decode step as a CUDA graph, beside plain launches", 10, 30, of_manager=True
    ),
    "engine": Plan(
        "serving", "the example engine under pressure: the same answers", 15, 45, of_manager=True
    ),
    "stress": Plan("serving", "kvmem stress: each byte checked", 40, 145, of_manager=True),
}
CHECKS = {
    "tests": Plan("correctness", "pytest -m gpu, of the kernels", 120, 500),
    "manager": Plan("correctness", "pytest -m gpu, of a Manager on the GPU", 60, 240),
    "memcheck": Plan("correctness", "some of them under compute-sanitizer, if on PATH", 40, 200),
    "racecheck": Plan("correctness", "the same, shared memory", 40, 200),
}
Say = Callable[[str], None]


def say(line: str) -> None:
    """Progress, on stderr, so that stdout stays the result."""
    print(line, file=sys.stderr, flush=True)


def commit() -> dict[str, Any]:
    """The commit of the checkout and whether files differ from it; unknown outside one."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain")
    return {"commit": git("rev-parse", "--short", "HEAD") or "unknown", "changed": bool(changes)}


def dry_run(missing: Missing, names: list[str], quick: bool) -> None:
    """Say what is missing, and what would run."""
    print("skipped: nothing was run on a GPU, and nothing was measured." if missing.no_gpu
          else "not run: there is a GPU, but something is missing.")  # fmt: skip
    print("missing:", *missing.lines, sep="\n  ")
    if missing.warnings:
        print("also:", *missing.warnings, sep="\n  ")
    print("it would run:")
    for name, plan in [*CHECKS.items(), *((name, SECTIONS[name]) for name in names)]:
        print(f"  {name:10} {plan.about} (at most {plan.seconds(quick):.0f} s)")


def run_sections(bench: Bench, record: Record, names: list[str], quick: bool, say: Say) -> bool:
    """Each section within its time; an error ends that section only. Whether all was right."""
    right = True
    for name in names:
        plan = SECTIONS[name]
        run = getattr(importlib.import_module(f"tools.gpu.{plan.where}"), name)
        budget = Budget(plan.seconds(quick)).start()
        record.begin(name, budget.seconds)
        say(f"{name} (at most {budget.seconds:.0f} s) ...")

        def keep(row: Row, name: str = name) -> None:
            nonlocal right
            right = right and not row.failed
            record.add(name, row)
            say(f"  {row}")

        bench.keep = keep
        status, note = "done", ""
        try:
            note = (plan.of_manager and manager_lacks()) or run(bench, budget)
        except Exception as error:  # the others still say something
            status, right = f"failed: {type(error).__name__}: {str(error)[:300]}", False
            say(f"  {status}")
        for line in [*filter(None, [note]), *(f"left out: {one}" for one in budget.left_out)]:
            say(f"  {line}")
        record.end(
            name, status=status, note=note, left_out=budget.left_out, seconds=round(budget.spent, 1)
        )
    return right


def open_bench(quick: bool, l2_bytes: int) -> Bench:
    """On GPU 0, torch's current stream."""
    import torch

    from cuda_kernels.cuda.launch import GpuDevice
    from tools.gpu.record import Bench

    torch.cuda.init()

    def free_bytes() -> int:
        torch.cuda.empty_cache()  # what torch keeps for later counts as free
        return int(torch.cuda.mem_get_info()[0])

    return Bench(
        torch=torch,
        device=GpuDevice(0),
        place="cuda",
        clock=CudaClock(torch),
        quick=quick,
        l2_bytes=l2_bytes or 64 << 20,  # some tell none: then as much as the largest have
        free_bytes=free_bytes,
        case_seconds=1.0 if quick else 2.0,
        stream=torch.cuda.current_stream().cuda_stream,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of: {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer cases, less time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page of it")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; allowed: {', '.join(SECTIONS)}")
    return asked


def check_and_measure(asked: argparse.Namespace, names: list[str]) -> int:
    """On a machine with all that is needed."""
    from tools.gpu import correctness
    from tools.gpu.record import Record
    from tools.gpu.report import write_page

    found = facts()
    major, minor = (int(word) for word in found["compute_capability"].split("."))
    record = Record(asked.json, commit() | {"quick": asked.quick, "device": found, "checks": []})
    say(f"{found['name']}, driver {found['driver']}, torch {found['software']['torch']}")
    status = 1
    try:
        checks = [correctness.compile_all((major, minor), say)]
        limit = {name: plan.seconds(asked.quick) for name, plan in CHECKS.items()}
        checks += correctness.run_checks(
            limit, 1 if asked.quick else 4, say, asked.json.parent if asked.json else None
        )
        record.data["checks"] = correctness.as_data(checks)
        for check in checks:
            say(f"{check.name}: {check.summary} ({check.seconds:.0f} s)")
        if not correctness.acceptable(checks):
            say("nothing is measured: the tests on the GPU did not pass")
        elif run_sections(
            open_bench(asked.quick, found["l2_bytes"]), record, names, asked.quick, say
        ):
            status = int(any(check.passed is False for check in checks))
    except KeyboardInterrupt:
        status = 130
    finally:
        record.write()
        if asked.html:
            write_page(record.data, asked.html)
    for path in filter(None, (asked.json, asked.html)):
        print(path)
    return status


def main(arguments: list[str] | None = None) -> int:
    """Say what is missing, or test and measure."""
    asked = parse(arguments)
    # Needed by every ratio: what the device can do at all.
    names = [name for name in SECTIONS if name in asked.sections or name == "bandwidth"]
    names = names if asked.sections else list(SECTIONS)
    os.environ.setdefault("KVMEM_CUDA_CACHE_DIR", str(ROOT / ".cache" / "cuda"))
    missing = find_missing()
    if missing:
        dry_run(missing, names, asked.quick)
        return 0 if missing.no_gpu else 2
    for line in missing.warnings:
        say(f"note: {line}")
    begin = time.monotonic()
    status = check_and_measure(asked, names)
    say(f"{(time.monotonic() - begin) / 60:.1f} minutes")
    return status


if __name__ == "__main__":
    sys.exit(main())
