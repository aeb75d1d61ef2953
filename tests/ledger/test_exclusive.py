"""`tier_policy="exclusive"`: a block lives in one tier; two full tiers trade places in rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmem.ledger.state import HOST, MAX_ROUNDS
from kvmem.ledger.verify import LedgerCorrupt
from kvmem.plan import Plan
from tests.ledger import leaves
from tests.ledger.play import Play

Maker = Callable[..., Play]


@pytest.fixture
def play(make_play: Maker) -> Play:
    """4 device and 4 host blocks of 4 tokens."""
    return make_play(4, 4, tier_policy="exclusive")


def in_rounds(plan: Plan) -> list[Plan]:
    return [*plan.earlier, plan]


def check_order(plan: Plan) -> None:
    """No transfer waits for itself or a later one, and each frame is handed on in order (R6)."""
    written_in: dict[int, int] = {}
    read_in: dict[int, int] = {}
    out_of: dict[int, int] = {}
    for part in in_rounds(plan):
        for f, h in zip(part.out_device.tolist(), part.out_host.tolist(), strict=True):
            assert part.out_after_in >= read_in.get(h, 0), "overwrites what is being copied in"
            out_of[f] = part.out_id
        if part.out_id and part.in_id:
            assert part.out_after_in < part.in_id, "waits in a circle"
        for h, f in zip(part.in_host.tolist(), part.in_device.tolist(), strict=True):
            assert part.in_after_out >= out_of.get(f, 0), "overwrites what is being copied out"
            assert written_in.get(f) is None
            written_in[f] = read_in[h] = part.in_id


def test_a_block_gives_up_its_host_copy_when_it_is_copied_in(play: Play) -> None:
    play.free(play.made(8))
    play.evict(4)
    assert play.pool("num_free", HOST) == 2
    s = play.create(9)
    plan, _ = play.run(s)
    assert (plan.num_in, plan.num_out) == (2, 0)
    assert play.pool("num_free", HOST) == 4
    assert [play.b(b, "host_frame") for b in play.table(s)] == [0, 0, 0]


def test_the_next_copy_out_waits_for_the_copy_in_that_reads_its_host_frame(play: Play) -> None:
    play.free(play.made(8))
    play.evict(4)
    s = play.create(9)
    planned, _ = play.run(s)
    play.free(s)
    _, plan = play.evict(4)
    assert set(plan.out_host.tolist()) & set(planned.in_host.tolist())
    assert plan.out_after_in == planned.in_id


def test_what_a_swapped_sequence_relies_on_stays_on_the_host(make_play: Maker) -> None:
    play = make_play(6, 6, tier_policy="exclusive")
    s = play.made(8)
    t = play.create([*range(8), 9])
    play.run(t)
    play.swap_out(s)
    shared = play.table(t)[:2]
    assert all(play.b(b, "host_frame") and play.b(b, "device_frame") for b in shared)
    play.free(s)
    assert not any(play.b(b, "host_frame") for b in shared), "nobody relies on it any more"


def test_a_swapped_sequence_comes_back_to_one_tier(play: Play) -> None:
    s = play.made(10)
    play.swap_out(s)
    play.swap_in(s)
    assert play.pool("num_free", HOST) == 4
    plan = play.swap_out(s)
    assert len(plan.out_host) == 3, "its copies were given up"
    play.evict(4)
    assert play.swap_in(s).num_in == 3
    assert play.pool("num_free", HOST) == 4


def test_full_tiers_trade_places_in_rounds(play: Play) -> None:
    """4 blocks come in, 4 go out, none new: one is given up, no more."""
    first, second = [1] * 16, [2] * 16
    play.free(play.made(first))
    play.free(play.made(second))
    assert (play.found(first), play.found(second)) == (4, 4)
    s = play.create(first)
    plan, _ = play.run(s)
    assert (plan.num_in, plan.num_out) == (4, 3)
    assert len(in_rounds(plan)) == 4
    check_order(plan)
    assert (play.found(first), play.found(second)) == (4, 3)


def test_room_that_new_blocks_need_anyway_saves_rounds(make_play: Maker) -> None:
    """2 blocks come in and 2 are new: the 2 oldest leave, in one round."""
    play = make_play(4, 4, tier_policy="exclusive")
    first, second = [1] * 16, [2] * 16
    play.free(play.made(first))
    play.free(play.made(second))
    s = play.create([*first[:8], *[3] * 8])
    plan, _ = play.run(s)
    assert (plan.num_in, plan.num_out) == (2, 4)
    check_order(plan)
    assert (play.found(first), play.found(second)) == (2, 4)


def test_the_number_of_rounds_is_limited(make_play: Maker) -> None:
    n = 3 * MAX_ROUNDS
    play = make_play(n, n, 1, tier_policy="exclusive")
    first, second = range(n), range(n, 2 * n)
    play.free(play.made(first))
    play.free(play.made(second))
    plan, _ = play.run(play.create(first))
    assert plan.num_in == n
    assert len(in_rounds(plan)) <= MAX_ROUNDS + 1
    check_order(plan)
    assert play.found(second) == n - 3


def test_poisoned_frames_are_filled_in_the_round_that_vacates_them(make_play: Maker) -> None:
    play = make_play(4, 4, tier_policy="exclusive", fills=True)
    play.free(play.made([1] * 16))
    play.free(play.made([2] * 16))
    plan, _ = play.run(play.create([1] * 16))
    for part in in_rounds(plan):
        assert set(part.out_device.tolist()) <= set(part.fill_frames.tolist())
        assert set(part.in_device.tolist()) <= set(part.fill_frames.tolist())


def test_verify_finds_a_block_in_both_tiers(play: Play) -> None:
    s = play.made(4)
    (b,) = play.table(s)
    frame = play.ledger.state
    h = leaves.take_free(frame, HOST)
    first = play.pool("first", HOST)
    frame.blocks["host_frame"][b] = h
    frame.frames["block"][first + h] = b
    frame.frames["num_tokens"][first + h] = 4
    frame.blocks["bits"][b] = 2
    frame.pools["oldest"][HOST] = frame.pools["newest"][HOST] = h
    frame.pools["num_evictable"][HOST] = 1
    with pytest.raises(LedgerCorrupt, match=r"R2: block \d+ is in both tiers under exclusive"):
        play.ledger.verify()
    play.evict(1, HOST)
