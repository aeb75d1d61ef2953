"""Copies ahead of evictions: write_through, and write_back between its watermarks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvmem.ledger import Refusal
from kvmem.ledger.state import DEVICE, HOST, QUEUED, RESIDENT, SWAPPED, SWEPT, UNSAVED
from kvmem.ledger.verify import LedgerCorrupt
from tests.ledger.play import Play

Maker = Callable[..., Play]


def blocks_in(play: Play, tier: int) -> list[int]:
    """Blocks that have a frame of a tier."""
    field = ("device_frame", "host_frame")[tier]
    return [b for b in range(1, len(play.state.blocks)) if play.b(b, field)]


# --- write_through --------------------------------------------------------------------------------


@pytest.fixture
def play(make_play: Maker) -> Play:
    """4 device and 8 host blocks of 4 tokens."""
    return make_play(4, 8, tier_policy="write_through")


def test_what_a_running_sequence_publishes_is_copied(play: Play) -> None:
    s = play.made(10)
    assert play.ledger.wants_cleaning is False, "as of the last plan"
    play.append(s, 10)
    play.plan(s)
    assert play.ledger.wants_cleaning
    plan = play.clean(8)
    full, second, partial = play.table(s)
    assert plan.out_device.tolist() == [play.b(b, "device_frame") for b in (full, second)]
    assert plan.out_tokens.tolist() == [4, 4]
    assert plan.out_after_step == 1, "the step that computed them, not the one that is open"
    assert play.b(partial, "host_frame") == 0
    assert not play.ledger.wants_cleaning
    assert play.clean(8).out_id == 0
    assert (play.of("blocks_cleaned"), play.of("blocks_out")) == (2, 2)


@pytest.mark.parametrize("with_child", [False, True])
def test_a_block_whose_copy_failed_keeps_the_order_of_the_host(
    make_play: Maker, with_child: bool
) -> None:
    """Its owner relied on it when the copy ahead failed, and went before it was evicted (R4)."""
    play = make_play(6, 8, tier_policy="write_through")
    s = play.made(12 if with_child else 8)
    parent, child, *_ = play.table(s)
    first = play.swap_out(s)
    play.ledger.fail(HOST, first.out_id)
    plans = [play.clean(1) for _ in play.table(s)]  # the deepest goes first
    assert [len(plan.out_device) for plan in plans] == [1] * len(plans)
    (lost,) = [p for p in plans if p.out_device[0] == play.b(child, "device_frame")]
    play.ledger.fail(HOST, lost.out_id)
    play.ledger.verify()
    play.free(s)
    assert play.b(child, "bits") & UNSAVED
    play.evict(6)  # verify() says who is newer than its parent
    assert play.b(parent, "host_frame")
    assert bool(play.b(child, "host_frame")) == with_child, "without children it is dropped"
    play.evict(8, HOST)


def test_a_clean_sequence_swaps_out_its_partial_block_only(play: Play) -> None:
    s = play.made(10)
    play.clean(8)
    plan = play.swap_out(s)
    assert plan.out_tokens.tolist() == [2]


def test_eviction_is_free(play: Play) -> None:
    play.free(play.made([1] * 16))
    play.clean(8)
    plan, _ = play.run(play.create([2] * 16))
    assert (plan.num_out, play.of("evicted_clean")) == (0, 4)
    assert play.found([1] * 16) == 4


def test_a_block_evicted_before_it_was_copied_is_copied_then(play: Play) -> None:
    play.free(play.made([1] * 16))
    plan, _ = play.run(play.create([2] * 16))
    assert plan.num_out == 4
    assert play.found([1] * 16) == 4


def test_cleaning_is_done_in_parts(play: Play) -> None:
    play.free(play.made([1] * 16))
    oldest = play.lru()
    for i in range(4):
        assert len(play.clean(1).out_host) == 1
        assert play.lru(HOST) == oldest[: i + 1]
    assert play.clean(1).out_id == 0


def test_the_host_list_follows_use(play: Play) -> None:
    first, second = [1] * 8, [2] * 8
    a = play.made(first)
    play.free(a)
    play.clean(8)
    play.free(play.made(second))
    play.clean(8)
    before = play.lru(HOST)
    play.free(play.made(first))
    play.clean(8)
    assert play.lru(HOST) == before[2:] + before[:2]
    play.evict(2)
    assert play.lru(HOST) == before[2:] + before[:2], "leaving the device is no use"


def test_what_is_cached_on_the_device_is_on_the_host_too(play: Play) -> None:
    play.free(play.made([1] * 16))
    play.clean(8)
    assert blocks_in(play, HOST) == blocks_in(play, DEVICE)


def test_a_copy_is_not_given_up_for_one_made_by_the_same_plan(make_play: Maker) -> None:
    play = make_play(4, 2, tier_policy="write_through")
    play.free(play.made([1] * 16))
    oldest = [play.b(b, "device_frame") for b in play.lru()]
    assert play.clean(8).out_device.tolist() == oldest[:2]
    assert play.clean(8).out_device.tolist() == oldest[2:]


def test_a_swept_block_without_its_copy_is_not_saved_as_newer_than_its_parent(
    make_play: Maker,
) -> None:
    play = make_play(6, 2, tier_policy="write_through")
    play.free(play.made([1] * 8))
    play.clean(8)
    child, parent = play.lru()
    s = play.made([2] * 8, publish=False)
    play.swap_out(s)
    assert (play.b(child, "host_frame"), play.b(parent, "host_frame")) == (0, 0)
    play.free(s)
    play.free(play.made([1] * 4))
    play.clean(8)
    assert play.lru() == [child, parent]
    assert (play.b(child, "host_frame"), play.pool("num_free", HOST)) == (0, 1)
    play.evict(2)
    assert play.found([1] * 8) == 1


def test_what_swapped_sequences_own_is_not_given_up(make_play: Maker) -> None:
    play = make_play(6, 2, tier_policy="write_through")
    s = play.made([1] * 8)
    play.swap_out(s)
    play.free(play.made([2] * 8))
    assert play.clean(8).out_id == 0
    assert not play.ledger.wants_cleaning, "nothing more can be done for them"
    play.evict(4)
    assert play.at(s) == "SWAPPED"
    play.swap_in(s)


def test_a_published_block_that_was_dropped_meanwhile_is_passed_over(play: Play) -> None:
    s = play.made([1] * 8)
    play.free(s)
    play.reset()
    t = play.made([3] * 3)
    assert play.clean(8).out_id == 0
    play.free(t)


def test_the_copies_wait_for_what_used_their_host_frames(make_play: Maker) -> None:
    play = make_play(2, 2, tier_policy="write_through")
    play.free(play.made([1] * 8))
    play.clean(4)
    play.free(play.made([2] * 8))
    s = play.create([1] * 9, max_cached=8)
    with pytest.raises(Refusal):
        play.run(s)
    play.truncate(s, 8)
    planned, _ = play.run(s)
    assert planned.num_in == 2
    play.free(s)
    play.free(play.made([3] * 8))
    plan = play.clean(4)
    assert plan.num_out == 2
    assert plan.out_after_in == planned.in_id


# --- write_back -----------------------------------------------------------------------------------


def test_between_the_watermarks(make_play: Maker) -> None:
    """8 frames: below 3 free or swept ones the oldest are copied, until 5 are."""
    play = make_play(8, 8, watermarks=(3, 5))
    play.free(play.made([1] * 20))
    assert not play.ledger.wants_cleaning
    s = play.made([2] * 4)
    play.append(s, 2)
    play.plan(s)
    assert play.ledger.wants_cleaning
    oldest = play.lru()
    plan = play.clean(8)
    assert plan.out_device.tolist() == [play.b(b, "device_frame") for b in oldest[:4]]
    assert not play.ledger.wants_cleaning
    assert play.clean(8).out_id == 0


def test_clean_blocks_are_passed_not_copied(make_play: Maker) -> None:
    play = make_play(4, 8, watermarks=(4, 4))
    s = play.made([1] * 8)
    play.swap_out(s)
    play.free(s)
    play.free(play.made([2] * 8))
    plan = play.clean(8)
    assert plan.num_out == 2
    assert play.of("num_swept") == 4


def test_without_watermarks_nothing_is_cleaned(make_play: Maker) -> None:
    for policy in ("write_back", "none", "exclusive"):
        play = make_play(4, 8, tier_policy=policy)
        play.free(play.made([1] * 16))
        assert play.clean(8).out_id == 0
        assert not play.ledger.wants_cleaning


def test_what_is_used_again_leaves_the_swept_run(make_play: Maker) -> None:
    play = make_play(6, 8, watermarks=(6, 6))
    for token in (1, 2, 3):
        play.free(play.made([token] * 8))
    play.clean(8)
    assert play.of("num_swept") == 6
    s = play.create([2] * 8)
    play.run(s)
    assert play.of("num_swept") == 4
    last = play.made([3] * 8)
    assert play.of("num_swept") == 2
    assert [play.b(b, "bits") & SWEPT for b in play.lru()] == [SWEPT] * 2
    play.free(last)
    assert [play.b(b, "bits") & SWEPT for b in play.lru()] == [SWEPT] * 2 + [0] * 2


# --- verify ---------------------------------------------------------------------------------------


def test_verify_finds_a_wrong_run_and_a_wrong_ring(play: Play) -> None:
    play.free(play.made([1] * 8))
    play.clean(8)
    state = play.state
    oldest = play.lru()[0]
    state.blocks["bits"][oldest] ^= SWEPT
    with pytest.raises(LedgerCorrupt, match=r"R2: the swept frames are not the oldest"):
        play.ledger.verify()
    state.blocks["bits"][oldest] ^= SWEPT
    newest = int(state.ledger["newest_swept"][0])
    state.ledger["newest_swept"] = 0
    with pytest.raises(LedgerCorrupt, match=r"R2: newest_swept is 0"):
        play.ledger.verify()
    state.ledger["newest_swept"] = newest
    state.blocks["bits"][oldest] |= QUEUED
    with pytest.raises(LedgerCorrupt, match=r"R2: the ring of blocks to clean"):
        play.ledger.verify()
    state.blocks["bits"][oldest] &= ~QUEUED


# --- any order of calls ---------------------------------------------------------------------------


POLICIES: list[dict[str, Any]] = [
    {"tier_policy": "none"},
    {"tier_policy": "write_back"},
    {"tier_policy": "write_back", "watermarks": (3, 5)},
    {"tier_policy": "write_through"},
    {"tier_policy": "exclusive"},
]


@pytest.mark.parametrize("options", POLICIES, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("sizes", [(5, 3, 2), (6, 8, 1), (8, 12, 2)])
def test_any_order_of_calls(
    make_play: Maker, sizes: tuple[int, int, int], options: dict[str, Any], seed: int
) -> None:
    """`verify` after each call (tests.ledger.play), and swept or not, hits are exact."""
    rng = random.Random(seed)
    play = make_play(*sizes, **options)
    live: list[int] = []
    for _ in range(250):
        able = [s for s in live if not play.q(s, "step")]
        s = rng.choice(able) if able else 0
        act = rng.choice("cccrrrrrafffoiegkkkkv")
        try:
            if act == "c" and len(live) < 5:
                tokens = [rng.randrange(2) for _ in range(rng.randint(1, sizes[0] * sizes[2] - 1))]
                live.append(play.create(tokens))
            elif act == "k":
                play.clean(rng.choice((1, 2, 50)))
            elif act == "e":
                play.evict(rng.randint(1, 3), rng.choice((DEVICE, HOST)))
            elif act == "v":
                play.ledger.retire(*play.ledger.issued)
            elif not s:
                continue
            elif act == "r":
                _, arrays = play.plan(s)
                play.end(arrays, commit=rng.random() < 0.9)
            elif act == "a":
                play.append(s, rng.randrange(2))
            elif act == "f":
                live.remove(s)
                play.free(s)
            elif act == "o" and play.q(s, "state") == RESIDENT:
                play.swap_out(s)
            elif act == "i" and play.q(s, "state") == SWAPPED:
                play.swap_in(s)
            elif act == "g":
                play.give_up(s)
        except Refusal:
            pass
