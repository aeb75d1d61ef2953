"""Measures kvmem against a peer or a limit in the same run; prints a table or JSON.

    make bench                              all sections (15 minutes and more)
    make bench ARGS="step swap --json"      some, as JSON (schema kvmem.bench/2)

Figures are medians with the 10th and 90th percentile. The sides of a ratio are measured in turns
in one process, so that a busy machine slows both; `load` is the machine's load average, and `busy`
what others kept busy of it just before a section. Exit status 1: a gate was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

# Waiting OpenMP threads must not steal the time of those that work; read at torch's import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parent.parent
for folder in (".", "tools", "docs/examples"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

from benchmarks.attend import bench_attend  # noqa: E402
from benchmarks.blocks import bench_blocks  # noqa: E402
from benchmarks.create import bench_create  # noqa: E402
from benchmarks.engine import bench_engine  # noqa: E402
from benchmarks.figure import Figure, busy_share  # noqa: E402
from benchmarks.fp8 import bench_fp8  # noqa: E402
from benchmarks.launch import bench_launch  # noqa: E402
from benchmarks.start import bench_start  # noqa: E402
from benchmarks.step import bench_step  # noqa: E402
from benchmarks.swap import bench_swap  # noqa: E402

SCHEMA = "kvmem.bench/2"
QUIET = 0.15  # others keep less of the machine busy

SECTIONS: dict[str, Callable[[int], list[Figure]]] = {
    "step": bench_step,
    "create": bench_create,
    "blocks": bench_blocks,
    "swap": bench_swap,
    "attend": bench_attend,
    "fp8": bench_fp8,
    "engine": bench_engine,
    "start": bench_start,
    "launch": bench_launch,
}


def commit() -> str:
    """The commit of the checkout, "unknown" outside one."""
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    )
    return run.stdout.strip() or "unknown"


def processor() -> str:
    """The processor's name as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measure(names: list[str], repeats: int) -> tuple[list[Figure], dict[str, float]]:
    """Run sections with a word on stderr; figures, and how busy others kept the machine."""
    figures: list[Figure] = []
    busy: dict[str, float] = {}
    for name in names:
        busy[name] = busy_share()
        note = "" if busy[name] < QUIET else f" (not quiet: {busy[name]:.0%} busy with other work)"
        print(f"{name} ...{note}", file=sys.stderr, flush=True)
        figures += SECTIONS[name](repeats)
    return figures, busy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of: {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; allowed: {', '.join(SECTIONS)}")
    try:
        figures, busy = measure(arguments.sections or list(SECTIONS), arguments.repeats)
    except KeyboardInterrupt:
        return 130
    missed = [f for f in figures if f.holds is False]
    if arguments.json:
        machine = {"processor": processor(), "cores": os.cpu_count(), "gpu": None}
        head = {"schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "commit": commit()}
        rows = [asdict(f) for f in figures]
        print(json.dumps({**head, "machine": machine, "busy": busy, "figures": rows}))
    else:
        print(*figures, sep="\n")
        print(f"{sum(f.holds is True for f in figures)} gates hold, {len(missed)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
