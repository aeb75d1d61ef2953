"""Hit rates of replayed traces: the ledger against published numbers and against plain caches."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvmem.ledger.state import MAX_ROUNDS
from kvmem.traces import read_trace
from tests.traces.lru import (
    SAMPLES,
    WHOLE,
    Prompts,
    exclusive_hits,
    lru_hits,
    prompts_in,
    two_tier_hits,
)
from tools.replay import Replayed, replay

NAMES = ("conversation", "synthetic")

# LRU, tail first, from the README of the traces: capacity in blocks -> hits in percent.
PUBLISHED = {
    "conversation": {
        1000: 4.45, 3000: 6.53, 5859: 13.61, 10000: 21.16, 30000: 32.57, 50000: 35.46,
        100000: 36.37,
    },
    "synthetic": {1000: 8.41, 3000: 19.06, 5859: 30.94, 10000: 42.39, 30000: 62.42, 50000: 63.96},
}  # fmt: skip
NUM_BLOCKS = {"conversation": 288_500, "synthetic": 121_877}


@cache
def whole(name: str) -> list[np.ndarray]:
    """A whole trace, where it lies beside the checkout."""
    path = WHOLE / f"mooncake_{name}_512.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is neither in $KVMEM_TRACES nor beside the checkout")
    return [request.hash_ids for request in read_trace(path)]


def sample(name: str) -> list[list[int]]:
    return prompts_in(SAMPLES / f"mooncake_{name}_60.jsonl.gz")


def replayed(prompts: Prompts, device: int, host: int = 0, policy: str = "none") -> Replayed:
    arrays = [np.array(ids, np.int64) for ids in prompts]
    return replay(arrays, device_blocks=device, host_blocks=host, tier_policy=policy)


def drawn(seed: int) -> list[list[int]]:
    """Prompts that begin as others did: each id stands for one prefix."""
    rng = random.Random(seed)
    paths: list[list[int]] = [[]]
    new = 0
    for _ in range(200):
        begin = rng.choice(paths[-12:])
        ids = begin[: rng.randrange(len(begin) + 1)]
        for _ in range(rng.randrange(4) + (not ids)):
            ids.append(new := new + 1)
        paths.append(ids[:12])
    return paths[1:]


@pytest.mark.traces
@pytest.mark.parametrize("name", NAMES)
def test_lru_on_the_device_alone(name: str) -> None:
    for blocks, expected in PUBLISHED[name].items():
        counted = replay(whole(name), device_blocks=blocks)
        assert counted.num_blocks == NUM_BLOCKS[name]
        assert round(counted.hit_rate, 2) == expected, blocks


# Sizes of the two tiers; the sums are capacities that the README of the traces has numbers for.
SIZES = [(400, 600), (1000, 2000), (2000, 1000), (3000, 2859), (5000, 5000), (10000, 20000)]


@pytest.mark.traces
@pytest.mark.parametrize(("device", "host"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_exclusive_is_lru_of_both_tiers_together(name: str, device: int, host: int) -> None:
    counted = replay(whole(name), device_blocks=device, host_blocks=host, tier_policy="exclusive")
    assert round(counted.hit_rate, 2) == PUBLISHED[name][device + host]


@pytest.mark.traces
@pytest.mark.parametrize(
    ("device", "host"), [(1000, 3000), (3000, 1000), (3000, 5859), (5859, 5859), (3000, 10000)]
)
@pytest.mark.parametrize("name", NAMES)
def test_write_through_is_lru_of_the_larger_tier(name: str, device: int, host: int) -> None:
    counted = replay(
        whole(name), device_blocks=device, host_blocks=host, tier_policy="write_through"
    )
    assert round(counted.hit_rate, 2) == PUBLISHED[name][max(device, host)]


@pytest.mark.parametrize("name", NAMES)
def test_lru_on_the_samples(name: str) -> None:
    prompts = sample(name)
    longest = max(map(len, prompts))
    for blocks in (longest, 400, 700, 5000):
        assert replayed(prompts, blocks).num_hits == lru_hits(prompts, blocks)


@pytest.mark.parametrize(("device", "host"), [(300, 100), (400, 400), (400, 1000)])
@pytest.mark.parametrize("name", NAMES)
def test_write_back_on_the_samples(name: str, device: int, host: int) -> None:
    prompts = sample(name)
    counted = replayed(prompts, device, host, "write_back")
    assert counted.num_hits == two_tier_hits(prompts, device, host)


@pytest.mark.parametrize(("device", "host"), [(300, 100), (400, 400), (400, 1000)])
@pytest.mark.parametrize("name", NAMES)
def test_exclusive_on_the_samples(name: str, device: int, host: int) -> None:
    prompts = sample(name)
    counted = replayed(prompts, device, host, "exclusive")
    assert counted.num_hits == lru_hits(prompts, device + host)
    assert counted.num_hits == exclusive_hits(prompts, device, host, MAX_ROUNDS)


@pytest.mark.parametrize(("device", "host"), [(300, 100), (400, 400), (400, 1000)])
@pytest.mark.parametrize("name", NAMES)
def test_write_through_on_the_samples(name: str, device: int, host: int) -> None:
    prompts = sample(name)
    counted = replayed(prompts, device, host, "write_through")
    assert counted.num_hits == lru_hits(prompts, max(device, host))


def test_drawn_prompts(seed: int) -> None:
    for i in range(10):
        prompts = drawn(seed + i)
        for device, host in ((12, 5), (12, 20), (20, 40)):
            assert replayed(prompts, device).num_hits == lru_hits(prompts, device)
            counted = replayed(prompts, device, host, "write_through")
            assert counted.num_hits == lru_hits(prompts, max(device, host))
            counted = replayed(prompts, device, host, "exclusive")
            assert counted.num_hits == exclusive_hits(prompts, device, host, MAX_ROUNDS)
            counted = replayed(prompts, device, host, "write_back")
            assert counted.num_hits == two_tier_hits(prompts, device, host)


def test_what_can_not_be_replayed() -> None:
    with pytest.raises(ValueError, match=r"prompt 1 has 3 blocks, the device tier 2"):
        replayed([[1, 2], [1, 2, 3]], 2)
    with pytest.raises(ValueError, match=r"prompt 0 has ids outside 0..2147483647"):
        replayed([[1, 2**31]], 2)


def test_the_command_line() -> None:
    path = SAMPLES / "mooncake_conversation_60.jsonl.gz"
    ran = subprocess.run(
        [sys.executable, "-m", "tools.replay", str(path), "--device-blocks", "5000"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    prompts = sample("conversation")
    expected = lru_hits(prompts, 5000)
    assert ran.stdout.startswith(f"{expected} hits of {sum(map(len, prompts))} blocks: ")
