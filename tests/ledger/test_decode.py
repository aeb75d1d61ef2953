"""The plain decode batch: the short way (decode.py) leaves what the general way would."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvmem.ledger import Refusal, StepArrays
from kvmem.ledger.decide import ARRIVING, PLANNED
from kvmem.ledger.state import RESIDENT
from tests.ledger.play import Play, ids

ARRAYS = (
    "tokens", "positions", "slot_mapping", "seq_lens", "query_start", "table_start", "last",
    "is_ready", "num_tokens",
)  # fmt: skip


def was_plain(arrays: StepArrays) -> bool:
    """True when the short way planned this step."""
    return bool(len(arrays.rows) and arrays.rows["tail"].all())


def shown(arrays: StepArrays) -> dict[str, list[Any]]:
    return {name: getattr(arrays, name).tolist() for name in ARRAYS}


def dense_table(play: Play, arrays: StepArrays) -> list[list[int]]:
    play.ledger.update_table(arrays)
    return arrays.block_table.tolist()  # type: ignore[no-any-return]


def table_by_hand(play: Play, arrays: StepArrays) -> list[list[int]]:
    """The frames of each planned row, from its table of blocks."""
    size = play.ledger.block_size
    lengths = [-(-int(n) // size) for n in arrays.seq_lens]
    planned = arrays.rows["sequence"][arrays.rows["reason"] == PLANNED]
    table = []
    for s, length in zip(planned.tolist(), lengths, strict=True):
        frames = [play.b(b, "device_frame") for b in play.table(s)[:length]]
        table.append(frames + [0] * (max(lengths) - length))
    return table


class Pair:
    """One ledger takes the short way when it can, its twin never: it is asked row by row."""

    def __init__(self, **sizes: Any) -> None:
        self.plays = (Play(**sizes), Play(**sizes))
        self.num_plain = self.num_plain_of_budget = 0

    def each(self, act: Any) -> Any:
        """Do the same to both, which must answer the same."""
        one, other = act(self.plays[0]), act(self.plays[1])
        assert one == other
        return one

    def step(self, seqs: list[int], commit: bool, budget: int | None) -> None:
        short, general = self.plays
        pending = [short.q(s, "num_tokens") - short.q(s, "num_computed") for s in seqs]
        limits = np.array(pending, np.int32)  # a limit that limits nothing: the general way
        try:
            _, one = short.plan(*seqs, max_tokens=budget)
        except Refusal as refusal:
            with pytest.raises(Refusal) as caught:
                general.plan(*seqs, num_tokens=limits, max_tokens=budget)
            assert caught.value == refusal
            return
        _, other = general.plan(*seqs, num_tokens=limits, max_tokens=budget)
        assert shown(one) == shown(other)
        assert not was_plain(other)
        self.num_plain += was_plain(one)
        self.num_plain_of_budget += was_plain(one) and budget is not None
        self.each(lambda play: play.meaning())
        for play, arrays in zip(self.plays, (one, other), strict=True):
            assert dense_table(play, arrays) == table_by_hand(play, arrays)
        short.end(one, commit)
        general.end(other, commit)
        self.each(lambda play: play.meaning())


def wander(pair: Pair, rng: random.Random, acts: int) -> None:
    """Random calls on both, mostly decode steps."""
    live: list[int] = []
    for _ in range(acts):
        act = rng.random()
        chosen = rng.sample(live, rng.randint(0, len(live)))
        if act < 0.12 and len(live) < 6:
            tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 9))]
            live.append(pair.each(lambda play, t=tokens: play.create(t)))
        elif act < 0.16 and live:
            parent = rng.choice(live)
            live += pair.each(lambda play, p=parent: play.fork(p))
        elif act < 0.2 and live:
            gone = rng.choice(live)
            live.remove(gone)
            pair.each(lambda play, s=gone: play.free(s) and None)
        elif act < 0.25:
            pair.each(lambda play, c=chosen: attempt(play, play.swap_out, c))
        elif act < 0.28:
            pair.each(lambda play, c=chosen: attempt(play, play.swap_in, c))
        elif act < 0.3 and live:
            s = rng.choice(live)
            length = rng.randint(0, pair.plays[0].q(s, "num_tokens"))
            pair.each(lambda play, s=s, n=length: play.truncate(s, n) and None)
        else:
            budget = rng.choice([None, None, 3, 100])
            for s in chosen:
                if rng.random() < 0.9:
                    token = rng.randint(0, 2)
                    pair.each(lambda play, s=s, t=token: play.append(s, t))
            pair.step(chosen, rng.random() < 0.85, budget)
    for s in live:
        pair.each(lambda play, s=s: play.free(s) and None)


def attempt(play: Play, act: Any, seqs: list[int]) -> int:
    """Run what may be refused; the code."""
    try:
        act(*seqs)
    except Refusal as refusal:
        return refusal.code
    return 0


@pytest.mark.parametrize("block", [1, 2, 4])
def test_both_ways_leave_the_same(block: int, seed: int) -> None:
    plain = of_budget = 0
    for turn in range(8):
        pair = Pair(device=12, host=6, block=block)
        wander(pair, random.Random(seed + turn), 40)
        plain += pair.num_plain
        of_budget += pair.num_plain_of_budget
    assert (of_budget > 2) == (block > 1)
    assert (plain > 5) == (block > 1)  # blocks of one token always take the general way


def test_what_a_decode_batch_is(play: Play) -> None:
    s, other = play.made(6), play.made([9, 9])
    play.append(s, 5)
    play.append(other, 5)
    _, arrays = play.run(s, other)
    assert was_plain(arrays)
    assert arrays.tokens.tolist() == [5, 5]
    assert arrays.positions.tolist() == [6, 2]
    play.append(s, 5)  # fills no block, begins none: 8 tokens
    play.append(other, 5, 6)  # two pending
    _, arrays = play.run(s, other)
    assert not was_plain(arrays)
    play.append(s, 7)  # begins a block
    _, arrays = play.plan(s)
    assert was_plain(arrays)
    play.end(arrays, commit=False)
    assert len(play.table(s)) == 2, "an abort gives the new block back"


def test_with_a_budget_twins_do_not_complete_one_block_twice(play: Play) -> None:
    s = play.made([1, 2])
    (twin,) = play.fork(s)
    play.append(s, 7)
    play.append(twin, 7)  # parts from the shared block
    play.run(s, twin)
    other = play.made([5, 5, 5])
    for one in (s, twin, other):
        play.append(one, 8)
    _, arrays = play.plan(s, twin, other, max_tokens=8)
    assert not was_plain(arrays)
    assert arrays.rows["reason"].tolist() == [PLANNED, ARRIVING, PLANNED]
    play.end(arrays)
    _, arrays = play.plan(twin, max_tokens=8)
    play.end(arrays, commit=False)
    play.append(other, 3)
    _, arrays = play.run(other, max_tokens=1)
    assert was_plain(arrays)


def test_a_batch_without_room_is_refused_as_ever() -> None:
    play = Play(device=4, host=4)
    one, two = play.made(8), play.made([7] * 8)
    play.append(one, 1)
    play.append(two, 1)
    before = play.meaning()
    with pytest.raises(Refusal) as caught:
        play.plan(one, two)
    assert (caught.value.needed, caught.value.available, caught.value.row) == (1, 0, 0)
    assert play.meaning() == before
    assert play.q(one, "state") == RESIDENT


def test_the_arrays_of_the_last_step_stay(play: Play) -> None:
    s = play.made(5)
    kept: list[tuple[StepArrays, dict[str, list[Any]]]] = []
    for _ in range(6):
        play.append(s, 1)
        _, arrays = play.plan(s)
        if kept:  # the step that ended last is still to be read while another is open
            last, text = kept[-1]
            assert last is not arrays
            assert shown(last) == text
        kept.append((arrays, shown(arrays)))
        play.end(arrays)
    assert len({id(arrays) for arrays, _ in kept}) == 2


def test_views_are_kept_while_their_lengths_stay(play: Play) -> None:
    s, other = play.made(5), play.made([8] * 5)
    seen = []
    for _ in range(4):
        play.append(s, 1)
        _, arrays = play.run(s)
        seen.append(arrays.positions)
    assert seen[0] is seen[2]
    assert seen[1] is seen[3]
    play.append(s, 1)
    play.append(other, 1)
    _, arrays = play.run(s, other)
    assert len(arrays.positions) == 2


def test_the_dense_table_follows_what_changes(play: Play) -> None:
    """Appended blocks, a copy on write, a swap with other frames, a shorter row."""
    s = play.made(7)
    (child,) = play.fork(s)
    for turn in range(8):
        play.append(s, turn)
        play.append(child, 50 + turn)
        if turn == 4:
            play.swap_out(s)
            play.evict(8)
            play.free(play.made([90 + turn] * 9))  # other frames now
        if turn == 8:
            play.truncate(child, 3)
        _, arrays = play.plan(s, child)
        assert dense_table(play, arrays) == table_by_hand(play, arrays)
        play.end(arrays, commit=turn != 6)


def test_many_rows_and_tokens_make_the_arrays_grow() -> None:
    play = Play(device=300, host=0, block=4)
    seqs = [play.made([i, i, i]) for i in range(100)]
    long = play.create(range(500, 900))
    for s in seqs:
        play.append(s, 5)
    _, arrays = play.plan(*seqs, long)
    assert len(arrays.tokens) == 500
    assert arrays.seq_lens.tolist() == [4] * 100 + [400]
    assert dense_table(play, arrays) == table_by_hand(play, arrays)
    play.end(arrays)
    assert ids(*seqs).tolist() == seqs
