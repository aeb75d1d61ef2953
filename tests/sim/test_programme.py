"""The simulated programme for some seconds of new seeds; `make sim` and `make soak` do more.

Seeds rotate with the run's own (KVMEM_SEED); a breach names the command that replays it.
"""

from __future__ import annotations

import warnings

import pytest

from kvmem.sim_options import SITES
from tests.sim.driver import drawn_setup, drive
from tests.sim.programme import programme

SECONDS = 25.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a failed Manager drops its handles
def test_random_operations_with_faults_end_well(seed: int) -> None:
    report = programme(seed, 100_000, 400, seconds=SECONDS)
    print("\n" + "\n".join(report.lines()))
    assert report.num_ops >= 5_000
    kinds = report.ops
    assert len(kinds) >= 25
    assert min(kinds.values()) >= report.num_ops / 200, kinds.most_common()[-3:]
    assert report.refusals.total() < report.num_ops / 5
    assert report.struck.total() >= report.num_ops / 200
    assert report.aborts_in_flight >= report.num_ops / 300
    assert {site for site in SITES if report.struck[site]} >= set(SITES) - {"event", "host_alloc"}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_seed_stands_for_everything(seed: int) -> None:
    """Twice the same: setup, operations, faults, schedule, log."""
    warnings.simplefilter("ignore", ResourceWarning)
    for i in range(3):
        runs = [drive(seed + i, drawn_setup(seed + i, 120)) for _ in range(2)]
        assert runs[0].digests == runs[1].digests
        assert runs[0].ops == runs[1].ops
        assert runs[0].struck == runs[1].struck
