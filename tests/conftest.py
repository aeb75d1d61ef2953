"""One seed a run, printed and replayable; Hypothesis and numba's cache set up before their import.

``KVMEM_SEED=n make test`` repeats a run: every random choice of every test hangs on that number
(and on the test's own name, so that a single test replays alone).
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

ROOT = Path(__file__).resolve().parent.parent


def _sources_hash() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for package in ("kvmem", "cuda_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


# numba's cache does not see an edit in a callee's module: one folder for each state of the sources,
# and one for bounds checks, which are not part of numba's key either.
os.environ.setdefault(
    "NUMBA_CACHE_DIR",
    str(
        ROOT
        / ".cache"
        / "numba"
        / (_sources_hash() + ("-bounds" if os.environ.get("NUMBA_BOUNDSCHECK") == "1" else ""))
    ),
)
# pytest has imported numba by now, for a category of warnings in pyproject.toml.
numba.config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]
# Compiling makes millions of small objects; the collector's walks through them are a tenth of it.
gc.set_threshold(200_000)
# In the environment, so that the processes which tests start draw from the same seed.
SEED = int(os.environ.setdefault("KVMEM_SEED", str(random.SystemRandom().randrange(2**31))))

import hypothesis  # noqa: E402
import hypothesis.core  # noqa: E402

hypothesis.settings.register_profile(
    "kvmem",
    derandomize=False,  # new cases each run: the printed seed is what makes them repeatable
    deadline=None,  # the first call of a compiled function takes seconds
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
    ],
)
hypothesis.settings.load_profile("kvmem")


def pytest_configure(config: pytest.Config) -> None:
    if hypothesis.core.global_force_seed is None:  # --hypothesis-seed wins
        hypothesis.core.global_force_seed = SEED


def pytest_report_header() -> list[str]:
    return [f"KVMEM_SEED={SEED}", f"NUMBA_CACHE_DIR={os.environ['NUMBA_CACHE_DIR']}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus:
        terminalreporter.write_line(f"replay with KVMEM_SEED={SEED}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test alone: the run's seed mixed with the test's name."""
    return zlib.crc32(request.node.nodeid.encode(), SEED) & 0x7FFFFFFF


ON_DOUBLE = os.environ.get("KVMEM_TEST_DEVICE") == "cuda"


@pytest.fixture(scope="session", autouse=ON_DOUBLE)
def cuda_double() -> Iterator[list[Any]]:
    """`KVMEM_TEST_DEVICE=cuda`: who asks for a GPU gets a double of one (tests/cuda_double)."""
    from tests.cuda_double.opening import install

    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, SEED, os.environ.get("KVMEM_TEST_MODE", "random"))


@pytest.fixture(autouse=ON_DOUBLE)
def nothing_wrong(cuda_double: list[Any]) -> Iterator[None]:
    """Nothing that the double objected to was swallowed by whoever was called then."""
    yield
    while cuda_double:
        cuda_double.pop().check()
