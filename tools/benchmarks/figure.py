"""One measured figure beside what it is compared with, and how both are measured in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass
class Figure:
    """One measured figure beside what it is compared with, in the same unit."""

    section: str
    name: str
    unit: str
    median: float
    p10: float
    p90: float
    best: float
    compared_with: str
    compared_median: float
    compared_best: float
    ratio: float  # of the medians: times as fast (or share of) what it is compared with
    load: float  # the machine's load average
    gate: str = ""  # what is asked of it
    holds: bool | None = None  # None: nothing is asked

    def __str__(self) -> str:
        gate = "" if self.holds is None else f"  {'ok' if self.holds else 'MISSED'}: {self.gate}"
        return (
            f"{self.section:7} {self.name:56} {self.median:9.3f} {self.unit} "
            f"({self.p10:.3f}-{self.p90:.3f})  {self.ratio:6.2f}x {self.compared_with} "
            f"({self.compared_median:.3f}), load {self.load}{gate}"
        )

    def at_most(self, limit: float) -> Figure:
        """Ask for a median up to a limit, in the figure's unit."""
        return self._gated(f"<= {limit:g} {self.unit}", self.median <= limit)

    def at_least(self, ratio: float) -> Figure:
        """Ask for a ratio."""
        return self._gated(f">= {ratio:g}x", self.ratio >= ratio)

    def _gated(self, gate: str, holds: bool) -> Figure:
        """One gate more; all have to hold."""
        self.gate = f"{self.gate}, {gate}" if self.gate else gate
        self.holds = holds and self.holds is not False
        return self


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each run."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds


def alternate(
    sides: tuple[Callable[[], object], Callable[[], object]], repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of each side, run in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, run in enumerate(sides):
            seconds[side].extend(timed(run, 1))
    return seconds


def figure(
    section: str, name: str, unit: str, per: float, ours: list[float], peer: str, other: list[float]
) -> Figure:
    """Times to a figure in `unit` = seconds * per; ratio > 1: kvmem is faster."""
    mine, theirs = np.array(ours) * per, np.array(other) * per
    low, median, high = (float(x) for x in np.percentile(mine, (10, 50, 90)))
    compared = float(np.median(theirs))
    digits = [round(value, 4) for value in (median, low, high, float(mine.min()))]
    others = [round(value, 4) for value in (compared, float(theirs.min()))]
    ratio, load = round(compared / median, 3), round(os.getloadavg()[0], 2)
    return Figure(section, name, unit, *digits, peer, *others, ratio, load)


def busy_share(seconds: float = 0.5) -> float:
    """The share of the machine's processors that others keep busy; 0 where the system can't say."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    total = after[0] - before[0]
    return round(1 - (after[1] - before[1]) / total, 2) if total > 0 else 0.0


def _ticks() -> tuple[int, int]:
    try:
        with open("/proc/stat") as stat:
            fields = [int(word) for word in stat.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(fields), fields[3] + fields[4]
