"""Times calls on a device, the sides of a comparison in turns; and budgets of time.

A GPU is timed by events around some calls in a row. They are queued while the device is kept busy
by something else, so that what is timed is the device and not Python; where that fails (the queue
was not ahead) the figure says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

#: One call; its argument counts on, so that a caller can take another layer each time.
Run = Callable[[int], object]


class Timing(NamedTuple):
    """Seconds a call, and whether the device never waited for the host between the calls."""

    seconds: float
    ahead: bool


class Clock(Protocol):
    """Times some calls in a row."""

    def time(self, run: Run, first: int, calls: int) -> Timing:
        """Run ``run(first)``, ``run(first + 1)``, ...; seconds a call."""

    def wait(self) -> None:
        """Wait until all work is done."""


class CudaClock:
    """CUDA events on torch's current stream."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._cycles_per_second = self._calibrate()

    def _calibrate(self) -> float:
        """How fast the device counts while it sleeps."""
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda._sleep(1000)
        cycles = 10_000_000
        begin.record()
        self._cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / max(begin.elapsed_time(end) / 1e3, 1e-6)

    def time(self, run: Run, first: int, calls: int) -> Timing:
        """Seconds a call by two events, queued behind a sleep of as long as queueing took last."""
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        sleep = 0.002 + 0.0001 * calls
        for _ in range(3):
            self._cuda.synchronize()
            self._cuda._sleep(int(min(sleep, 0.2) * self._cycles_per_second))
            begin.record()
            start = time.perf_counter()
            for i in range(calls):
                run(first + i)
            end.record()
            ahead = not begin.query()
            queueing = time.perf_counter() - start
            end.synchronize()
            if ahead or queueing > 0.15:
                break
            sleep = 1.5 * queueing + 0.002
        return Timing(begin.elapsed_time(end) / 1e3 / calls, ahead)

    def wait(self) -> None:
        """Wait until the device has done all work."""
        self._cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of a call over some turns: median, 10th and 90th percentile, the best."""

    median: float
    p10: float
    p90: float
    best: float
    turns: int
    ahead: bool  # in each turn the device never waited for the host

    @classmethod
    def of(cls, timings: list[Timing]) -> Spread:
        """Of at least one timing."""
        seconds = sorted(timing.seconds for timing in timings)
        last = len(seconds) - 1
        low, high = seconds[round(0.1 * last)], seconds[round(0.9 * last)]
        ahead = all(timing.ahead for timing in timings)
        return cls(statistics.median(seconds), low, high, seconds[0], len(seconds), ahead)


@dataclass(slots=True)
class Budget:
    """Seconds that a section may take; what doesn't fit is left out and named."""

    seconds: float
    now: Callable[[], float] = time.monotonic
    left_out: list[str] = field(default_factory=list)
    _start: float = -1.0

    def start(self) -> Budget:
        """Count from now."""
        self._start = self.now()
        return self

    @property
    def spent(self) -> float:
        """Seconds since `start`."""
        return self.now() - self._start

    def allows(self, name: str) -> bool:
        """Whether a further case may begin; notes its name if not."""
        if self.spent < self.seconds:
            return True
        self.left_out.append(f"{name}: the section's {self.seconds:.0f} s were spent")
        return False


def measure(
    clock: Clock,
    sides: Mapping[str, Run],
    *,
    seconds: float,
    most_turns: int = 25,
    least_turns: int = 3,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Spread | str]:
    """Time each side in turns after a warm-up; of a side that raises, the reason instead.

    A turn of a side is as many calls as take about 3 ms, at most 50. It ends after
    ``most_turns`` turns, or when ``seconds`` are over and there were ``least_turns``.
    """
    start, found = now(), {}
    calls: dict[str, int] = {}
    for name, run in sides.items():
        try:
            for i in range(3):
                run(i)
            clock.wait()
            once = clock.time(run, 3, 1).seconds
            calls[name] = int(min(50, max(1, 0.003 // max(once, 1e-7))))
        except Exception as error:  # a peer may fail in any way; the others go on
            found[name] = f"failed: {type(error).__name__}: {str(error)[:200]}"
    timings: dict[str, list[Timing]] = {name: [] for name in calls}
    done = 4
    for turn in range(most_turns):
        if turn >= least_turns and now() - start > seconds:
            break
        for name in calls:
            timings[name].append(clock.time(sides[name], done, calls[name]))
        done += max(calls.values(), default=1)
    return found | {name: Spread.of(taken) for name, taken in timings.items() if taken}
