"""Which rows a step computes, and why others are left out; room is counted by one function (R7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvmem.ledger import Refusal, StepArrays, decide
from kvmem.ledger.raising import REASONS
from tests.ledger.play import Play, ids


def reasons(arrays: StepArrays) -> list[str]:
    return [REASONS[int(r)] for r in arrays.rows["reason"]]


def refused(play: Play, *seqs: int, **options: int) -> Refusal:
    """The refusal of a step over all these rows; nothing changed (R8) and `fits` agrees (R7)."""
    before = play.meaning()
    with pytest.raises(Refusal) as caught:
        play.plan(*seqs, **options)
    assert play.meaning() == before
    said = play.ledger.fits(ids(*seqs), **options)
    assert said == ("never" if caught.value.code == decide.TOO_LONG else "later")
    return caught.value


def test_rows_compute_what_is_pending(play: Play) -> None:
    a, b, c = play.create(5), play.made([9, 9]), play.create([4])
    play.append(b, 7)
    assert play.ledger.fits(ids(a, b, c)) == "yes"
    _, arrays = play.plan(a, b, c)
    assert arrays.tokens.tolist() == [0, 1, 2, 3, 4, 7, 4]
    assert arrays.positions.tolist() == [0, 1, 2, 3, 4, 2, 0]
    assert arrays.query_start.tolist() == [0, 5, 6, 7]
    assert arrays.seq_lens.tolist() == [5, 3, 1]
    assert arrays.num_tokens.tolist() == [5, 1, 1]
    assert arrays.last.tolist() == [4, 5, 6]
    assert arrays.is_ready.tolist() == [True] * 3
    for row, s in enumerate((a, b, c)):
        start = int(arrays.table_start[row])
        for i, block in enumerate(play.table(s)):
            assert arrays.frame_table[start + i] == play.b(block, "device_frame")
    frames = np.repeat(arrays.frame_table[arrays.table_start], [5, 1, 1])
    frames[4] = arrays.frame_table[arrays.table_start[0] + 1]
    assert arrays.slot_mapping.tolist() == (frames * 4 + arrays.positions % 4).tolist()
    play.end(arrays)


def test_nothing_pending_is_idle(play: Play) -> None:
    s, t = play.made(5), play.create(3)
    _, arrays = play.run(s, t)
    assert reasons(arrays) == ["idle", "planned"]
    assert arrays.seq_lens.tolist() == [3]
    _, arrays = play.run(s)
    assert (len(arrays.tokens), len(arrays.last)) == (0, 0)
    _, arrays = play.run()
    assert arrays.query_start.tolist() == [0]


def test_asked_for_less(play: Play) -> None:
    s, t = play.create(7), play.create([9, 9])
    _, arrays = play.run(s, t, num_tokens=ids(3, 0))
    assert reasons(arrays) == ["planned", "idle"]
    assert arrays.is_ready.tolist() == [False]
    assert len(arrays.last) == 0
    _, arrays = play.run(s, num_tokens=ids(100))
    assert arrays.positions.tolist() == [3, 4, 5, 6]
    assert arrays.is_ready.tolist() == [True]


def test_the_budget_is_spent_in_order(play: Play) -> None:
    a, b, c = play.create(5), play.create([9] * 5), play.create([8] * 2)
    _, arrays = play.run(a, b, c, max_tokens=7)
    assert reasons(arrays) == ["planned", "planned", "budget"]
    assert arrays.num_tokens.tolist() == [5, 2]
    assert arrays.is_ready.tolist() == [True, False]
    _, arrays = play.run(b, c, max_tokens=0)
    assert reasons(arrays) == ["budget", "budget"]


def test_a_row_waits_for_what_another_computes(play: Play) -> None:
    a, b = play.create(9), play.create([*range(8), 70])
    early, other = play.create(3), play.create(9, b"other")
    _, arrays = play.run(a, b, early, other, max_tokens=100)
    assert reasons(arrays) == ["planned", "arriving", "planned", "planned"]
    _, arrays = play.run(b, max_tokens=100)
    assert arrays.positions.tolist() == [8]
    assert play.table(b)[:2] == play.table(a)[:2]
    assert play.q(b, "num_cached") == 8


def test_who_does_not_publish_is_not_waited_for(play: Play) -> None:
    a, b = play.create(4, publish=False), play.create(4)
    _, arrays = play.run(a, b, max_tokens=100)
    assert reasons(arrays) == ["planned", "planned"]


def test_a_block_that_is_only_begun_is_waited_for_too(play: Play) -> None:
    a, b = play.create(8), play.create(8)
    play.run(a, b, num_tokens=ids(4, 4))
    _, arrays = play.plan(a, b, num_tokens=ids(2, 4), max_tokens=100)
    assert reasons(arrays) == ["planned", "arriving"]
    play.end(arrays)


def test_no_room_now(make_play: Callable[..., Play]) -> None:
    play = make_play(4, 4)
    kept, s, small = play.made(10), play.create([9] * 9), play.create([8])
    refusal = refused(play, small, s)
    assert (refusal.code, refusal.row) == (decide.NO_DEVICE_ROOM, 1)
    assert (refusal.needed, refusal.available) == (3, 0)
    _, arrays = play.run(s, small, need_all=False)
    assert reasons(arrays) == ["room", "planned"]
    play.free(kept)
    play.free(small)
    assert play.ledger.fits(ids(s)) == "yes"
    play.run(s)


def test_longer_than_the_device(make_play: Callable[..., Play]) -> None:
    play = make_play(2, 8)
    s, t = play.create(9), play.create([9] * 8)
    refusal = refused(play, t, s)
    assert (refusal.code, refusal.row) == (decide.TOO_LONG, 1)
    _, arrays = play.run(s, t, need_all=False)
    assert reasons(arrays) == ["never", "planned"]


def test_reserved_blocks_stay_free(make_play: Callable[..., Play]) -> None:
    play = make_play(4, 4)
    s = play.create(8)
    assert refused(play, s, reserve=3).code == decide.TOO_LONG  # 2 of its own and 3 of 4
    play.run(s, reserve=2)
    refusal = refused(play, s, reserve=3)  # an idle row takes nothing, the reserve is asked for
    assert (refusal.needed, refusal.available) == (3, 2)
    assert play.ledger.fits(ids(s), reserve=5) == "never"
    assert play.ledger.fits(ids(s), reserve=2) == "yes"


def test_a_hit_is_not_room_as_well(make_play: Callable[..., Play]) -> None:
    play = make_play(4, 0, tier_policy="none")
    play.free(play.made(8))
    s = play.create([*range(8), *[9] * 9])
    refusal = refused(play, s)
    assert refusal.code == decide.TOO_LONG
    play.truncate(s, 16)
    assert play.ledger.fits(ids(s)) == "yes"
    t = play.create([7])
    refusal = refused(play, s, t)  # two hits and two new blocks are all there is
    assert (refusal.row, refusal.needed, refusal.available) == (1, 1, 0)
    play.run(s)
    assert play.q(s, "num_cached") == 8


def test_a_shared_block_is_counted_once(make_play: Callable[..., Play]) -> None:
    play = make_play(4, 4)
    s = play.made(8)
    (child,) = play.fork(s)
    play.swap_out(s, child)
    play.evict(4)
    play.append(s, 1)
    play.append(child, 2)
    assert play.ledger.fits(ids(s, child)) == "yes"  # two shared, one own block each
    plan, _ = play.run(s, child)
    assert len(plan.in_host) == 2
    assert play.pool("num_free") == 0


def test_a_hit_of_two_rows_is_counted_once(make_play: Callable[..., Play]) -> None:
    play = make_play(4, 4)
    play.free(play.made(8))
    a, b = play.create([*range(8), 1]), play.create([*range(8), 2])
    assert play.ledger.fits(ids(a, b), reserve=1) == "later"
    _, arrays = play.run(a, b)
    assert arrays.positions.tolist() == [8, 8]
    assert play.pool("num_free") == 0


def test_a_copy_on_write_needs_a_block(make_play: Callable[..., Play]) -> None:
    play = make_play(3, 4)
    s = play.made(10)
    (child,) = play.fork(s)
    play.append(child, 1)
    refusal = refused(play, child)
    assert (refusal.needed, refusal.available) == (1, 0)
    play.free(s)
    play.run(child)
    assert play.of("copied_on_write") == 0


def test_a_full_hit_computes_the_last_token_again(play: Play) -> None:
    first = play.made(8)
    s = play.create(8)
    assert play.q(s, "num_cached") == 8
    _, arrays = play.plan(s)
    assert arrays.positions.tolist() == [7]
    assert arrays.slot_mapping.tolist() == [-1], "its K/V is there and shared (R3)"
    assert arrays.is_ready.tolist() == [True]
    assert play.q(s, "num_stored") == 8
    play.end(arrays)
    assert play.q(s, "num_computed") == 8
    assert play.table(s) == play.table(first)


@pytest.mark.parametrize(("most", "hit"), [(-1, 8), (100, 8), (7, 4), (4, 4), (3, 0), (0, 0)])
def test_hits_are_limited_on_wish(play: Play, most: int, hit: int) -> None:
    play.free(play.made(8))
    s = play.create(10, max_cached=most)
    assert play.q(s, "num_cached") == hit
    play.run(s)
    assert play.q(s, "num_cached") == hit


def test_hits_continue_at_a_block_boundary(play: Play) -> None:
    a, b = play.create(12), play.create(12)
    play.run(b, num_tokens=ids(4))
    play.run(a)
    assert play.table(a)[0] == play.table(b)[0]
    _, arrays = play.run(b)
    assert arrays.positions.tolist() == [11]
    assert play.table(b) == play.table(a)
    assert (play.of("hit_tokens"), play.of("query_tokens")) == (12, 24)


def test_no_hit_inside_a_begun_block_or_behind_an_unpublished_one(play: Play) -> None:
    a, b, c = play.create(12), play.create(12), play.create(12, publish=False)
    play.run(c, num_tokens=ids(4))
    play.run(b, num_tokens=ids(5))
    play.run(a)
    assert len(play.ledger.look_up(b)) == 0
    assert len(play.ledger.look_up(c)) == 0
    _, arrays = play.run(b, c)
    assert arrays.num_tokens.tolist() == [7, 8]


def test_drafts_find_nothing(play: Play) -> None:
    play.free(play.made(8))
    s = play.create(4)
    play.append(s, 4, 5, 6, 7, draft=True)
    _, arrays = play.run(s)
    assert arrays.positions.tolist() == [3, 4, 5, 6, 7]
    assert arrays.slot_mapping[0] == -1
    assert play.q(s, "num_cached") == 4


def test_looking_up_changes_nothing(play: Play) -> None:
    play.free(play.made(8))
    s = play.create(9)
    before = play.meaning()
    assert len(play.ledger.look_up(s)) == 2
    assert play.ledger.fits(ids(s)) == "yes"
    assert play.meaning() == before
    assert play.ledger.blocks_for(9) == 3


def test_rows_whose_hashes_meet_in_the_table_of_a_step(make_play: Callable[..., Play]) -> None:
    """Other hashes are probed past: nobody waits for what nobody computes."""
    play = make_play(90, 0, 1, tier_policy="none")
    seqs = [play.create([i, i + 1, i + 2]) for i in range(30)]
    _, arrays = play.run(*seqs, max_tokens=1000)
    assert arrays.num_tokens.tolist() == [3] * 30


def test_two_open_steps(play: Play) -> None:
    a, b = play.create(6), play.create([9] * 6)
    _, first = play.plan(a)
    _, second = play.plan(b)
    assert (first.epoch, second.epoch) == (1, 2)
    play.end(second)
    assert play.found([9] * 4) == 1
    play.end(first, commit=False)
    assert (play.at(a), play.at(b)) == ("WAITING", "RESIDENT")
