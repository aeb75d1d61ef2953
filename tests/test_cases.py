"""Public bug reports of other KV caches as scenarios: the whole kind of each fault, on kvmem.

Numbered as in the list of cases that this project keeps. Those of the kernels alone are in
tests/cuda_kernels and test_ops.py: 3 (overlapping block copies), 63 and 65 (ALiBi, head sizes), 67
(NaN in unused slots), 69 (table bounds), 71 (offsets past 2**31), 73 (features refused); 13 is in
test_threads.py. Cases that need streams to stand still hold the copy streams of the CPU device; the
calling thread is its compute stream. tests/sim/test_cases.py has those again where compute is late.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import kvmem
from tests.driver import Driver, assert_same, state_of, tokens_of


@contextmanager
def released_meanwhile(d: Driver, *streams: str) -> Iterator[None]:
    """Another thread lets the held streams go on while this one waits for them."""
    timer = threading.Timer(0.1, d.release, streams)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def plain_step(d: Driver, seqs: list[kvmem.Sequence]) -> None:
    """A step of which only the bookkeeping counts."""
    with d.manager.step(seqs):
        pass


def test_case_5_no_block_leaks_per_request(seed: int) -> None:
    rng = random.Random(seed)
    with Driver(device_blocks=128, host_blocks=0, block_size=16, debug=False) as d:
        for i in range(2000):
            length = rng.randint(1, 200)
            seq = d.create(tokens_of(length, rng.randrange(5)))
            plain_step(d, [seq])
            for _ in range(rng.choice((0, 0, 1, 17, 40)) // 8):
                d.manager.append([seq], tokens_of(8), counts=[8])
                plain_step(d, [seq])
            d.free(seq)
            if i % 100 == 0:
                tier = d.manager.stats().device
                assert tier.free + tier.evictable == tier.total == 128
                d.manager.evict(128)
                assert d.manager.stats().device.free == 128
                d.manager.verify()


def test_case_7_a_reused_block_leaves_the_index_at_that_moment() -> None:
    with Driver(device_blocks=4, host_blocks=0) as d:
        seq = d.create(tokens_of(8))
        d.step([seq])
        d.free(seq)
        assert d.manager.match(tokens_of(8)).num_tokens == 8
        other = d.create(tokens_of(116, 100))
        with d.manager.step([other]) as step:
            assert d.manager.match(tokens_of(8)).num_tokens == 0
            d.run(step)
        d.free(other)
        again = d.create(tokens_of(8))
        assert d.step([again]).num_tokens == 8
        d.check_content()


def test_case_9_the_index_follows_truncation() -> None:
    with Driver() as d:
        seq = d.create([1, 2, 3])
        d.step([seq])
        d.manager.append([seq], [99])
        d.step([seq])
        d.manager.truncate([seq], 3)
        d.manager.append([seq], [5])
        d.step([seq])
        d.free(seq)
        assert d.manager.match([1, 2, 3, 99]).num_tokens == 0
        assert d.manager.match([1, 2, 3, 5]).num_tokens == 4


def test_case_9_after_any_truncations_hits_are_right(seed: int) -> None:
    rng = random.Random(seed)
    with Driver(device_blocks=16, host_blocks=8) as d:
        seq = d.create([1])
        for _ in range(60):
            d.manager.truncate([seq], rng.randint(0, seq.num_tokens))
            count = rng.randint(1, 6)
            d.manager.append([seq], [rng.randrange(2) for _ in range(count)], counts=[count])
            d.step([seq])
            if rng.random() < 0.3:
                d.manager.swap_out([seq], how="auto")
            reader = d.create([rng.randrange(2) for _ in range(9)])
            d.step([reader])  # compares attention over whatever was hit
            d.free(reader)
            d.manager.verify()
            if seq.num_tokens > 30:
                d.manager.truncate([seq], 3)
        d.check_content()


def test_case_11_a_partial_block_is_never_a_hit() -> None:
    with Driver() as d:
        one, two = d.create([1, 2, 3, 4, 5, 6]), d.create([1, 2, 3, 4, 5, 9])
        d.step([one])
        d.step([two])
        assert one.block_ids[0] == two.block_ids[0]
        assert one.block_ids[1] != two.block_ids[1]
        d.free(one)
        assert d.manager.match([1, 2, 3, 4, 5, 6]).num_tokens == 4
        d.manager.append([two], [7, 8], counts=[2])
        d.step([two])
        assert d.manager.match([1, 2, 3, 4, 5, 6, 7, 8]).num_tokens == 4
        assert d.manager.match([1, 2, 3, 4, 5, 9, 7, 8]).num_tokens == 8
        d.check_content()


def test_case_15_hits_are_not_counted_as_free_as_well() -> None:
    with Driver(device_blocks=5, host_blocks=0) as d:
        gone, holds = d.create(tokens_of(8)), d.create(tokens_of(108, 100))
        d.step([gone])
        d.free(gone)
        d.step([holds])
        more = d.create([*range(8), *range(200, 208)])
        assert d.manager.can_fit(seqs=[more]) == "later"
        before = state_of(d.manager)
        with pytest.raises(kvmem.OutOfBlocks):
            d.manager.step([more])
        assert_same(before, state_of(d.manager))
        assert d.manager.stats().device.evictable == 2
        d.free(holds)
        step = d.step([more])
        assert step.num_tokens == 8
        d.check_content()


def test_case_17_pinned_blocks_are_told_as_such() -> None:
    with Driver(device_blocks=4, host_blocks=64) as d:
        gone = d.create(tokens_of(16))
        d.step([gone])
        d.free(gone)
        seq = d.create(tokens_of(116, 100))
        d.step([seq])  # offloads what is cached
        assert d.manager.match(tokens_of(16)).on_host == 16
        d.pin(seq)
        d.free(seq)
        small = d.create([1, 2, 3, 4])
        with pytest.raises(kvmem.OutOfBlocks, match="4 pinned") as caught:
            d.manager.step([small])
        assert (caught.value.tier, caught.value.pinned, caught.value.free) == ("device", 4, 0)


def test_case_19_a_victim_that_the_host_cannot_take_is_dropped_not_lost() -> None:
    with Driver(device_blocks=4, host_blocks=4) as d:
        swapped = d.create(tokens_of(16))
        d.step([swapped])
        d.manager.swap_out([swapped])  # owns every host frame from now on
        for i in (1, 2, 3):
            seq = d.create(tokens_of(100 * i + 16, 100 * i))
            d.step([seq])
            d.free(seq)
            d.manager.verify()
        assert d.manager.match(tokens_of(116, 100)).num_tokens == 0
        match = d.manager.match(tokens_of(316, 300))
        assert (match.on_device, match.on_host) == (16, 0)
        d.manager.swap_in([swapped])
        d.check_content()


def test_case_21_evict_host_counts_exactly() -> None:
    with Driver(device_blocks=100, host_blocks=100) as d:
        for i in range(100):
            seq = d.create(tokens_of(4 * i + 4, 4 * i))
            assert d.step([seq]).num_tokens == 4
            d.free(seq)
        assert d.manager.evict(1000) == 100
        assert d.manager.stats().host.held == 100
        assert d.manager.evict(10, "host") == 10
        assert d.manager.stats().host.held == 90
        assert d.manager.evict(0, "host") == 0
        assert d.manager.evict(1000, "host") == 90
        assert d.manager.stats().cached_nodes == 0


def test_case_23_shared_blocks_take_one_host_frame() -> None:
    with Driver(device_blocks=16, host_blocks=16) as d:
        seq = d.create(tokens_of(30))
        d.step([seq])
        seqs = [seq, *d.fork(seq, 7)]
        d.manager.append(seqs, list(range(500, 508)))
        d.step(seqs)
        d.manager.swap_out(seqs)
        assert d.manager.stats().host.held == 7 + 8
        d.wait()
        d.manager.evict(16)
        d.manager.swap_in(seqs)
        assert d.manager.stats().blocks_in == 7 + 8
        assert len({tuple(s.block_ids[:7]) for s in seqs}) == 1
        d.check_content()


def test_case_25_evictable_and_protected_add_up(seed: int) -> None:
    rng = random.Random(seed)
    with Driver(device_blocks=32, host_blocks=0, debug=False) as d:
        m, pins = d.manager, []
        for _ in range(20_000):
            act = rng.random()
            tokens = tokens_of(rng.randint(1, 24), rng.randrange(3))
            if act < 0.3 and len(d.live) < 4:
                seq = d.create(tokens)
                if m.can_fit(seqs=[seq]) == "yes":
                    plain_step(d, [seq])
            elif act < 0.5 and d.live:
                d.free(rng.choice(d.live))
            elif act < 0.7 and m.match(tokens).on_device and len(pins) < 4:
                pins.append(m.pin(tokens))
            elif act < 0.9 and pins:
                pins.pop(rng.randrange(len(pins))).release()
            else:
                m.evict(rng.randint(0, 3))
            blocks = d.state.blocks
            held = blocks["device_frame"] > 0
            protected = held & ((blocks["num_resident"] > 0) | (blocks["num_pins"] > 0))
            evictable = int(d.state.pools["num_evictable"][0])
            assert evictable >= 0
            assert evictable + np.count_nonzero(protected) == np.count_nonzero(held)
        for pin in pins:
            pin.release()


def test_case_27_pins_end_with_their_handle() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(8))
        d.step([seq])
        d.manager.swap_out([seq])
        d.free(seq)  # cached in both tiers
        with d.manager.pin(tokens_of(8)):
            assert d.manager.evict(8) == 0
        d.manager.pin(tokens_of(8)).release()
        with pytest.warns(ResourceWarning, match="without release"):
            d.manager.pin(tokens_of(8))
        gc.collect()
        d.manager.poll()
        assert not d.state.blocks["num_pins"].any()
        assert d.manager.evict(8) == 2
        assert d.manager.match(tokens_of(8)).on_host == 8


def test_case_29_each_lookup_has_its_own_pin(seed: int) -> None:
    rng = random.Random(seed)
    with Driver(device_blocks=16) as d:
        seq = d.create(tokens_of(60))
        d.step([seq])
        pins = [d.manager.pin(seq if i % 2 else tokens_of(60)) for i in range(100)]
        d.free(seq)
        rng.shuffle(pins)
        for left in range(99, -1, -1):
            pin = pins.pop()
            pin.release()
            with pytest.raises(kvmem.PinError):
                pin.release()
            assert set(d.state.blocks["num_pins"].tolist()) <= {0, left}
            assert d.manager.evict(16) == (15 if not left else 0)


def test_case_31_a_host_frame_is_not_rewritten_while_it_is_read() -> None:
    with Driver(device_blocks=16, host_blocks=8) as d:
        seq, other = d.create(tokens_of(32)), d.create(tokens_of(132, 100))
        d.step([seq])
        d.manager.swap_out([seq])
        d.step([other])
        d.wait()
        d.manager.evict(8)
        d.hold("in")
        d.manager.swap_in([seq])  # the reader: its copies stand still
        assert d.manager.evict(8, "host") == 8
        assert d.manager.stats().host.free == 8  # freed once, at once
        transfer = d.manager.swap_out([other])  # wants the same host frames
        assert transfer.num_blocks == 8
        with pytest.raises(TimeoutError):
            transfer.wait(0.05)
        d.release("in")
        transfer.wait(30)
        d.check_content()


def refuse(*_: object) -> None:
    raise OSError("no such luck")


def test_case_35_counters_are_exact_and_failed_copies_are_not_done() -> None:
    d = Driver(device_blocks=16, host_blocks=16)
    seq, tail, cached = (
        d.create(tokens_of(20)),
        d.create(tokens_of(58, 50)),
        d.create(tokens_of(92, 80)),
    )
    d.step([seq, tail, cached])
    d.manager.swap_out([seq, tail])
    d.free(cached)
    assert d.manager.evict(7) == 7  # the oldest: what was swapped out, clean
    d.manager.swap_in([seq])
    assert d.manager.evict(3) == 3
    d.wait()
    stats, frame = d.manager.stats(), d.store.layout.frame_bytes
    assert (stats.blocks_out, stats.blocks_in) == (7 + 3, 5)
    assert (stats.evicted_device, stats.evicted_clean) == (10, 7)
    assert (stats.bytes_out, stats.bytes_in) == (10 * frame, 5 * frame)
    assert (stats.bytes_out_done, stats.bytes_in_done) == (10 * frame, 5 * frame)
    d.store.device.hook = refuse
    with pytest.raises(kvmem.TransferError, match="OSError: no such luck") as caught:
        d.manager.swap_in([tail]).wait(30)
    assert caught.value.lost == ((tail.id, 0),)
    assert d.store.counters()["in_blocks"] == 5
    stats = d.manager.stats()
    assert (stats.blocks_in, stats.blocks_in_failed, stats.blocks_out_failed) == (7, 2, 0)
    d.store.device.hook = None
    d.step([tail])
    d.drain()
    d.manager.close()


def test_case_37_a_copy_out_waits_for_the_step_that_writes() -> None:
    with Driver() as d:
        seq, other = d.create(tokens_of(7)), d.create([5])
        d.step([seq])
        child = d.fork(seq)[0]
        d.manager.append([child], [50])
        with d.manager.step([child]) as step:  # compute stands still here
            before = state_of(d.manager)
            with pytest.raises(RuntimeError, match="end the step first"):
                d.manager.swap_out([child])
            assert_same(before, state_of(d.manager))
            early = d.manager.swap_out([seq])  # shares the full block with the open step
            d.run(step)
        early.wait(30)
        d.manager.append([other], [6])
        seen: list[bool] = []
        d.store.device.hook = lambda *_: seen.append(step.ended)
        d.manager.swap_out([child]).wait(30)
        assert seen and all(seen)  # a late device may run an earlier copy here as well
        d.store.device.hook = None
        d.manager.evict(8)
        d.manager.swap_in([seq, child])
        d.check_content()


def test_case_41_a_planned_step_keeps_its_tables(seed: int) -> None:
    rng = random.Random(seed)
    with Driver(device_blocks=64, host_blocks=64) as d:
        first = [d.create(tokens_of(9 + i, 100 * i)) for i in range(3)]
        step = d.manager.step(first)
        names = ("tokens", "positions", "slot_mapping", "seq_lens", "query_start", "table_start")
        kept = {name: getattr(step.host, name).copy() for name in names}
        table = step.block_table.clone()
        d.manager.free([first[2]])
        # step n + 1 is planned and run before step n, and the ledger's arrays grow meanwhile
        for round_number in range(6):
            others = [d.create(tokens_of(rng.randint(1, 12), 7)) for _ in range(20)]
            d.step(others, fit="some")
            d.free(*others)
            d.create(np.full(200 << round_number, 9, np.int32))
        for name, array in kept.items():
            np.testing.assert_array_equal(getattr(step.host, name), array)
        starts, frames = step.host.table_start, step.host.frame_table
        for i, row in enumerate(table.tolist()):
            used = [f for f in row if f]
            assert frames[starts[i] : starts[i] + len(used)].tolist() == used
        d.live.remove(first[2])
        step.cancel()
        d.step(first[:2])
        d.check_content()


def test_case_41_two_steps_run_in_the_other_order() -> None:
    with Driver(device_blocks=16) as d:
        one, two = d.create(tokens_of(9)), d.create(tokens_of(111, 100))
        first, second = d.manager.step([one]), d.manager.step([two])
        with second:
            d.run(second)
        with first:
            d.run(first)
        d.check_content()


def test_case_43_free_while_a_copy_in_is_under_way() -> None:
    with Driver(device_blocks=4, host_blocks=8) as d:
        seq = d.create(tokens_of(16), publish=False)
        d.step([seq])
        d.manager.swap_out([seq])
        d.wait()
        d.manager.evict(4)
        d.hold("in")
        d.manager.swap_in([seq])
        d.free(seq)
        other = d.create(tokens_of(116, 100))
        step = d.manager.step([other])  # takes the very frames that the late copy will write
        with released_meanwhile(d, "in"):
            with step:
                d.run(step)
        d.check_content()


def test_case_43_free_while_a_copy_out_is_under_way() -> None:
    with Driver(device_blocks=4, host_blocks=4) as d:
        seq = d.create(tokens_of(16), publish=False)
        d.step([seq])
        d.hold("out")
        d.manager.swap_out([seq])
        d.free(seq)
        other = d.create(tokens_of(116, 100))
        step = d.manager.step([other])
        with released_meanwhile(d, "out"):
            with step:
                d.run(step)
        d.check_content()
        d.manager.swap_out([other])
        d.check_content()


def test_case_45_each_act_may_follow_a_swap_out_in_flight() -> None:
    with Driver(device_blocks=16, host_blocks=16) as d:
        m = d.manager
        seq = d.create(tokens_of(10))
        d.step([seq])
        d.hold("out", "in")
        out = m.swap_out([seq])
        assert m.swap_out([seq]).num_blocks == 0
        m.swap_in([seq])
        m.append([seq], [50])
        child = d.fork(seq)[0]
        with d.pin(seq) as pin:
            assert pin.num_tokens == 8
        m.swap_out([child])
        m.truncate([child], 9)
        m.verify()
        assert not out.done
        with released_meanwhile(d, "out", "in"):
            d.step([seq])
        m.append([child], [60])
        d.step([child])
        d.check_content()


def test_case_45_evict_and_swap_in_while_the_copy_out_stands_still() -> None:
    with Driver() as d:
        m = d.manager
        seq = d.create(tokens_of(10))
        d.step([seq])
        d.hold("out")
        m.swap_out([seq])
        assert m.evict(8) == 3  # departing frames are handed on
        assert m.swap_in([seq]).num_blocks == 3  # chains behind the copy out
        m.append([seq], [50])
        with released_meanwhile(d, "out"):
            d.step([seq])
        d.check_content()


def test_case_47_fifty_requests_wait_for_one_load() -> None:
    with Driver(device_blocks=75, host_blocks=80) as d:
        first = d.create(tokens_of(80))
        d.step([first])
        d.free(first)
        d.manager.evict(75)
        d.wait()
        seqs = [d.create([*range(80), 1000 + i]) for i in range(50)]
        assert all(seq.num_cached == 80 for seq in seqs)
        d.hold("in")
        step = d.manager.step(seqs)
        assert d.manager.stats().blocks_in == 20
        with released_meanwhile(d, "in"):
            with step:
                d.run(step)
        assert all(seq.num_computed == 81 for seq in seqs)
        assert step.num_tokens == 50
        assert d.store.counters()["in_blocks"] == 20
        d.check_content()


def test_case_49_tables_name_the_frames_that_hold_the_data(seed: int) -> None:
    rng = random.Random(seed)
    with Driver(device_blocks=4, host_blocks=4) as d:
        seqs = [d.create([*range(100 * i, 100 * i + n)]) for i, n in enumerate((3, 5, 7))]
        for _ in range(500):
            seq = rng.choice(seqs)
            if seq.state == "RESIDENT":
                d.manager.swap_out([seq], how="auto")
                continue
            step = d.step(seqs, fit="some") if seq.state == "WAITING" else None
            if step is None:
                d.manager.prefetch([seq])
                if seq.state == "RESIDENT":
                    d.manager.append([seq], [1])
                    step = d.step([seq], fit="some")
                    d.manager.truncate([seq], rng.randint(1, min(8, seq.num_tokens)))
            if step is not None:
                table = step.block_table
                assert int(table.max()) <= 4 if table.numel() else True
        d.check_content()


def test_case_57_swapping_in_needs_no_contiguous_room() -> None:
    with Driver(device_blocks=16, host_blocks=8) as d:
        seq = d.create(tokens_of(32))
        d.step([seq])
        d.manager.swap_out([seq])
        d.wait()
        d.manager.evict(8)
        small = [d.create([1000 + i], publish=False) for i in range(16)]
        d.step(small)
        d.free(*small[::2])
        d.manager.swap_in([seq])
        frames = [d.manager.block(b).frame_ids[0] for b in seq.block_ids]
        assert max(np.diff(sorted(frames))) > 1
        d.check_content()


def test_case_59_what_a_former_owner_left_is_never_read() -> None:
    """Isolation by zeroing is not in this version; unused slots are never read, in either tier."""
    with Driver(device_blocks=1, host_blocks=4, block_size=16) as d:
        owner = d.create(tokens_of(16), publish=False)
        d.step([owner])
        d.free(owner)
        seq = d.create([1, 2, 3])
        d.step([seq])
        block = d.manager.block(seq.block_ids[0])
        assert torch.isnan(block.k_data(0)[3:]).all()  # poison of debug=True
        d.manager.swap_out([seq])
        d.manager.evict(1)
        d.manager.append([seq], [4])
        d.step([seq])  # attention equals the dense reference over 4 tokens
        d.check_content()
        assert torch.isnan(block.v_data(1)[4:]).all()


def test_case_75_each_row_of_a_batch_has_its_own_table() -> None:
    with Driver(device_blocks=16) as d:
        first = d.create(tokens_of(12))
        d.step([first])
        hits, none, empty = d.create(tokens_of(14)), d.create(tokens_of(105, 100)), d.create([])
        step = d.step([hits, none, empty])
        assert hits.num_cached == 12
        assert step.seqs == [hits, none]
        assert step.query_start.tolist() == [0, 2, 7]
        assert step.block_table[0, :3].tolist() != step.block_table[1, :3].tolist()
        assert hits.block_ids[:3] == first.block_ids
        d.check_content()


def test_a_fork_of_a_duplicate_never_hangs_below_another_block() -> None:
    """A duplicate that a fork shares is not merged: the fork's next block would stand on a block
    that the fork does not hold, which could leave before it (found in review; R4)."""
    with Driver(device_blocks=12, host_blocks=0) as d:
        m = d.manager
        first = d.create([1, 2, 3, 4, 9])
        drafted = d.create([1, 2])
        m.append([drafted], [3, 4, 5, 6, 7, 8], counts=[6], draft=True)
        d.step([first, drafted])  # the block 1 2 3 4 twice, one of them of drafts
        (fork,) = d.fork(drafted)
        m.accept([drafted], [6], [7])
        m.verify()
        d.free(first)
        d.free(drafted)
        m.evict(12)
        m.verify()
        m.accept([fork], [6], [8])
        m.verify()
        d.step([fork])
        d.check_content()


def test_make_room_keeps_its_word_when_the_host_is_full() -> None:
    """What was swapped out is returned, also when the next victim finds no room (R8)."""
    with Driver(device_blocks=6, host_blocks=2) as d:
        best, *others = [d.create([i] * 7, namespace=str(i)) for i in range(3)]
        d.step([best, *others])
        d.manager.append([best], [[1] * 17][0], counts=[17])
        gone = d.manager.make_room([best], how="swap")
        assert gone == [others[1]]
        assert others[0].state == "RESIDENT"
        never = d.create(range_of(25))
        assert d.manager.make_room([never]) == []  # nobody goes for what can't come


def range_of(count: int) -> list[int]:
    return list(range(count))
