"""Would the tests notice a mistake in the ledger? Each planted one is killed by recorded seeds.

The faults live in tests/faults/seeded_*.py, the workload that kills them in tests/faults/driver.py;
one process without compilation drives them all. Unpatched, the same seeds pass, there and here
(compiled, with copies racing the calls).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.driver import Setup, drive
from tests.faults.plant import printed_by
from tests.faults.seeded import FAULTS


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """What the process that drives all faults printed."""
    return printed_by("tests.faults.run")


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 15
    assert all(fault.seeds for fault in FAULTS.values())


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_reached_and_killed(name: str, lines: list[dict[str, Any]]) -> None:
    (line,) = [line for line in lines if line.get("fault") == name]
    assert line["reached"] > 0, f"{name} was never reached: it proves nothing"
    assert line["killers"], f"{name} survived seeds {FAULTS[name].seeds}"
    print(name, "was found as:", line["found"])


def test_the_same_seeds_pass_without_a_fault(lines: list[dict[str, Any]]) -> None:
    bases = [line for line in lines if "baseline" in line]
    assert len(bases) >= 3
    failed = [line for line in bases if line["found"] is not None]
    assert not failed, failed


SETUPS = {
    "default": Setup(racing=True),
    "tight": Setup(device_blocks=6, host_blocks=4, racing=True),
    "single slots": Setup(device_blocks=10, host_blocks=16, block_size=1, racing=True),
    "poison": Setup(device_blocks=5, host_blocks=8, block_size=4, debug=True, racing=True),
    "no host tier": Setup(host_blocks=0, racing=True),
    "no write back": Setup(tier_policy="none", racing=True),
    "write through": Setup(tier_policy="write_through", host_blocks=12, racing=True),
    "write through, small host": Setup(tier_policy="write_through", host_blocks=5, racing=True),
    "cleaning": Setup(tier_policy="write_back", watermarks=(0.5, 0.8), racing=True),
    "exclusive": Setup(tier_policy="exclusive", racing=True),
    "exclusive, tight": Setup(device_blocks=6, host_blocks=5, tier_policy="exclusive", racing=True),
    "small host": Setup(device_blocks=12, host_blocks=2, debug=True, racing=True),
}


@pytest.mark.parametrize("name", SETUPS)
def test_new_seeds_pass_compiled_while_copies_race(name: str, seed: int) -> None:
    for i in range(4):
        print("driver seed", seed + i)
        drive(seed + i, SETUPS[name])
