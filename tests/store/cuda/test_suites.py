"""The tests of the public API once more, on the double of a GPU in a mode drawn from the seed.

`KVMEM_TEST_DEVICE=cuda KVMEM_TEST_MODE=late pytest tests/test_manager.py` does the same by hand.
"""

from __future__ import annotations

from tests.cuda_double.opening import MODES
from tests.sim.test_suites import run_suites


def test_the_public_api_behaves_as_on_the_cpu(seed: int) -> None:
    run_suites("cuda", MODES[seed % len(MODES)], seed)
