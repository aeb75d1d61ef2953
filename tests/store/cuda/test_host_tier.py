"""What a Manager says and does about the host tier of a GPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

import kvmem
from kvmem.store.cuda import host_arena
from tests.cuda_double.opening import Double, install
from tests.cuda_double.runtime import Error
from tests.driver import Driver, tokens_of


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[Double]:
    return install(monkeypatch, seed, "random")


def test_stats_tell_the_ways_and_what_is_page_locked(doubles: list[Double]) -> None:
    with Driver(device="cuda", device_blocks=40, host_blocks=40, debug=False) as d:
        seqs = [d.create(tokens_of(104 * n, 100 * n)) for n in range(1, 8)]
        d.step(seqs)
        d.manager.swap_out(seqs[::2])
        d.manager.evict(40)
        d.manager.swap_in(seqs[::2])
        d.wait()
        stats, arena = d.manager.stats(), d.store._host_arena
        assert stats.host_locked_bytes == arena.num_bytes == stats.host.arena_bytes
        went = stats.transfers_copied + stats.transfers_batched + stats.transfers_staged
        assert went == sum(q.last for q in d.store._transfers.values()) > 0
    assert not doubles[-1].memory.registered


def test_what_the_system_does_not_lock_is_pageable_and_said_once(
    doubles: list[Double], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = host_arena.pin

    def small_chunks(runtime: Any, memory: Any, **options: Any) -> Any:
        runtime.fail("cudaHostRegister", 2, Error.cudaErrorMemoryAllocation)
        return real(runtime, memory, chunk_bytes=4096, **options)

    monkeypatch.setattr(host_arena, "pin", small_chunks)
    with caplog.at_level(logging.WARNING, "kvmem"), Driver(device="cuda", host_blocks=40) as d:
        assert d.manager.stats().host_locked_bytes == 4096 < d.store._host_arena.num_bytes
        seqs = [d.create(tokens_of(30)), d.create(tokens_of(90, 60))]
        for seq in seqs:
            d.step([seq])
            d.manager.swap_out([seq])
            d.manager.evict(8)
        for seq in seqs:
            d.manager.swap_in([seq])
            d.check_content()
            d.manager.swap_out([seq])
    assert len([r for r in caplog.records if "page-locked" in r.getMessage()]) == 1


def test_progress_hears_of_it_and_may_end_it(doubles: list[Double]) -> None:
    told: list[tuple[int, int]] = []
    settings = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "device": "cuda"}
    config = kvmem.Config(**settings, device_blocks=4, host_blocks=4)
    kvmem.Manager(config, progress=lambda *now: told.append(now)).close()
    assert told == [(told[0][1], told[0][1])]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvmem.Manager(config, progress=stop)
    assert not doubles[-1].memory.registered
    history = [what for what, _, _ in doubles[-1].memory.history]
    assert history == ["registered", "unregistered"]


def test_a_forked_child_gets_no_page_locked_memory(doubles: list[Double]) -> None:
    with Driver(device="cuda") as d:
        seq = d.create(tokens_of(8))
        d.step([seq])
        d.manager.swap_out([seq]).wait(30)
        address = d.store._host_arena.address
        child = os.fork()
        if not child:
            starts = {
                line.split("-")[0] for line in Path("/proc/self/maps").read_text().split("\n")
            }
            os._exit(3 if f"{address:08x}" in starts else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        d.manager.evict(8)
        d.manager.swap_in([seq])
        d.check_content()


def test_the_host_tier_lies_on_the_node_of_the_gpu(
    doubles: list[Double], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []
    (tmp_path / "0000:65:00.0").mkdir()
    (tmp_path / "0000:65:00.0" / "numa_node").write_text("0")
    real = host_arena.numa_node_of
    monkeypatch.setattr(host_arena, "numa_node_of", lambda address: real(address, tmp_path))
    monkeypatch.setattr(
        "kvmem.store.cuda.pinning.prefer_node", lambda memory, node: asked.append(node)
    )
    for node in ("gpu", 1, None):
        with Driver(device="cuda", numa_node=node):
            pass
    assert asked == [0, 1]


def test_an_arena_of_the_gpu_that_does_not_fit_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, doubles: list[Double]
) -> None:
    from kvmem.store.cuda import api

    small = Double.new(0, "eager", capacity=8192)
    monkeypatch.setattr(api, "open_cuda", lambda name: small.cuda)
    with pytest.raises(kvmem.ConfigError, match=r"of 8192 bytes free: ask for fewer blocks"):
        Driver(device="cuda", device_blocks=1000)
    assert small.memory.used == 0
