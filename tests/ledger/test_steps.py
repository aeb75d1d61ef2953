"""Deciding, carrying out, committing and aborting a step (R5, R7, R8)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvmem.ledger import Refusal, decide
from kvmem.ledger.state import HOST
from tests.ledger.play import Play, ids


def reasons(play: Play, *seqs: int, **options: Any) -> list[int]:
    """The reasons of a step with fit="some", which is then given up."""
    _, arrays = play.plan(*seqs, need_all=False, **options)
    play.end(arrays, commit=False)
    return [int(r) for r in arrays.rows["reason"]]


# --- what is planned -----------------------------------------------------------------------------


def test_the_arrays_of_a_mixed_step(play: Play) -> None:
    one = play.made(6)
    play.append(one, 60)
    two = play.create([9, 8, 7], b"x")
    _, arrays = play.plan(two, one)
    assert arrays.tokens.tolist() == [9, 8, 7, 60]
    assert arrays.positions.tolist() == [0, 1, 2, 6]
    assert arrays.seq_lens.tolist() == [3, 7]
    assert arrays.query_start.tolist() == [0, 3, 4]
    assert arrays.last.tolist() == [2, 3]
    frames = [
        int(play.state.blocks["device_frame"][b]) for b in (*play.table(two), *play.table(one))
    ]
    assert arrays.slot_mapping.tolist() == [
        frames[0] * 4, frames[0] * 4 + 1, frames[0] * 4 + 2, frames[2] * 4 + 2,
    ]  # fmt: skip
    start = arrays.table_start[1]
    assert arrays.frame_table[start : start + 2].tolist() == frames[1:]


def test_a_full_hit_computes_one_token_and_writes_nothing(play: Play) -> None:
    play.made(8)
    s = play.create(8)
    _, arrays = play.plan(s)
    assert arrays.positions.tolist() == [7]
    assert arrays.slot_mapping.tolist() == [-1]
    assert arrays.seq_lens.tolist() == [8]
    play.end(arrays)
    assert (play.q(s, "num_computed"), play.q(s, "num_stored")) == (8, 8)
    play.append(s, 50)
    _, arrays = play.run(s)
    assert arrays.slot_mapping[0] >= 0


def test_num_tokens_computes_a_part_and_is_not_ready(play: Play) -> None:
    s = play.create(10)
    _, arrays = play.run(s, num_tokens=ids(3))
    assert len(arrays.last) == 0
    assert play.q(s, "num_computed") == 3
    _, arrays = play.run(s)
    assert arrays.positions.tolist() == list(range(3, 10))
    assert arrays.last.tolist() == [6]


def test_a_plan_that_asks_for_more_than_is_pending_gets_what_is_there(play: Play) -> None:
    s = play.create(3)
    _, arrays = play.run(s, num_tokens=ids(9))
    assert len(arrays.tokens) == 3


def test_requests_that_arrive_together_share_what_the_first_computes(play: Play) -> None:
    seqs = [play.create([*range(8), 50 + i]) for i in range(3)]
    _, arrays = play.run(*seqs, max_tokens=100, need_all=False)
    assert arrays.num_tokens.tolist() == [9]
    assert [int(r) for r in arrays.rows["reason"]] == [0, decide.ARRIVING, decide.ARRIVING]
    _, arrays = play.run(*seqs[1:], max_tokens=100)
    assert arrays.num_tokens.tolist() == [1, 1]
    assert play.pool("num_free") == 8 - 2 - 3


def test_an_unpublishing_row_keeps_nobody_waiting(play: Play) -> None:
    one, two = play.create(8, publish=False), play.create(8)
    _, arrays = play.run(one, two, max_tokens=100)
    assert arrays.num_tokens.tolist() == [8, 8]


# --- why a row is left out -----------------------------------------------------------------------


def test_idle(play: Play) -> None:
    s, empty = play.made(4), play.create(0)
    assert reasons(play, s, empty) == [decide.IDLE, decide.IDLE]
    assert reasons(play, play.create(4, b"x"), num_tokens=ids(0)) == [decide.IDLE]


def test_budget(play: Play) -> None:
    one, two = play.create(5), play.create(5, b"x")
    _, arrays = play.plan(one, two, need_all=False, max_tokens=5)
    assert arrays.num_tokens.tolist() == [5]
    assert arrays.rows["reason"].tolist() == [decide.PLANNED, decide.BUDGET]
    play.end(arrays, commit=False)
    _, arrays = play.plan(one, two, max_tokens=7)
    assert arrays.num_tokens.tolist() == [5, 2]
    play.end(arrays, commit=False)
    assert reasons(play, one, max_tokens=0) == [decide.BUDGET]


def test_room(play: Play) -> None:
    one, two = play.create(20), play.create(20, b"x")
    assert reasons(play, one, two) == [decide.PLANNED, decide.ROOM]
    assert reasons(play, one, two, num_tokens=ids(20, 12)) == [decide.PLANNED, decide.PLANNED]
    assert reasons(play, one, reserve=3) == [decide.PLANNED]
    assert reasons(play, one, reserve=4) == [decide.ROOM]


def test_never(play: Play) -> None:
    s = play.create(33)
    assert reasons(play, s) == [decide.NEVER]
    with pytest.raises(Refusal) as caught:
        play.plan(s)
    assert caught.value.code == decide.TOO_LONG
    assert play.ledger.fits(ids(s)) == "never"


def test_a_refused_step_changed_nothing_and_says_what_was_missing(play: Play) -> None:
    one, two = play.create(20), play.create(20, b"x")
    before = play.meaning()
    with pytest.raises(Refusal) as caught:
        play.plan(one, two)
    found = caught.value
    assert (found.code, found.row, found.needed, found.available) == (
        decide.NO_DEVICE_ROOM, 1, 5, 3,
    )  # fmt: skip
    assert play.meaning() == before
    assert not (play.state.blocks["bits"] & 4).any()


def test_hits_are_not_counted_as_free_as_well(play: Play) -> None:
    """R7: 8 cached blocks, all evictable; a row that reuses 5 of them leaves 3 to take."""
    play.free(play.made(20), play.made(12, b"x"))
    s = play.create([*range(20), *range(50, 62)])
    _, arrays = play.plan(s)
    play.end(arrays, commit=False)
    other = play.create(4, b"y")
    assert play.ledger.fits(ids(s, other)) == "later"
    assert play.ledger.fits(ids(s)) == "yes"


def test_a_block_that_two_rows_want_is_counted_once(play: Play) -> None:
    s = play.made(16)
    children = play.fork(s, 3)
    play.swap_out(s, *children)
    play.evict(8)
    for child in children:
        play.append(child, 9)
    need_one_each = 4 + 3
    assert play.ledger.fits(ids(*children), reserve=8 - need_one_each) == "yes"
    assert play.ledger.fits(ids(*children), reserve=9 - need_one_each) == "later"
    plan, _ = play.run(*children)
    assert len(plan.in_device) == 4


def test_fits_agrees_with_the_step_after_it(make_play: Callable[..., Play], seed: int) -> None:
    rng = random.Random(seed)
    play = make_play(6, 6, 2)
    seqs = [play.create([rng.randrange(2) for _ in range(rng.randint(1, 14))]) for _ in range(6)]
    for _ in range(60):
        chosen = rng.sample(seqs, rng.randint(1, 3))
        reserve = rng.choice((0, 0, 1, 7))
        answer = play.ledger.fits(ids(*chosen), reserve=reserve)
        try:
            _, arrays = play.plan(*chosen, reserve=reserve)
        except Refusal as refusal:
            never = refusal.code == decide.TOO_LONG or reserve > 6
            assert answer == ("never" if never else "later")
            resident = [s for s in seqs if play.at(s) == "RESIDENT"]
            if resident:
                play.give_up(rng.choice(resident))
        else:
            assert answer == "yes"
            play.end(arrays, commit=rng.random() < 0.7)


def test_the_spare_blocks_of_an_idle_step_are_checked_too(play: Play) -> None:
    s = play.made(20)
    assert play.ledger.fits(ids(s), reserve=3) == "yes"
    assert play.ledger.fits(ids(s), reserve=4) == "later"
    assert play.ledger.fits(ids(s), reserve=9) == "never"
    assert play.ledger.fits(ids(), reserve=8) == "later"


# --- carrying out --------------------------------------------------------------------------------


def test_no_row_evicts_what_another_row_counted_on(play: Play) -> None:
    play.free(play.made(16))  # four cached blocks, the oldest ones
    hit, fresh = play.create(17), play.create(12, b"x")
    plan, arrays = play.run(fresh, hit)
    assert arrays.num_tokens.tolist() == [12, 1]
    assert len(plan.out_device) == 0
    assert play.pool("num_free") == 0


def test_block_ids_do_not_run_out_when_every_frame_holds_another_block(play: Play) -> None:
    for i in range(20):
        play.free(play.made(5, f"t{i}".encode()))
    assert play.pool("num_free", HOST) == 0
    assert play.of("num_blocks_used") <= 16


def test_the_plan_waits_for_the_last_users_of_a_frame(make_play: Callable[..., Play]) -> None:
    play = make_play(2, 4)
    first = play.made(8)
    plan, _ = play.run(play.create(8, b"x"), need_all=False)
    assert plan.step_after_out == 0
    out = play.swap_out(first)
    assert (out.out_id, out.out_after_step) == (1, 1)
    second = play.create(8, b"x")
    plan, arrays = play.run(second)
    assert plan.step_after_out == 1, "the new owner writes only after the copy out"
    out = play.swap_out(second)
    assert out.out_after_step == arrays.epoch
    into = play.swap_in(first)
    assert (into.in_id, into.in_after_step, into.in_after_out) == (1, arrays.epoch, 2)
    play.append(first, 7)
    assert play.ledger.fits(ids(first)) == "never"
    play.truncate(first, 7)
    play.append(first, 9)
    plan, _ = play.run(first)
    assert plan.step_after_in == 1


def test_a_swapped_row_becomes_resident_in_its_step(play: Play) -> None:
    s = play.made(6)
    play.swap_out(s)
    play.evict(8)
    play.append(s, 9)
    plan, arrays = play.plan(s)
    assert (plan.in_id, len(plan.in_device), plan.step_after_in) == (1, 2, 1)
    assert plan.in_tokens.tolist() == [4, 2]
    assert play.q(s, "fresh") == 1
    play.end(arrays)
    assert play.q(s, "fresh") == 0


def test_poisoned_frames_are_filled_before_their_next_use(make_play: Callable[..., Play]) -> None:
    play = make_play(2, 0, fills=True)
    s = play.made(8, publish=False)
    frames = {int(play.state.blocks["device_frame"][b]) for b in play.table(s)}
    plan = play.free(s)
    assert set(plan.fill_frames.tolist()) == frames
    assert plan.out_after_step == 1
    plan, _ = play.run(play.create(8, b"x"))
    assert plan.step_after_out == 1


def test_two_open_steps(play: Play) -> None:
    one, two = play.create(8), play.create(8, b"x")
    _, first = play.plan(one)
    _, second = play.plan(two)
    assert (first.epoch, second.epoch) == (1, 2)
    play.end(second)
    play.end(first, commit=False)
    assert (play.at(one), play.at(two)) == ("WAITING", "RESIDENT")


# --- committing and aborting ---------------------------------------------------------------------


def test_commit_counts_and_publishes_full_blocks_only(play: Play) -> None:
    s = play.made(10)
    assert [play.b(b, "num_tokens") for b in play.table(s)] == [4, 4, 2]
    assert play.q(s, "num_published") == play.of("published") == 2


def abort_cases() -> dict[str, Callable[[Play], list[int]]]:
    """Ways to a step whose abort has something to restore."""

    def waiting(p: Play) -> list[int]:
        return [p.create(10)]

    def hit(p: Play) -> list[int]:
        p.made(8)
        return [p.create(8), p.create(11)]

    def cached_only(p: Play) -> list[int]:
        p.free(p.made(12))
        return [p.create(12), p.create(13)]

    def grow(p: Play) -> list[int]:
        s = p.made(8)
        p.append(s, 1, 2)
        return [s]

    def inside(p: Play) -> list[int]:
        s = p.made(6)
        p.append(s, 1, 2, 3, 4)
        return [s]

    def copied(p: Play) -> list[int]:
        s = p.made(6)
        children = p.fork(s, 2)
        for child in children:
            p.append(child, 9)
        return [*children]

    def drafts(p: Play) -> list[int]:
        s = p.made(6)
        p.append(s, 1, 2, 3, draft=True)
        return [s]

    def cut_tail(p: Play) -> list[int]:
        s = p.made(8)
        p.truncate(s, 6)
        p.append(s, 9)
        return [s]

    return {
        f.__name__: f for f in (waiting, hit, cached_only, grow, inside, copied, drafts, cut_tail)
    }


@pytest.mark.parametrize("case", abort_cases().values(), ids=abort_cases().keys())
def test_abort_restores_the_meaning_of_every_record(
    play: Play, case: Callable[[Play], list[int]]
) -> None:
    seqs = case(play)
    before = play.meaning()
    _, arrays = play.plan(*seqs)
    assert play.meaning() != before
    play.end(arrays, commit=False)
    after = play.meaning()
    for key in before:
        assert after[key] == before[key], key
    play.run(*seqs)


def test_abort_leaves_a_swapped_row_resident(play: Play) -> None:
    s = play.made(6)
    play.append(s, 9)
    play.swap_out(s)
    play.evict(8)
    table = play.table(s)
    _, arrays = play.plan(s)
    play.end(arrays, commit=False)
    assert play.at(s) == "RESIDENT"
    assert play.table(s) == table
    assert (play.q(s, "num_computed"), play.q(s, "fresh")) == (6, 1)


def test_abort_of_a_sequence_freed_inside(play: Play) -> None:
    (s,) = [play.create(8)]
    _, arrays = play.plan(s)
    play.free(s)
    play.end(arrays, commit=False)
    assert play.pool("num_free") == 8
    assert play.found(8) == 0


def test_abort_of_an_eviction_costs_only_the_cache(play: Play) -> None:
    """R8: unreferenced cached content may have gone."""
    play.free(play.made(32))
    s = play.create(20, b"x")
    _, arrays = play.plan(s)
    play.end(arrays, commit=False)
    assert play.at(s) == "WAITING"
    assert play.pool("num_free") == 5


def test_arrays_of_an_empty_step(play: Play) -> None:
    _, arrays = play.run()
    assert (arrays.epoch, len(arrays.tokens), arrays.query_start.tolist()) == (1, 0, [0])
    assert np.asarray(arrays.last).shape == (0,)
