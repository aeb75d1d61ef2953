"""The tests of the public API once more, on the simulated device in a mode drawn from the seed.

`KVMEM_TEST_DEVICE=sim KVMEM_TEST_MODE=late pytest tests/test_manager.py` does the same by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvmem.sim_options import MODES

ROOT = Path(__file__).resolve().parents[2]
SUITES = ["test_manager.py", "test_manager_tiers.py", "test_manager_views.py", "test_cases.py"]
LONG = "not case_25 and not case_5_"  # thousands of steps about counts, which no device changes


def test_the_public_api_behaves_as_on_the_cpu(seed: int) -> None:
    run_suites("sim", MODES[seed % len(MODES)], seed)


def run_suites(device: str, mode: str, seed: int) -> None:
    """All of them, in a process of their own."""
    print("mode", mode)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", LONG, *(f"tests/{s}" for s in SUITES)],
        cwd=ROOT,
        env={
            **os.environ,
            "KVMEM_SEED": str(seed),
            "KVMEM_TEST_DEVICE": device,
            "KVMEM_TEST_MODE": mode,
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    print(done.stdout.splitlines()[-1])
