"""Every array that grows does so without changing what it holds; numbers are used again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvmem.ledger.growth import span_capacity
from kvmem.ledger.state import GROUP, metadata_bytes_per_block
from tests.ledger.play import Play, counts, ids


def test_token_spans_move_with_their_tokens(play: Play) -> None:
    lists: dict[int, list[int]] = {play.create([s]): [s] for s in range(5)}
    size = len(play.state.tokens)
    for i in range(60):
        for s, tokens in lists.items():
            more = [i, s, *range(i)]
            play.ledger.append(ids(s), counts(len(more)), ids(*more), False)
            tokens += more
    assert len(play.state.tokens) > size
    play.ledger.verify()
    for s, tokens in lists.items():
        assert play.ledger.tokens_of(s).tolist() == tokens


def test_accept_grows_tokens_too(play: Play) -> None:
    s = play.made(1)
    play.append(s, *range(2062), draft=True)
    size = len(play.state.tokens)
    others = []
    while play.of("tokens_top") + 2 * span_capacity(1000) <= size:
        others.append(play.create(1000))
    play.ledger.append(ids(s), counts(1), ids(5), True)
    play.accept(s, 2063, 77)  # length 2065 needs a span of the next class
    assert len(play.state.tokens) > size
    assert play.ledger.tokens_of(s).tolist() == [0, *range(2062), 5, 77]
    assert all(play.ledger.tokens_of(o).tolist() == [*range(1000)] for o in others)


def test_the_keys_of_extras_move_along(play: Play) -> None:
    s = play.create([1] * 10, keys=ids(*[-5] * 10))
    for i in range(40):
        play.append(s, i, i)
    q = play.state.sequences[s]
    start = int(q["keys_start"])
    assert start != q["tokens_start"]
    assert play.state.tokens[start : start + 12].tolist() == [-5] * 10 + [0, 0]
    assert play.ledger.tokens_of(s)[:12].tolist() == [1] * 10 + [0, 0]
    freed = {int(q["keys_start"]), int(q["tokens_start"])}
    play.free(s)
    again = play.create(90, keys=ids(*range(90)))
    assert {play.q(again, "keys_start"), play.q(again, "tokens_start")} == freed


def test_records_of_sequences_grow(play: Play) -> None:
    made = [play.ledger.create(ids(s), namespace=b"") for s in range(70)]
    assert len(set(made)) == 70
    assert len(play.state.sequences) == len(play.state.tables) > 65
    assert [play.ledger.tokens_of(s).tolist() for s in made] == [[s] for s in range(70)]
    arrivals = [play.q(s, "arrival") for s in made]
    assert arrivals == sorted(arrivals)
    children = play.fork(made[0], 80)
    assert len(set(children) | set(made)) == 150


def test_tables_and_lists_grow_while_planning(make_play: Callable[..., Play]) -> None:
    """One plan finds both too short and is made all the same, once."""
    play = make_play(320, 0, 1, tier_policy="none")
    before = len(play.state.table), len(play.state.out_list)
    s = play.create(300)
    plan, arrays = play.run(s)
    assert len(arrays.tokens) == 300
    assert plan.step_epoch == 1, "planned once however often it was tried"
    assert len(play.state.table) > before[0]
    assert len(play.state.out_list) > before[1]
    assert len(play.state.frame_table) == len(play.state.table)


def test_the_list_of_found_blocks_grows_while_planning(make_play: Callable[..., Play]) -> None:
    play = make_play(210, 0, 1, tier_policy="none")
    play.free(play.made(200))
    a, b = play.create(200), play.create([*range(200), 5])
    assert len(play.ledger._found) == 256
    _, arrays = play.run(a, b)
    assert len(play.ledger._found) >= 400
    assert arrays.num_tokens.tolist() == [1, 1]
    assert play.table(a) == play.table(b)[:200]


def test_a_table_that_outgrows_its_span_moves(make_play: Callable[..., Play]) -> None:
    play = make_play(90, 0, 1, tier_policy="none")
    seqs = [play.made([s, *range(14)]) for s in range(2)]
    for i in range(20):
        for s in seqs:
            before = play.table(s)
            play.append(s, 50 + i)
            play.run(s)
            assert play.table(s)[:-1] == before
    assert play.pool("num_free") == 20
    spans = sorted(int(play.state.tables["start"][s, GROUP]) for s in seqs)
    assert spans[1] - spans[0] >= 64
    play.free(seqs[0])
    assert play.table(play.made(3, b"new"))[0] > 0


def test_growing_leaves_open_steps_alone(make_play: Callable[..., Play]) -> None:
    play = make_play(520, 0, 1, tier_policy="none")
    a = play.create(3)
    _, first = play.plan(a)
    frames = first.frame_table[first.table_start[0] :][:3].tolist()
    b = play.create([7, *range(500)])
    _, second = play.plan(b)
    assert first.frame_table is not second.frame_table
    assert first.frame_table[first.table_start[0] :][:3].tolist() == frames
    play.end(first)
    play.end(second)
    assert play.found(3) == 3


def test_plan_lists_grow_with_what_a_swap_moves(make_play: Callable[..., Play]) -> None:
    play = make_play(100, 100, 1)
    s = play.made(90)
    play.state.out_list[:] = 0
    plan = play.swap_out(s)
    assert sorted(plan.out_device.tolist()) == [*range(1, 91)]
    assert len(set(plan.out_host.tolist())) == 90
    play.evict(100)
    assert len(play.swap_in(s).in_device) == 90


def test_the_hashes_of_one_step_grow(make_play: Callable[..., Play]) -> None:
    play = make_play(64, 0, 1, tier_policy="none")
    seqs = [play.create([q, *range(6)]) for q in range(6)]
    _, arrays = play.run(*seqs, max_tokens=1000)
    assert len(arrays.num_tokens) == 6
    assert len(play.ledger._hashes) > 16


def test_tables_of_many_forks_find_room(make_play: Callable[..., Play]) -> None:
    play = make_play(40, 0, 1, tier_policy="none")
    s = play.made(33)
    children = play.fork(s, 12)
    assert len(play.state.table) >= 13 * 64
    assert all(play.table(c) == play.table(s) for c in children)


def test_numbers_of_unused_namespaces_are_used_again(play: Play) -> None:
    size = len(play.state.namespaces)
    kept = play.made(4, b"kept")
    number = play.q(kept, "namespace")
    for i in range(40):
        play.free(play.create(3, b"%d" % i))
    assert len(play.state.namespaces) <= 2 * size, "room for those in use, no more"
    assert play.q(kept, "namespace") == number
    assert play.found(4, b"kept") == 1


def test_many_live_namespaces_grow_the_records(play: Play) -> None:
    seqs = [play.create([i], b"%d" % i) for i in range(40)]
    numbers = {play.q(s, "namespace") for s in seqs}
    assert len(numbers) == 40
    assert 0 not in numbers
    assert len(play.state.namespaces) > 40
    assert play.state.namespaces["num_sequences"].sum() == 40
    assert play.ledger.namespace_id(b"17") == play.q(seqs[17], "namespace")


def test_cached_content_keeps_its_namespace_alive(play: Play) -> None:
    play.free(play.made(4, b"cached"))
    for i in range(30):
        play.free(play.create(3, b"%d" % i))
    assert play.ledger.knows_namespace(b"cached")
    assert play.found(4, b"cached") == 1
    assert play.found(4, b"29") == 0


@pytest.mark.parametrize("block_size", [1, 64, 1024])
def test_a_block_costs_few_bytes_of_records(block_size: int) -> None:
    state = Play(100, 100, block_size).state
    fixed = ("blocks", "frames", "nodes", "node_blocks", "index")
    total = sum(getattr(state, name).nbytes for name in fixed)
    assert total <= 201 * metadata_bytes_per_block(block_size) + 200
    assert metadata_bytes_per_block(block_size) <= 96
    assert np.asarray(state.node_keys).shape == (201, block_size)
    assert state.tables.shape[1] == GROUP + 1


def test_links_reach_over_freed_spans_of_each_class(play: Play, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = {play.create(int(n)): int(n) for n in rng.integers(1, 300, 20)}
    for s in list(lengths)[::2]:
        play.free(s)
        del lengths[s]
    top = play.of("tokens_top")
    small = [play.create(2) for _ in range(3)]
    for s, n in lengths.items():
        assert play.ledger.tokens_of(s).tolist() == [*range(n)]
    assert play.of("tokens_top") - top <= 16 * len(small)
