"""A failed copy costs its K/V, nothing else: who lost what is told, and the work ends the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvmem
from kvmem.sim_options import MODES, SimOptions
from kvmem.store.device import Stream
from tests.driver import Driver
from tests.sim.test_engine import SCHEDULES, answers

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full blocks of four and two tokens


class Refuser:
    """Fails the next copies of one stream, as many as `count` says."""

    def __init__(self, d: Driver) -> None:
        self._stream: Stream | None = None
        self.count = 0
        d.store.device.hook = self

    def fail(self, stream: Stream, count: int = 1) -> None:
        self._stream, self.count = stream, count

    def __call__(self, stream: Stream, *ids: Any) -> None:
        if stream is self._stream and self.count:
            self.count -= 1
            raise OSError("this copy fails")


@pytest.fixture(params=[*MODES, "cpu"])
def made(request: pytest.FixtureRequest, seed: int) -> Iterator[tuple[Driver, Refuser]]:
    """A driver on each device and in each mode. Both tiers are empty at the end (R9)."""
    options: dict[str, Any] = {"device": "cpu"}
    if request.param != "cpu":
        options = {"device": "sim", "sim": SimOptions(mode=request.param, seed=seed)}
    with Driver(device_blocks=12, host_blocks=12, **options) as d:
        yield d, Refuser(d)


def moved_away(d: Driver, tokens: list[int]) -> kvmem.Sequence:
    """A sequence on the host alone."""
    seq = d.create(tokens)
    d.step([seq])
    d.manager.swap_out([seq]).wait(30)
    d.manager.evict(100)
    d.wait()
    return seq


@pytest.mark.parametrize(("mode", "starve"), SCHEDULES)
def test_the_example_engine_answers_the_same_while_copies_fail(
    mode: str, starve: str | None
) -> None:
    wanted, _ = answers()
    failed = 0
    for seed in range(4):
        rate = (0.1, 0.4, 0.2, 0.4)[seed]
        faults = {("copy_before", "copy_after")[seed % 2]: rate}
        sim = SimOptions(seed=seed, mode=mode, starve=starve, faults=faults)
        tokens, stats = answers(device="sim", sim=sim, debug=seed == 3)
        assert tokens == wanted, f"seed {seed}"
        failed += stats.blocks_out_failed + stats.blocks_in_failed
    assert failed > 10


def test_a_copy_in_that_fails_is_told_and_computed_again(made: tuple[Driver, Refuser]) -> None:
    d, refuser = made
    seq, other = moved_away(d, PROMPT), d.create([50, 51, 52])
    d.step([other])
    refuser.fail(Stream.IN)
    transfer = d.manager.swap_in([seq])
    with pytest.raises(kvmem.TransferError, match="this copy fails.*lost: sequence") as caught:
        transfer.wait(30)
    assert caught.value.lost == ((seq.id, 0),)
    assert d.manager.poll() == [seq]
    assert d.manager.poll() == []
    assert (seq.lost_from, seq.num_computed, seq.state) == (0, 0, "WAITING")
    assert (other.lost_from, other.num_computed) == (None, 3)
    assert transfer.done
    assert d.manager.match(PROMPT).num_tokens == 0  # nothing of it is served to others (R5)
    d.step([seq, other] if other.num_computed < 3 else [seq])
    assert (seq.lost_from, seq.num_computed) == (None, 10)
    d.check_content()


def test_a_step_over_a_failed_copy_counts_nothing(made: tuple[Driver, Refuser]) -> None:
    d, refuser = made
    seq, other = moved_away(d, PROMPT), d.create([50, 51, 52])
    d.manager.append([seq], [11])
    refuser.fail(Stream.IN)
    with pytest.raises(kvmem.TransferError, match="the step was given up") as caught:
        d.step([seq, other])
    assert caught.value.lost == ((seq.id, 0),)
    assert (seq.num_computed, other.num_computed) == (0, 0)
    assert (seq.lost_from, other.lost_from) == (0, None)
    kinds = [event.kind for event in d.manager.events()]
    assert kinds[-1] == "abort"
    assert kinds.count("lost") == 1
    d.step([seq, other])
    assert (seq.num_computed, other.num_computed) == (11, 3)
    d.check_content()


def test_a_copy_out_that_fails_leaves_the_block_where_it_is(made: tuple[Driver, Refuser]) -> None:
    d, refuser = made
    seq = d.create(PROMPT)
    d.step([seq])
    refuser.fail(Stream.OUT)
    with pytest.raises(kvmem.TransferError, match="no sequence lost K/V") as caught:
        d.manager.swap_out([seq]).wait(30)
    assert caught.value.lost == ()
    assert (seq.lost_from, seq.num_computed, seq.state) == (None, 10, "SWAPPED")
    assert d.manager.stats().blocks_out_failed == 3
    assert d.manager.swap_in([seq]).num_blocks == 0
    d.check_content()
    d.manager.swap_out([seq]).wait(30)  # tried again: nothing of it is on the host
    assert d.manager.evict(100) == 3
    d.step([seq] if seq.num_computed < 10 else [d.create([9])])
    d.manager.swap_in([seq])
    d.check_content()


def test_it_is_tried_again_when_the_frame_is_wanted(made: tuple[Driver, Refuser]) -> None:
    d, refuser = made
    seq = d.create(PROMPT)
    d.step([seq])
    refuser.fail(Stream.OUT)
    d.manager.swap_out([seq])
    d.wait()
    assert d.manager.evict(100) == 3  # copies them now
    d.wait()
    assert (seq.lost_from, seq.num_computed) == (None, 10)
    d.manager.append([seq], [11])
    d.step([seq])
    d.check_content()


def test_lost_where_the_frame_was_handed_on(made: tuple[Driver, Refuser]) -> None:
    """The copy out fails after its frames were given to others."""
    d, refuser = made
    seq = d.create(PROMPT)
    d.step([seq])
    child = d.fork(seq)[0]
    d.hold("out")
    refuser.fail(Stream.OUT)
    d.manager.swap_out([seq, child])
    d.manager.evict(1)  # the oldest: the block of the last two tokens
    d.release()
    d.wait()
    assert [s.lost_from for s in (seq, child)] == [8, 8]
    assert [s.num_computed for s in (seq, child)] == [8, 8]
    assert d.manager.match(PROMPT).num_tokens == 8
    d.step([seq, child])
    d.check_content()


def test_what_was_copied_or_computed_from_it_goes_too(made: tuple[Driver, Refuser]) -> None:
    """A fork's copy on write, blocks behind it, and what is published below a lost block (R4)."""
    d, refuser = made
    seq = moved_away(d, PROMPT)
    d.hold("in")
    refuser.fail(Stream.IN)
    d.manager.swap_in([seq])
    child = d.fork(seq)[0]
    d.manager.append([child], [60])
    step = d.manager.step([child])  # copies the block of the last two tokens on write
    d.release()
    with pytest.raises(kvmem.TransferError) as caught, step:
        d.run_or_lose(step)
    assert caught.value.lost == ((child.id, 0),)
    assert [s.lost_from for s in (seq, child)] == [0, 0]
    d.step([seq, child])
    assert child.num_computed == 11
    d.check_content()


