"""Exhaustion explains itself: who holds what and why, what is short, and what would help."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

import kvmem
from kvmem.ledger import Refusal, decide
from kvmem.ledger.state import DEVICE, HOST
from kvmem.refusals import MOST_HOLDERS, out_of_blocks
from tests.driver import Driver, assert_same, state_of, tokens_of


def refused(d: Driver, seqs: list[kvmem.Sequence], **options: Any) -> kvmem.OutOfBlocks:
    """The error of a step that finds no room; nothing is changed by it."""
    d.store.wait("out", d.store._transfers["out"].last, 30)  # poison is still being written
    d.manager.poll()
    before = state_of(d.manager)
    with pytest.raises(kvmem.OutOfBlocks) as caught:
        d.manager.step(seqs, **options)
    assert_same(before, state_of(d.manager))
    return caught.value


def test_holders_say_who_has_what_and_why() -> None:
    with Driver(device_blocks=20, host_blocks=20) as d:
        m = d.manager
        pinned = d.create(tokens_of(16))
        shared = d.create(tokens_of(112, 100), priority=-3)
        busy = d.create(tokens_of(209, 200))
        back = d.create(tokens_of(308, 300))
        plain = d.create(tokens_of(420, 400), priority=2)
        d.step([pinned, shared, busy, back, plain])
        twin = d.fork(shared)[0]
        with d.pin(pinned), d.pin(pinned), d.pin(shared) as partly:
            m.swap_out([back])
            d.wait()
            m.evict(2)
            d.hold("in")
            m.swap_in([back])
            m.append([busy], [7])
            opened = m.step([busy])
            error = refused(d, [d.create(tokens_of(516, 500))])
            partly.release()
            d.release("in")
            with opened as step:
                d.run(step)
        assert error.holders == (
            kvmem.Holder(plain.id, "RESIDENT", 2, 5, 0, 0, "resident"),
            kvmem.Holder(pinned.id, "RESIDENT", 0, 4, 0, 4, "pinned"),
            kvmem.Holder(shared.id, "RESIDENT", -3, 3, 3, 3, "pinned"),
            kvmem.Holder(busy.id, "RESIDENT", 0, 3, 0, 0, "in an open step"),
            kvmem.Holder(twin.id, "RESIDENT", -3, 3, 3, 3, "pinned"),
            kvmem.Holder(back.id, "RESIDENT", 0, 2, 0, 0, "being copied"),
        )
        assert (error.more_holders, error.more_blocks) == (0, 0)
        assert (error.pins, error.pinned, error.free, error.evictable) == (3, 7, 3, 0)
        assert (error.short_blocks, error.setting, error.value) == (1, "device_blocks", 21)
        assert error.short_bytes == d.store.layout.frame_bytes


def test_host_holders_and_their_copies() -> None:
    with Driver(device_blocks=16, host_blocks=6) as d:
        m = d.manager
        first, second, third = (d.create(tokens_of(100 * i + 12, 100 * i)) for i in range(3))
        d.step([first, second, third])
        m.swap_out([first]).wait(30)
        m.poll()
        d.hold("out")
        m.swap_out([second])
        with pytest.raises(kvmem.OutOfBlocks) as caught:
            m.swap_out([third])
        d.release()
        error = caught.value
        assert error.holders == (
            kvmem.Holder(first.id, "SWAPPED", 0, 3, 0, 0, "swapped"),
            kvmem.Holder(second.id, "SWAPPED", 0, 3, 0, 0, "being copied"),
        )
        assert (error.tier, error.short_blocks) == ("host", 3)
        assert (error.setting, error.value) == ("host_blocks", 9)
        assert "raise host_blocks to 9" in str(error)


def test_the_largest_are_named_and_the_others_summed() -> None:
    with Driver(device_blocks=60, host_blocks=0, debug=False) as d:
        seqs = [d.create([i] * (4 * (i % 5) + 4), namespace=str(i)) for i in range(20)]
        with d.manager.step(seqs):
            pass
        error = refused(d, [d.create(tokens_of(9))])
        sizes = [holder.num_blocks for holder in error.holders]
        assert sizes == [5, 5, 5, 5, 4, 4, 4, 4]
        assert len(sizes) == MOST_HOLDERS
        assert (error.more_holders, error.more_blocks) == (12, 60 - sum(sizes))


def test_dropped_and_released_pins_do_not_count() -> None:
    with Driver(device_blocks=4, host_blocks=0) as d:
        seq = d.create(tokens_of(16))
        d.step([seq])
        more = d.create([1])
        with d.pin(seq):
            assert refused(d, [more]).pins == 1
        assert refused(d, [more]).pins == 0
        with pytest.warns(ResourceWarning, match="without release"):
            d.manager.pin(seq)
        d.manager.poll()  # lets go of its blocks
        assert refused(d, [more]).pins == 0


def test_a_call_is_short_of_all_its_rows_not_of_the_first() -> None:
    with Driver(device_blocks=8, host_blocks=0) as d:
        seqs = [d.create(tokens_of(100 * i + 12, 100 * i)) for i in range(4)]
        error = refused(d, seqs)
        assert (error.needed, error.short_blocks, error.value) == (3, 4, 12)
        error = refused(d, seqs, reserve_blocks=2)
        assert (error.needed, error.short_blocks, error.value) == (5, 6, 14)
        error = refused(d, seqs, num_tokens=[12, 8, 8, 8])
        assert (error.short_blocks, error.value) == (1, 9)
        error = refused(d, [], reserve_blocks=9)
        assert (error.needed, error.short_blocks, error.value) == (9, 1, 9)


def test_what_can_never_fit_says_what_it_takes() -> None:
    with Driver(device_blocks=4, host_blocks=0) as d:
        other, long = d.create(tokens_of(5)), d.create(tokens_of(121, 100))
        d.step([other])
        with pytest.raises(kvmem.SequenceTooLong, match="raise device_blocks to 8") as caught:
            d.manager.step([long])  # 6 blocks and the 2 that others hold
        assert (caught.value.setting, caught.value.value) == ("device_blocks", 8)
        with pytest.raises(kvmem.SequenceTooLong) as caught:
            d.manager.step([long], reserve_blocks=3, num_tokens=[4])
        assert caught.value.value == 9  # the whole sequence and the reserve


def test_messages_are_short_and_tell_no_content() -> None:
    with Driver(device_blocks=2, host_blocks=1, debug=False) as d:
        seq = d.create([771234] * 8, namespace="a-tenant")
        with d.manager.step([seq]):
            pass
        texts = [str(refused(d, [d.create([771234] * 5)], reserve_blocks=0))]
        with pytest.raises(kvmem.OutOfBlocks) as caught:
            d.manager.swap_out([seq])
        texts.append(str(caught.value))
        for tier, code in ((DEVICE, decide.NO_DEVICE_ROOM), (HOST, decide.NO_HOST_ROOM)):
            pools = d.state.pools[tier : tier + 1]
            saved = pools.copy()
            for name in ("num_frames", "num_free", "num_evictable"):
                pools[name] = 9_999_999
            act = ("step: row 99999", "swap_out")[tier]
            refusal = Refusal(code, 0, 9_999_999, 9_999_999, 9_999_999)
            texts.append(str(out_of_blocks(d.manager._runtime, tier, refusal, act)))
            texts[-1] = (
                texts[-1]
                .replace("held by 1 ", "held by 99999 ")
                .replace("by 1 (resident", "by 9999999 (in an open step")
            )
            pools[:] = saved
        for text in texts:
            print(len(text), text)
            assert len(text) <= 300
            assert "771234" not in text
            assert "tenant" not in text


# --- the promise of `value` ----------------------------------------------------------------------


class Script:
    """Random calls that need room, the same ones again with other numbers of blocks."""

    def __init__(self, seed: int, **blocks: int) -> None:
        self._rng = random.Random(seed)
        self._seqs: list[kvmem.Sequence] = []
        self._pins: list[kvmem.Pin] = []
        self.manager = kvmem.Manager(
            kvmem.Config(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, **blocks)
        )

    def run(self, most: int) -> tuple[int, Exception | None]:
        """Up to `most` calls, until one is refused: how many were not, and the refusal."""
        acts = [self._create, self._create, self._step, self._step, self._fork, self._append]
        acts += [self._swap_out, self._swap_in, self._recompute, self._pin, self._free]
        for count in range(most):
            act = self._rng.choice(acts)
            try:
                act()
            except (kvmem.OutOfBlocks, kvmem.SequenceTooLong) as error:
                self.manager.verify()
                return count, error
        return most, None

    def close(self) -> None:
        for pin in self._pins:
            pin.release()
        self.manager.free(self._seqs)
        self.manager.verify()
        self.manager.close()

    def _some(self) -> list[kvmem.Sequence]:
        return self._rng.sample(self._seqs, self._rng.randint(0, len(self._seqs)))

    def _create(self) -> None:
        length = self._rng.randint(1, 12)
        self._seqs.append(self.manager.create([self._rng.randrange(2) for _ in range(length)]))

    def _step(self) -> None:
        seqs, reserve = self._some(), self._rng.choice((0, 0, 1, 3))
        with self.manager.step(seqs, reserve_blocks=reserve):
            pass

    def _append(self) -> None:
        seqs = self._some()
        self.manager.append(seqs, [self._rng.randrange(2) for _ in seqs])

    def _fork(self) -> None:
        if self._seqs:
            self._seqs += self.manager.fork(self._rng.choice(self._seqs))

    def _swap_out(self) -> None:
        self.manager.swap_out(self._some())

    def _swap_in(self) -> None:
        self.manager.swap_in(self._some())

    def _recompute(self) -> None:
        self.manager.swap_out(self._some()[:1], "recompute")

    def _pin(self) -> None:
        seqs = self._some()
        known = seqs and int(
            self.manager._runtime.ledger.state.sequences["num_published"][seqs[0]._record]
        )
        if known and self._rng.random() < 0.5 and seqs[0].state == "RESIDENT":
            self._pins.append(self.manager.pin(seqs[0]))

    def _free(self) -> None:
        if len(self._seqs) > 3:
            self.manager.free([self._seqs.pop(self._rng.randrange(len(self._seqs)))])


def test_with_value_blocks_the_refused_call_succeeds(seed: int) -> None:
    """The same calls on a Manager with as many blocks as the error says: the refused one works,
    and it is the smallest such number."""
    seen = {"device_blocks": 0, "host_blocks": 0, "too long": 0}
    for number in range(seed, seed + 120):
        blocks = {"device_blocks": 12 if number % 2 else 7, "host_blocks": 5}
        count, error = run_script(number, 60, blocks)
        if error is None:
            continue
        assert isinstance(error, kvmem.OutOfBlocks | kvmem.SequenceTooLong)
        assert error.value > blocks[error.setting]
        seen["too long" if isinstance(error, kvmem.SequenceTooLong) else error.setting] += 1
        more, again = run_script(number, count + 1, blocks | {error.setting: error.value})
        assert (more, again) == (count + 1, None), f"script {number}: {error}; then {again}"
        less, again = run_script(number, count + 1, blocks | {error.setting: error.value - 1})
        assert less == count
        assert again is not None
    print(seen)
    assert all(seen.values())


def run_script(seed: int, most: int, blocks: dict[str, int]) -> tuple[int, Exception | None]:
    script = Script(seed, **blocks)
    try:
        return script.run(most)
    finally:
        script.close()


# --- make_room says what it did -------------------------------------------------------------------


def test_make_room_tells_victims_and_how(caplog: pytest.LogCaptureFixture) -> None:
    with Driver(device_blocks=6, host_blocks=2) as d:
        m = d.manager
        best, middle, last = (d.create([i] * 7, namespace=f"n{i}") for i in range(3))
        d.step([best, middle, last])
        m.append([best], [1] * 17, counts=[17])
        m.events()
        with caplog.at_level(logging.DEBUG, logger="kvmem"):
            gone = m.make_room([best])
        assert gone == [last, middle]
        (told,) = [event for event in m.events() if event.kind == "make_room"]
        assert told.sequence_ids == (last.id, middle.id)
        assert told.how == ("swap", "recompute")
        (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("kvmem")]
        assert line == (
            f"make_room for sequence {best.id}: {last.id} (swap), {middle.id} (recompute); it fits"
        )
        m.make_room([best])
        assert [event.kind for event in m.events()] == []  # nobody had to go


def test_make_room_tells_who_could_not_go(caplog: pytest.LogCaptureFixture) -> None:
    with Driver(device_blocks=6, host_blocks=1) as d:
        m = d.manager
        best, middle = (d.create([i] * 12, namespace=f"n{i}") for i in range(2))
        d.step([best, middle])
        m.append([best], [1])
        with caplog.at_level(logging.DEBUG, logger="kvmem"):
            assert m.make_room([best], how="swap") == []
        (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("kvmem")]
        assert line.startswith(
            f"make_room for sequence {best.id}: nobody went; it does not fit; {middle.id} stays: "
            "swap_out needs 3 blocks of the host tier"
        )
        assert "raise host_blocks to 3" in line


def test_make_room_goes_on_to_a_victim_that_the_host_can_take() -> None:
    """The last to come is too large for the host; the one before it is not. Without it nobody
    would ever get the block that all three wait for."""
    with Driver(device_blocks=9, host_blocks=3) as d:
        m = d.manager
        best, small, large = (
            d.create([i] * n, namespace=f"n{i}") for i, n in enumerate((8, 8, 20))
        )
        d.step([best, small, large])
        m.append([best, small, large], [1, 1, 1])
        assert m.make_room([best, small, large], how="swap") == [small]
        assert best in d.step([best, small, large], fit="some").seqs
        d.check_content()
