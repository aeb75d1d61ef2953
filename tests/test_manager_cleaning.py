"""The public API under the tier policies that copy ahead of evictions, and under exclusive."""

from __future__ import annotations

import kvmem
from kvmem.store.device import Stream
from tests.driver import Driver, tokens_of


def settled(d: Driver) -> list[kvmem.Event]:
    """Poll until nothing is on the way or to be copied; the events meanwhile."""
    ledger, store = d.manager._runtime.ledger, d.manager._runtime.store
    before = (-1, -1)
    while before != (issued := ledger.issued):
        before = issued
        store.wait("out", issued[0], 30)
        store.wait("in", issued[1], 30)
        d.manager.poll()
    return d.manager.events()


def test_write_through_copies_full_blocks_in_the_background() -> None:
    with Driver(tier_policy="write_through", host_blocks=12) as d:
        m = d.manager
        seq = d.create(tokens_of(10))
        d.step([seq])
        cleaned = [event for event in settled(d) if event.kind == "clean"]
        assert sum(event.blocks_out for event in cleaned) == m.stats().blocks_cleaned == 2
        assert all(event.sequence_ids == () for event in cleaned)
        assert [m.block(b).state for b in seq.block_ids] == ["USED"] * 3
        out = m.swap_out([seq])
        assert out.num_blocks == 1, "its partial block"
        m.swap_in([seq])
        d.free(seq)
        settled(d)
        blocks_out = m.stats().blocks_out
        assert m.evict(8) == 2
        assert m.stats().blocks_out == blocks_out, "eviction is free"
        assert m.match(tokens_of(10)).on_host == 8
        again = d.create(tokens_of(10))
        d.step([again])
        d.check_content()


def test_nothing_is_cleaned_while_another_copy_is_on_the_way() -> None:
    with Driver(tier_policy="write_through", host_blocks=12) as d:
        m = d.manager
        settled(d)
        first = d.create(tokens_of(8))
        d.step([first])
        settled(d)
        m._runtime.store.device.hold(Stream.OUT)
        second = d.create(tokens_of(107, 100))
        d.step([second])
        m.swap_out([second])
        cleaned = m.stats().blocks_cleaned
        third = d.create(tokens_of(204, 200))
        d.step([third])
        m.poll()
        assert m.stats().blocks_cleaned == cleaned
        m._runtime.store.device.release(Stream.OUT)
        settled(d)
        assert m.stats().blocks_cleaned == cleaned + 1
        d.check_content()


def test_write_back_cleans_between_its_watermarks() -> None:
    with Driver(tier_policy="write_back", watermarks=(0.5, 0.75)) as d:
        m = d.manager
        for i in range(3):  # 6 of 8 blocks cached
            seq = d.create(tokens_of(100 * i + 8, 100 * i))
            d.step([seq])
            d.free(seq)
        settled(d)
        assert m.stats().blocks_cleaned == 4, "2 free + 4 saved are three quarters of 8"
        assert m.evict(4) == 4
        assert (m.stats().evicted_clean, m.stats().blocks_out) == (4, 4)
        assert m.match(tokens_of(8)).on_host == 8


def test_write_back_cleans_nothing_unless_asked() -> None:
    with Driver() as d:
        for i in range(4):
            seq = d.create(tokens_of(100 * i + 8, 100 * i))
            d.step([seq])
            d.free(seq)
        settled(d)
        assert d.manager.stats().blocks_out == 0


def test_exclusive_trades_places_between_full_tiers() -> None:
    with Driver(tier_policy="exclusive") as d:
        m = d.manager
        for i in range(2):
            seq = d.create(tokens_of(100 * i + 32, 100 * i))
            d.step([seq])
            d.free(seq)
        assert m.match(tokens_of(32)).on_host == 32
        assert m.match(tokens_of(132, 100)).on_device == 32
        m.events()
        again = d.create(tokens_of(32))
        d.step([again])
        (event,) = [event for event in m.events() if event.kind == "step"]
        assert (event.blocks_out, event.blocks_in) == (7, 8)
        assert m.match(tokens_of(132, 100)).on_host == 28, "one was given up to begin with"
        assert {m.block(b).device for b in again.block_ids} == {"device"}
        d.check_content()
