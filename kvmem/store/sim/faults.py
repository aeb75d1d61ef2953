"""Which operations of a simulated device fail: rates a site drawn from the seed, or one script."""

from __future__ import annotations

import random

from kvmem.sim_options import SITES, SimOptions
from kvmem.store.sim.log import Log


class SimFault(RuntimeError):
    """An injected fault, never a bug; ``site`` says where."""

    def __init__(self, site: str, what: str) -> None:
        super().__init__(f"injected fault {site} at {what}")
        self.site = site


class Faults:
    """Decides at each site that is passed. ``enabled = False`` lets everything succeed."""

    def __init__(self, options: SimOptions, log: Log) -> None:
        self._rates = options.rates
        self._fail_at = options.fail_at
        self._random = random.Random(f"{options.seed}:faults")
        self._log = log
        self.enabled = True
        self.passed = dict.fromkeys(SITES, 0)
        self.struck = dict.fromkeys(SITES, 0)

    def strikes(self, site: str, what: str) -> bool:
        """Whether the operation that passes this site fails. O(1)."""
        self.passed[site] += 1
        script, rate = self._fail_at, self._rates.get(site, 0.0)
        hit = rate > 0 and self._random.random() < rate
        if script is not None and script.site == site:
            count = self.passed[site]
            hit = hit or count == script.nth or (script.onwards and count > script.nth)
        if not hit or not self.enabled:
            return False
        self.struck[site] += 1
        self._log.add(f"fault {site} at {what}")
        return True

    def raise_at(self, site: str, what: str) -> None:
        """Raise SimFault where ``strikes`` says so."""
        if self.strikes(site, what):
            raise SimFault(site, what)

    def error(self, site: str, what: str) -> SimFault:
        """The error of a fault that struck before."""
        return SimFault(site, what)

    def draw(self, low: int, high: int) -> int:
        """A number for a fault that struck, low and high included."""
        return self._random.randint(low, high)
