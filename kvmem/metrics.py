"""Prometheus metrics of a Manager (the extra ``metrics``): a collector, a registry of its own.

::

    from kvmem.metrics import Metrics

    metrics = Metrics(manager)
    metrics.text()                                # the exposition format, for your own endpoint
    prometheus_client.REGISTRY.register(metrics)  # or beside the metrics of your engine

Nothing listens on a port. Gauges and counters are those of ``Manager.stats()``, read at each
collection. The histograms are filled as things happen: transfers when they have ended, blocks by
looking at a sample of them at each event of the Manager.
"""

from __future__ import annotations

import re
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvmem.checks import integer
from kvmem.errors import KVMemError
from kvmem.inspect_state import BlockSample, sample_blocks
from kvmem.manager import Manager

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "kvmem.metrics needs prometheus_client: pip install 'kvmem[metrics]'"
    ) from error

if TYPE_CHECKING:
    from kvmem.events import Event
    from kvmem.stats import Stats, TierStats

__all__ = ["Metrics"]

_BYTES = tuple(float(4**n) for n in range(6, 18))  # 4 KiB to 16 GiB
_FAST = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SLOW = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
_LABEL = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*", re.ASCII)
_OWN_LABELS = ("tier", "state", "direction", "how", "le", "quantile")

# (name, help, field of TierStats) of gauges with a label "tier".
_TIER_GAUGES = (
    ("kvmem_blocks", "Blocks of the tier.", "total"),
    ("kvmem_blocks_free", "Blocks without content.", "free"),
    ("kvmem_blocks_held", "Blocks with content: used, pinned or cached.", "held"),
    ("kvmem_blocks_used", "Blocks named by a sequence's table.", "used"),
    ("kvmem_blocks_pinned", "Blocks named by a live Pin.", "pinned"),
    ("kvmem_blocks_evictable", "Cached blocks that may be taken for others.", "evictable"),
    ("kvmem_blocks_peak", "Most blocks held at once.", "peak"),
    ("kvmem_arena_bytes", "Memory of the tier, reserved frames included.", "arena_bytes"),
)

# (name, help, field of Stats) of counters without labels.
_COUNTERS = (
    ("kvmem_steps", "Steps planned, aborted ones included.", "steps"),
    ("kvmem_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
     "prefix_query_tokens"),
    ("kvmem_prefix_cache_hits", "Tokens served by the prefix cache.", "prefix_hit_tokens"),
    ("kvmem_swap_ins", "Sequences swapped in.", "swap_ins"),
    ("kvmem_blocks_published", "Blocks entered into the prefix cache.", "blocks_published"),
    ("kvmem_blocks_merged", "Blocks replaced by an equal published one.", "blocks_merged"),
    ("kvmem_blocks_copied_on_write", "Blocks copied because a shared one was written.",
     "blocks_copied_on_write"),
    ("kvmem_blocks_dropped", "Cached blocks that left their last tier.", "blocks_dropped"),
    ("kvmem_offload_store_blocks", "Blocks copied device to host.", "blocks_out"),
    ("kvmem_offload_store_bytes", "Bytes copied device to host.", "bytes_out_done"),
    ("kvmem_offload_load_blocks", "Blocks copied host to device.", "blocks_in"),
    ("kvmem_offload_load_bytes", "Bytes copied host to device.", "bytes_in_done"),
)  # fmt: skip


