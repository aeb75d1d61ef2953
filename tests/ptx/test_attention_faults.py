"""Mistakes planted in the kernels on tensor cores; each must be noticed by the interpreted shapes.

A fault is an edit of the kernel's source, compiled like the real one, or of how it is called. The
shapes are those of `test_attention_mma.py` for the smallest kernel; the first that notices ends it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cuda_kernels.attention import cuda_call
from cuda_kernels.cuda.kernel import KernelSource
from cuda_kernels.dtypes import BFLOAT16
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import PtxError, Race
from tests.ptx.seeded_faults import skip_unless_drawn
from tests.ptx.test_attention import check, split_by
from tests.ptx.test_attention_mma import attend, draw

pytestmark = needs_compiler

KEY = (BFLOAT16, 64, 1)
#: A recorded seed: a fault that shapes may miss by chance is no test.
SEED, SHAPES = 1, 40


class Fault(NamedTuple):
    """A text of one of the files a kernel is made of, what stands there instead, how it shows."""

    name: str
    file: str
    old: str
    new: str
    shows: type[BaseException] = AssertionError


TENSOR, MERGE, SPLITS = "cuda_decode_mma", "cuda_merge", "cuda_splits"
JOINED = "multiply_add(whole_sums[at], olds[h], part * news[h])"
RACED = '    cuda.syncthreads()\n\n\n@cuda.jit(device=True, inline="always")\ndef begin_splits'
FAULTS = [
    Fault("one position too many", TENSOR, "place <= above\n", "place <= above + 1\n"),
    Fault("stale values kept", TENSOR, "below > 0 or above < TILE - 1", "below > TILE"),
    Fault("a split one too long", TENSOR, "((split + 1) << bits) - 1)", "(split + 1) << bits)"),
    Fault("folded without rescaling", SPLITS, JOINED, JOINED.replace("olds[h]", "float32(1)")),
    Fault("no barrier after a split", SPLITS, RACED, RACED.replace("cuda.syncthreads()", ""), Race),
    Fault("merged without rescaling", MERGE, "(found, old, part", "(found, float32(1), part"),
    Fault("one split left out", MERGE, "(first >> split_bits) + 1", "(first >> split_bits)"),
]


def planted(fault: Fault, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Put a kernel with the fault in the place of the right one, made of modules of its own."""
    kernels: dict[Any, KernelSource] = (
        cuda_call.MERGE_KERNELS if fault.file == MERGE else cuda_call.TENSOR_KERNELS
    )
    key = BFLOAT16 if fault.file == MERGE else KEY
    package, _, own = kernels[key].module.rpartition(".")
    here = Path(cuda_call.__file__).parent
    suffix = "_with_" + fault.name.replace(" ", "_")
    for name in {own, fault.file}:
        text = (here / f"{name}.py").read_text()
        if name == fault.file:
            assert text.count(fault.old) == 1, f"{fault.old!r} stands {text.count(fault.old)} times"
            text = text.replace(fault.old, fault.new)
        else:
            assert text.count(f"from {package}.{fault.file} import") == 1
            text = text.replace(f"{package}.{fault.file} ", f"{fault.file}{suffix} ")
        (folder / f"{name}{suffix}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(kernels, key, dataclasses.replace(kernels[key], module=own + suffix))


class OneArchitecture(InterpretedDevice):
    """Kernels with a mistake are wanted for no other."""

    together = ()


def noticed(monkeypatch: pytest.MonkeyPatch, seed: int = SEED) -> BaseException | None:
    """What the first shape that notices raises."""
    rng, device = np.random.default_rng(seed), OneArchitecture((9, 0))
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
def test_faults_of_the_kernels(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_drawn(fault.name)
    planted(fault, monkeypatch, tmp_path)
    assert isinstance(noticed(monkeypatch), fault.shows)


def test_faults_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and token strides swapped; room for one split too few."""
    right = cuda_call._planes
    swapped = (0, 1, 3, 2, 4, 5, 7, 6)
    monkeypatch.setattr(cuda_call, "_planes", lambda request: [right(request)[i] for i in swapped])
    assert noticed(monkeypatch) is not None
    monkeypatch.undo()
    count = cuda_call.num_splits
    monkeypatch.setattr(cuda_call, "num_splits", lambda *given: max(1, count(*given) - 1))
    assert noticed(monkeypatch) is not None
    monkeypatch.undo()


def test_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shapes notice nothing: it's the faults that they notice."""
    assert noticed(monkeypatch) is None
