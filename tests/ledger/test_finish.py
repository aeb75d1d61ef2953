"""The end of a step: an abort brings everything back, a commit counts and publishes (R5, R8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvmem.ledger.state import HOST
from tests.ledger.play import Play, ids


def new(play: Play) -> tuple[int, ...]:
    return play.create(6), play.create([9] * 8)


def hits(play: Play) -> tuple[int, ...]:
    play.free(play.made(8))
    return play.create(8), play.create([*range(8), 1])


def one_more(play: Play) -> tuple[int, ...]:
    s, t = play.made(7), play.made([9] * 8)
    play.append(s, 1)
    play.append(t, 1)
    return s, t


def copies(play: Play) -> tuple[int, ...]:
    s = play.made(6)
    (child,) = play.fork(s)
    play.append(s, 1)
    play.append(child, 2)
    return child, s


def cut_into_published(play: Play) -> tuple[int, ...]:
    s, t = play.made(8), play.made(12)
    play.truncate(s, 6)
    play.append(s, 90)
    return s, t


def drafts(play: Play) -> tuple[int, ...]:
    s = play.made(3)
    play.append(s, 7, 8, draft=True)
    return (s,)


def chunk_done(play: Play) -> tuple[int, ...]:
    s, t = play.create(12), play.create(12)
    play.run(s, num_tokens=ids(4))
    play.run(t)
    return (s,)


def given_up(play: Play) -> tuple[int, ...]:
    s = play.made(10)
    play.give_up(s)
    return (s,)


SCENES = [new, hits, one_more, copies, cut_into_published, drafts, chunk_done, given_up]


def same_but_order(before: dict[str, Any], after: dict[str, Any]) -> None:
    """What a hit took from the LRU comes back as its newest: the order may differ."""
    for meaning in (before, after):
        meaning["lru"] = tuple(sorted(blocks) for blocks in meaning["lru"])
    assert after == before


@pytest.mark.parametrize("scene", SCENES, ids=[s.__name__ for s in SCENES])
@pytest.mark.parametrize("again", [False, True])
def test_an_abort_brings_everything_back(
    make_play: Callable[..., Play], scene: Callable[[Play], tuple[int, ...]], again: bool
) -> None:
    play = make_play(12, 12)
    seqs = scene(play)
    before, counters = play.meaning(), (play.of("hit_tokens"), play.of("published"))
    if again:
        play.end(play.plan(*seqs)[1], commit=False)
    _, arrays = play.plan(*seqs)
    assert play.meaning() != before
    play.end(arrays, commit=False)
    same_but_order(before, play.meaning())
    assert (play.of("hit_tokens"), play.of("published")) == counters
    play.run(*seqs)
    for s in seqs:
        assert play.q(s, "num_computed") == play.q(s, "num_tokens")


def test_an_abort_keeps_the_order_of_the_lru(play: Play) -> None:
    play.free(play.made(12))
    before = play.lru()
    s = play.create(13)
    play.end(play.plan(s)[1], commit=False)
    assert play.lru() == before


def test_what_was_swapped_stays_resident_after_an_abort(play: Play) -> None:
    s, t = play.made(6), play.made([9] * 5)
    play.swap_out(s, t)
    play.evict(8)
    play.append(s, 1)
    before = (play.table(s), play.q(s, "num_computed"))
    plan, arrays = play.plan(s)
    assert len(plan.in_host) == 2
    play.end(arrays, commit=False)
    assert (play.table(s), play.q(s, "num_computed")) == before
    assert (play.at(s), play.q(s, "fresh"), play.at(t)) == ("RESIDENT", 1, "SWAPPED")


def test_an_aborted_copy_gives_the_shared_block_back(play: Play) -> None:
    s = play.made(6)
    (child,) = play.fork(s)
    shared = play.table(s)[1]
    play.append(child, 1)
    plan, arrays = play.plan(child)
    copy = play.table(child)[1]
    assert copy != shared
    assert (plan.copy_source.tolist(), plan.copy_target.tolist()) == (
        [play.b(shared, "device_frame")],
        [play.b(copy, "device_frame")],
    )
    assert play.b(shared, "ref_count") == 2, "the step holds it until it ends"
    play.end(arrays, commit=False)
    assert play.table(child) == play.table(s)
    assert play.b(copy, "device_frame") == 0


def test_a_source_freed_meanwhile_goes_with_the_step(play: Play) -> None:
    s = play.made(6)
    (child,) = play.fork(s)
    shared = play.table(s)[1]
    play.append(child, 1)
    _, arrays = play.plan(child)
    play.free(s)
    assert play.b(shared, "ref_count") == 1
    play.end(arrays)
    assert play.b(shared, "device_frame") == 0
    assert play.b(play.table(child)[0], "ref_count") == 1


def test_a_commit_counts_slots_and_queries(play: Play) -> None:
    s = play.create(10)
    _, arrays = play.plan(s, num_tokens=ids(6))
    assert [play.b(b, "num_tokens") for b in play.table(s)] == [0, 0]
    play.end(arrays)
    assert [play.b(b, "num_tokens") for b in play.table(s)] == [4, 2]
    assert play.of("query_tokens") == 10
    play.run(s)
    assert [play.b(b, "num_tokens") for b in play.table(s)] == [4, 4, 2]
    assert play.of("query_tokens") == 10, "at its first step only"
    assert play.q(s, "fresh") == 0


def test_hits_are_counted_when_they_were_of_use(play: Play) -> None:
    play.free(play.made(8))
    s = play.create(9)
    play.end(play.plan(s)[1], commit=False)
    assert play.of("hit_tokens") == 0
    play.run(s)
    assert (play.of("hit_tokens"), play.q(s, "num_cached")) == (8, 8)


def test_the_frames_of_a_step_remember_it(play: Play) -> None:
    s = play.made(6)
    play.append(s, 1, 2, 3)
    _, arrays = play.run(s)
    play.free(s)
    frames = play.state.frames
    used = frames["last_use"][: play.pool("num_frames") + 1]
    assert sorted(used.tolist())[-3:] == [arrays.epoch] * 3
    plan, _ = play.run(play.create([5] * 32))
    assert plan.out_after_step >= arrays.epoch, "the cached ones are copied out after it (R6)"


def test_a_write_waits_for_the_copy_out_of_its_frame(make_play: Callable[..., Play]) -> None:
    play = make_play(2, 8)
    s = play.made(8)
    plan = play.swap_out(s)
    assert (plan.out_id, plan.out_after_step) == (1, 1)
    t = play.create([9] * 5)
    plan, _ = play.run(t)
    assert plan.out_id == 0, "clean: nothing moves"
    assert plan.step_after_out == 1
    play.ledger.retire(1, 0)
    play.swap_out(t)
    plan, _ = play.run(play.create([8]))
    assert plan.step_after_out <= 2


def test_a_step_waits_for_its_arrivals(make_play: Callable[..., Play]) -> None:
    play = make_play(4, 8)
    s = play.made(8)
    play.swap_out(s)
    play.evict(4)
    play.append(s, 1)
    plan, arrays = play.plan(s)
    assert (plan.in_id, plan.step_after_in) == (1, 1)
    assert plan.in_after_out == 1
    assert plan.in_tokens.tolist() == [4, 4]
    play.end(arrays)
    play.append(s, 2)
    plan, _ = play.run(s)
    assert plan.step_after_in == 1, "until it is known to be done"


def test_a_fork_of_an_arriving_sequence_waits_as_well(make_play: Callable[..., Play]) -> None:
    play = make_play(4, 8)
    s = play.made(5)
    play.swap_out(s)
    play.evict(4)
    assert play.swap_in(s).in_id == 1
    (child,) = play.fork(s)
    play.append(child, 1)
    plan, _ = play.run(child)
    assert plan.step_after_in == 1
    assert len(plan.copy_source) == 1


def test_an_abort_after_evictions_loses_only_cached_content(make_play: Callable[..., Play]) -> None:
    play = make_play(4, 2)
    play.free(play.made(16))
    s = play.create([9] * 12)
    before = (play.table(s), play.at(s), play.q(s, "num_cached"))
    _, arrays = play.plan(s)
    play.end(arrays, commit=False)
    assert (play.table(s), play.at(s), play.q(s, "num_cached")) == before
    assert play.pool("num_free") == 3
    assert play.pool("num_free", HOST) == 0
    assert play.found(16) == 3
    assert np.count_nonzero(play.state.blocks["ref_count"]) == 0
