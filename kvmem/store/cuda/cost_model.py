"""Which way a copy between the tiers goes, by what each way costs on this machine.

::

    copies   one cudaMemcpyAsync a run               run: contiguous on both sides
    batch    one cudaMemcpyBatchAsync for all runs
    staged   a gather or scatter kernel between the frames and a buffer of the device that has
             them side by side, and one copy for each run that is contiguous on the host

    seconds = per_call + (per_run * runs + per_byte * bytes) * shape(bytes of a run)

Which of them is fastest depends on the size and number of runs, the direction, the driver and the
card, so no constant tells. A few copies are timed when a device opens. For each way and direction a
line is fitted to them by least squares, and its shape is what it misses at each size of run. Both
are kept in the user's cache folder for the next process.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvmem.store.cuda.cost_figures import (
    DIRECTIONS,
    RUN_BYTES,
    WAYS,
    Costs,
    Direction,
    Figures,
    Key,
    Way,
    cache_place,
    read_figures,
    write_figures,
)

__all__ = [
    "DIRECTIONS", "MEASURED_BYTES", "POINTS", "WAYS", "CostModel", "Costs", "Direction", "Key",
    "Point", "TimeCopy", "Way", "fit", "measure", "open_model", "shape",
]  # fmt: skip

#: ``time_copy(way, direction, run_bytes, num_runs) -> seconds`` from the start of submitting to the
#: end of the last copy, runs apart on the device, for "staged" side by side on the host. Raises
#: ``NotImplementedError`` for a way that driver or runtime don't have.
TimeCopy = Callable[[Way, Direction, int, int], float]

BUDGET_SECONDS = 0.5


class Point(NamedTuple):
    """One copy to time."""

    run_bytes: int
    num_runs: int

    @property
    def num_bytes(self) -> int:
        """Of all runs."""
        return self.run_bytes * self.num_runs


#: What is timed, the cheap ones first: each term of the line decides the time of some point.
#: One of a run alone, and of each size of run one of so many that the runs decide.
POINTS = (
    Point(4 << 10, 1),
    Point(64 << 10, 1),
    *(Point(size, max(1, min(512, (8 << 20) // size))) for size in RUN_BYTES),
)
#: Bytes that ``time_copy`` needs on each side, the runs side by side.
MEASURED_BYTES = max(point.num_bytes for point in POINTS)
_PASSES = 5  # over all points while the budget lasts
_TERMS = 3
_SHORTEST = 1e-7  # seconds; events tell no less, and a time of 0 has no relative error


class CostModel:
    """Chooses the way of a copy. Made by `open_model`; it never changes, so threads may share it.

    ``source``: "measured", "cache", or "partly measured" where the time was up before all points
    were timed; such figures are used but not kept.
    """

    def __init__(self, costs: Figures, source: str) -> None:
        self._costs = costs
        self.source = source

    def seconds(
        self,
        way: Way,
        direction: Direction,
        num_runs: int,
        num_bytes: int,
        *,
        num_host_runs: int | None = None,
    ) -> float:
        """What the model expects; infinity for a way that is not there. About a microsecond."""
        costs = self._costs.get((way, direction))
        if costs is None:
            return math.inf
        expected = costs.seconds(num_runs, num_bytes)
        if way == "staged":
            more = (num_runs if num_host_runs is None else num_host_runs) - 1
            copies = self._costs.get(("copies", direction))
            expected += more * (copies.per_run if copies is not None else math.inf) if more else 0.0
        return expected

    def choose(
        self,
        direction: Direction,
        num_runs: int,
        num_bytes: int,
        *,
        num_host_runs: int | None = None,
    ) -> Way:
        """The way that is expected to be fastest. A few microseconds.

        ``num_runs`` of bytes are contiguous on both sides, ``num_bytes`` in all, ``num_host_runs``
        contiguous on the host (None: as many). Of ways that differ by less than the noise of the
        measurement the simplest is taken, as it is where nothing was measured. "staged" is never
        chosen for what is as scattered on the host as on the device: it would gain nothing.
        """
        host_runs = num_runs if num_host_runs is None else num_host_runs
        if direction not in DIRECTIONS:
            raise ValueError(f"direction={direction!r}; allowed: {', '.join(DIRECTIONS)}")
        if not (0 <= host_runs <= num_runs and num_bytes >= 0):
            raise ValueError(
                f"num_runs={num_runs}, num_host_runs={host_runs}, num_bytes={num_bytes}; allowed: "
                f"0 <= num_host_runs <= num_runs, num_bytes >= 0"
            )
        if self._costs.get(("copies", direction)) is None:
            return "copies"
        candidates = [way for way in WAYS if way != "staged" or host_runs < num_runs]
        expected = {
            way: self.seconds(way, direction, num_runs, num_bytes, num_host_runs=host_runs)
            for way in candidates
        }
        best = min(candidates, key=lambda way: expected[way])
        for way in candidates:
            if expected[way] <= expected[best] * (1 + self._error(way, best, direction)):
                return way
        return best

    def figures(self) -> dict[str, Any]:
        """What was measured, for stats and reports; JSON can hold it.

        ``{"source": ..., "out": {"copies": {"per_call_us", "per_run_us", "gb_per_second",
        "error", "shape"}, ...}, "in": ...}``, None for a way that is not there.
        """
        found: dict[str, Any] = {"source": self.source}
        for direction in DIRECTIONS:
            found[direction] = {way: _shown(self._costs.get((way, direction))) for way in WAYS}
        return found

    def _error(self, way: Way, other: Way, direction: Direction) -> float:
        both = (self._costs.get((way, direction)), self._costs.get((other, direction)))
        return max(costs.error if costs is not None else 0.0 for costs in both)


def open_model(
    key: Key,
    time_copy: TimeCopy,
    *,
    folder: Path | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """The model of a device, from the cache or measured now.

    ``folder`` is the cache's (None: that of the compiled kernels). What ``time_copy`` raises,
    but for ``NotImplementedError``, comes out, as does a ``ValueError`` for a time that is none.
    Cost: 0.1 ms from the cache, else at most ``budget_seconds``: no copy is started that is
    expected to end later.
    """
    place = cache_place(key, folder)
    cached = read_figures(place, key)
    if cached is not None:
        return CostModel(cached, "cache")
    costs, complete = measure(time_copy, budget_seconds=budget_seconds, clock=clock)
    if complete and all(line is None or line.plausible() for line in costs.values()):
        write_figures(place, key, costs)
    return CostModel(costs, "measured" if complete else "partly measured")


# -- measuring -------------------------------------------------------------------------------------


class _Samples:
    """What was timed of one way in one direction."""

    def __init__(self) -> None:
        self.seconds: dict[Point, list[float]] = {}
        self.spent: dict[Point, float] = {}  # the shortest call of time_copy, preparations included
        self.is_there = True
        self.is_warm = False  # the first copy loads code: it tells nothing

    def expected(self, point: Point) -> float:
        """Seconds that timing ``point`` will take, from the nearest one known; 0 if none is."""
        if not self.spent:
            return 0.0
        if point in self.spent:
            return self.spent[point]

        def times(known: Point) -> float:
            return max(1.0, point.num_bytes / known.num_bytes, point.num_runs / known.num_runs)

        nearest = min(self.spent, key=times)
        return self.spent[nearest] * times(nearest)

    def costs(self) -> Costs | None:
        """The line through the fastest of each point, None where too few were timed."""
        if not self.is_there or len(self.seconds) < _TERMS:
            return None
        fastest = {point: min(samples) for point, samples in self.seconds.items()}
        noise = [float(np.median(self.seconds[point])) / fastest[point] - 1 for point in fastest]
        line = Costs(*fit(fastest), error=float(np.median(noise)))
        return replace(line, shape=shape(line, fastest))


def measure(
    time_copy: TimeCopy,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Figures, bool]:
    """Figures of each way and direction, and whether all points could be timed in the budget.

    The first copy of each is not counted. Ways take turns, so that a machine that gets busy in the
    middle slows them all.
    """
    deadline = clock() + budget_seconds
    lines = {(way, direction): _Samples() for way in WAYS for direction in DIRECTIONS}
    for point in POINTS[:1] + POINTS * _PASSES:
        for (way, direction), samples in lines.items():
            start = clock()
            if not samples.is_there or start + samples.expected(point) >= deadline:
                continue
            try:
                seconds = time_copy(way, direction, *point)
            except NotImplementedError:
                samples.is_there = False
                continue
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(
                    f"time_copy gave {seconds!r} seconds for {way} {direction}; allowed: finite, "
                    f"not negative"
                )
            if samples.is_warm:
                samples.seconds.setdefault(point, []).append(max(seconds, _SHORTEST))
                spent = clock() - start
                samples.spent[point] = min(spent, samples.spent.get(point, spent))
            samples.is_warm = True
    there = [samples for samples in lines.values() if samples.is_there]
    complete = all(len(samples.seconds) == len(POINTS) for samples in there)
    return {name: samples.costs() for name, samples in lines.items()}, complete


def fit(seconds: dict[Point, float]) -> tuple[float, float, float]:
    """(per call, per run, per byte), none negative, with the least sum of squared relative errors.

    The best such line is the best unbounded one over some subset of its terms; there are seven.
    """
    points = np.array([(1, point.num_runs, point.num_bytes) for point in seconds], np.float64)
    rows = points / np.array(list(seconds.values()))[:, None]  # each should come to 1
    scale = rows.max(axis=0)
    best, least = np.zeros(_TERMS), math.inf
    for count in range(1, _TERMS + 1):
        for subset in map(list, itertools.combinations(range(_TERMS), count)):
            found = np.linalg.lstsq(rows[:, subset] / scale[subset], np.ones(len(rows)))[0]
            error = float(((rows[:, subset] / scale[subset] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(_TERMS), error
                best[subset] = found / scale[subset]
    per_call, per_run, per_byte = (float(term) for term in best)
    return per_call, per_run, per_byte


def shape(line: Costs, seconds: dict[Point, float]) -> tuple[float, ...]:
    """``Costs.shape`` from the times of points; 1 for a size that was not timed, or in no time."""
    found = []
    for size in RUN_BYTES:
        times = {point: taken for point, taken in seconds.items() if point.run_bytes == size}
        most = max(times, key=lambda point: point.num_runs, default=None)
        runs = 0.0 if most is None else line.seconds(most.num_runs, most.num_bytes) - line.per_call
        if most is None or runs <= 0:
            found.append(1.0)
            continue
        bend = (times[most] - line.per_call) / runs
        found.append(min(max(bend, 0.05), 20.0))
    return tuple(1.0 if abs(bend - 1) < 1e-6 else bend for bend in found)


def _shown(costs: Costs | None) -> dict[str, Any] | None:
    if costs is None:
        return None
    return {
        "per_call_us": costs.per_call * 1e6,
        "per_run_us": costs.per_run * 1e6,
        "gb_per_second": 1e-9 / costs.per_byte if costs.per_byte > 0 else None,
        "error": costs.error,
        "shape": {str(size): bend for size, bend in zip(RUN_BYTES, costs.shape, strict=True)},
    }
