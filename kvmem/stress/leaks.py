"""Whether a run gave everything back: frames, threads, file descriptors, memory."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, field

import numpy as np
import psutil

MIB = 2**20
#: The slope of the resident memory is judged in runs of at least so many seconds, after the first
#: quarter: arenas take their pages when they are first written.
LEAST_SECONDS, WARM_UP = 60.0, 0.25
#: A finding: growth of so much over the judged part, and of so much a minute.
GROWTH_MIB, SLOPE_MIB = 32.0, 0.5
_THREADS_END_WITHIN = 5.0


@dataclass(slots=True)
class Leaks:
    """What was not given back. Frames are those held at the end of each Manager, after all was
    freed, unpinned and evicted (R9)."""

    device_frames: int = 0
    host_frames: int = 0
    managers_drained: int = 0  # of how many Managers that was looked at (a failed one can't say)
    threads: int = 0
    fds: int = 0
    rss_mib: float = 0.0  # at the end
    rss_slope_mib_per_minute: float | None = None  # None: too short to say
    rss_limit_mib_per_minute: float | None = None  # a larger slope is a finding
    reasons: list[str] = field(default_factory=list)

    def findings(self) -> list[str]:
        """Each leak in words; empty where there is none."""
        found = list(self.reasons)
        if self.threads:
            found.append(f"{self.threads} threads are left")
        if self.fds:
            found.append(f"{self.fds} file descriptors are left")
        slope, limit = self.rss_slope_mib_per_minute, self.rss_limit_mib_per_minute
        if slope is not None and limit is not None and slope > limit:
            found.append(f"resident memory grew by {slope:.2f} MiB a minute, limit {limit:.2f} MiB")
        return found

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class LeakWatch:
    """Begins with what is there when all is compiled, ends when all is closed."""

    def __init__(self, leaks: Leaks) -> None:
        self._leaks = leaks
        self._process = psutil.Process()
        self._threads = threading.active_count()
        self._fds = self._process.num_fds()
        self._samples: list[tuple[float, float]] = []  # seconds, MiB
        self.sample()

    def sample(self) -> None:
        """Note the resident memory; once a second is often enough."""
        rss = self._process.memory_info().rss / MIB
        self._leaks.rss_mib = round(rss, 3)
        self._samples.append((time.monotonic(), rss))

    def end(self) -> None:
        """Compare; threads have some seconds to end."""
        deadline = time.monotonic() + _THREADS_END_WITHIN
        while threading.active_count() > self._threads and time.monotonic() < deadline:
            time.sleep(0.01)
        self.sample()
        leaks = self._leaks
        leaks.threads = max(0, threading.active_count() - self._threads)
        leaks.fds = max(0, self._process.num_fds() - self._fds)
        slope = slope_per_minute(self._samples)
        if slope is not None:
            leaks.rss_slope_mib_per_minute = round(slope[0], 3)
            leaks.rss_limit_mib_per_minute = round(max(SLOPE_MIB, GROWTH_MIB / slope[1]), 3)


def slope_per_minute(samples: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Least squares over (seconds, MiB) behind the warm-up: MiB a minute, and over how many
    minutes; None for runs that are too short."""
    if len(samples) < 8 or samples[-1][0] - samples[0][0] < LEAST_SECONDS:
        return None
    seconds, sizes = np.array(samples).T
    late = seconds >= seconds[0] + WARM_UP * (seconds[-1] - seconds[0])
    if np.count_nonzero(late) < 4:
        return None
    minutes = (seconds[late] - seconds[late][0]) / 60
    return float(np.polyfit(minutes, sizes[late], 1)[0]), float(minutes[-1])
