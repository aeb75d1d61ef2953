"""Swapping and eviction: what moves, what is clean, what is lost (R1-R3, R5, R8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmem.ledger import Refusal, decide
from kvmem.ledger.state import DEVICE, HOST
from tests.ledger.play import Play, ids

Maker = Callable[..., Play]


def test_swapping_out_copies_every_dirty_block(play: Play) -> None:
    s = play.made(6)
    first, second = play.table(s)
    plan = play.swap_out(s)
    assert play.at(s) == "SWAPPED"
    assert plan.out_device.tolist() == [play.b(b, "device_frame") for b in (first, second)]
    assert plan.out_host.tolist() == [play.b(b, "host_frame") for b in (first, second)]
    assert plan.out_tokens.tolist() == [4, 2]
    assert (play.of("swap_outs"), play.of("blocks_out"), play.of("clean_swap_outs")) == (1, 2, 0)
    assert play.q(s, "num_swaps") == 1
    assert play.lru() == [second, first], "its frames stay as cached content"


def test_back_at_once_copies_nothing(play: Play) -> None:
    s = play.made(6)
    play.swap_out(s)
    plan = play.swap_in(s)
    assert (plan.in_id, len(plan.in_host)) == (0, 0)
    assert (play.at(s), play.q(s, "fresh")) == ("RESIDENT", 1)
    assert (play.of("swap_ins"), play.of("blocks_in")) == (1, 0)
    assert play.lru() == []


def test_a_clean_sequence_moves_no_bytes(play: Play) -> None:
    s = play.made(6)
    play.swap_out(s)
    play.evict(8)
    assert play.of("evicted_clean") == 2
    plan = play.swap_in(s)
    assert plan.in_tokens.tolist() == [4, 2]
    plan = play.swap_out(s)
    assert (plan.out_id, len(plan.out_host)) == (0, 0)
    assert play.of("clean_swap_outs") == 2
    plan = play.evict(8)[1]
    assert len(plan.out_host) == 0


def test_only_the_block_that_grew_is_copied_again(play: Play) -> None:
    s = play.made(6)
    play.swap_out(s)
    before = [play.b(b, "host_frame") for b in play.table(s)]
    play.append(s, 1)
    play.run(s)
    block = play.table(s)[1]
    assert (play.b(block, "num_tokens"), play.host_frame(block, "num_tokens")) == (3, 2)
    plan = play.swap_out(s)
    assert plan.out_host.tolist() == before[1:]
    assert plan.out_tokens.tolist() == [3]


def test_calls_on_the_wrong_state_are_no_ops(play: Play) -> None:
    waiting, resident, swapped = play.create(3), play.made([8] * 3), play.made([9] * 3)
    play.swap_out(swapped)
    before = play.meaning()
    assert play.swap_out(waiting, swapped).out_id == 0
    assert play.swap_in(waiting, resident).in_id == 0
    assert play.give_up(waiting).out_id == 0
    assert play.meaning() == before


def test_a_shared_block_moves_once(play: Play) -> None:
    s = play.made(6)
    (child,) = play.fork(s)
    plan = play.swap_out(s, child)
    assert len(plan.out_host) == 2
    assert play.of("clean_swap_outs") == 0, "copied a moment ago is not clean"
    play.evict(8)
    assert len(play.swap_in(s, child).in_host) == 2


def test_a_shared_block_is_saved_while_another_owner_is_resident(play: Play) -> None:
    s = play.made(6)
    (child,) = play.fork(s)
    assert len(play.swap_out(s).out_host) == 2
    assert play.lru() == []
    play.append(child, 1)
    plan, _ = play.run(child)
    assert len(plan.copy_source) == 1, "the SWAPPED one still owns it (R3)"
    assert len(play.swap_out(child).out_host) == 1


def test_without_host_room_nothing_changes(make_play: Maker) -> None:
    play = make_play(8, 3)
    a, b = play.made(8), play.made([9] * 8)
    before = play.meaning()
    with pytest.raises(Refusal) as refused:
        play.swap_out(a, b)
    assert refused.value.code == decide.NO_HOST_ROOM
    assert (refused.value.needed, refused.value.available) == (4, 3)
    assert play.meaning() == before
    play.swap_out(a)
    with pytest.raises(Refusal):
        play.swap_out(b)


def test_cached_host_copies_make_room_but_not_ones_own(make_play: Maker) -> None:
    play = make_play(8, 3)
    play.free(play.made([7] * 8))
    play.evict(2)
    assert play.pool("num_evictable", HOST) == 2
    a, b = play.made(8), play.made([9] * 8)
    play.swap_out(a)
    assert (play.of("evicted_host"), play.of("dropped")) == (1, 1)
    play.swap_in(a)
    play.append(a, 1, 2)
    play.run(a)
    assert play.table(a)[:2] == [b for b in play.table(a)[:2] if play.b(b, "host_frame")]
    play.swap_out(a)  # two clean copies of his own are kept, the third frame is taken
    assert play.found([7] * 8) == 0
    with pytest.raises(Refusal):
        play.swap_out(b)


def test_own_clean_copies_are_not_room_as_well(make_play: Maker) -> None:
    play = make_play(8, 2)
    s = play.made(8)
    play.swap_out(s)
    play.swap_in(s)
    play.append(s, 1)
    play.run(s)
    with pytest.raises(Refusal) as refused:
        play.swap_out(s)
    assert (refused.value.needed, refused.value.available) == (1, 0)


def test_without_device_room_nothing_changes(make_play: Maker) -> None:
    play = make_play(3, 8)
    a = play.made(8)
    play.swap_out(a)
    b = play.made([9] * 8)
    before = play.meaning()
    with pytest.raises(Refusal) as refused:
        play.swap_in(a)
    assert refused.value.code == decide.NO_DEVICE_ROOM
    assert (refused.value.needed, refused.value.available) == (1, 0)
    assert play.meaning() == before
    play.swap_out(b)
    assert len(play.swap_in(a).in_host) == 1


def test_giving_up_keeps_tokens_and_cached_content(play: Play) -> None:
    s = play.made(6)
    first, second = play.table(s)
    play.give_up(s)
    assert (play.at(s), play.table(s), play.q(s, "num_computed")) == ("WAITING", [], 0)
    assert play.ledger.tokens_of(s).tolist() == [*range(6)]
    assert play.b(second, "device_frame") == 0
    assert play.of("recomputes") == 1
    _, arrays = play.run(s)
    assert arrays.positions.tolist() == [4, 5]
    assert play.table(s)[0] == first
    play.swap_out(s)
    play.give_up(s)
    assert play.pool("num_free", HOST) == 7, "the host copy of a cached block stays"


# --- eviction ------------------------------------------------------------------------------------


def test_the_deepest_of_the_oldest_goes_first(play: Play) -> None:
    a, b = play.made(8), play.made([9] * 8)
    tables = play.table(a), play.table(b)
    play.free(b)
    play.free(a)
    assert play.lru() == [*tables[1][::-1], *tables[0][::-1]]
    count, plan = play.evict(3)
    assert count == 3
    assert plan.out_tokens.tolist() == [4, 4, 4]
    assert play.lru() == tables[0][:1]
    assert play.lru(HOST) == [*tables[1][::-1], tables[0][1]]
    assert play.found(8) == play.found([9] * 8) == 2
    assert play.evict(9)[0] == 1
    assert play.evict(9)[0] == 0


def test_a_hit_brings_host_content_back(play: Play) -> None:
    play.free(play.made(8))
    play.evict(8)
    s = play.create(9)
    assert play.q(s, "num_cached") == 8
    plan, arrays = play.run(s)
    assert plan.in_tokens.tolist() == [4, 4]
    assert arrays.positions.tolist() == [8]
    assert play.q(s, "fence_in") == plan.in_id == plan.step_after_in == 1


def test_leaving_the_last_tier_drops_a_block(play: Play) -> None:
    play.free(play.made(8))
    play.evict(8)
    assert play.evict(1, HOST)[0] == 1
    assert play.found(8) == 1
    assert (play.of("evicted_host"), play.of("dropped")) == (1, 1)
    assert play.evict(5, HOST)[0] == 1
    assert play.found(8) == 0


def test_a_host_copy_goes_while_the_device_frame_stays(play: Play) -> None:
    s = play.made(8)
    play.swap_out(s)
    play.swap_in(s)
    assert play.evict(5, HOST)[0] == 2
    assert play.of("dropped") == 0
    assert len(play.swap_out(s).out_host) == 2


def test_without_write_back_evicted_content_is_dropped(make_play: Maker) -> None:
    play = make_play(8, 8, tier_policy="none")
    play.free(play.made(8))
    count, plan = play.evict(1)
    assert (count, plan.out_id) == (1, 0)
    assert play.found(8) == 1
    assert play.of("dropped") == 1


def test_a_parent_is_kept_while_the_host_tier_caches_its_child(make_play: Maker) -> None:
    """Even without write back: the child could not be found without it (R4)."""
    play = make_play(8, 8, tier_policy="none")
    s = play.made(8)
    play.swap_out(s)
    play.evict(8)
    play.swap_in(s)
    play.free(s)
    parent = play.lru()[1]
    h = play.b(parent, "host_frame")
    play.state.frames["num_tokens"][play.pool("first", HOST) + h] = 2  # as if it had been stale
    play.evict(1)
    _, plan = play.evict(1)
    assert plan.out_tokens.tolist() == [4]
    assert play.found(8) == 2


def test_with_the_host_tier_owned_cached_content_is_dropped(make_play: Maker) -> None:
    play = make_play(8, 2)
    s = play.made(8)
    play.swap_out(s)
    play.free(play.made([9] * 4))
    assert play.found([9] * 4) == 1
    play.evict(8)
    assert play.found([9] * 4) == 0
    assert play.of("dropped") == 1
    play.swap_in(s)


def test_an_incomplete_host_copy_goes_with_its_block(make_play: Maker) -> None:
    play = make_play(8, 8, tier_policy="none")
    s = play.made(3)
    play.swap_out(s)
    play.append(s, 3)
    play.run(s)
    (block,) = play.table(s)
    assert (play.b(block, "num_tokens"), play.host_frame(block, "num_tokens")) == (4, 3)
    play.free(s)
    play.evict(1)
    assert play.pool("num_free", HOST) == 8
    assert play.found(4) == 0


def test_an_incomplete_host_copy_is_completed(play: Play) -> None:
    s = play.made(3)
    play.swap_out(s)
    play.append(s, 3)
    play.run(s)
    (block,) = play.table(s)
    h = play.b(block, "host_frame")
    play.free(s)
    _, plan = play.evict(1)
    assert (plan.out_host.tolist(), plan.out_tokens.tolist()) == ([h], [4])
    assert play.found(4) == 1


def test_a_host_frame_taken_again_in_the_same_plan_is_written_once(make_play: Maker) -> None:
    play = make_play(8, 2)
    play.free(play.made(16))
    count, plan = play.evict(4)
    assert count == 4
    assert sorted(plan.out_host.tolist()) == [1, 2]
    assert plan.out_tokens.tolist() == [4, 4]
    assert play.of("blocks_out") == 2
    assert play.found(16) == 2
    assert play.of("dropped") == 2


def test_sources_of_copies_in_are_not_overwritten_by_the_same_plan(make_play: Maker) -> None:
    """Evicting for an arrival needs host frames; those being read are not among them."""
    play = make_play(3, 2)
    s = play.made(8)
    play.swap_out(s)
    play.evict(3)
    play.free(play.made([9] * 12))  # dirty, and no host frame to be had for it
    plan = play.swap_in(s)
    assert len(plan.in_host) == 2
    assert not set(plan.in_host.tolist()) & set(plan.out_host.tolist())
    assert play.of("blocks_out") == 2
    play.append(s, 1)
    play.run(s)


def test_vacated_frames_are_listed_for_poison(make_play: Maker) -> None:
    play = make_play(4, 4, fills=True)
    s = play.made(6)
    frames = [play.b(b, "device_frame") for b in play.table(s)]
    plan = play.free(s)
    assert plan.fill_frames.tolist() == frames[1:], "the other is still cached"
    assert plan.out_id == 1
    _, plan = play.evict(1)
    assert plan.fill_frames.tolist() == frames[:1]
    assert plan.out_tokens.tolist() == [4], "copied first, poisoned then"
    assert (plan.out_id, plan.out_after_step) == (2, 1)
    plan, _ = play.run(play.create([9] * 16))
    assert plan.step_after_out == 2


def test_orders_of_copies_over_one_frame(make_play: Maker) -> None:
    """Out, in and out again: each copy names what it has to wait for (R3, R6)."""
    play = make_play(2, 2)
    a = play.made(8)
    plan = play.swap_out(a)
    assert (plan.out_id, plan.out_after_step, plan.out_after_in) == (1, 1, 0)
    b = play.made([9] * 8)
    play.give_up(b)
    play.evict(2)
    plan = play.swap_in(a)
    assert (plan.in_id, plan.in_after_step, plan.in_after_out) == (1, 2, 1)
    play.free(a)
    plan, _ = play.run(play.create([8] * 4))
    assert plan.out_id == 0, "clean"
    assert (plan.step_after_in, plan.step_after_out) == (1, 1)
    c = play.made([6] * 4)
    plan = play.swap_out(c)
    assert plan.out_after_in == 1, "its host frame was read by the copy in"


def test_peaks_are_the_most_ever_used(play: Play) -> None:
    s = play.made(20)
    play.swap_out(s)
    play.free(s)
    play.evict(8, DEVICE)
    play.evict(8, HOST)
    assert (play.pool("peak"), play.pool("peak", HOST)) == (5, 5)
    play.ledger.retire(1, 0)
    assert play.of("retired_out") == 1


def test_the_device_alone(make_play: Maker) -> None:
    play = make_play(4, 0, tier_policy="none")
    s = play.made(8)
    with pytest.raises(Refusal) as refused:
        play.ledger.swap_out(ids(s))
    assert (refused.value.code, refused.value.available) == (decide.NO_HOST_ROOM, 0)
    play.free(s)
    play.run(play.create([9] * 16))
    assert play.found(8) == 0
