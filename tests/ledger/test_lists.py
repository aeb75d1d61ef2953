"""The free list, the LRU lists and the spans, against plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvmem.ledger import Ledger
from kvmem.ledger.ledger import span_capacity
from kvmem.ledger.state import DEVICE, HOST
from tests.ledger import leaves

TIERS = pytest.mark.parametrize("tier", [DEVICE, HOST])


def make(device: int = 6, host: int = 5, *, quarantine: bool = False) -> Ledger:
    return Ledger(
        device_blocks=device, host_blocks=host, block_size=4, tier_policy="write_back", hash_seed=7,
        quarantine=quarantine,
    )  # fmt: skip


@TIERS
def test_each_frame_is_handed_out_once(tier: int) -> None:
    state = make().state
    total = int(state.pools["num_frames"][tier])
    taken = [leaves.take_free(state, tier) for _ in range(total)]
    assert taken == list(range(1, total + 1))  # ascending: copies of neighbours coalesce
    assert leaves.take_free(state, tier) == 0  # frame 0 is reserved
    assert state.pools["num_free"][tier] == 0
    assert state.pools["peak"][tier] == total


@TIERS
def test_freed_frames_come_back(tier: int, seed: int) -> None:
    rng, state = random.Random(seed), make().state
    total, held, peak = int(state.pools["num_frames"][tier]), set[int](), 0
    for _ in range(200):
        if held and rng.random() < 0.5:
            f = rng.choice(sorted(held))
            held.remove(f)
            leaves.give_free(state, tier, f)
        elif f := leaves.take_free(state, tier):
            assert f not in held
            held.add(f)
        peak = max(peak, len(held))
        assert state.pools["num_free"][tier] == total - len(held)
    assert state.pools["peak"][tier] == peak


@TIERS
@pytest.mark.parametrize("quarantine", [False, True])
def test_the_free_list_is_the_model(tier: int, quarantine: bool, seed: int) -> None:
    """Last in first out, or in quarantine first in first out; a free neighbour when asked for."""
    rng, state = random.Random(seed), make(quarantine=quarantine).state
    total = int(state.pools["num_frames"][tier])
    free, held = list(range(1, total + 1)), list[int]()
    for _ in range(400):
        if held and rng.random() < 0.5:
            f = held.pop(rng.randrange(len(held)))
            leaves.give_free(state, tier, f)
            free.insert(len(free) if quarantine else 0, f)
        else:
            wanted = rng.randrange(-1, total + 3)
            is_there = wanted in free and not quarantine
            expected = wanted if is_there else free[0] if free else 0
            assert leaves.take_free_beside(state, tier, wanted) == expected
            if expected:
                free.remove(expected)
                held.append(expected)
        assert chain(state, tier, "next", "free_head") == free
        assert chain(state, tier, "previous", "free_tail") == free[::-1]


def chain(state: object, tier: int, links: str, end: str) -> list[int]:
    first, f = int(state.pools["first"][tier]), int(state.pools[end][tier])  # type: ignore[attr-defined]
    found = []
    while f:
        found.append(f)
        f = int(state.frames[links][first + f])  # type: ignore[attr-defined]
    return found


@TIERS
def test_lru_is_a_queue_with_removal(tier: int, seed: int) -> None:
    rng, state = random.Random(seed), make().state
    total, model = int(state.pools["num_frames"][tier]), list[int]()
    for _ in range(300):
        f = rng.randint(1, total)
        if f in model:
            leaves.remove(state, tier, f)
            model.remove(f)
        else:
            leaves.append_newest(state, tier, f)
            model.append(f)
        assert chain(state, tier, "next", "oldest") == model
        assert chain(state, tier, "previous", "newest") == model[::-1]
        assert state.pools["num_evictable"][tier] == len(model)


def test_the_tiers_do_not_mix() -> None:
    state = make().state
    leaves.append_newest(state, DEVICE, 3)
    leaves.append_newest(state, HOST, 3)
    leaves.append_newest(state, HOST, 2)
    assert chain(state, DEVICE, "next", "oldest") == [3]
    assert chain(state, HOST, "next", "oldest") == [3, 2]


def test_span_sizes_double_and_long_ones_are_uneven() -> None:
    for length in [*range(70), 1000, 1 << 20]:
        capacity = leaves.span_capacity(length)
        assert capacity >= max(length, 16)
        assert capacity == span_capacity(length), "Python and compiled code must agree"
        even = capacity - 16 if capacity > 256 else capacity
        assert even & (even - 1) == 0
        assert capacity == 16 or capacity < 2 * length


def test_spans_never_overlap_and_are_used_again(seed: int) -> None:
    rng, state = random.Random(seed), make().state
    held: dict[int, int] = {}
    top = 0
    for _ in range(300):
        if held and (rng.random() < 0.5 or top > 3000):
            start = rng.choice(sorted(held))
            leaves.give_span(state, start, held.pop(start))
        else:
            length = rng.choice((1, 16, 17, 40, 100))
            start = leaves.take_span(state, length)
            held[start] = leaves.span_capacity(length)
            state.tokens[start : start + held[start]] = 1  # its owner writes all over it
        end = 0
        for start, capacity in sorted(held.items()):
            assert start >= end
            end = start + capacity
        top = int(state.ledger["tokens_top"][0])
        assert end <= top <= len(state.tokens)
    for start, capacity in held.items():
        leaves.give_span(state, start, capacity)
    again = [leaves.take_span(state, 16) for _ in range(5)]
    assert len(set(again)) == 5


def test_links_of_freed_spans_hold_positions_beyond_31_bits() -> None:
    state = make().state
    leaves.give_span(state, 0, 16)
    state.spans["free_head"][0] = (1 << 40) + 5  # as if a span far up had been freed
    leaves.give_span(state, 32, 16)
    assert leaves.take_span(state, 16) == 32
    assert int(state.spans["free_head"][0]) == (1 << 40) + 5
    assert np.asarray(state.spans["free_head"]).dtype == np.int64
