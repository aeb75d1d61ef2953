"""Room is what the decision counted: no more is taken, and what is taken is waited for (R3, R7)."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvmem.ledger import Refusal, decide
from kvmem.ledger.state import HOST
from tests.ledger.play import Play, ids


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


def test_poisoned_frames_are_filled_before_their_next_use(make_play: Callable[..., Play]) -> None:
    play = make_play(2, 0, fills=True)
    s = play.made(8, publish=False)
    frames = {int(play.state.blocks["device_frame"][b]) for b in play.table(s)}
    plan = play.free(s)
    assert set(plan.fill_frames.tolist()) == frames
    assert plan.out_after_step == 1
    plan, _ = play.run(play.create(8, b"x"))
    assert plan.step_after_out == 1
