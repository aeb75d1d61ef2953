"""The simulated test programme: random operations, faults, then a liveness phase, seed by seed.

    python -m tests.sim.programme --seeds 100 --ops 500

Prints the histogram of operations, refusals and faults, and one line that replays a breach (exit
1). A seed stands for everything: sizes, mode, fault rates, operations, schedule.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvmem.errors import RaceError
from kvmem.sim_options import SITES
from tests.sim.driver import SimDriver, drawn_setup, drive


@dataclass
class Report:
    """Sums over seeds."""

    seeds: int = 0
    seconds: float = 0.0
    ops: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    aborts_in_flight: int = 0
    managers: int = 0
    turns: int = 0
    accesses: int = 0

    def add(self, driver: SimDriver) -> None:
        assert driver.setup.sim is not None
        self.seeds += 1
        self.ops += driver.ops
        self.refusals += driver.refusals
        self.struck += driver.struck
        self.modes[driver.setup.sim.mode] += 1
        self.aborts_in_flight += driver.aborts_in_flight
        self.managers += driver.num_managers
        self.turns += driver.num_turns
        self.accesses += driver.num_checked

    @property
    def num_ops(self) -> int:
        return self.ops.total()

    def to_dict(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "operations": self.num_ops,
            "operations_per_second": round(self.num_ops / max(self.seconds, 1e-9)),
            "seconds": round(self.seconds, 1),
            "refusals": self.refusals.total(),
            "faults": self.struck.total(),
            "aborts_in_flight": self.aborts_in_flight,
            "managers": self.managers,
            "turns": self.turns,
            "accesses_checked": self.accesses,
            "modes": dict(self.modes),
            "by_operation": dict(self.ops.most_common()),
            "by_refusal": dict(self.refusals.most_common()),
            "by_site": {site: self.struck[site] for site in SITES},
        }

    def lines(self) -> list[str]:
        """The histogram in words."""
        data = self.to_dict()
        shown = [f"{name:24} {data[name]}" for name in data if not name.startswith("by_")]
        for title in ("by_operation", "by_refusal", "by_site"):
            shown.append(title.replace("_", " ") + ":")
            for name, count in data[title].items():
                shown.append(f"  {name:22} {count:9} {count / max(1, self.num_ops):7.2%}")
        million = 1e6 / max(1e-9, self.num_ops / max(self.seconds, 1e-9)) / 60
        return [*shown, f"1,000,000 operations would take {million:.0f} minutes of one core"]


def programme(
    first: int, seeds: int, num_ops: int, *, faults: bool = True, seconds: float = float("inf")
) -> Report:
    """Drive so many seeds, or for so long; raises the first breach."""
    report = Report()
    begin = time.perf_counter()
    for seed in range(first, first + seeds):
        report.add(drive(seed, drawn_setup(seed, num_ops, faults=faults)))
        report.seconds = time.perf_counter() - begin
        if report.seconds > seconds:
            break
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ops", type=int, default=500, help="operations a seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # a failed Manager drops its handles
    try:
        report = programme(
            options.first, options.seeds, options.ops,
            faults=not options.no_faults, seconds=options.seconds,
        )  # fmt: skip
    except Exception as error:
        traceback.print_exception(error)
        if isinstance(error, RaceError):
            print("first: ", error.first, "\nsecond:", error.second)
        return 1
    print(json.dumps(report.to_dict()) if options.json else "\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
