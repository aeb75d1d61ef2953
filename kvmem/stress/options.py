"""What a stress run is made of, and the command line that says the same."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from typing import Any

from kvmem.checks import boolean, integer, shown
from kvmem.config import Config
from kvmem.errors import ConfigError
from kvmem.sim_options import MODES, SimOptions

MAX_SEQUENCES = 65536
MAX_THREADS = 256
MAX_OPS = MAX_SEED = 2**62
#: The flag of each option; ``command`` and the messages of the command line use it.
FLAGS = {
    "device": "--device",
    "seconds": "--seconds",
    "ops": "--ops",
    "sequences": "--sequences",
    "sequence_blocks": "--sequence-blocks",
    "pressure": "--pressure",
    "block_size": "--block-size",
    "num_layers": "--layers",
    "num_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "dtype": "--dtype",
    "kv_dtype": "--kv-dtype",
    "faults": "--faults",
    "seed": "--seed",
    "threads": "--threads",
    "switch_interval": "--switch-interval",
    "debug": "--config-debug",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StressOptions:
    """One run. Raises ConfigError or TypeError for what can't be; the Config judges its own part.

    ``seconds``, ``ops`` (operations of all threads together): the run ends with the one that comes
    first; one must be given. ``sequences`` are live at once, each of at most ``sequence_blocks``
    blocks. ``pressure``: how many times their blocks exceed the device tier; it decides the sizes
    of both tiers. ``faults``: share of copies that fail, device="sim" only; fences fail at a
    twentieth of that rate, the whole device at a two-hundredth. ``threads`` work on one Manager;
    with one thread, ``ops`` and device="sim" a run is repeated exactly by its ``seed``.
    ``switch_interval``: seconds after which Python changes threads, during the run. ``debug`` is
    that of the Config. ``hang_seconds``: no operation ended for so long is a breach.
    """

    device: str = "cpu"
    seconds: float | None = None
    ops: int | None = None
    sequences: int = 16
    sequence_blocks: int = 8
    pressure: float = 2.0
    block_size: int = 16
    num_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    faults: float = 0.0
    seed: int = 0
    threads: int = 1
    switch_interval: float | None = None
    debug: bool = False
    hang_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.seconds is None and self.ops is None:
            raise ConfigError("seconds and ops are both None: give one, or the run never ends")
        if self.seconds is not None:
            _number("seconds", self.seconds, "a number > 0", lambda x: x > 0)
        if self.ops is not None:
            _whole("ops", self.ops, MAX_OPS)
        _whole("sequences", self.sequences, MAX_SEQUENCES)
        _whole("sequence_blocks", self.sequence_blocks, 4096)
        _whole("threads", self.threads, MAX_THREADS)
        if self.threads > self.sequences:
            raise ConfigError(
                f"threads={self.threads} work on sequences of their own, sequences="
                f"{self.sequences}: give at least one a thread"
            )
        _number("pressure", self.pressure, "a number 0.1 to 1000", lambda x: 0.1 <= x <= 1000)
        _number("faults", self.faults, "a share 0 to 0.5", lambda x: 0 <= x <= 0.5)
        self.config(0)
        if self.faults and self.device != "sim":
            raise ConfigError(
                f"faults={self.faults} needs device='sim': nothing injects faults elsewhere"
            )
        integer("seed", self.seed, low=0, high=MAX_SEED, error=ConfigError)
        if self.switch_interval is not None:
            allowed = "seconds, 0 < x <= 1"
            _number("switch_interval", self.switch_interval, allowed, lambda x: 0 < x <= 1)
        _number("hang_seconds", self.hang_seconds, "a number > 0", lambda x: x > 0)
        boolean("debug", self.debug)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.sequence_blocks * self.block_size

    def config(self, number: int) -> Config:
        """The Config of the ``number``-th Manager of the run. Raises ConfigError, TypeError."""
        live_blocks = 0.4 * self.sequences * self.sequence_blocks  # measured: they come and go
        device_blocks = math.ceil(live_blocks / self.pressure)
        return Config(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=self.device,
            block_size=self.block_size,
            # the longest and its copy on write must fit, else it would never be computed
            device_blocks=max(self.sequence_blocks + 2, device_blocks),
            # a little scarce: both tiers are full now and then
            host_blocks=max(self.sequence_blocks, math.ceil(0.9 * live_blocks)),
            debug=self.debug,
            sim=self._sim(number) if self.device == "sim" else None,
        )

    def _sim(self, number: int) -> SimOptions:
        """Another behaviour of the simulated device for each Manager of the run."""
        rng = random.Random(f"{self.seed}:{number}:sim")
        faults = {
            "copy_before": self.faults / 2,
            "copy_after": self.faults / 2,
            "slow_copy": self.faults,
            "event": self.faults / 20,
            "sticky": self.faults / 200,
        }
        return SimOptions(
            seed=rng.randrange(MAX_SEED),
            mode=rng.choice(MODES),
            not_yet=rng.choice((0.0, 0.25, 0.6)),
            copy_engines=rng.choice((1, 2)),
            poison=rng.random() < 0.5,
            faults=faults if self.faults else {},
        )

    def command(self, *, ops: int | None = None) -> str:
        """The command line of this run; with ``ops``, one that ends after so many operations."""
        words = ["kvmem stress"]
        for field in fields(self):
            value: Any = getattr(self, field.name)
            flag = FLAGS.get(field.name)
            if field.name in ("seconds", "ops") and ops is not None:
                value = ops if field.name == "ops" else None
            if flag is None or value is None or value is False:
                continue
            if value == field.default and field.name not in ("seed", "device"):
                continue
            words.append(flag if value is True else f"{flag} {value}")
        return " ".join(words)


def _whole(name: str, value: object, high: int) -> None:
    integer(name, value, low=1, high=high, error=ConfigError)


def _number(name: str, value: object, allowed: str, judge: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be {allowed}, not {shown(value)}")
    if not (math.isfinite(value) and judge(value)):
        raise ConfigError(f"{name}={shown(value)} is out of range: give {allowed}")
