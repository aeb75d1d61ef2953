"""The public API, one behaviour a test: sequences and steps (design section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from tests.driver import Driver, assert_same, state_of, tokens_of

# --- create, hits ----------------------------------------------------------------------------


def test_create_takes_nothing_and_forecasts_the_hit() -> None:
    with Driver() as d:
        first = d.create(tokens_of(10))
        assert (first.state, first.num_tokens, first.num_computed, first.num_cached) == (
            "WAITING",
            10,
            0,
            0,
        )
        assert first.block_ids == []
        assert d.manager.stats().device.free == 8
        d.step([first])
        second = d.create(tokens_of(10))
        assert second.num_cached == 8  # a forecast: nothing is taken before a step
        assert second.block_ids == []
        d.free(first)
        d.manager.evict(8)
        d.manager.evict(8, "host")
        d.step([second])
        assert second.num_cached == 0  # what a step found


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.uint8),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        torch.tensor([1, 2, 3]),
        [np.int64(1), 2, 3],
        np.array([1, 9, 2, 9, 3, 9], np.int32)[::2],
    ],
)
def test_token_forms(tokens: Any) -> None:
    with Driver() as d:
        assert d.create(tokens).tokens.tolist() == [1, 2, 3]


def test_requests_that_arrive_together_share_what_the_first_computes() -> None:
    with Driver(device_blocks=32) as d:
        seqs = [d.create([*range(16), 100 + i]) for i in range(6)]
        rows = 0
        while any(seq.num_computed < 17 for seq in seqs):
            step = d.step(seqs, max_tokens=8, fit="some")
            rows += step.num_tokens
        assert rows == 16 + 6  # the 16 shared ones once, the own one of each
        assert d.manager.stats().prefix_hit_tokens == 5 * 16
        assert len({tuple(seq.block_ids[:4]) for seq in seqs}) == 1
        d.check_content()


def test_a_row_waits_for_the_block_that_an_earlier_row_computes() -> None:
    with Driver() as d:
        one, two = d.create(tokens_of(6)), d.create(tokens_of(6))
        step = d.step([one, two], max_tokens=100, fit="some")
        assert step.seqs == [one]
        assert step.left_out == [(two, "arriving")]
        step = d.step([one, two], max_tokens=100, fit="some")
        assert step.left_out == [(one, "idle")]
        assert step.num_tokens == 2
        assert two.num_cached == 4


def test_full_hit_computes_one_token_and_writes_nothing() -> None:
    with Driver() as d:
        one = d.create(tokens_of(8))
        d.step([one])
        blocks = list(one.block_ids)
        two = d.create(tokens_of(8))
        assert two.num_cached == 8
        step = d.step([two])
        assert step.num_tokens == 1
        assert step.slot_mapping.tolist() == [-1]
        assert step.positions.tolist() == [7]
        assert step.ready == [two]
        assert two.block_ids == blocks
        assert two.num_computed == 8
        d.manager.append([two], [50])
        d.step([two])  # the next token goes into a new block
        assert two.block_ids[:2] == blocks
        assert len(two.block_ids) == 3


@pytest.mark.parametrize(("limit", "hit"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (100, 8)])
def test_max_cached_limits_the_hit(limit: int, hit: int) -> None:
    with Driver() as d:
        d.step([d.create(tokens_of(9))])
        seq = d.create(tokens_of(9), max_cached=limit)
        assert seq.num_cached == hit
        assert d.step([seq]).num_tokens == 9 - hit
        assert seq.num_cached == hit


def test_publish_false_stays_out_of_the_cache() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(9), publish=False)
        d.step([seq])
        assert d.manager.match(tokens_of(9)).num_tokens == 0
        assert not d.manager.block(seq.block_ids[0]).is_cached
        d.step([d.create(tokens_of(9))])  # but others compute and publish the same tokens
        assert d.manager.match(tokens_of(9)).num_tokens == 8
        reader = d.create(tokens_of(9), publish=False)
        assert reader.num_cached == 8


@pytest.mark.parametrize(
    ("mine", "other"), [("a", "b"), ("a", b"a"), (None, ""), (None, b""), ("", b""), ("s", None)]
)
def test_namespaces_are_apart(mine: str | bytes | None, other: str | bytes | None) -> None:
    with Driver() as d:
        d.step([d.create(tokens_of(9), namespace=mine)])
        assert d.manager.match(tokens_of(9), mine).num_tokens == 8
        assert d.manager.match(tokens_of(9), other).num_tokens == 0
        seq = d.create(tokens_of(9), namespace=other)
        assert seq.num_cached == 0
        assert d.step([seq]).num_tokens == 9
        again = d.create(tokens_of(9), namespace=mine)
        assert again.num_cached == 8


def test_extras_isolate_and_equal_ones_share() -> None:
    cat, dog = b"c" * 16, b"d" * 32
    with Driver(device_blocks=24) as d:
        d.step([d.create(tokens_of(13), extras=[(4, 4, cat)])])
        same = d.create(tokens_of(13), extras=[(4, 4, cat)])
        assert same.num_cached == 12
        assert d.step([same]).num_tokens == 1
        other = d.create(tokens_of(13), extras=[(4, 4, dog)])
        assert other.num_cached == 4
        assert d.step([other]).num_tokens == 9
        shifted = d.create(tokens_of(13), extras=[(5, 4, cat)])
        assert shifted.num_cached == 4
        plain = d.create(tokens_of(13))
        assert plain.num_cached == 4
        d.step([shifted, plain])
        d.manager.append([same], [77])
        d.step([same])
        child = d.fork(same)[0]
        d.manager.append([child], [78])
        d.step([child])
        d.check_content()


def test_many_namespaces_come_and_go() -> None:
    with Driver() as d:
        for i in range(300):
            seq = d.create(tokens_of(5), namespace=f"tenant {i}")
            d.step([seq])
            d.free(seq)
        assert d.manager.match(tokens_of(5), "tenant 299").num_tokens == 4
        assert d.manager.match(tokens_of(5), "tenant 0").num_tokens == 0
        assert len(d.state.namespaces) < 128


# --- append, drafts --------------------------------------------------------------------------


def test_append_one_each_or_ragged() -> None:
    with Driver() as d:
        one, two = d.create([1]), d.create([2])
        d.manager.append([one, two], [10, 20])
        d.manager.append([one, two], np.array([11, 12, 21], np.int32), counts=[2, 1])
        d.manager.append([one, two], [22], counts=torch.tensor([0, 1]))
        d.manager.append([], [])
        d.manager.append([one, two], [], counts=0)
        assert one.tokens.tolist() == [1, 10, 11, 12]
        assert two.tokens.tolist() == [2, 20, 21, 22]
        d.step([one, two])
        assert d.step([one, two], fit="some").left_out == [(one, "idle"), (two, "idle")]


def test_drafts_are_computed_but_published_only_when_accepted() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(5))
        d.step([seq])
        d.manager.append([seq], [5, 6, 7], counts=[3], draft=True)
        assert seq.num_drafts == 3
        d.step([seq])
        assert seq.num_computed == 8
        assert d.manager.match(tokens_of(8)).num_tokens == 4
        with pytest.raises(ValueError, match="accept"):
            d.manager.append([seq], [9])
        d.manager.accept([seq], [2], [70])
        assert seq.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 70]
        assert (seq.num_drafts, seq.num_computed) == (0, 7)
        d.step([seq])
        assert d.manager.match([0, 1, 2, 3, 4, 5, 6, 70]).num_tokens == 8
        assert d.manager.match(tokens_of(8)).num_tokens == 4
        d.check_content()


@pytest.mark.parametrize("kept", [0, 1, 4, 5])
def test_accepting_all_or_none(kept: int) -> None:
    with Driver() as d:
        seq = d.create(tokens_of(3))
        d.step([seq])
        d.manager.append([seq], tokens_of(8, 3), counts=[5], draft=True)
        d.step([seq])
        d.manager.accept([seq], [kept], [99])
        assert seq.tokens.tolist() == [*range(3 + kept), 99]
        d.step([seq])
        assert seq.num_computed == 4 + kept
        assert d.manager.match(seq.tokens).num_tokens == (4 + kept) // 4 * 4
        d.check_content()


# --- fork, truncate --------------------------------------------------------------------------


def test_fork_shares_all_blocks_and_copies_on_write() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(6))
        d.step([seq])
        child, other = d.fork(seq, 2)
        assert child.block_ids == other.block_ids == seq.block_ids
        assert d.manager.block(seq.block_ids[0]).ref_count == 3
        assert d.manager.stats().device.free == 6
        d.manager.append([seq, child, other], [10, 11, 12])
        d.step([seq, child, other])
        assert len({s.block_ids[0] for s in (seq, child, other)}) == 1
        assert len({s.block_ids[1] for s in (seq, child, other)}) == 3
        assert d.manager.stats().device.free == 4
        d.manager.append([seq, child, other], [20, 21, 22])
        copied = d.manager.stats().blocks_copied_on_write
        d.step([seq, child, other])
        assert d.manager.stats().blocks_copied_on_write == copied  # private by now
        d.check_content()


def test_fork_of_waiting_and_swapped() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(6), priority=3)
        waiting = d.fork(seq)[0]
        assert (waiting.state, waiting.priority, waiting.num_tokens) == ("WAITING", 3, 6)
        d.step([seq])
        d.manager.swap_out([seq])
        swapped = d.fork(seq)[0]
        assert swapped.state == "SWAPPED"
        d.manager.append([swapped, seq], [50, 60])
        d.step([swapped, seq])
        d.check_content()


def test_truncate_gives_blocks_back_and_the_rest_is_still_right() -> None:
    with Driver() as d:
        seq, other = d.create(tokens_of(14)), d.create(tokens_of(4, 1))
        d.step([seq, other])
        assert d.manager.stats().device.free == 3
        d.manager.truncate([seq, other], [6, 3])
        assert (seq.num_tokens, seq.num_computed, len(seq.block_ids)) == (6, 6, 2)
        d.manager.append([seq], [99])
        d.step([seq])
        d.check_content()
        d.manager.truncate([seq], 0)
        assert seq.block_ids == []
        assert seq.num_computed == 0
        d.manager.append([seq], [4])
        d.step([seq])
        d.check_content()


def test_truncate_of_a_shared_block_leaves_the_others_alone() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(8))
        d.step([seq])
        child = d.fork(seq)[0]
        d.manager.truncate([child], 6)
        d.manager.append([child], [99])
        d.step([child])
        assert d.manager.match(tokens_of(8)).num_tokens == 8
        assert d.manager.stats().blocks_copied_on_write == 1
        d.check_content()


# --- step ------------------------------------------------------------------------------------


def test_step_arrays() -> None:
    with Driver() as d:
        one, two, idle = d.create(tokens_of(6)), d.create([50, 51, 52]), d.create([])
        with d.manager.step([one, idle, two], num_tokens=[5, 0, 3]) as step:
            assert step.seqs == [one, two]
            assert step.left_out == [(idle, "idle")]
            assert (step.num_tokens, step.max_query_len, step.max_seq_len) == (8, 5, 5)
            assert step.query_start.tolist() == [0, 5, 8]
            assert step.seq_lens.tolist() == [5, 3]
            assert step.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
            assert step.ready == [two]
            assert step.last.tolist() == [7]
            table = step.block_table
            assert table.dtype == torch.int32
            assert table.shape == (2, 2)
            assert table[1, 1] == 0
            frames = [d.manager.block(b).frame_ids[0] for b in one.block_ids]
            assert table[0].tolist() == frames
            assert step.slot_mapping[:5].tolist() == [frames[p // 4] * 4 + p % 4 for p in range(5)]
            group = step.group(1)
            assert group.block_table is table
            assert group.slot_mapping is step.slot_mapping
            assert step.host.tokens.tolist() == step.tokens.tolist()
            d.run(step)
        assert step.ended
        assert one.num_computed == 5
        assert "ended" in repr(step)
        d.step([one])
        assert one.num_computed == 6


def test_ready_and_last_follow_the_rows() -> None:
    with Driver(device_blocks=16) as d:
        seqs = [d.create([i] * (i + 1)) for i in range(5)]
        step = d.step(seqs, num_tokens=[1, 1, 3, 2, 5])
        assert step.ready == [seqs[0], seqs[2], seqs[4]]
        assert step.last.tolist() == [0, 4, 11]


def test_left_out_reasons() -> None:
    with Driver() as d:
        wide = d.create(tokens_of(20))
        never, idle = d.create(tokens_of(33)), d.create([])
        d.step([wide])
        big, small = d.create(tokens_of(120, 100)), d.create([7, 8])
        late = d.create([9])
        step = d.step([never, idle, big, small, late], fit="some", max_tokens=22)
        assert step.left_out == [(never, "never"), (idle, "idle"), (big, "room")]
        assert step.seqs == [small, late]
        small, late = d.create([17, 18]), d.create([19])
        step = d.step([big, small, late], num_tokens=[0, 2, 1], fit="some", max_tokens=2)
        assert step.left_out == [(big, "idle"), (late, "budget")]
        assert step.seqs == [small]
        with pytest.raises(kvmem.SequenceTooLong, match="9 blocks.*has 8"):
            d.manager.step([never])


def test_reserve_blocks_stay_untaken() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(20))
        assert d.manager.can_fit(seqs=[seq]) == "yes"
        with pytest.raises(kvmem.SequenceTooLong):  # 5 blocks and 4 reserved of 8
            d.manager.step([seq], reserve_blocks=4)
        assert d.step([seq], fit="some", reserve_blocks=4).left_out == [(seq, "never")]
        d.step([seq], reserve_blocks=3)
        assert d.manager.stats().device.free == 3


def test_out_of_blocks_tells_the_counts_and_changes_nothing() -> None:
    with Driver() as d:
        seq, cached = d.create(tokens_of(20)), d.create(tokens_of(54, 50))
        d.step([seq, cached])
        d.free(cached)
        big = d.create(tokens_of(116, 100))
        before = state_of(d.manager)
        with pytest.raises(kvmem.OutOfBlocks) as caught:
            d.manager.step([big])
        error = caught.value
        assert (error.tier, error.needed, error.free, error.evictable, error.pinned) == (
            "device",
            4,
            2,
            1,
            0,
        )
        assert isinstance(error, MemoryError)
        assert_same(before, state_of(d.manager))
        d.manager.swap_out([seq])
        d.step([big])
        d.check_content()


def test_chunked_prefill_over_several_steps() -> None:
    with Driver() as d:
        one, two = d.create(tokens_of(14)), d.create(tokens_of(70, 57))
        while one.num_computed < 14 or two.num_computed < 13:
            step = d.step([one, two], max_tokens=5, fit="some")
            assert step.num_tokens <= 5
        d.check_content()


def test_open_steps_on_disjoint_sequences() -> None:
    with Driver() as d:
        one, two = d.create(tokens_of(5)), d.create(tokens_of(9, 3))
        first = d.manager.step([one])
        second = d.manager.step([two])
        with pytest.raises(RuntimeError, match="open step"):
            d.manager.step([one])
        with second, first:
            d.run(first)
            d.run(second)
            d.manager.append([one], [42])  # bookkeeping only: legal in an open step
        assert (one.num_computed, two.num_computed) == (5, 6)
        d.step([one, two], fit="some")
        assert one.num_computed == 6
        d.check_content()


def test_free_in_an_open_step_ends_with_it() -> None:
    with Driver() as d:
        one, two = d.create(tokens_of(5)), d.create(tokens_of(9, 3))
        with d.manager.step([one, two]) as step:
            d.manager.free([one])
            d.manager.verify()
            assert one.is_freed
            assert d.manager.stats().device.free == 4  # the step still writes there
            for layer in range(2):
                step.write(layer, torch.zeros(11, 1, 4), torch.zeros(11, 1, 4))
        d.live = [two]
        assert d.manager.stats().device.free == 5  # one cached block stays
        assert d.manager.match(tokens_of(5)).num_tokens == 4


def test_exception_in_the_body_restores_everything() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(6))
        d.step([seq])
        child = d.fork(seq)[0]
        d.manager.append([seq, child], [10, 11])
        fresh, hit = d.create([1, 2, 3]), d.create([*range(4), 9])
        seqs = [seq, child, fresh, hit]
        fields = ("state", "num_tokens", "num_computed", "num_cached", "block_ids")
        before = [[getattr(s, f) for f in fields] for s in seqs]
        stats = d.manager.stats()
        with pytest.raises(ZeroDivisionError):
            with d.manager.step(seqs) as step:
                d.run(step)
                1 / 0
        assert [[getattr(s, f) for f in fields] for s in seqs] == before
        after = d.manager.stats()
        assert after.device.free == stats.device.free
        assert after.cached_nodes == stats.cached_nodes
        assert after.prefix_hit_tokens == stats.prefix_hit_tokens
        assert d.manager.match([1, 2, 3]).num_tokens == 0
        d.manager.verify()
        d.check_content()
        d.step(seqs)
        d.check_content()


def test_a_planned_step_can_be_cancelled() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(6))
        step = d.manager.step([seq])
        step.cancel()
        step.cancel()
        assert (seq.state, seq.num_computed) == ("WAITING", 0)
        assert d.manager.stats().device.free == 8


def test_empty_batch() -> None:
    with Driver() as d:
        with d.manager.step([]) as step:
            assert step.num_tokens == 0
            assert step.tokens.shape == step.last.shape == (0,)
            assert step.block_table.shape == (0, 0)
            empty = torch.zeros(0, 1, 4)
            step.write(0, empty, empty)
            step.write(1, empty, empty)
            assert step.attend(0, torch.zeros(0, 2, 4)).shape == (0, 2, 4)  # type: ignore[union-attr]
        assert step.ready == step.seqs == step.left_out == []


def test_attend_options() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(6))
        with d.manager.step([seq]) as step:
            d.run(step)
            query = torch.randn(6, 2, 4)
            plain = step.attend(0, query)
            out = torch.empty(6, 2, 4)
            same, lse = step.attend(0, query, out=out, return_lse=True)
            assert same is out
            assert torch.equal(out, plain)  # type: ignore[arg-type]
            assert lse.shape == (6, 2)
            for options in (
                {"scale": 0.1},
                {"softcap": 1.0},
                {"alibi": [0.5, 0.25]},
                {"sinks": torch.ones(2)},
            ):
                other = step.attend(0, query, **options)  # type: ignore[arg-type]
                assert not torch.equal(other, plain)  # type: ignore[arg-type]
                assert torch.isfinite(other).all()  # type: ignore[arg-type]
