"""Publishing and merging: complete, accepted blocks only, each content once (R4, R5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmem.ledger import Refusal, decide
from kvmem.ledger.state import GROUP, HOST
from tests.ledger.play import Play, ids


def test_full_blocks_are_published_when_the_step_ends(play: Play) -> None:
    s = play.create(9)
    _, arrays = play.plan(s)
    assert play.found(9) == 0, "not yet computed"
    play.end(arrays)
    assert play.found(9) == play.of("published") == play.q(s, "num_published") == 2
    first, second, third = play.table(s)
    assert play.state.nodes["parent"][play.b(second, "node")] == play.b(first, "node")
    assert play.state.nodes["parent"][play.b(first, "node")] == -play.q(s, "namespace")
    assert play.b(third, "node") == 0


def test_block_by_block(play: Play) -> None:
    s = play.create(3)
    for i in range(3, 9):
        play.run(s)
        assert play.q(s, "num_published") == i // 4
        play.append(s, i)


def test_on_wish_nothing_is_published(play: Play) -> None:
    s = play.made(8, publish=False)
    assert play.found(8) == 0
    play.free(s)
    assert play.pool("num_free") == 8, "nobody could find it again"


def test_who_does_not_publish_finds(play: Play) -> None:
    s, t = play.made(8), play.made([*range(8), 9, 9, 9, 9], publish=False)
    assert play.table(t)[:2] == play.table(s)
    assert play.found([*range(8), 9, 9, 9, 9]) == 2


def test_equal_blocks_of_one_step_merge(play: Play) -> None:
    a, b = play.create(9), play.create(9)
    play.run(a, b)
    assert play.table(a)[:2] == play.table(b)[:2]
    assert play.table(a)[2] != play.table(b)[2]
    assert play.of("merged") == play.of("published") == 2
    assert [play.b(x, "ref_count") for x in play.table(a)] == [2, 2, 1]
    assert play.pool("num_free") == 4
    play.append(b, 1)
    _, arrays = play.run(b)
    block = play.table(b)[0]
    start = int(arrays.table_start[0])
    assert arrays.frame_table[start] == play.b(block, "device_frame"), "the table was patched"


def test_a_merge_waits_for_the_arrival_of_the_published_block(
    make_play: Callable[..., Play],
) -> None:
    play = make_play(6, 6)
    a = play.made(4)
    play.swap_out(a)
    play.evict(6)
    b = play.create(4, max_cached=0)
    _, arrays = play.plan(b)
    assert play.swap_in(a).in_id == 1
    play.end(arrays)
    assert play.table(a) == play.table(b)
    play.append(b, 9)
    plan, _ = play.run(b)
    assert plan.step_after_in == 1


def test_a_block_without_device_frame_adopts_that_of_its_duplicate(
    make_play: Callable[..., Play],
) -> None:
    play = make_play(4, 4)
    a = play.made(8)
    play.swap_out(a)
    play.evict(4)
    b = play.create(8, max_cached=0)
    play.run(b)
    assert play.table(b) == play.table(a)
    for block in play.table(a):
        assert play.b(block, "device_frame") > 0
        assert play.b(block, "host_frame") > 0
        assert (play.b(block, "ref_count"), play.b(block, "num_resident")) == (2, 1)
    assert len(play.swap_in(a).in_host) == 0
    assert play.pool("num_free") == 2


def drafted_pair(play: Play) -> tuple[int, int, int]:
    """A SWAPPED owner of a published block, and two forks of an equal one, held back by drafts."""
    a = play.made(4)
    play.swap_out(a)
    b = play.create(3)
    play.append(b, 3, draft=True)
    play.run(b)
    (c,) = play.fork(b)
    return a, b, c


def test_a_shared_duplicate_cannot_give_its_frame_away(play: Play) -> None:
    a, b, c = drafted_pair(play)
    play.evict(8)
    play.accept(b, 1, 50)
    assert play.table(b) == play.table(c) != play.table(a)
    assert play.q(b, "num_published") == 0
    play.accept(c, 1, 51)
    play.free(c)
    play.run(b)
    assert play.table(b)[0] == play.table(a)[0], "now it is its own to give"


def test_a_shared_duplicate_waits_until_it_is_nobody_elses(play: Play) -> None:
    """Else the fork's next blocks would hang on a block that the fork does not hold (R4)."""
    a, b, c = drafted_pair(play)
    play.accept(b, 1, 50)
    assert play.table(b)[0] == play.table(c)[0] != play.table(a)[0]
    assert play.q(b, "num_published") == 0
    play.free(c)
    play.run(b)
    assert play.table(b)[0] == play.table(a)[0]


def test_a_pinned_duplicate_keeps_its_frame(play: Play) -> None:
    a, b, c = drafted_pair(play)
    play.free(c)
    play.evict(8)
    play.pin(play.table(b)[0])
    play.accept(b, 1, 50)
    assert play.table(b)[0] != play.table(a)[0]


def test_a_fork_may_have_published_first(play: Play) -> None:
    b = play.create(6)
    play.append(b, 6, 7, draft=True)
    play.run(b)
    (c,) = play.fork(b)
    play.accept(b, 2, 50)
    assert play.q(b, "num_published") == 2
    assert play.q(c, "num_published") == 1
    play.accept(c, 2, 51)
    assert play.q(c, "num_published") == 2
    assert play.of("published") == 2
    assert play.table(b)[:2] == play.table(c)[:2]


