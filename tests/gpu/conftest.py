"""The device of the tests here: a GPU, else they are skipped with what is missing.

`KVMEM_GPU_REHEARSAL=1` takes the interpreter of `tests/ptx` instead, so that these tests
themselves can be tried where there is no GPU; `KVMEM_GPU_SHAPES` multiplies generated shapes
(0: one of each). A seed of their own, for `make gpu` runs without the conftest above.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tools.gpu.machine import find_missing

SEED = int(os.environ.setdefault("KVMEM_SEED", str(random.SystemRandom().randrange(2**31))))


@pytest.fixture(scope="session")
def some_device() -> Any:
    if os.environ.get("KVMEM_GPU_REHEARSAL") == "1":
        from tests.ptx.device import InterpretedDevice

        device = InterpretedDevice((9, 0))
        device.is_real = False  # type: ignore[attr-defined]
        return device
    missing = find_missing()
    if missing:
        pytest.skip("no GPU tests here: " + "; ".join(missing.lines))
    import torch

    from cuda_kernels.cuda.launch import GpuDevice
    from tests.gpu.device import TorchDevice

    torch.cuda.init()
    return TorchDevice(GpuDevice(0))


@pytest.fixture
def device(some_device: Any) -> Iterator[Any]:
    some_device.clear()
    yield some_device
    some_device.clear()


@pytest.fixture
def real_device(device: Any) -> Any:
    """For what the interpreter would take hours for, or has no memory for."""
    if not device.is_real:
        pytest.skip("too large for the rehearsal")
    return device


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test alone: the run's seed mixed with the test's name."""
    return zlib.crc32(request.node.name.encode(), SEED) & 0x7FFFFFFF


def pytest_report_header() -> list[str]:
    return [f"KVMEM_SEED={SEED}"]