class Metrics(Collector):
    """The metrics of one Manager. A prometheus_client collector with its own ``registry``.

    ``labels`` are put on every sample, e.g. ``{"model": "a"}``; ``sample_blocks`` is how many
    blocks the block histograms look at (a fixed, even choice). The Manager is held weakly; once it
    is closed or has failed, only ``kvmem_up 0`` is left. Raises TypeError, ValueError. Costs one
    pass over the sample at each event of the Manager, and two notes a transfer.
    """

    def __init__(
        self,
        manager: Manager,
        *,
        labels: Mapping[str, str] | None = None,
        sample_blocks: int = 256,
    ) -> None:
        if not isinstance(manager, Manager):
            raise TypeError(f"manager must be a kvmem.Manager, not {type(manager).__name__}")
        count = integer("sample_blocks", sample_blocks, low=0, high=1 << 20)
        self._labels = _checked_labels(labels)
        self._manager = weakref.ref(manager)
        self._lock = threading.Lock()
        self._transfer_bytes = {way: _Distribution(_BYTES) for way in ("out", "in")}
        self._transfer_seconds = {way: _Distribution(_FAST) for way in ("out", "in")}
        with manager._lock():
            runtime = manager._runtime
            self._blocks = _BlockTimes(len(runtime.ledger.state.blocks) - 1, count)
            # Bound once: to take them off again, the same objects are needed.
            self._heard, self._moved = self._hear, self._note_transfer
            runtime.events.listeners += (self._heard,)
            runtime.store.observers += (self._moved,)
            self._runtime = weakref.ref(runtime)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self) -> str:
        """All metrics in the text exposition format. O(blocks)."""
        return generate_latest(self.registry).decode()

    def close(self) -> None:
        """Stop watching; a second call is a no-op. What was counted can still be collected."""
        runtime = self._runtime()
        if runtime is None or runtime.is_forked:
            return
        with runtime.lock:
            events, store = runtime.events, runtime.store
            events.listeners = tuple(x for x in events.listeners if x is not self._heard)
            store.observers = tuple(x for x in store.observers if x is not self._moved)

    def collect(self) -> Iterable[Metric]:
        """The metrics now; called by a registry."""
        manager = self._manager()
        stats = None
        try:
            stats = None if manager is None else manager.stats()
        except KVMemError:  # closed, forked, or its device failed
            stats = None
        up = "1: the Manager works; 0: it was closed, or its device failed."
        yield self._gauge("kvmem_up", up, [({}, int(stats is not None))])
        if manager is None or stats is None:
            return
        runtime = manager._runtime
        yield from self._gauges(stats, runtime.config.block_size)
        yield from self._counters(stats, runtime.events.refusals)
        yield from self._histograms()

    # --- what happens ---------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        """Look at the sample; under the Manager's lock."""
        runtime = self._runtime()
        if runtime is not None and len(self._blocks.ids):
            with self._lock:
                self._blocks.look(sample_blocks(runtime, self._blocks.ids), event.time)

    def _note_transfer(self, way: str, blocks: int, num_bytes: int, seconds: float) -> None:
        """A transfer has ended; on the thread that moved it."""
        with self._lock:
            self._transfer_bytes[way].add(num_bytes)
            self._transfer_seconds[way].add(seconds)

    # --- families -------------------------------------------------------------------------------

    def _gauges(self, stats: Stats, block_size: int) -> Iterator[Metric]:
        tiers: dict[str, TierStats] = {"device": stats.device}
        if stats.host.total:
            tiers["host"] = stats.host
        usage = [({"tier": n}, t.used / t.total if t.total else 0.0) for n, t in tiers.items()]
        yield self._gauge("kvmem_cache_usage_ratio", "Used blocks, as a share of all.", usage)
        for name, text, field in _TIER_GAUGES:
            rows = [({"tier": n}, getattr(t, field)) for n, t in tiers.items()]
            yield self._gauge(name, text, rows)
        for name, text, fields in (
            ("kvmem_tokens_used", "Slots of used blocks.", ("used",)),
            ("kvmem_tokens_evictable", "Slots of evictable blocks.", ("evictable",)),
            ("kvmem_tokens_available", "Slots of free and evictable blocks.",
             ("free", "evictable")),
        ):  # fmt: skip
            slots = [
                ({"tier": n}, sum(getattr(t, field) for field in fields) * block_size)
                for n, t in tiers.items()
            ]
            yield self._gauge(name, text, slots)
        states = ("waiting", "resident", "swapped")
        yield self._gauge(
            "kvmem_sequences",
            "Live sequences.",
            [({"state": state}, getattr(stats, f"sequences_{state}")) for state in states],
        )
        text = "Blocks that the prefix cache serves."
        yield self._gauge("kvmem_cached_blocks", text, [({}, stats.cached_nodes)])

    def _counters(self, stats: Stats, refusals: Sequence[int]) -> Iterator[Metric]:
        for name, text, field in _COUNTERS:
            yield self._counter(name, text, [({}, getattr(stats, field))])
        yield self._counter(
            "kvmem_preemptions",
            "Sequences that gave up the device.",
            [({"how": "swap"}, stats.swap_outs), ({"how": "recompute"}, stats.recomputes)],
        )
        yield self._counter(
            "kvmem_evictions",
            "Blocks that lost their frame in the tier to others.",
            [({"tier": "device"}, stats.evicted_device), ({"tier": "host"}, stats.evicted_host)],
        )
        skipped = stats.clean_swap_outs + stats.evicted_clean
        yield self._counter(
            "kvmem_offload_stores_skipped",
            "Blocks that left the device without a copy: the host had one.",
            [({}, skipped)],
        )
        yield self._counter(
            "kvmem_allocation_failures",
            "Calls that found too little room in the tier.",
            [({"tier": "device"}, refusals[0]), ({"tier": "host"}, refusals[1])],
        )

    def _histograms(self) -> list[Metric]:
        """Made under the lock, and yielded without it: a slow reader must not stop an engine."""
        times = self._blocks
        since = "From a cached block's last release until"
        with self._lock:
            return [
                self._histogram(
                    "kvmem_transfer_bytes", "Size of a transfer.", self._transfer_bytes
                ),
                self._histogram(
                    "kvmem_transfer_seconds", "Time of a transfer's copy.", self._transfer_seconds
                ),
                self._histogram(
                    "kvmem_block_lifetime_seconds",
                    "From taking a block until its content left the last tier (sampled).",
                    {"": times.lifetime},
                ),
                self._histogram(
                    "kvmem_block_reuse_gap_seconds",
                    f"{since} its next use (sampled).",
                    {"": times.gap},
                ),
                self._histogram(
                    "kvmem_block_idle_before_evict_seconds",
                    f"{since} it left the last tier (sampled).",
                    {"": times.idle},
                ),
            ]

    def _gauge(self, name: str, text: str, rows: list[tuple[dict[str, str], float]]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names(rows[0][0]))
        for labels, value in rows:
            family.add_metric(self._values(labels), value)
        return family

    def _counter(self, name: str, text: str, rows: list[tuple[dict[str, str], float]]) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names(rows[0][0]))
        for labels, value in rows:
            family.add_metric(self._values(labels), value)
        return family

    def _histogram(self, name: str, text: str, found: Mapping[str, _Distribution]) -> Metric:
        extra = {} if "" in found else {"direction": ""}
        family = HistogramMetricFamily(name, text, labels=self._names(extra))
        for way, distribution in found.items():
            labels = {"direction": way} if way else {}
            family.add_metric(self._values(labels), distribution.buckets(), distribution.total)
        return family

    def _names(self, own: Mapping[str, str]) -> list[str]:
        return [*own, *self._labels]

    def _values(self, own: Mapping[str, str]) -> list[str]:
        return [*own.values(), *self._labels.values()]


