"""The public API, one behaviour a test: views, handles, debug, the loop (design section 4)."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from kvmem.store.device import Stream
from tests.driver import DEVICE, Driver, GoodWork, tokens_of

# --- looking ---------------------------------------------------------------------------------


def test_block_fields() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(6))
        d.step([seq])
        child = d.fork(seq)[0]
        full, part = (d.manager.block(b) for b in seq.block_ids)
        assert (full.state, full.ref_count, full.num_valid_tokens) == ("USED", 2, 4)
        assert full.seq_ids == [seq.id, child.id]
        assert full.is_cached
        assert not part.is_cached
        assert full.device == "device"
        assert full.slot_mapping == [(0, True), (1, True), (2, True), (3, True)]
        assert part.slot_mapping == [(4, True), (5, True)]
        d.free(child)
        assert part.slot_mapping == [(4, False), (5, False)]
        assert full.k_data(0).shape == full.v_data(1).shape == (4, 1, 4)
        with pytest.raises(kvmem.NotResident, match="swap it out first"):
            full.host_data(0)
        d.manager.swap_out([seq]).wait()
        assert full.device == "device+host"
        keys, _ = full.host_data(1)
        assert torch.equal(keys, full.k_data(1))
        d.manager.evict(8)
        assert full.device == "host"
        with pytest.raises(kvmem.NotResident, match="swap"):
            full.k_data(0)
        assert str(full.block_id) in repr(full)
        d.free(seq)
        d.manager.evict(8, "host")
        assert (full.state, full.device, full.is_cached) == ("FREE", "none", False)


def test_kv_views_are_the_arena() -> None:
    with Driver(v_head_dim=2) as d:
        seq = d.create(tokens_of(5))
        d.step([seq])
        keys, values = d.manager.kv(1)
        assert keys.shape == (9, 4, 1, 4)
        assert values.shape == (9, 4, 1, 2)
        assert not keys[0].any()  # the null frame
        block = d.manager.block(seq.block_ids[0])
        assert torch.equal(keys[block.frame_ids[0]], block.k_data(1))
        assert keys.data_ptr() == d.manager.kv(1)[0].data_ptr()


def test_stats_bytes_equal_the_bytes_at_the_device_interface(seed: int) -> None:
    with Driver(debug=False) as d:
        GoodWork(d, seed).run(200)
        d.wait()
        stats = d.manager.stats()
        device, frame_bytes = d.store.device, d.store.layout.frame_bytes
        out, into = device.moved(Stream.OUT), device.moved(Stream.IN)
        assert (stats.bytes_out, stats.bytes_in) == (out.num_bytes, into.num_bytes)
        assert (stats.bytes_out_done, stats.bytes_in_done) == (stats.bytes_out, stats.bytes_in)
        assert stats.blocks_out * frame_bytes == stats.bytes_out
        assert stats.blocks_out == out.frames > 0
        assert stats.blocks_in == into.frames
        assert stats.device.free + stats.device.held == stats.device.total == 8
        assert stats.to_dict()["device"]["total"] == 8  # type: ignore[index]


def test_snapshot() -> None:
    with Driver() as d:
        m = d.manager
        mine, shared, gone = d.create([1]), d.create(tokens_of(4)), d.create(tokens_of(60, 56))
        d.step([mine, shared, gone])
        d.fork(shared)
        d.free(gone)
        pinned = d.create(tokens_of(80, 76))
        d.step([pinned])
        d.pin(pinned)
        shot = m.snapshot()
        owner = shot["tiers"]["device"]["owner"]
        assert owner.dtype == np.int32
        assert sorted(owner.tolist()) == sorted([mine.id, -2, -1, -3, 0, 0, 0, 0])
        assert shot["tiers"]["host"]["owner"].tolist() == [0] * 8
        assert shot["step"] == 2
        d.hold("out")
        m.swap_out([mine])
        owner = m.snapshot()["tiers"]["device"]["owner"]
        assert -4 in owner
        d.release("out")
        d.wait()
        assert -4 not in m.snapshot()["tiers"]["device"]["owner"]


def test_events() -> None:
    with Driver() as d:
        m = d.manager
        seq = d.create(tokens_of(5))
        d.step([seq])
        m.swap_out([seq])
        m.evict(8)
        m.swap_in([seq])
        d.free(seq)
        m.reset()
        events = m.events()
        assert [e.kind for e in events] == ["step", "swap_out", "evict", "swap_in", "free", "reset"]
        assert events[1].blocks_out == events[3].blocks_in == 2
        assert events[0].sequence_ids == (seq.id,)
        times = [e.time for e in events]
        assert times == sorted(times)
        assert m.events() == []


def test_events_are_bounded() -> None:
    with Driver() as d:
        for _ in range(5000):
            d.manager.reset()
        assert len(d.manager.events()) == 4096


# --- handles, ends ---------------------------------------------------------------------------


def test_a_dropped_sequence_warns_and_is_freed() -> None:
    with Driver() as d:
        seq = d.manager.create(tokens_of(5))
        d._salts[seq.id] = (b"None", [])
        d.step([seq])
        d.manager.step([]).cancel()  # else the Manager keeps the last list, and with it the handle
        with pytest.warns(ResourceWarning, match="without Manager.free"):
            del seq
        d.manager.poll()
        assert d.manager.stats().sequences_resident == 0
        d.manager.verify()


def test_a_dropped_pin_warns_and_is_released() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(5))
        d.step([seq])
        with pytest.warns(ResourceWarning, match="without release"):
            d.manager.pin(seq)
        d.manager.poll()
        assert d.manager.stats().device.pinned == 0


def test_a_dropped_step_warns() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(5))
        step = d.manager.step([seq])
        with pytest.warns(ResourceWarning, match="cancel"):
            del step
        d.manager.poll()
        d.step([seq])


def test_nothing_warns_after_close() -> None:
    d = Driver()
    d.step([d.create(tokens_of(5))])
    d.pin(tokens_of(4))
    d.manager.close()
    d.live.clear()
    d.pins.clear()
    gc.collect()


def test_pickling_is_refused() -> None:
    with Driver() as d:
        seq = d.create([1])
        for thing in (d.manager, seq):
            with pytest.raises(TypeError, match="pickled"):
                pickle.dumps(thing)
            with pytest.raises(TypeError, match="copied"):
                copy.copy(thing)


def test_handles_compare_by_identity() -> None:
    with Driver() as d:
        one, two = d.create([1]), d.create([1])
        assert one != two
        assert len({one, two}) == 2
        assert "WAITING" in repr(one)
        assert "8+8" in repr(d.manager)
        d.free(one)
        assert "freed" in repr(one)


def test_closed() -> None:
    d = Driver()
    seq = d.create([1])
    with d.manager as m:
        transfer = m.swap_out([seq])
    m.close()
    assert m.closed
    assert seq.is_freed
    for act in (
        lambda: transfer.done,
        lambda: m.create([1]),
        m.stats,
        m.verify,
        m.poll,
        lambda: m.kv(0),
        m.snapshot,
    ):
        with pytest.raises(kvmem.ManagerClosed, match="make a new one"):
            act()
    with pytest.raises(kvmem.ManagerClosed):
        transfer.wait()
    with pytest.raises(kvmem.ManagerClosed):
        _ = seq.num_tokens


def test_two_managers_in_one_process() -> None:
    with Driver() as one, Driver(block_size=2) as two:
        a, b = one.create(tokens_of(7)), two.create(tokens_of(9, 3))
        one.step([a])
        two.step([b])
        one.check_content()
        two.check_content()


@pytest.mark.parametrize("settings", [{"sync": True}, {"debug": False}, {"block_size": 1}, {}])
def test_modes_work(settings: dict[str, Any], seed: int) -> None:
    with Driver(**settings) as d:
        work = GoodWork(d, seed)
        for _ in range(15):
            work.run(10)
            d.check_content()
            d.manager.verify()


def test_sync_runs_each_transfer_at_once() -> None:
    with Driver(sync=True) as d:
        seq = d.create(tokens_of(6))
        d.step([seq])
        assert d.manager.swap_out([seq]).done
        d.manager.evict(8)
        assert d.manager.swap_in([seq]).done
        d.check_content()


# --- debug -----------------------------------------------------------------------------------


def test_debug_finds_a_layer_that_was_not_written() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(3))
        with pytest.raises(RuntimeError, match=r"layers \[1\]"):
            with d.manager.step([seq]) as step:
                step.write(0, torch.zeros(3, 1, 4), torch.zeros(3, 1, 4))
        assert seq.num_computed == 0
        d.step([seq])


def test_debug_poisons_vacated_frames() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(3))
        d.step([seq])
        frame = d.manager.block(seq.block_ids[0]).frame_ids[0]
        d.free(seq)
        d.wait()
        keys, values = d.manager.kv(0)
        assert torch.isnan(keys[frame]).all()
        assert torch.isnan(values[frame]).all()


def test_debug_sees_a_written_guard() -> None:
    with Driver() as d:
        guard = d.store._device_arena.tensor[-1]
        old = guard.clone()
        guard[5] ^= 1
        with pytest.raises(AssertionError, match="guard"):
            d.manager.verify()
        guard[:] = old


@pytest.mark.skipif(DEVICE["device"] == "cuda", reason="debug takes no checksums on a GPU")
def test_debug_sees_bytes_that_changed_in_the_host_tier() -> None:
    d = Driver()
    seq = d.create(tokens_of(4))
    d.step([seq])
    d.manager.swap_out([seq]).wait()
    d.manager.evict(8)
    frame = d.manager.block(seq.block_ids[0]).frame_ids[1]
    d.wait()
    d.store._host_arena.bytes[frame, 3] ^= 1
    with pytest.raises((kvmem.TransferError, kvmem.CorruptEntry), match="checksum"):
        d.manager.swap_in([seq]).wait(30)  # an eager simulated device tells at once
    with pytest.raises((kvmem.DeviceUnavailable, kvmem.CorruptEntry), match="new one"):
        d.manager.step([seq])
    d.manager.close()


# --- the whole loop --------------------------------------------------------------------------


@pytest.mark.parametrize("device_blocks", [8, 12, 64])
def test_an_engine_loop_gives_the_same_whatever_the_pool(device_blocks: int) -> None:
    """Continuous batching with make_room: the stamps of `Driver.step` check every row."""
    with Driver(device_blocks=device_blocks, host_blocks=40) as d:
        m = d.manager
        waiting = [[*range(9), 100 + i, 200 + i] for i in range(8)]
        running: list[kvmem.Sequence] = []
        done = steps = 0
        while running or waiting:
            steps += 1
            assert steps < 400, "no progress"
            while waiting and len(running) < 4:
                running.append(d.create(waiting.pop(0)))
            m.make_room(running, max_tokens=16)
            step = d.step(running, max_tokens=16, fit="some")
            m.append(step.ready, [7] * len(step.ready))
            for seq in [s for s in running if s.num_tokens >= 20]:
                running.remove(seq)
                d.free(seq)
                done += 1
        assert done == 8
        stats = m.stats()
        assert (stats.swap_outs == 0) == (device_blocks == 64)
        assert stats.prefix_hit_tokens >= 7 * 8


def test_an_equal_list_is_not_looked_up_again() -> None:
    with Driver(device_blocks=64) as d:
        seqs = [d.create([i]) for i in range(40)]
        d.step(seqs)
        runtime = d.manager._runtime
        kept = runtime.records(seqs)
        assert runtime.records(list(seqs)) is kept
        d.free(seqs[0])
        assert len(runtime.records(seqs[1:])) == 39


def test_an_old_step_does_not_show_the_arrays_of_another() -> None:
    with Driver() as d:
        seq = d.create(tokens_of(3))
        first = d.step([seq])
        assert first.positions.tolist() == [0, 1, 2]
        d.manager.append([seq], [7])
        second = d.step([seq])
        assert first.positions.tolist() == [0, 1, 2], "the step before may still be read"
        d.manager.append([seq], [8])
        d.step([seq])
        assert second.tokens.tolist() == [7]
        for name in ("tokens", "last", "ready", "host", "block_table"):
            with pytest.raises(RuntimeError, match="used again; clone"):
                getattr(first, name)


def test_a_table_is_read_inside_its_step() -> None:
    with Driver() as d:
        step = d.manager.step([d.create(tokens_of(5))])
        step.cancel()
        with pytest.raises(RuntimeError, match="inside it"):
            _ = step.block_table


def test_only_a_handle_stands_for_itself() -> None:
    """The kept list is compared by identity: an object that equals everything is no handle."""

    class Everything:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    with Driver() as d:
        seq = d.create(tokens_of(3))
        d.step([seq])
        with pytest.raises(TypeError, match="Sequence"):
            d.manager.append([Everything()], [1])  # type: ignore[list-item]
        d.manager.append([seq], [1])
        assert seq.num_tokens == 4
