"""A machine on which copies take what is said, on a clock that only they move."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmem.store.cuda.cost_model import CostModel, Direction, Key, Way, open_model

KEY = Key("NVIDIA H100", "GPU-1", "580.65", "13000")
MICRO = 1e-6


@dataclass
class FakeMachine:
    """Copies that take what a line says, on a clock that only they move.

    ``lines``: (per call, per run, bytes a second) of a way; one that is missing is not supported.
    ``overhead``: seconds of preparing each copy, which count against the budget only. ``warming``:
    of the first one of each way and direction.
    """

    lines: dict[Way, tuple[float, float, float]]
    overhead: float = 0.0
    warming: float = 0.0
    again: float = 1.0  # a copy like an earlier one takes so many times as long
    now: float = 100.0
    calls: list[tuple[Way, Direction, int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def seconds(self, way: Way, num_runs: int, num_bytes: int) -> float:
        per_call, per_run, bandwidth = self.lines[way]
        return per_call + per_run * num_runs + num_bytes / bandwidth

    def time_copy(self, way: Way, direction: Direction, run_bytes: int, num_runs: int) -> float:
        if way not in self.lines:
            raise NotImplementedError(f"{way} needs a newer driver")
        call = (way, direction, run_bytes, num_runs)
        taken = self.seconds(way, num_runs, run_bytes * num_runs)
        taken *= self.again if call in self.calls[len(self.lines) * 2 :] else 1.0
        taken += self.warming if call[:2] not in {old[:2] for old in self.calls} else 0.0
        self.calls.append(call)
        self.now += taken + self.overhead
        return taken

    def open(self, folder: Path, key: Key = KEY, **options: Any) -> CostModel:
        return open_model(key, self.time_copy, folder=folder, clock=self.clock, **options)


def usual() -> FakeMachine:
    """Calls are dear, as published for a PCIe 5 card; the kernel is a little slower on big runs."""
    return FakeMachine(
        {
            "copies": (2 * MICRO, 4 * MICRO, 51e9),
            "batch": (12 * MICRO, 0.5 * MICRO, 51e9),
            "staged": (18 * MICRO, 0.05 * MICRO, 47e9),
        }
    )