class _Distribution:
    """Counts by bucket, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, the last one is +Inf, as the format wants it."""
        sums = np.cumsum(self._counts).tolist()
        names = [f"{bound:g}" if bound < 1e6 else f"{bound:.0f}" for bound in self._bounds]
        return [(name, float(n)) for name, n in zip([*names, "+Inf"], sums, strict=True)]


class _BlockTimes:
    """Lives of some blocks, from what two looks at them tell apart."""

    def __init__(self, num_blocks: int, sample: int) -> None:
        stride = max(1, -(-num_blocks // sample)) if sample else 1
        self.ids: NDArray[np.int64] = np.arange(1, num_blocks + 1, stride)[:sample]
        count = len(self.ids)
        self._live, self._used = np.zeros(count, bool), np.zeros(count, bool)
        self._content = np.zeros(count, np.int64)
        self._born, self._released = np.zeros(count), np.zeros(count)
        self.lifetime, self.gap, self.idle = (_Distribution(_SLOW) for _ in range(3))

    def look(self, now: BlockSample, moment: float) -> None:
        """Compare with the last look. A block that was given to other content in between (its
        published content differs) ended one life and began another."""
        was_idle = self._live & ~self._used
        other = self._live & now.live & (self._content != 0) & (now.content != self._content)
        ended = (self._live & ~now.live) | other
        for i in np.flatnonzero(ended):
            self.lifetime.add(moment - self._born[i])
            if was_idle[i]:
                self.idle.add(moment - self._released[i])
        for i in np.flatnonzero(was_idle & now.used & ~ended):
            self.gap.add(moment - self._released[i])
        self._born[(now.live & ~self._live) | other] = moment
        self._released[now.live & ~now.used & (self._used | ended | ~self._live)] = moment
        self._live, self._used, self._content = now


def _checked_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Constant labels, or the first thing that is wrong with them."""
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels must be a mapping of str to str, not {type(labels).__name__}")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"labels must map str to str, not {name!r} to a {type(value).__name__}")
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise ValueError(f"labels: {name[:40]!r} is no label name; give letters, digits and _")
        if name in _OWN_LABELS:
            raise ValueError(
                f"labels: {name!r} is a label of kvmem's own ({', '.join(_OWN_LABELS)}); "
                f"give another name"
            )
    return dict(labels)
