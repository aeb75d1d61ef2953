"""Metrics: the format as a parser reads it, each figure beside ``stats()``, lives of blocks."""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import kvmem
from kvmem.inspect_state import BlockSample
from kvmem.metrics import Metrics, _BlockTimes, _Distribution

Samples = dict[str, list[tuple[dict[str, str], float]]]


def small(**changes: Any) -> kvmem.Config:
    settings: dict[str, Any] = {
        "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "block_size": 16,
        "device_blocks": 12, "host_blocks": 12,
    }  # fmt: skip
    return kvmem.Config(**{**settings, **changes})


@pytest.fixture
def manager() -> Iterator[kvmem.Manager]:
    with kvmem.Manager(small()) as made:
        yield made


def work(manager: kvmem.Manager) -> None:
    """Hits, swaps both ways, a clean swap, evictions, a refusal, a recompute."""
    one = manager.create(list(range(100)))
    with manager.step([one]):
        pass
    manager.swap_out([one]).wait()
    manager.evict(12)
    manager.swap_in([one]).wait()
    manager.swap_out([one]).wait()
    two = manager.create(list(range(100)))
    with manager.step([two]):
        pass
    three = manager.create(list(range(500, 700)))
    with pytest.raises(kvmem.KVMemError):
        with manager.step([two, three]):
            pass
    manager.swap_out([two], how="recompute")
    manager.free([one, two, three])


