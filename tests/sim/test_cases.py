"""Public bug reports as scenarios, as tests/test_cases.py has them, where streams have to be late.

Each in every mode of the scheduler. The device here queues kernels too, so the compute stream can
stand still while the host goes on, which the CPU device can't show. tests/sim/test_in_flight.py has
cases 43 and 45 for every act at every moment of a copy.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from kvmem.ledger.jit import JIT_DISABLED
from kvmem.sim_options import MODES, FailAt
from kvmem.store.device import Stream
from tests.driver import NUM_HEADS, Driver, dense_attention, tokens_of

pytestmark = pytest.mark.skipif(JIT_DISABLED, reason="attention exists compiled only")

COMPUTE, OUT, IN = Stream.COMPUTE, Stream.OUT, Stream.IN


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def made(mode: str, seed: int, *, sim: dict[str, Any] | None = None, **settings: Any) -> Driver:
    """A Driver on a simulated device; without debug, whose poison orders more than it has to."""
    options = kvmem.SimOptions(mode=mode, seed=seed, **{"poison": False, **(sim or {})})
    return Driver(device="sim", sim=options, **{"debug": False, **settings})


def test_case_23_shared_blocks_go_out_and_come_back_once(mode: str, seed: int) -> None:
    with made(mode, seed, device_blocks=16, host_blocks=16) as d:
        seq = d.create(tokens_of(30))
        d.step([seq])
        seqs = [seq, *d.fork(seq, 7)]
        d.manager.append(seqs, list(range(500, 508)))
        d.step(seqs)
        d.manager.swap_out(seqs)
        assert d.manager.stats().host.held == 7 + 8
        assert d.manager.evict(16) == 15  # while the copies may not have begun
        assert d.manager.swap_in(seqs).num_blocks == 7 + 8
        d.check_content()
        assert (d.store.device.moved(OUT).frames, d.store.device.moved(IN).frames) == (15, 15)
        assert len({tuple(s.block_ids[:7]) for s in seqs}) == 1


def test_case_31_a_host_frame_is_kept_from_the_next_while_it_is_read(mode: str, seed: int) -> None:
    with made(mode, seed, device_blocks=16, host_blocks=8) as d:
        seq, other = d.create(tokens_of(32)), d.create(tokens_of(132, 100))
        d.step([seq])
        d.manager.swap_out([seq])
        d.step([other])
        d.wait()
        d.manager.evict(8)
        d.hold("in")
        d.manager.swap_in([seq])  # the reader
        while not d.store.device.scheduler.queues[IN][0].done:
            d.store.device.run(IN, 1)  # stands in the middle of its copy
        assert d.manager.evict(8, "host") == 8
        late = d.manager.swap_out([other])  # wants the same host frames
        assert late.num_blocks == 8
        d.store.device.run(OUT)
        assert d.store.device.moved(OUT).frames == 8  # the first swap out, not this one
        d.release("in")
        late.wait(60)
        d.check_content()


def test_case_35_counters_are_exact_and_a_failed_copy_is_not_counted(mode: str, seed: int) -> None:
    fail = {"fail_at": FailAt("copy_before", 4)}
    d = made(mode, seed, sim=fail, device_blocks=16, host_blocks=16)
    seq, tail = d.create(tokens_of(20)), d.create(tokens_of(58, 50))
    cached = d.create(tokens_of(92, 80))
    d.step([seq, tail, cached])
    d.manager.swap_out([seq, tail])
    d.free(cached)
    assert d.manager.evict(7) == 7
    d.manager.swap_in([seq])
    assert d.manager.evict(3) == 3
    d.wait()
    stats, frame = d.manager.stats(), d.store.layout.frame_bytes
    assert (stats.blocks_out, stats.blocks_in) == (7 + 3, 5)
    assert (stats.evicted_device, stats.evicted_clean) == (10, 7)
    assert (stats.bytes_out_done, stats.bytes_in_done) == (10 * frame, 5 * frame)
    with pytest.raises((kvmem.TransferError, kvmem.DeviceUnavailable)):
        d.manager.swap_in([tail]).wait(60)
    counters = d.store.counters()
    assert (counters["out_blocks"], counters["in_blocks"]) == (10, 5)
    assert counters["in_bytes"] == 5 * frame
    d.manager.close()


def test_case_37_a_copy_out_waits_for_writes_that_have_not_run(mode: str, seed: int) -> None:
    with made(mode, seed) as d:
        device = d.store.device
        seq = d.create(tokens_of(7))
        device.hold(COMPUTE)
        with d.manager.step([seq]) as step:
            d.write(step)  # queued: the step ends, its kernels have not begun
        d.manager.swap_out([seq])
        device.run(OUT)  # d2h first
        assert device.moved(OUT).frames == 0
        assert d.manager.evict(8) == 2
        device.release(COMPUTE)
        d.manager.swap_in([seq])
        d.check_content()
        d.manager.append([seq], [70])
        d.step([seq])


def test_case_37_an_arrival_waits_for_kernels_that_read_its_frames(mode: str, seed: int) -> None:
    """The other direction: who reads the frames is done for the host, but has not run."""
    with made(mode, seed, sim={"late_results": True}, device_blocks=4, host_blocks=8) as d:
        device = d.store.device
        back = d.create(tokens_of(116, 100))
        with d.manager.step([back]) as step:
            d.write(step)
        d.manager.swap_out([back])
        d.wait()
        d.manager.evict(4)
        seq = d.create(tokens_of(16), publish=False)
        device.hold(COMPUTE)
        with d.manager.step([seq]) as step:
            d.write(step)
            out = step.attend(0, torch.ones(16, NUM_HEADS, d.config.head_dim))
        keys, values = d.rows(d.stamps(seq), 0)
        d.free(seq)
        d.manager.swap_in([back])  # into the frames that the attention reads
        device.run(IN)
        assert device.moved(IN).frames == 0
        device.release(COMPUTE)
        d.check_content()
        device.drain()
        query = np.ones(out.shape, np.float32)
        expected = dense_attention(query, keys, values)
        np.testing.assert_allclose(out.numpy(), expected, atol=2e-5, rtol=0)


def test_case_39_the_order_of_a_frame_is_inherited_through_its_second_owner(
    mode: str, seed: int
) -> None:
    """OUT reads a frame; it is given to IN, which waits; that owner goes without any work; COMPUTE
    takes it: its write comes after the read of OUT."""
    with made(mode, seed, device_blocks=4, host_blocks=16) as d:
        device = d.store.device
        second = d.create(tokens_of(116, 100), publish=False)
        d.step([second])
        d.manager.swap_out([second])
        d.wait()
        d.manager.evict(4)
        first = d.create(tokens_of(16), publish=False)
        d.step([first])
        d.hold("out", "in")
        d.manager.swap_out([first])
        assert d.manager.evict(4) == 4
        d.manager.swap_in([second])  # into the very frames that OUT reads
        d.free(second)
        third = d.create(tokens_of(216, 200), publish=False)
        with d.manager.step([third]) as step:
            d.write(step)
        device.run(COMPUTE)
        device.run(IN)
        assert (device.moved(IN).frames, device.moved(OUT).frames) == (0, 4)
        assert device.scheduler.queues[COMPUTE], "the third did not wait for the first"
        d.release()
        d.check_content()


def test_case_41_each_step_reads_its_own_table_however_late(mode: str, seed: int) -> None:
    """Three steps are planned, run and left before the kernels of the first one have begun."""
    rng = np.random.default_rng(seed)
    with made(mode, seed, sim={"late_results": True}, device_blocks=64, host_blocks=0) as d:
        device = d.store.device
        seqs = [d.create(tokens_of(5 + 4 * i, 100 * i)) for i in range(3)]
        checks: list[tuple[Any, Any]] = []
        device.hold(COMPUTE)
        for number in range(3):
            d.manager.append(seqs, [900 + number] * 3)
            with d.manager.step(seqs[number:] + seqs[:number]) as step:
                d.write(step)
                query = rng.standard_normal((step.num_tokens, NUM_HEADS, d.config.head_dim))
                query = query.astype(np.float32)
                out = step.attend(0, torch.from_numpy(query))
                starts = step.query_start.tolist()
                for i, seq in enumerate(step.seqs):
                    keys, values = d.rows(d.stamps(seq), 0)
                    part = slice(starts[i], starts[i + 1])
                    checks.append((out[part], dense_attention(query[part], keys, values)))
        assert all(torch.isnan(out).all() for out, _ in checks)
        device.release(COMPUTE)
        device.drain()
        for out, expected in checks:
            np.testing.assert_allclose(out.numpy(), expected, atol=2e-5, rtol=0)
        d.check_content()


@pytest.mark.parametrize("moment", ["before", "in the middle", "after"])
def test_case_43_frames_of_an_aborted_arrival_stay_guarded(
    moment: str, mode: str, seed: int
) -> None:
    with made(mode, seed, device_blocks=4, host_blocks=8) as d:
        device = d.store.device
        seq = d.create(tokens_of(16), publish=False)
        d.step([seq])
        d.manager.swap_out([seq])
        d.wait()
        d.manager.evict(4)
        d.hold("in")
        d.manager.swap_in([seq])
        while moment != "before" and not device.scheduler.queues[IN][0].done:
            device.run(IN, 1)
        if moment == "after":
            device.run(IN)
        d.free(seq)
        other = d.create(tokens_of(116, 100))
        with d.manager.step([other]) as step:  # takes the frames that the late copy still writes
            d.write(step)
        device.run(COMPUTE)
        arrived = moment == "after"
        assert device.moved(IN).frames == 4 * arrived
        assert bool(device.scheduler.queues[COMPUTE]) is not arrived
        d.release("in")
        d.check_content()


def test_case_47_fifty_requests_share_one_load_that_is_half_done(mode: str, seed: int) -> None:
    with made(mode, seed, device_blocks=75, host_blocks=80) as d:
        device = d.store.device
        first = d.create(tokens_of(80))
        d.step([first])
        d.free(first)
        d.manager.evict(75)
        d.wait()
        seqs = [d.create([*range(80), 1000 + i]) for i in range(50)]
        d.hold("in")
        early = d.manager.step(seqs[:1])
        while not device.scheduler.queues[IN][0].done:
            device.run(IN, 1)
        late = d.manager.step(seqs[1:])
        assert d.manager.stats().blocks_in == 20
        d.release("in")
        for step in (late, early):
            with step:
                d.run(step)
        assert device.moved(IN).frames == 20
        assert early.num_tokens + late.num_tokens == 50
        d.check_content()


def test_case_49_tables_name_the_frames_that_hold_the_data(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    with made(mode, seed, device_blocks=4, host_blocks=4) as d:
        seqs = [d.create([*range(100 * i, 100 * i + n)]) for i, n in enumerate((3, 5, 7))]
        for _ in range(120):
            seq = rng.choice(seqs)
            if seq.state == "RESIDENT" and rng.random() < 0.6:
                d.manager.swap_out([seq], how="auto")
                d.manager.evict(rng.choice((0, 1, 4)))
                continue
            if seq.num_tokens == seq.num_computed:
                d.manager.truncate([seq], rng.randint(1, min(7, seq.num_tokens)))
                d.manager.append([seq], [1])
            step = d.step([seq], fit="some")  # attention is compared with the stamps
            for _, reason in step.left_out:
                assert reason == "room"
                d.manager.swap_out([rng.choice(seqs)], how="auto")
            if step.num_tokens:
                slots = step.host.slot_mapping
                assert int(slots.max()) < (4 + 1) * d.config.block_size
        d.check_content()
