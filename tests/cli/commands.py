"""Running the ``kvmem`` command in tests: in this process, or as a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvmem.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent.parent


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command in this process: (status, stdout, stderr)."""
    status = cli.main(words)
    out, err = capsys.readouterr()
    return status, out, err


def process(
    *words: str, shell_tail: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the real command; ``shell_tail`` redirects or pipes its output."""
    command: Sequence[str] = [sys.executable, "-m", "kvmem.cli", *words]
    if shell_tail:
        command = ["bash", "-o", "pipefail", "-c", " ".join(command) + shell_tail]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )  # fmt: skip