def parsed(text: str) -> Samples:
    """Samples by name; the parser raises for what it can't read."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    matching = [v for found, v in samples[name] if found == labels]
    assert len(matching) == 1, (name, labels, samples[name])
    return matching[0]


def test_every_figure_is_that_of_the_stats(manager: kvmem.Manager) -> None:
    metrics = Metrics(manager)
    work(manager)
    samples, stats = parsed(metrics.text()), manager.stats()
    assert value(samples, "kvmem_up") == 1
    for tier, found in (("device", stats.device), ("host", stats.host)):
        for name, figure in (
            ("kvmem_blocks", found.total), ("kvmem_blocks_free", found.free),
            ("kvmem_blocks_held", found.held), ("kvmem_blocks_used", found.used),
            ("kvmem_blocks_pinned", found.pinned), ("kvmem_blocks_evictable", found.evictable),
            ("kvmem_blocks_peak", found.peak), ("kvmem_arena_bytes", found.arena_bytes),
            ("kvmem_cache_usage_ratio", found.used / found.total),
            ("kvmem_tokens_available", (found.free + found.evictable) * 16),
        ):  # fmt: skip
            assert value(samples, name, tier=tier) == figure
    for name, figure in (
        ("kvmem_steps_total", stats.steps),
        ("kvmem_prefix_cache_queries_total", stats.prefix_query_tokens),
        ("kvmem_prefix_cache_hits_total", stats.prefix_hit_tokens),
        ("kvmem_offload_store_bytes_total", stats.bytes_out_done),
        ("kvmem_offload_load_bytes_total", stats.bytes_in_done),
        ("kvmem_offload_stores_skipped_total", stats.clean_swap_outs + stats.evicted_clean),
    ):
        assert figure > 0
        assert value(samples, name) == figure
    assert value(samples, "kvmem_preemptions_total", how="swap") == stats.swap_outs > 0
    assert value(samples, "kvmem_preemptions_total", how="recompute") == stats.recomputes > 0
    assert value(samples, "kvmem_evictions_total", tier="device") == stats.evicted_device > 0
    assert value(samples, "kvmem_allocation_failures_total", tier="host") == 0
    manager_sequences = sum(v for _, v in samples["kvmem_sequences"])
    assert manager_sequences == 0


def test_transfers_are_counted_when_they_ended(manager: kvmem.Manager) -> None:
    metrics = Metrics(manager)
    work(manager)
    samples, stats = parsed(metrics.text()), manager.stats()
    for way, num_bytes in (("out", stats.bytes_out_done), ("in", stats.bytes_in_done)):
        assert value(samples, "kvmem_transfer_bytes_sum", direction=way) == num_bytes
        count = value(samples, "kvmem_transfer_bytes_count", direction=way)
        assert count == value(samples, "kvmem_transfer_seconds_count", direction=way) > 0
        assert 0 < value(samples, "kvmem_transfer_seconds_sum", direction=way) < 60


def test_histograms_are_cumulative(manager: kvmem.Manager) -> None:
    metrics = Metrics(manager)
    work(manager)
    samples = parsed(metrics.text())
    names = [name for name in samples if name.endswith("_bucket")]
    assert len(names) == 5
    for name in names:
        series: dict[str, list[tuple[float, float]]] = {}
        for labels, count in samples[name]:
            series.setdefault(labels.get("direction", ""), []).append((float(labels["le"]), count))
        for direction, points in series.items():
            assert points == sorted(points)
            assert [count for _, count in points] == sorted(count for _, count in points)
            assert points[-1][0] == math.inf
            labels = {"direction": direction} if direction else {}
            assert value(samples, name.replace("_bucket", "_count"), **labels) == points[-1][1]


def test_a_refusal_is_counted(manager: kvmem.Manager) -> None:
    metrics = Metrics(manager)
    seqs = [manager.create(list(range(start, start + 100))) for start in (0, 200)]
    with pytest.raises(kvmem.OutOfBlocks):
        with manager.step(seqs):
            pass
    assert value(parsed(metrics.text()), "kvmem_allocation_failures_total", tier="device") == 1
    manager.free(seqs)


def test_labels_are_on_every_sample(manager: kvmem.Manager) -> None:
    odd = 'a "quoted" \\ name\n'
    metrics = Metrics(manager, labels={"model": odd, "rank": "0"})
    work(manager)
    for found in parsed(metrics.text()).values():
        for labels, _ in found:
            assert (labels["model"], labels["rank"]) == (odd, "0")


def test_without_a_host_tier() -> None:
    with kvmem.Manager(small(host_blocks=0)) as manager:
        samples = parsed(Metrics(manager).text())
        assert [labels for labels, _ in samples["kvmem_blocks"]] == [{"tier": "device"}]


def test_a_closed_manager_is_down_and_not_kept_alive() -> None:
    manager = kvmem.Manager(small())
    metrics = Metrics(manager)
    manager.close()
    assert parsed(metrics.text()) == {"kvmem_up": [({}, 0.0)]}
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    assert parsed(metrics.text()) == {"kvmem_up": [({}, 0.0)]}
    metrics.close()


def test_after_close_nothing_is_watched(manager: kvmem.Manager) -> None:
    one, two = Metrics(manager), Metrics(manager)
    one.close()
    one.close()
    work(manager)
    quiet, watching = parsed(one.text()), parsed(two.text())
    assert value(quiet, "kvmem_transfer_bytes_count", direction="out") == 0
    assert value(watching, "kvmem_transfer_bytes_count", direction="out") > 0
    two.close()
    assert manager._runtime.events.listeners == manager._runtime.store.observers == ()


def test_own_registry_and_no_port(manager: kvmem.Manager) -> None:
    import psutil

    before = psutil.Process().net_connections()
    metrics = Metrics(manager)
    metrics.text()
    assert "kvmem" not in str([family.name for family in REGISTRY.collect()])
    assert psutil.Process().net_connections() == before
    other = CollectorRegistry()
    other.register(metrics)
    assert other.get_sample_value("kvmem_up") == 1


def test_collecting_while_the_engine_works(manager: kvmem.Manager) -> None:
    metrics, stop, seen = Metrics(manager), threading.Event(), []

    def scrape() -> None:
        while not stop.is_set():
            seen.append(value(parsed(metrics.text()), "kvmem_steps_total"))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for _ in range(5):
            work(manager)
    finally:
        stop.set()
        thread.join(60)
    assert seen
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"manager": 7}, TypeError, r"manager must be a kvmem\.Manager, not int"),
        ({"labels": ["a"]}, TypeError, "labels must be a mapping"),
        ({"labels": {"a": 1}}, TypeError, "labels must map str to str"),
        ({"labels": {"a b": "x"}}, ValueError, "'a b' is no label name"),
        ({"labels": {"__name": "x"}}, ValueError, "is no label name"),
        ({"labels": {"": "x"}}, ValueError, "is no label name"),
        ({"labels": {"tier": "x"}}, ValueError, "'tier' is a label of kvmem's own"),
        ({"sample_blocks": -1}, ValueError, "sample_blocks=-1 is out of range"),
        ({"sample_blocks": 1.5}, TypeError, "sample_blocks must be an integer"),
    ],
)
def test_bad_arguments(
    manager: kvmem.Manager, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        Metrics(**{"manager": manager, **arguments})
    assert len(str(caught.value)) <= 300
    assert manager._runtime.events.listeners == ()


def test_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import kvmem\n"
        "try: import kvmem.metrics\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ("kvmem.metrics needs prometheus_client: pip install 'kvmem[metrics]'\n")


# --- lives of blocks ------------------------------------------------------------------------------


class Life:
    """A naive model of one block: what happens to it, with the times."""

    def __init__(self) -> None:
        self.content, self.used, self.born, self.released = 0, False, 0.0, 0.0
        self.live = False
        self.lifetimes: list[float] = []
        self.gaps: list[float] = []
        self.idles: list[float] = []

    def end(self, now: float) -> None:
        if self.live:
            self.lifetimes.append(now - self.born)
            if not self.used:
                self.idles.append(now - self.released)
        self.live = self.used = False
        self.content = 0

    def take(self, now: float) -> None:
        self.end(now)
        self.live, self.used, self.born = True, True, now

    def act(self, draw: random.Random, now: float, serial: int) -> None:
        if not self.live:
            if draw.random() < 0.5:
                self.take(now)
        elif self.used:
            if not self.content and draw.random() < 0.6:
                self.content = serial  # published
            elif draw.random() < 0.6:
                if self.content:
                    self.used, self.released = False, now
                else:
                    self.end(now)  # an unpublished block goes with its sequence
        else:
            match draw.randrange(4):
                case 0:
                    self.end(now)
                case 1:
                    self.take(now)  # evicted and given to others between two looks
                case 2:
                    self.gaps.append(now - self.released)
                    self.used = True
                case _:
                    pass


def test_lives_of_blocks_against_a_naive_model(seed: int) -> None:
    draw = random.Random(seed)
    lives = [Life() for _ in range(40)]
    times = _BlockTimes(len(lives), len(lives))
    assert times.ids.tolist() == list(range(1, 41))
    for moment in range(400):
        for life in lives:
            life.act(draw, float(moment), draw.randrange(1, 2**40))
        now = BlockSample(
            np.array([life.live for life in lives]),
            np.array([life.used for life in lives]),
            np.array([life.content for life in lives]),
        )
        times.look(now, float(moment))
    for found, name in ((times.lifetime, "lifetimes"), (times.gap, "gaps"), (times.idle, "idles")):
        expected = [v for life in lives for v in getattr(life, name)]
        assert len(expected) > 100
        assert found.buckets()[-1][1] == len(expected)
        assert found.total == pytest.approx(sum(expected))


def test_lives_of_the_blocks_of_a_manager(manager: kvmem.Manager) -> None:
    """7 blocks live, 6 of them published: they outlive their sequence, are used again, dropped."""
    metrics = Metrics(manager, sample_blocks=1000)
    one = manager.create(list(range(100)))
    with manager.step([one]):
        pass
    manager.free([one])  # the partial block ends
    two = manager.create(list(range(100)))
    with manager.step([two]):
        pass
    manager.free([two])
    manager.reset()
    samples = parsed(metrics.text())
    assert value(samples, "kvmem_block_reuse_gap_seconds_count") == 6
    assert value(samples, "kvmem_block_idle_before_evict_seconds_count") == 6
    assert value(samples, "kvmem_block_lifetime_seconds_count") == 8


@pytest.mark.parametrize(("blocks", "sample"), [(10, 4), (10, 100), (1000, 256), (5, 0), (1, 1)])
def test_the_sample_is_even_and_bounded(blocks: int, sample: int) -> None:
    ids = _BlockTimes(blocks, sample).ids
    assert len(ids) <= sample
    assert len(ids) == len(set(ids.tolist()))
    if sample:
        assert ids[0] == 1 and ids[-1] <= blocks
        assert len(ids) >= min(blocks, sample) / 2


def test_a_distribution_counts_the_bound_into_its_bucket() -> None:
    found = _Distribution((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0, 99.0):
        found.add(number)
    assert found.buckets() == [("1", 2), ("2", 4), ("+Inf", 5)]
    assert found.total == 104.0
