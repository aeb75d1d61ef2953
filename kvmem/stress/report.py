"""What a run counted, while it goes on and at its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from kvmem.stats import Stats
from kvmem.stress.breach import Breach
from kvmem.stress.leaks import Leaks
from kvmem.stress.options import StressOptions

#: Counters of ``Manager.stats()`` that are added up over the Managers of a run.
SUMMED = (
    "swap_outs", "swap_ins", "recomputes", "blocks_out", "blocks_in", "bytes_out_done",
    "bytes_in_done", "prefix_hit_tokens", "blocks_copied_on_write", "blocks_merged",
    "evicted_device", "evicted_host",
)  # fmt: skip
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class StressProgress:
    """The run up to now. Rates are those since the last one, in GB (10^9 bytes) a second."""

    seconds: float
    operations: int
    operations_per_second: float
    swaps: int  # sequences swapped out or in
    gb_per_second_out: float
    gb_per_second_in: float
    faults: int
    breaches: int


@dataclass(slots=True)
class StressReport:
    """What happened. ``ok`` is False with a breach or a leak.

    Counts of a Manager that failed are those of its last look, at most 32 operations before.
    """

    options: StressOptions
    seconds: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)  # begun, by kind
    refusals: Counter[str] = field(default_factory=Counter)  # of these, for want of room
    faults: Counter[str] = field(default_factory=Counter)  # injected ones that were told, by site
    sequences_lost: int = 0  # that lost K/V by a failed copy and were computed again
    managers: int = 0
    sequences: int = 0  # created and forked
    tokens: int = 0  # appended, prompts included
    rows_checked: int = 0  # K and V of one token in one layer, bit by bit
    attentions_checked: int = 0  # outputs of one token in one layer
    pressure: float = 0.0  # blocks of the live sequences per device block, on average
    counted: Counter[str] = field(default_factory=Counter)  # of Manager.stats(), see SUMMED
    breaches: list[Breach] = field(default_factory=list)
    leaks: Leaks = field(default_factory=Leaks)
    replay: str = ""  # the command line that repeats the run up to its end or its breach

    @property
    def ok(self) -> bool:
        """No breach and no leak."""
        return not self.breaches and not self.leaks.findings()

    @property
    def num_operations(self) -> int:
        """Of all kinds."""
        return sum(self.operations.values())

    def add(self, stats: Stats) -> None:
        """Add the counters of a Manager at its end."""
        for name in SUMMED:
            self.counted[name] += int(getattr(stats, name))

    def gb_per_second(self, direction: str) -> float:
        """GB (10^9 bytes) a second "out" or "in", over the whole run."""
        return self.counted[f"bytes_{direction}_done"] / GIGA / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the counts hang on options and seed alone where a run can be repeated, but not
        ``seconds``, ``gb_per_second_*`` and ``leaks``."""
        options = asdict(self.options)
        return {
            "ok": self.ok,
            "seed": self.options.seed,
            "options": options,
            "seconds": round(self.seconds, 3),
            "operations": dict(sorted(self.operations.items())),
            "refusals": dict(sorted(self.refusals.items())),
            "faults": dict(sorted(self.faults.items())),
            "sequences_lost": self.sequences_lost,
            "managers": self.managers,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "rows_checked": self.rows_checked,
            "attentions_checked": self.attentions_checked,
            "pressure": round(self.pressure, 3),
            **{name: self.counted[name] for name in SUMMED},
            "gb_per_second_out": round(self.gb_per_second("out"), 6),
            "gb_per_second_in": round(self.gb_per_second("in"), 6),
            "breaches": [breach.to_dict() for breach in self.breaches],
            "leaks": self.leaks.to_dict() | {"findings": self.leaks.findings()},
            "replay": self.replay,
        }