def test_another_prefix_does_not_pass_for_ones_own(play: Play) -> None:
    """As if block 1 had been published behind other tokens."""
    b = play.create(6)
    play.append(b, 6, 7, draft=True)
    play.run(b)
    (c,) = play.fork(b)
    play.accept(b, 2, 50)
    node = play.b(play.table(b)[1], "node")
    play.state.sequences["num_published"][c] = 0
    parent = int(play.state.nodes["parent"][node])
    play.state.nodes["parent"][node] = -1
    play.ledger.accept(ids(c), ids(2).astype("i8"), ids(51))
    assert play.q(c, "num_published") == 1
    play.state.nodes["parent"][node] = parent


def test_a_swapped_sequence_publishes_nothing(play: Play) -> None:
    s = play.create(3)
    play.append(s, 3, draft=True)
    play.run(s)
    play.swap_out(s)
    play.accept(s, 1, 4)
    assert play.q(s, "num_published") == 0
    play.run(s)
    assert play.q(s, "num_published") == 1
    assert play.found(4) == 1


def test_rejected_drafts_leave_no_trace_in_the_trie(play: Play) -> None:
    s = play.create(2)
    play.append(s, *range(90, 97), draft=True)
    play.run(s)
    assert play.of("num_nodes") == 0
    play.accept(s, 2, 7)
    play.append(s, 8, 9, 10)
    play.run(s)
    assert play.found([0, 1, 90, 91, 7, 8, 9, 10]) == 2
    assert play.found([0, 1, *range(90, 96)]) == 1
    assert play.of("num_nodes") == 2


# --- reset and pins ------------------------------------------------------------------------------


def test_reset_forgets_one_namespace(play: Play) -> None:
    play.free(play.made(8, b"a"))
    kept = play.made(8, b"b")
    waiting = play.create(8, b"a")
    assert play.q(waiting, "num_cached") == 8
    play.reset(b"unknown")
    assert play.found(8, b"a") == 2
    play.reset(b"a")
    assert play.found(8, b"a") == 0
    assert play.q(waiting, "num_cached") == 0
    assert play.found(8, b"b") == 2
    assert play.q(kept, "publish") == 1
    play.run(waiting)
    assert play.found(8, b"a") == 2, "who had no block yet publishes new content"


@pytest.mark.parametrize("name", [None, b"unknown"])
def test_nothing_is_reset_under_an_open_step(play: Play, name: bytes | None) -> None:
    play.free(play.made(8))
    _, arrays = play.plan(play.create(9))
    with pytest.raises(Refusal) as refused:
        play.ledger.reset(name)
    assert refused.value.code == decide.IN_STEP
    play.end(arrays)
    assert play.found(8) == 2


def test_reset_of_all_goes_through_both_tiers(play: Play) -> None:
    for tokens, name in ((8, b"a"), (12, b"b")):
        play.free(play.made(tokens, name))
    play.evict(3)
    assert play.pool("num_free", HOST) == 5
    play.reset()
    assert play.of("num_nodes") == 0
    assert play.pool("num_free") == play.pool("num_free", HOST) == 8


def test_live_sequences_go_on_but_publish_no_more(play: Play) -> None:
    s, swapped = play.made(8), play.made([9] * 6)
    play.swap_out(swapped)
    table = play.table(s)
    play.reset()
    assert play.table(s) == table
    assert play.q(s, "num_computed") == 8
    play.append(s, 1, 2, 3, 4)
    plan, _ = play.run(s)
    assert len(plan.copy_source) == 0
    assert play.found(8) == 0
    play.run(swapped)
    play.free(s, swapped)
    assert play.pool("num_free") == 8


def test_pins_keep_blocks_on_the_device(play: Play) -> None:
    s = play.made(8)
    first, second = play.table(s)
    play.pin(first, second)
    play.pin(first)
    play.free(s)
    assert play.evict(8)[0] == 0
    assert play.found(8) == 2
    play.pin(first, second, change=-1)
    assert play.lru() == [second]
    play.pin(first, change=-1)
    assert play.lru() == [second, first]


def test_a_pin_alone_owns_an_unpublished_block(play: Play) -> None:
    s = play.made(3)
    (block,) = play.table(s)
    play.pin(block)
    play.free(s)
    assert play.b(block, "device_frame") > 0
    play.pin(block, change=-1)
    assert play.b(block, "device_frame") == 0
    assert play.pool("num_free") == 8


def test_pins_are_counted_in_sixteen_bits(play: Play) -> None:
    s = play.made(8)
    first, second = play.table(s)
    play.pin(second)
    play.state.blocks["num_pins"][second] = 32767
    with pytest.raises(Refusal) as refused:
        play.ledger.change_pins(ids(first, second), 1)
    assert refused.value.code == decide.TOO_MANY_PINS
    assert play.b(first, "num_pins") == 0
    play.state.blocks["num_pins"][second] = 1


def test_nodes_name_one_block_a_group(play: Play) -> None:
    s = play.made(8)
    for block in play.table(s):
        assert play.state.node_blocks[play.b(block, "node"), GROUP] == block
