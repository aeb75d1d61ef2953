"""What ``Config(device="sim", sim=SimOptions(...))`` says of the simulated device.

It lies beside Config because a Config carries it; ``kvmem/store/sim/`` does what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvmem.checks import boolean, choice, integer, shown
from kvmem.errors import ConfigError

#: When queued work runs; see ``SimOptions``.
MODES = ("eager", "late", "reverse", "random", "starve")
STREAMS = ("compute", "out", "in")
#: Where a fault can be injected; see ``SimOptions``.
SITES = (
    "device_alloc", "host_alloc", "copy_before", "copy_after", "event", "sticky", "slow_copy",
)  # fmt: skip
MAX_SEED = 2**63 - 1


class FailAt(NamedTuple):
    """One scripted fault: the ``nth`` time (from 1) that ``site`` is passed, or from then on."""

    site: str
    nth: int
    onwards: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """How the streams of ``device="sim"`` behave. Equal options and calls give equal runs.

    ``mode``: "eager" (everything at once), "late" (only what someone waits for), "reverse" (newest
    work first), "random", "starve" (the stream ``starve``, drawn from the seed if None, only when
    nothing else can run). ``not_yet``: share of queries of a reached fence that say "not yet".
    ``copy_engines``: 2, or 1 where a copy has to end before one of the other direction begins.
    ``late_results``: attention outputs are NaN until their kernel has run, instead of being forced.
    ``poison``: vacated frames become NaN, after their readers (with ``debug`` always). That is work
    of its own, which orders what a device without it would not: tests do both.

    ``faults`` gives rates 0 to 1 by site, each drawn from the seed: "device_alloc", "host_alloc"
    (the memory is refused), "copy_before", "copy_after" (a copy fails before its first, after its
    n-th fragment), "event" (a fence can't be recorded), "sticky" (the device fails for good at any
    piece of work), "slow_copy" (it takes 1,000 turns more). ``fail_at`` scripts one fault instead.
    Raises ConfigError, TypeError.
    """

    seed: int = 0
    mode: str = "random"
    starve: str | None = None
    not_yet: float = 0.25
    copy_engines: int = 2
    late_results: bool = False
    poison: bool = True
    faults: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    fail_at: FailAt | None = None

    def __post_init__(self) -> None:
        integer("seed", self.seed, low=0, high=MAX_SEED, error=ConfigError)
        choice("mode", self.mode, MODES, error=ConfigError)
        if self.starve is not None:
            choice("starve", self.starve, STREAMS, error=ConfigError)
            if self.mode != "starve":
                raise ConfigError(f"starve={self.starve!r} needs mode='starve', not {self.mode!r}")
        _share("not_yet", self.not_yet)
        if self.not_yet == 1:
            raise ConfigError("not_yet=1 would let no query ever say yes: give a share below 1")
        integer("copy_engines", self.copy_engines, low=1, high=2, error=ConfigError)
        boolean("late_results", self.late_results)
        boolean("poison", self.poison)
        rates = self.rates
        object.__setattr__(self, "faults", tuple(sorted(rates.items())))  # hashable, one order
        for site, rate in rates.items():
            choice("faults", site, SITES, error=ConfigError)
            _share(f"faults[{site!r}]", rate)
        if self.fail_at is not None:
            object.__setattr__(self, "fail_at", _fail_at(self.fail_at))

    @property
    def rates(self) -> dict[str, float]:
        """``faults`` as a dict."""
        try:
            return dict(self.faults)
        except (TypeError, ValueError):
            raise TypeError(
                f"faults must map sites to rates, not {shown(self.faults)}; sites: "
                f"{', '.join(SITES)}"
            ) from None


def _share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number 0 to 1, not {shown(value)}")
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={shown(value)} is out of range: give a number 0 to 1")


def _fail_at(value: object) -> FailAt:
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        raise TypeError(f"fail_at must be FailAt(site, nth), not {shown(value)}")
    fail = FailAt(*value)
    choice("fail_at.site", fail.site, SITES, error=ConfigError)
    integer("fail_at.nth", fail.nth, low=1, high=MAX_SEED, error=ConfigError)
    boolean("fail_at.onwards", fail.onwards)
    return fail
