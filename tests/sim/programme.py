"""The simulated test programme: random operations, faults, then a liveness phase, seed by seed.

    python -m tests.sim.programme --seeds 100 --ops 500
    python -m tests.sim.programme --seeds 2500 --ops 400 --jobs 2 --require --first -1

Prints the histogram of operations, refusals and faults, and one line that replays a breach (exit
1). A seed stands for everything: sizes, mode, fault rates, operations, schedule. `--require` also
fails a run that did too little of something.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
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

    def merge(self, data: dict[str, Any]) -> None:
        """Add what another process did beside; seconds are those of the slowest."""
        self.seconds = max(self.seconds, data["seconds"])
        for name in ("seeds", "aborts_in_flight", "managers", "turns"):
            setattr(self, name, getattr(self, name) + data[name])
        self.accesses += data["accesses_checked"]
        for counter, name in (
            (self.ops, "by_operation"),
            (self.refusals, "by_refusal"),
            (self.struck, "by_site"),
            (self.modes, "modes"),
        ):
            counter.update(data[name])

    @property
    def num_ops(self) -> int:
        return self.ops.total()

    def shortcomings(self) -> list[str]:
        """What a run of some size has to have done and this one did not."""
        least = self.ops.most_common()[-1]
        checks = {
            f"only {least[1]} of {least[0]} (1 %)": least[1] >= self.num_ops / 100,
            f"{self.refusals.total()} refusals (20 %)": self.refusals.total() < self.num_ops / 5,
            f"{self.struck.total()} faults (2 %)": self.struck.total() >= self.num_ops / 50,
            f"{self.aborts_in_flight} aborts in flight (1 %)": self.aborts_in_flight
            >= self.num_ops / 100,
            "a site without faults": all(self.struck[site] for site in SITES),
        }
        return [text for text, held in checks.items() if not held]

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
        return [*shown, f"1,000,000 operations would take {million:.0f} minutes"]


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


def beside(first: int, seeds: int, num_ops: int, jobs: int, *, faults: bool) -> Report | None:
    """The same in several processes; None when one of them found a breach, and printed it."""
    share = -(-seeds // jobs)
    command = [sys.executable, "-m", "tests.sim.programme", "--json", "--ops", str(num_ops)]
    command += [] if faults else ["--no-faults"]
    running = []
    for begin in range(first, first + seeds, share):
        count = min(share, first + seeds - begin)
        part = [*command, "--first", str(begin), "--seeds", str(count)]
        running.append(subprocess.Popen(part, stdout=subprocess.PIPE, text=True))
    report = Report()
    try:
        for process in running:
            told, _ = process.communicate()
            if process.returncode:
                print(told)
                return None
            report.merge(json.loads(told))
    finally:
        for process in running:
            process.kill()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ops", type=int, default=500, help="operations a seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed; -1 draws it")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--require", action="store_true", help="fail a run that did too little")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # a failed Manager drops its handles
    warnings.simplefilter("ignore", RuntimeWarning)  # NaN of a failed copy in what is compared
    faults, first = not options.no_faults, options.first
    if first < 0:
        first = random.SystemRandom().randrange(10**9)
    if not options.json:
        print(f"seeds from {first}", flush=True)
    try:
        if options.jobs > 1:
            found = beside(first, options.seeds, options.ops, options.jobs, faults=faults)
            if found is None:
                return 1
            report = found
        else:
            report = programme(
                first, options.seeds, options.ops, faults=faults, seconds=options.seconds
            )
    except Exception as error:
        traceback.print_exception(error)
        if isinstance(error, RaceError):
            print("first: ", error.first, "\nsecond:", error.second)
        return 1
    print(json.dumps(report.to_dict()) if options.json else "\n".join(report.lines()))
    short = report.shortcomings() if options.require else []
    for text in short:
        print("too little:", text)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
