"""Options of a stress run, the command line that says the same, and the slope of memory."""

from __future__ import annotations

import random
import shlex
from typing import Any

import pytest

import kvmem
from kvmem.cli import main as cli
from kvmem.cli import stress as cli_stress
from kvmem.stress import Leaks, StressOptions, run_stress
from kvmem.stress.leaks import slope_per_minute
from kvmem.stress.run import _share

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ops": None}, kvmem.ConfigError, "seconds and ops are both None: give one"),
    ({"ops": 0}, kvmem.ConfigError, "ops=0 is out of range"),
    ({"ops": 1.5}, TypeError, "ops must be"),
    ({"seconds": 0}, kvmem.ConfigError, "seconds=0 is out of range: give a number > 0"),
    ({"seconds": float("nan")}, kvmem.ConfigError, "seconds=nan"),
    ({"seconds": "1"}, TypeError, "seconds must be a number > 0, not '1'"),
    ({"seconds": True}, TypeError, "seconds must be"),
    ({"sequences": 0}, kvmem.ConfigError, "sequences=0"),
    ({"sequence_blocks": 0}, kvmem.ConfigError, "sequence_blocks=0"),
    ({"threads": 0}, kvmem.ConfigError, "threads=0"),
    ({"threads": 17}, kvmem.ConfigError, "threads=17 .* sequences=16: give at least one a thread"),
    ({"pressure": 0}, kvmem.ConfigError, "pressure=0 is out of range: give a number 0.1 to 1000"),
    ({"pressure": -2.0}, kvmem.ConfigError, "pressure=-2.0"),
    ({"faults": -0.1, "device": "sim"}, kvmem.ConfigError, "faults=-0.1 is out of range"),
    ({"faults": 0.6, "device": "sim"}, kvmem.ConfigError, "give a share 0 to 0.5"),
    ({"faults": 0.1}, kvmem.ConfigError, "faults=0.1 needs device='sim'"),
    ({"seed": -1}, kvmem.ConfigError, "seed=-1"),
    ({"seed": None}, TypeError, "seed must be"),
    ({"switch_interval": 0}, kvmem.ConfigError, "switch_interval=0"),
    ({"switch_interval": 2.0}, kvmem.ConfigError, "seconds, 0 < x <= 1"),
    ({"hang_seconds": 0}, kvmem.ConfigError, "hang_seconds=0"),
    ({"debug": 1}, TypeError, "debug must be True or False"),
    ({"device": "cuda", "faults": 0.1}, kvmem.ConfigError, "faults=0.1 needs device='sim'"),
    ({"device": "gpu"}, kvmem.ConfigError, "device='gpu' is unknown"),
    ({"block_size": 48}, kvmem.ConfigError, "block_size=48 must be a power of two"),
    ({"dtype": "fp8"}, kvmem.ConfigError, "dtype='fp8' is not in this version"),
    ({"num_layers": 0}, kvmem.ConfigError, "num_layers=0"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        StressOptions(**{"ops": 10, **options})
    assert len(str(caught.value)) <= 300


def test_run_stress_takes_options_only() -> None:
    with pytest.raises(TypeError, match="options must be a StressOptions, not dict"):
        run_stress({"ops": 3})  # type: ignore[arg-type]


def test_the_command_says_the_same(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        device = rng.choice(("cpu", "sim"))
        options = StressOptions(
            device=device,
            seconds=rng.choice((None, 2.5)),
            ops=rng.randint(1, 10**6),
            sequences=rng.randint(8, 20),
            sequence_blocks=rng.randint(1, 9),
            pressure=rng.choice((2.0, 0.75)),
            block_size=rng.choice((1, 16)),
            num_layers=rng.randint(1, 3),
            num_kv_heads=rng.randint(1, 3),
            head_dim=rng.choice((8, 16)),
            dtype=rng.choice(("float32", "bfloat16")),
            faults=rng.choice((0.0, 1e-05)) if device == "sim" else 0.0,
            seed=rng.randrange(2**62),
            threads=rng.randint(1, 8),
            switch_interval=rng.choice((None, 1e-6)),
            debug=rng.random() < 0.5,
        )
        words = shlex.split(options.command())
        assert words[:2] == ["kvmem", "stress"]
        arguments = cli.command_parser("stress", cli_stress).parse_args(words[2:])
        assert cli_stress._options(arguments) == options
        shorter = shlex.split(options.command(ops=7))
        assert shorter[shorter.index("--ops") + 1] == "7"
        assert "--seconds" not in shorter


def test_pressure_decides_the_tiers() -> None:
    low, high = (StressOptions(ops=1, pressure=x).config(0) for x in (1.0, 4.0))
    assert low.device_blocks > 2 * high.device_blocks
    assert low.host_blocks == high.host_blocks
    smallest = StressOptions(ops=1, pressure=1000, sequence_blocks=30).config(0)
    assert smallest.device_blocks == 32  # the longest fits, with a copy on write


def test_each_simulated_device_of_a_run_behaves_in_its_own_way() -> None:
    options = StressOptions(ops=1, device="sim", seed=5, faults=0.1)
    sims = [options.config(number).sim for number in range(20)]
    assert len({sim.seed for sim in sims if sim}) == 20
    assert len({sim.mode for sim in sims if sim}) > 2
    assert sims == [options.config(number).sim for number in range(20)]


def test_shares() -> None:
    for total in (0, 1, 7, 100):
        assert sum(_share(total, 8, i) for i in range(8)) == total


def test_the_slope_of_memory() -> None:
    noise = random.Random(3)
    flat = [(float(t), 100 + noise.random()) for t in range(200)]
    slope, minutes = slope_per_minute(flat) or (9.0, 0.0)
    assert abs(slope) < 0.5
    assert 2.4 < minutes < 2.6
    warm = [(float(t), 100 + min(t, 40)) for t in range(200)]  # pages taken at first
    assert abs((slope_per_minute(warm) or (9.0, 0.0))[0]) < 0.1
    growing = [(float(t), 100 + t / 2) for t in range(200)]
    assert (slope_per_minute(growing) or (0.0, 0.0))[0] == pytest.approx(30)
    assert slope_per_minute(growing[:50]) is None


@pytest.mark.parametrize(("slope", "found"), [(30.0, 1), (3.0, 0), (None, 0)])
def test_a_slope_is_a_finding_above_the_limit(slope: float | None, found: int) -> None:
    leaks = Leaks(rss_slope_mib_per_minute=slope, rss_limit_mib_per_minute=12.8)
    assert len(leaks.findings()) == found
