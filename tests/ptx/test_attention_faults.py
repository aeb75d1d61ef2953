"""Mistakes planted in the kernels on tensor cores; each must be noticed by the interpreted shapes.

A fault is an edit of the kernel's source, compiled like the real one, or of how it is called. The
shapes are those of `test_attention_mma.py` for the smallest kernel; the first that notices ends it.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cuda_kernels.attention import cuda_call
from cuda_kernels.cuda.kernel import KernelSource
from cuda_kernels.dtypes import BFLOAT16
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import PtxError, Race
from tests.ptx.test_attention import check
from tests.ptx.test_attention_mma import attend, draw, split_by

pytestmark = needs_compiler

KEY = (BFLOAT16, 64, 1)
SHAPES = 25
SYNC, NEXT = "            cuda.syncthreads()\n", "            split += parts\n"


class Fault(NamedTuple):
    """A text of a kernel's source, what stands there instead, how it shows."""

    name: str
    old: str
    new: str
    shows: type[BaseException] = AssertionError


FAULTS = [
    Fault("one position too many", "place <= above\n", "place <= above + 1\n"),
    Fault("stale values kept", "below > 0 or above < TILE - 1", "below > TILE"),
    Fault("splits added without rescaling", "whole_sums[i], olds[h],", "whole_sums[i], news[h],"),
    Fault("a split one too long", "(int64(1) << split_bits) - 1)", "int64(1) << split_bits)"),
    Fault("no barrier after a split", f"{SYNC}{NEXT}", NEXT, Race),
]
MERGE_FAULTS = [
    Fault("merged without rescaling", "(found, old, part * new)", "(found, new, part * new)"),
    Fault("one split left out", "(first >> split_bits) + 1", "(first >> split_bits)"),
]


def planted(
    source: KernelSource, fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> KernelSource:
    """The kernel with a fault, as a module of its own."""
    spec = find_spec(source.module)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} stands {text.count(fault.old)} times"
    name = "cuda_fault_" + fault.name.replace(" ", "_")
    (folder / f"{name}.py").write_text(text.replace(fault.old, fault.new))
    monkeypatch.syspath_prepend(folder)
    return dataclasses.replace(source, module=name)


def noticed(seed: int, monkeypatch: pytest.MonkeyPatch) -> BaseException | None:
    """What the first shape that notices raises."""
    rng, device = np.random.default_rng(seed), InterpretedDevice((9, 0))
    for _ in range(SHAPES):
        split_by(monkeypatch, 64)
        arguments = draw(rng, KEY, 64)
        try:
            attend(device, arguments, cut=rng.random() < 0.5)
            check(arguments)
        except (AssertionError, PtxError) as error:
            return error
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_of_the_kernel(
    seed: int, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = planted(cuda_call.TENSOR_KERNELS[KEY], fault, tmp_path, monkeypatch)
    monkeypatch.setitem(cuda_call.TENSOR_KERNELS, KEY, source)
    assert isinstance(noticed(seed, monkeypatch), fault.shows)


@pytest.mark.parametrize("fault", MERGE_FAULTS, ids=lambda fault: fault.name)
def test_faults_of_the_merge(
    seed: int, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = planted(cuda_call.MERGE_KERNELS[BFLOAT16], fault, tmp_path, monkeypatch)
    monkeypatch.setitem(cuda_call.MERGE_KERNELS, BFLOAT16, source)
    assert isinstance(noticed(seed, monkeypatch), fault.shows)


def test_faults_of_the_call(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and token strides swapped; room for one split too few."""
    right = cuda_call._planes
    swapped = (0, 1, 3, 2, 4, 5, 7, 6)
    monkeypatch.setattr(cuda_call, "_planes", lambda request: [right(request)[i] for i in swapped])
    assert noticed(seed, monkeypatch) is not None
    monkeypatch.undo()
    count = cuda_call.num_splits
    monkeypatch.setattr(cuda_call, "num_splits", lambda *given: max(1, count(*given) - 1))
    assert noticed(seed, monkeypatch) is not None
    monkeypatch.undo()


def test_without_a_fault(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shapes notice nothing: it's the faults that they notice."""
    assert noticed(seed, monkeypatch) is None
