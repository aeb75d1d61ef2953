"""Would the kernels' tests notice a mistake in a kernel? Each planted one is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ptx import test_attention, test_moves, test_prefill
from tests.ptx.device import InterpretedDevice, needs_compiler
from tests.ptx.errors import PtxError
from tests.ptx.seeded_faults import (
    ATTENTION,
    COPY,
    FAULTS,
    MOVE,
    PROMPTS,
    WRITE,
    faulty,
    skip_unless_drawn,
)

SM_90 = (9, 0)
SEED = 1
# Rows of several tiles, most dims drawn unequal; one head a block compiles fastest.
KEY = (1, 1, 128)


def attention(device: type[InterpretedDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of attention with shapes enough for every rule to be drawn."""
    monkeypatch.setattr(test_attention, "InterpretedDevice", device)
    for seed in range(SEED, SEED + 6):
        test_attention.test_attention(seed, SM_90, KEY, monkeypatch)


def prompts(device: type[InterpretedDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of prompts, for the smallest kernel."""
    monkeypatch.setattr(test_prefill, "InterpretedDevice", device)
    test_prefill.test_numbers_that_are_not_finite(SEED, "bfloat16")
    test_prefill.test_prompts(SEED, SM_90, (1, 64), monkeypatch)


def moving(test: Callable[..., None]) -> Callable[..., None]:
    def run(device: type[InterpretedDevice], monkeypatch: pytest.MonkeyPatch) -> None:
        test(SEED, device(SM_90), SM_90)

    return run


TESTS = {
    WRITE: moving(test_moves.test_write_kv),
    COPY: moving(test_moves.test_copy_blocks),
    MOVE: moving(test_moves.test_move_frames),
    ATTENTION: attention,
    PROMPTS: prompts,
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_the_mistake_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_drawn(name)
    fault = FAULTS[name]
    with faulty(fault, tmp_path) as device:
        with pytest.raises((AssertionError, PtxError)) as found:
            TESTS[fault.victim](device, monkeypatch)
    print(name, "was found as:", type(found.value).__name__, str(found.value)[:200])


@needs_compiler
@pytest.mark.parametrize("victim", TESTS)
def test_the_same_shapes_pass_without_a_mistake(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    TESTS[victim](InterpretedDevice, monkeypatch)