def test_a_copy_on_write_of_what_is_lost_is_lost(made: tuple[Driver, Refuser]) -> None:
    """Only the block of the last two tokens is on its way; its one owner goes before it fails."""
    d, refuser = made
    seq = d.create(PROMPT[:6])
    d.step([seq])
    d.manager.swap_out([seq]).wait(30)
    d.manager.evict(1)
    d.wait()
    d.hold("in")
    refuser.fail(Stream.IN)
    assert d.manager.swap_in([seq]).num_blocks == 1
    child = d.fork(seq)[0]
    d.manager.append([child], [60])
    step = d.manager.step([child])
    d.free(seq)
    d.release()
    with pytest.raises(kvmem.TransferError) as caught, step:
        d.run_or_lose(step)
    assert caught.value.lost == ((child.id, 4),)
    d.step([child])
    d.check_content()


def test_a_sample_drawn_over_lost_kv_is_refused(seed: int) -> None:
    """The copy fails after the step has ended: ``append`` tells, before the token counts."""
    sim = SimOptions(mode="late", seed=seed, poison=False)
    with Driver(device="sim", sim=sim, debug=False) as d:
        refuser = Refuser(d)
        seq, other = moved_away(d, PROMPT[:9]), d.create([50, 51, 52])
        refuser.fail(Stream.IN)
        one = torch.ones(4, 1, 4)
        d.manager.append([seq], [11])
        with d.manager.step([other, seq]) as step:
            for layer in range(2):
                step.write(layer, one, one)
        assert seq.num_computed == 10  # nobody knows yet
        d.store.device.drain()  # as reading the logits does
        with pytest.raises(kvmem.TransferError, match="append: what was sampled") as caught:
            d.manager.append([seq, other], [12, 53])
        assert caught.value.lost == ((seq.id, 0),)
        assert (seq.num_tokens, other.num_tokens) == (10, 3)
        d.manager.append([other], [53])
        d.free(other)  # its K/V is ones, not stamps
        d.step([seq])
        d.manager.append([seq], [12])
        d.step([seq])
        d.check_content()


def test_nothing_is_merged_over_a_copy_under_way(seed: int) -> None:
    """A block that came in by a copy not known to be done becomes full and equals a published one:
    merged, the sequence would have no link any more to the copy, which fails."""
    sim = SimOptions(mode="late", seed=seed, poison=False)
    with Driver(device="sim", sim=sim, device_blocks=12, debug=False) as d:
        refuser = Refuser(d)
        first = moved_away(d, PROMPT[:6])
        second = d.create(PROMPT[:6], max_cached=0)
        d.step([second])
        d.manager.append([second], [7, 8], counts=[2])
        d.step([second])
        assert d.manager.match(PROMPT[:8]).num_tokens == 8
        d.hold("in")
        refuser.fail(Stream.IN)
        d.manager.append([first], [7, 8], counts=[2])
        one = torch.ones(2, 1, 4)
        with d.manager.step([first]) as step:  # nothing is read, so nothing has to run
            for layer in range(2):
                step.write(layer, one, one)
        assert first.num_computed == 8
        d.release("in")
        d.store.device.drain()
        assert d.manager.poll() == [first]
        assert (first.lost_from, second.lost_from) == (4, None)
        d.step([first])
        assert d.manager.match(PROMPT[:8]).num_tokens == 8
        d.check_content()


def test_pins_and_frees_of_lost_blocks(made: tuple[Driver, Refuser]) -> None:
    d, refuser = made
    seq = moved_away(d, PROMPT)
    d.hold("in")
    refuser.fail(Stream.IN)
    d.manager.swap_in([seq])
    pin = d.pin(seq)
    d.free(seq)
    d.release()
    d.wait()
    d.manager.verify()
    assert d.manager.match(PROMPT).num_tokens == 0
    pin.release()
    d.manager.verify()
    again = d.create(PROMPT)
    d.step([again])
    d.check_content()
