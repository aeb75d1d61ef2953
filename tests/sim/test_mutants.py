"""Would the simulator notice a dropped wait, note or hold? Each planted one dies by its seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.plant import printed_by
from tests.sim import mutants_ledger, mutants_recovery
from tests.sim.mutants import MUTANTS

assert mutants_ledger and mutants_recovery  # they register their own
SEEDS: dict[str, list[int]] = json.loads(Path(__file__).with_name("mutant_seeds.json").read_text())
SURVIVORS = {name for name, one in MUTANTS.items() if one.survives}


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """What the process that plants all mistakes printed."""
    return printed_by("tests.sim.mutate")


def test_there_are_enough_and_each_has_seeds_or_a_reason() -> None:
    assert len(MUTANTS) - len(SURVIVORS) >= 30
    assert set(SEEDS) == set(MUTANTS)
    for name in MUTANTS:
        assert bool(SEEDS[name]) != (name in SURVIVORS), f"{name}: found, or a reason why not"
        assert len(SEEDS[name]) <= 5


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - SURVIVORS))
def test_the_mistake_is_reached_and_found(name: str, lines: list[dict[str, Any]]) -> None:
    (line,) = [line for line in lines if line.get("mutant") == name]
    assert line["reached"] > 0, f"{name} was never reached: it proves nothing"
    assert line["killers"], f"{name} survived seeds {SEEDS[name]}"
    print(name, "was found as:", line["found"])


def test_the_same_seeds_pass_without_a_mistake(lines: list[dict[str, Any]]) -> None:
    bases = [line for line in lines if "baseline" in line]
    assert len(bases) >= 5
    failed = [line for line in bases if line["found"] is not None]
    assert not failed, failed
