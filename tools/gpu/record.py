"""Figures of a run on a GPU, and the file that keeps them after each one."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu.arrays import device_array
from tools.gpu.clock import Budget, Clock, Spread

SCHEMA = "kvmem.gpu/1"


@dataclass(slots=True)
class Row:
    """One case: our time, that of others on the same work, and a share of a measured limit."""

    name: str
    facts: dict[str, Any]  # batch, context, block, ...
    moved_bytes: int  # what a call has to read and write at least
    ours: Spread | str  # a string says why there is no figure
    others: dict[str, Spread | str] = field(default_factory=dict)
    limit: str = ""  # of which limit `share` is
    share: float | None = None
    operations: int = 0  # floating-point operations of a call, where they are what counts
    error: float | None = None  # largest difference from another implementation's result
    allowed_error: float | None = None
    note: str = ""  # what else a reader should know

    @property
    def failed(self) -> bool:
        """No figure of ours, or a result that is further off than allowed."""
        wrong = self.error is not None and self.allowed_error is not None
        return isinstance(self.ours, str) or (wrong and not self.error <= self.allowed_error)  # type: ignore[operator]

    def __str__(self) -> str:
        if isinstance(self.ours, str):
            return f"{self.name}: {self.ours}"
        parts = [f"{1e6 * self.ours.median:.1f} us ({1e6 * self.ours.p10:.1f} to "
                 f"{1e6 * self.ours.p90:.1f})"]  # fmt: skip
        if self.share is not None:
            parts.append(f"{self.share:.0%} of {self.limit}")
        for name, other in self.others.items():
            ratio = other if isinstance(other, str) else f"{other.median / self.ours.median:.2f}x"
            parts.append(f"{name} {ratio}")
        if self.note:
            parts.append(self.note)
        if self.failed:
            parts.append(f"WRONG: off by {self.error:.3g}, allowed {self.allowed_error:.3g}")
        return f"{self.name}: {', '.join(parts)}"


@dataclass(slots=True)
class Bench:
    """What a section measures with. ``free_bytes`` may be taken; rates are in bytes a second."""

    torch: Any
    device: Any  # launches kernels
    place: str  # torch's name of it
    clock: Clock
    quick: bool
    l2_bytes: int
    free_bytes: Callable[[], int]
    case_seconds: float  # of measuring, a case
    stream: int = 0
    read_rate: float = 0.0  # 0: not measured in this run
    copy_rate: float = 0.0
    keep: Callable[[Row], None] = lambda row: None
    now: Callable[[], float] = time.perf_counter  # for what is timed on the host

    def array(self, tensor: Any) -> Any:
        """A tensor as the kernels take it."""
        return device_array(tensor, self.device)

    def layers_for(self, layer_bytes: int, most: int = 128) -> int:
        """How many layers to take in turn, so that none is in the cache when it comes again."""
        return max(1, min(most, -(-4 * self.l2_bytes // max(layer_bytes, 1))))


Section = Callable[[Bench, Budget], str]
"""Measures its cases, gives each to `Bench.keep`; returns a note, or empty."""


class Record:
    """The figures so far; `write` leaves a whole file at any moment."""

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path = path
        now = time.gmtime()
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "date": time.strftime("%Y-%m-%d", now),
            "time": time.strftime("%H:%M UTC", now),
            **head,
            "sections": {},
        }

    def begin(self, name: str, budget_seconds: float) -> dict[str, Any]:
        """Open a section; its entry is marked as interrupted until `end`."""
        entry = {"status": "interrupted", "budget_s": budget_seconds, "note": "", "left_out": [],
                 "rows": []}  # fmt: skip
        self.data["sections"][name] = entry
        return entry

    def add(self, name: str, row: Row) -> None:
        """Keep a row, on disk too."""
        made = asdict(row) | {"failed": row.failed}
        if row.error is not None and not math.isfinite(row.error):
            made["error"] = None  # JSON has no such number; `failed` says it
        self.data["sections"][name]["rows"].append(made)
        self.write()

    def end(self, name: str, **changes: Any) -> None:
        """Close a section."""
        self.data["sections"][name].update(changes)
        self.write()

    def write(self) -> None:
        """Replace the file by one with what there is now."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self._path)
