"""The bench of the state machine: a Manager, its model, and what must hold after every call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant

import kvmem
from kvmem.stats import Stats
from kvmem.store.device import Stream
from tests.machine.model import HEAD_DIM, LAYERS, Floats, Model, ModelSequence, World

MAX_LIVE = 6
NAMESPACES = (None, "a", b"a")
COUNTED = (  # counts that a run has to move, or it was no test of them
    "blocks_copied_on_write",
    "blocks_merged",
    "blocks_dropped",
    "clean_swap_outs",
    "evicted_clean",
    "evicted_device",
    "evicted_host",
    "prefix_hit_tokens",
    "recomputes",
    "swap_ins",
    "swap_outs",
)

# device blocks, host blocks, block size, other settings
CONFIGS: list[tuple[int, int, int, dict[str, Any]]] = [
    (6, 8, 2, {}),
    (4, 4, 2, {}),
    (8, 16, 4, {}),
    (5, 3, 1, {}),
    (12, 16, 1, {"debug": True}),
    (6, 6, 2, {"debug": True}),
    (7, 0, 2, {}),
    (6, 8, 2, {"tier_policy": "none"}),
    (6, 5, 2, {"tier_policy": "exclusive"}),
    (7, 9, 1, {"tier_policy": "exclusive", "debug": True}),
    (5, 6, 4, {"sync": True, "debug": True}),
    (4, 12, 2, {"debug": True}),
]


class Dice(random.Random):
    """All free choices of one call, from one number: evenly spread, and small for Hypothesis."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def chance(self, share: float) -> bool:
        return self.random() < share

    def tokens(self, count: int) -> list[int]:
        return [self.randint(0, 1) for _ in range(count)]

    def __repr__(self) -> str:
        return f"Dice({self.number})"


Method = TypeVar("Method", bound=Callable[..., None])
# name -> how often, when it makes sense
OPERATIONS: dict[str, tuple[float, Callable[[Any], Any]]] = {}


def operation(weight: float, able: Callable[[Any], Any] = lambda _: True) -> Callable[..., Any]:
    """Register a call that a machine may make."""

    def register(function: Method) -> Method:
        OPERATIONS[function.__name__] = (weight, able)
        return function

    return register


def has_live(machine: Bench) -> bool:
    """There is a sequence."""
    return bool(machine.model.live)


def has_room(machine: Bench) -> bool:
    """There is a sequence, and there may be another."""
    return 0 < len(machine.model.live) < MAX_LIVE


