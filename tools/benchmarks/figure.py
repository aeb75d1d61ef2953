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
    compared_with: str
    compared_median: float
    ratio: float  # times faster than (or share of) what it is compared with
    load: float

    def __str__(self) -> str:
        return (
            f"{self.section:7} {self.name:46} {self.median:9.3f} {self.unit} "
            f"({self.p10:.3f}-{self.p90:.3f})  {self.ratio:6.2f}x {self.compared_with} "
            f"({self.compared_median:.3f}), load {self.load}"
        )


def alternate(
    sides: tuple[Callable[[], object], Callable[[], object]], repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of each side, run in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, run in enumerate(sides):
            begin = time.perf_counter()
            run()
            seconds[side].append(time.perf_counter() - begin)
    return seconds


def figure(
    section: str, name: str, unit: str, per: float, ours: list[float], peer: str, other: list[float]
) -> Figure:
    """Times to a figure in `unit` = seconds * per; ratio > 1: kvmem is faster."""
    low, median, high = (float(np.percentile(ours, q)) * per for q in (10, 50, 90))
    compared = float(np.median(other)) * per
    ratio = round(compared / median, 3)
    digits = [round(value, 3) for value in (median, low, high)]
    load = round(os.getloadavg()[0], 2)
    return Figure(section, name, unit, *digits, peer, round(compared, 3), ratio, load)
