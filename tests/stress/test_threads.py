"""Many threads on one Manager for a minute, Python changing between them as often as it can.

Not part of ``make test``: ``pytest tests/stress/test_threads.py -m threads``. KVMEM_THREAD_SECONDS
says how long each takes.
"""

from __future__ import annotations

import os

import pytest

from kvmem.stress import StressOptions, run_stress


@pytest.mark.threads
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_eight_threads_on_one_manager(device: str, seed: int) -> None:
    """On sim one more thread lets the streams go on, so that copies end in yet another."""
    seconds = float(os.environ.get("KVMEM_THREAD_SECONDS", "60"))
    options = StressOptions(
        device=device, seconds=seconds, threads=8, sequences=24, switch_interval=1e-6, seed=seed
    )
    report = run_stress(options)
    print(report.to_dict())
    assert report.breaches == [], report.replay
    assert report.leaks.findings() == []
    assert report.num_operations > 0
    assert report.counted["swap_outs"] > 0