class Bench(RuleBasedStateMachine):
    """Begin, end, and the checks between."""

    reached: ClassVar[Counter[str]] = Counter()  # what happened, over all machines of a run

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Any] = []  # open steps, see steps.py
        self.whole = False  # a check failed, or a call raised: nothing can be expected any more

    # --- begin and end ----------------------------------------------------------------------------

    def set_up(self, which: int) -> None:
        device, host, size, more = CONFIGS[which]
        self.config = kvmem.Config(
            num_layers=LAYERS,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            block_size=size,
            device_blocks=device,
            host_blocks=host,
            **more,
        )
        self.manager = kvmem.Manager(self.config)
        self.store: Any = self.manager._runtime.store
        self.model = Model(self.manager)
        views = [x.numpy() for layer in range(LAYERS) for x in self.manager.kv(layer)]
        self.device_views = views
        self.host_views = (
            [x.numpy() for layer in range(LAYERS) for x in self.store._views(1, layer)]
            if host
            else []
        )

    def teardown(self) -> None:
        if not hasattr(self, "manager") or self.manager.closed:
            return
        try:
            if self.whole:
                self.drain()
        finally:
            self.let_copies_go()
            self.manager.close()

    def drain(self) -> None:
        """DRAIN: all let go, both tiers are empty again."""
        manager, model = self.manager, self.model
        self.let_copies_go()
        while self.open:
            self.end_at(0, fails=False)
        manager.free([seq.handle for seq in model.live])
        model.live.clear()
        for pin, _, _ in model.pins:
            pin.release()
        model.pins.clear()
        self.count_all()
        manager.evict(1000, "device")
        manager.evict(1000, "host")
        self.wait_all()
        manager.verify()
        stats = manager.stats()
        for name in COUNTED:
            self.reached[name] += getattr(stats, name)
        for tier in (stats.device, stats.host):
            assert (tier.free, tier.held, tier.evictable) == (tier.total, 0, 0)
        assert stats.cached_nodes == 0
        assert (stats.bytes_out, stats.bytes_in) == (stats.bytes_out_done, stats.bytes_in_done)

    def let_copies_go(self) -> None:
        for stream in (Stream.OUT, Stream.IN):
            self.store.device.release(stream)

    def wait_all(self) -> None:
        """Wait for every copy submitted so far; none may be held."""
        ledger = self.manager._runtime.ledger.state.ledger
        assert self.store.wait("out", int(ledger["last_out"][0]), 30)
        assert self.store.wait("in", int(ledger["last_in"][0]), 30)

    def counts(self) -> Stats:
        """stats() without what the copy threads count."""
        done = ("bytes_out_done", "bytes_in_done", "runs_out_done", "runs_in_done")
        return replace(self.manager.stats(), **dict.fromkeys(done, 0))

    def reach(self, what: str) -> None:
        self.reached[what] += 1

    # --- picking ----------------------------------------------------------------------------------

    def pick(self, dice: Dice) -> ModelSequence:
        return dice.choice(self.model.live)

    def some(self, dice: Dice, *, idle: bool, most: int = 4) -> list[ModelSequence]:
        """One to `most` sequences in any order, with `idle` only those in no open step."""
        able = [seq for seq in self.model.live if not (idle and seq.step)]
        return dice.sample(able, min(len(able), dice.randint(1, most)))

    # --- after each rule --------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        """The invariants, after every call."""
        if not hasattr(self, "manager") or self.manager.closed:
            return
        self.whole = False
        self.manager.verify()
        world = self.model.world()
        self.check_sequences(world)
        self.check_stats(world)
        self.check_content(world)
        extra = set(world.cached) - set(self.model.published)
        assert not extra, f"{len(extra)} blocks are cached that nobody published"
        self.whole = True

    def check_sequences(self, world: World) -> None:
        for seq in self.model.live:
            h = seq.handle
            found = (h.state, h.num_tokens, h.num_computed, h.num_drafts, h.num_cached)
            cached = seq.cached
            if not seq.queried:  # a forecast: what would be served now
                cached = len(self.model.hits(seq, world)[0]) * self.model.block_size
            expected = (seq.state, len(seq.tokens), seq.computed, seq.drafts, cached)
            assert found == expected, f"sequence {seq.id}: {found}, the model says {expected}"
            assert h.tokens.tolist() == seq.tokens
            if seq.step is None:
                assert len(world.table(seq)) == self.model.blocks_for(seq.stored)

    def check_stats(self, world: World) -> None:
        """R10: the Manager's counts are the model's."""
        stats, model = self.manager.stats(), self.model
        for name, count in model.counts.items():
            assert getattr(stats, name) == count, f"{name} {getattr(stats, name)}, model {count}"
        states = [seq.state for seq in model.holders()]
        assert stats.sequences_waiting == states.count("WAITING")
        assert stats.sequences_resident == states.count("RESIDENT")
        assert stats.sequences_swapped == states.count("SWAPPED")
        assert stats.device.free == model.device_free(world)
        assert stats.device.evictable == len(model.device_evictable(world))
        assert stats.host.free == model.host_free(world)
        assert stats.host.evictable == len(model.host_evictable(world))
        assert stats.cached_nodes == len(world.cached)
        named = model.references(world)
        assert stats.device.used == sum(1 for b in named if world.device_frame[b])
        assert stats.host.used == sum(1 for b in named if world.host_frame[b])
        assert stats.device.pinned == len(model.pinned())

    def check_content(self, world: World) -> None:
        """Every block holds the stamps of its tokens in each tier where it is (R4, R11)."""
        state = world.ledger.state
        out, into = self.store.retired()
        arrived = (state.frames["fence_in"] <= into).tolist()
        left = (state.frames["fence_out"] <= out).tolist()
        first_host = int(state.pools["first"][1])
        copied = state.frames["num_tokens"].tolist()
        device = gathered(self.device_views)
        host = gathered(self.host_views) if self.host_views else None

        def check(b: int, rows: Floats, what: str) -> None:
            f, h = world.device_frame[b], world.host_frame[b]
            if f and arrived[f]:
                assert np.array_equal(device[f, : len(rows)], rows), f"{what}: device frame {f}"
            if h and host is not None and left[first_host + h]:
                n = min(len(rows), copied[first_host + h])
                assert np.array_equal(host[h, :n], rows[:n]), f"{what}: host frame {h}"

        size = self.model.block_size
        for seq in self.model.live:
            stored = seq.stored
            for i, b in enumerate(world.table(seq)):
                if i * size < stored:
                    rows = seq.rows[i * size : min(stored, (i + 1) * size)]
                    check(b, rows, f"block {i} of sequence {seq.id}")
        for b, rows in world.node_rows.items():
            check(b, rows, f"cached block {b}")
        for _, blocks, contents in self.model.pins:
            for b, rows in zip(blocks, contents, strict=True):
                assert world.device_frame[b], "a pinned block left the device"
                check(b, rows, f"pinned block {b}")


def gathered(views: list[Any]) -> Floats:
    """Stamps of all slots of a tier: `[frames, block_size, WIDTH]`."""
    return np.concatenate([view[:, :, 0, :] for view in views], axis=-1)
