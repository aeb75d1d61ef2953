"""Create, append, accept, truncate, fork, free: lengths, references, tails (R2, R3, R4)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvmem.ledger import Refusal, decide
from tests.ledger.play import Play, counts, ids


def refusal(call: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def test_create_claims_nothing(play: Play) -> None:
    s = play.create(9)
    assert (play.at(s), play.table(s), play.q(s, "num_tokens")) == ("WAITING", [], 9)
    assert play.pool("num_free") == 8
    assert play.ledger.is_live(s)
    play.free(s)
    assert not play.ledger.is_live(s)


def test_the_hit_is_a_forecast_until_the_first_step(play: Play) -> None:
    play.made(9)
    s = play.create(12)
    assert play.q(s, "num_cached") == 8
    assert play.q(s, "queried") == 0
    play.run(s)
    assert play.q(s, "num_cached") == 8
    assert (play.of("hit_tokens"), play.of("query_tokens")) == (8, 9 + 12)


def test_max_cached_limits_the_hit_in_whole_blocks(play: Play) -> None:
    play.made(13)
    for limit, expected in ((0, 0), (3, 0), (4, 4), (11, 8), (-1, 12)):
        s = play.create(13, max_cached=limit)
        assert play.q(s, "num_cached") == expected
        play.free(s)


def test_append_and_drafts(play: Play) -> None:
    s = play.made(4)
    play.append(s, 8, 9)
    play.append(s, 5, draft=True)
    assert play.ledger.tokens_of(s).tolist() == [0, 1, 2, 3, 8, 9, 5]
    assert play.q(s, "num_drafts") == 1
    before = play.meaning()
    assert refusal(lambda: play.append(s, 7)).code == decide.DRAFTS_PENDING
    assert play.meaning() == before
    play.append(s, 6, draft=True)
    assert play.q(s, "num_drafts") == 2


def test_append_in_an_open_step_waits_for_the_next(play: Play) -> None:
    s = play.create(4)
    _, arrays = play.plan(s)
    play.append(s, 9)
    play.end(arrays)
    assert (play.q(s, "num_computed"), play.q(s, "num_tokens")) == (4, 5)


def test_accept_keeps_the_first_drafts(play: Play) -> None:
    s = play.made(6)
    play.append(s, 10, 11, 12, draft=True)
    play.run(s)
    assert play.q(s, "num_published") == 1  # 0-3; a block with drafts is not
    play.accept(s, 2, 20)
    assert play.ledger.tokens_of(s).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 20]
    assert play.q(s, "num_published") == 2
    assert play.q(s, "num_computed") == 8
    assert play.found([0, 1, 2, 3, 4, 5, 10, 11]) == 2


def test_drafts_that_were_dropped_are_never_found(play: Play) -> None:
    s = play.made(3)
    play.append(s, 9, 9, 9, 9, 9, draft=True)
    play.run(s)
    assert play.found([0, 1, 2, 9]) == 0
    play.accept(s, 0, 3)
    assert play.q(s, "num_stored") == 3
    assert len(play.table(s)) == 1
    play.run(s)
    assert play.found([0, 1, 2, 9]) == 0
    assert play.found([0, 1, 2, 3]) == 1


def test_accept_refusals_name_the_row(play: Play) -> None:
    one, two = play.made(4), play.made(4, b"x")
    play.append(one, 1, draft=True)
    before = play.meaning()
    found = refusal(lambda: play.ledger.accept(ids(one, two), counts(1, 1), ids(1, 1)))
    assert (found.code, found.row, found.available) == (decide.TOO_MANY_ACCEPTED, 1, 0)
    _, arrays = play.plan(one)
    assert refusal(lambda: play.accept(one, 1, 1)).code == decide.IN_STEP
    play.end(arrays, commit=False)
    assert play.meaning() == before


def test_truncate_gives_back_blocks_and_unpublishes_the_tail(play: Play) -> None:
    s = play.made(11)
    play.truncate(s, 6)
    assert (play.q(s, "num_stored"), len(play.table(s)), play.q(s, "num_published")) == (6, 2, 1)
    assert play.b(play.table(s)[1], "num_tokens") == 2
    assert play.found(8) == 1  # its second node went with the cut
    play.truncate(s, 0)
    assert play.table(s) == []
    assert play.found(4) == 1  # the first block is only cached now


def test_truncate_of_pending_tokens_touches_no_block(play: Play) -> None:
    s = play.made(5)
    play.append(s, 7, 7, 7)
    before = play.table(s)
    play.truncate(s, 6)
    assert (play.table(s), play.q(s, "num_computed"), play.q(s, "num_tokens")) == (before, 5, 6)


def test_a_cut_shared_tail_stays_published_and_is_copied_at_the_next_write(play: Play) -> None:
    s = play.made(8)
    other = play.create(9)
    play.run(other)
    shared = play.table(s)[1]
    play.truncate(s, 6)
    assert play.b(shared, "node") != 0
    play.append(s, 30)
    plan, _ = play.run(s)
    assert len(plan.copy_source) == 1
    assert plan.copy_tokens.tolist() == [2]
    assert play.table(s)[1] != shared
    assert play.found(8) == 2


def test_a_pinned_tail_is_not_unpublished(play: Play) -> None:
    s = play.made(8)
    play.pin(play.table(s)[1])
    play.truncate(s, 7)
    assert play.found(8) == 2
    play.append(s, 9)
    plan, _ = play.run(s)
    assert len(plan.copy_source) == 1


def test_a_tail_with_children_is_not_unpublished(play: Play) -> None:
    s = play.made(12)
    other = play.create(12)
    play.run(other)
    play.truncate(s, 4)
    play.free(other)
    play.truncate(s, 3)
    assert play.found(12) == 3


def test_a_cut_host_copy_does_not_pass_for_clean(play: Play) -> None:
    s = play.made(7)
    play.swap_out(s)
    play.swap_in(s)
    b = play.table(s)[1]
    assert play.host_frame(b, "num_tokens") == 3
    play.truncate(s, 5)
    assert play.host_frame(b, "num_tokens") == 1
    play.append(s, 8, 9)
    play.run(s)
    plan = play.swap_out(s)
    assert plan.out_tokens.tolist() == [3]


def test_fork_shares_every_block_and_counts_it(play: Play) -> None:
    s = play.made(10)
    play.append(s, 5, draft=True)
    children = play.fork(s, 3)
    for child in children:
        assert play.table(child) == play.table(s)
        assert play.ledger.tokens_of(child).tolist() == play.ledger.tokens_of(s).tolist()
        assert play.q(child, "num_drafts") == 1
    assert {play.b(b, "ref_count") for b in play.table(s)} == {4}
    assert {play.b(b, "num_resident") for b in play.table(s)} == {4}


def test_writing_after_a_fork_copies_only_the_filled_slots(play: Play) -> None:
    s = play.made(6)
    (child,) = play.fork(s)
    source = play.device_frame(play.table(s)[1], "block")
    play.append(child, 9)
    plan, arrays = play.plan(child)
    assert plan.copy_tokens.tolist() == [2]
    assert play.b(source, "ref_count") == 2  # the step holds it until it ends
    target = int(plan.copy_target[0])
    assert arrays.slot_mapping.tolist() == [target * 4 + 2]
    play.end(arrays)
    assert play.b(source, "ref_count") == 1
    play.append(s, 8)
    plan, _ = play.run(s)
    assert len(plan.copy_source) == 0  # alone again


def test_fork_of_a_swapped_sequence_claims_no_frames(play: Play) -> None:
    s = play.made(6)
    play.swap_out(s)
    (child,) = play.fork(s)
    assert play.at(child) == "SWAPPED"
    assert {play.b(b, "num_resident") for b in play.table(child)} == {0}
    play.free(s)
    play.evict(8)
    play.swap_in(child)
    assert play.at(child) == "RESIDENT"


def test_fork_keeps_the_keys_of_extras(play: Play) -> None:
    keys = ids(0, 1, -7, 3, 4)
    s = play.made(5, keys=keys)
    (child,) = play.fork(s)
    play.append(child, 6)
    start = play.q(child, "keys_start")
    assert start != play.q(child, "tokens_start")
    assert play.state.tokens[start : start + 6].tolist() == [0, 1, -7, 3, 4, 6]
    assert play.found(4) == 0
    other = play.create(5, keys=keys)
    assert play.q(other, "num_cached") == 4


def test_keys_move_with_the_tokens_when_they_outgrow_their_span(play: Play) -> None:
    s = play.create(16, keys=ids(*range(-16, 0)))
    for token in range(20):
        play.append(s, token)
    start = play.q(s, "keys_start")
    assert play.state.tokens[start : start + 36].tolist() == [*range(-16, 0), *range(20)]


def test_fork_and_truncate_refuse_an_open_step(play: Play) -> None:
    s = play.create(6)
    _, arrays = play.plan(s)
    assert refusal(lambda: play.fork(s)).code == decide.IN_STEP
    assert refusal(lambda: play.truncate(s, 1)).code == decide.IN_STEP
    assert refusal(lambda: play.swap_out(s)).code == decide.IN_STEP
    assert refusal(lambda: play.give_up(s)).code == decide.IN_STEP
    play.end(arrays)


def test_free_in_an_open_step_ends_with_it(play: Play) -> None:
    s = play.create(6)
    _, arrays = play.plan(s)
    play.free(s)
    assert not play.ledger.is_live(s)
    assert play.pool("num_free") == 6
    play.end(arrays)
    assert play.of("num_sequences") == 0
    assert play.found(6) == 1  # what it computed is cached


def test_freed_blocks_are_evictable_deepest_first(play: Play) -> None:
    s = play.made(13)
    table = play.table(s)
    play.free(s)
    assert play.lru() == table[2::-1]
    assert play.pool("num_free") == 8 - 3  # the partial block is not cached


def test_records_are_used_again_and_start_afresh(play: Play) -> None:
    s = play.made(6, priority=3, max_cached=2, publish=False)
    play.swap_out(s)
    play.free(s)
    again = play.create(2)
    assert again == s
    fields = (
        "priority",
        "num_swaps",
        "num_computed",
        "step",
        "at_end",
        "lost",
        "fresh",
        "num_drafts",
    )
    assert [play.q(again, f) for f in fields] == [0] * len(fields)
    assert (play.q(again, "max_cached"), play.q(again, "publish")) == (-1, 1)
    assert play.q(again, "arrival") == 2


def test_tokens_of_is_a_copy(play: Play) -> None:
    s = play.create(3)
    play.ledger.tokens_of(s)[0] = 99
    assert play.ledger.tokens_of(s)[0] == 0
    assert play.ledger.tokens_of(s).dtype == np.int32
