"""Every act on a sequence at every moment of a swap: the whole grid, in each mode of the scheduler.

A state is scripted to the fragment: the streams are held, and moved by hand into the middle of a
copy. Then comes the act, with the copy where it stands; what needs a step plans it before the
streams go on. At the end attention over the stamps, a read of both tiers, `verify()`, and both
tiers empty again. The checker of races is on throughout.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import kvmem
from kvmem.ledger.jit import JIT_DISABLED
from kvmem.sim_options import MODES
from kvmem.store.device import Stream
from tests.driver import Driver, tokens_of

pytestmark = pytest.mark.skipif(JIT_DISABLED, reason="attention exists compiled only")

BLOCKS = 12
PROMPT = 10  # two full blocks and a half one
NUM_BLOCKS = 3


class Flight(Driver):
    """A Driver whose copy streams stand still until somebody says so."""

    def __init__(self, mode: str, rng: random.Random) -> None:
        options = kvmem.SimOptions(
            mode=mode,
            seed=rng.randrange(1 << 30),
            poison=rng.random() < 0.5,
            copy_engines=rng.choice((1, 2)),
        )
        blocks = {"device_blocks": BLOCKS, "host_blocks": BLOCKS, "debug": rng.random() < 0.3}
        super().__init__(device="sim", sim=options, **blocks)
        self.rng = rng

    @property
    def device(self) -> Any:
        return self.store.device

    def head(self, name: str) -> Any:
        """The entry that a stream stands at."""
        queue = self.device.scheduler.queues[Stream[name.upper()]]
        return queue[0] if queue else None

    def to_the_copy(self, name: str, *, half: bool) -> None:
        """Move a held stream, and what it waits for, up to its copy, or into the middle of it."""
        stream = Stream[name.upper()]
        for _ in range(1000):
            head = self.head(name)
            if head.copy is not None and (head.done or not half):
                break
            first = stream  # or what it waits for: what computed, or brought, what goes out now
            while self.head(first.name).kind == "wait" and not self.head(first.name).fence.reached:
                first = self.head(first.name).fence.stream
            assert self.device.run(first, 1)
        else:
            raise AssertionError(f"{name} never comes to its copy")
        if half:
            for _ in range(self.rng.randint(0, self.head(name).num_fragments - 2)):
                self.device.run(stream, 1)
            assert 0 < self.head(name).done < self.head(name).num_fragments
        else:
            assert not self.head(name).done

    def go(self, *seqs: kvmem.Sequence) -> None:
        """Plan a step with the copies as they are; then let all streams go, and run it."""
        step = self.manager.step(list(seqs))
        self.manager.verify()
        self.release()
        with step:
            self.run(step)

    def evict(self, count: int = BLOCKS) -> int:
        return self.manager.evict(count)


def others_tokens() -> Any:
    """A prompt that takes the whole device, with room for one token more."""
    return tokens_of(900 + 4 * BLOCKS - 1, 900)


# --- the states -----------------------------------------------------------------------------------


def out_queued(d: Flight, seq: kvmem.Sequence) -> None:
    d.hold("out", "in")
    assert d.manager.swap_out([seq]).num_blocks == NUM_BLOCKS


def out_half(d: Flight, seq: kvmem.Sequence) -> None:
    out_queued(d, seq)
    d.to_the_copy("out", half=True)


def out_half_and_frames_gone(d: Flight, seq: kvmem.Sequence) -> None:
    """The frames that are read were handed on already."""
    out_half(d, seq)
    assert d.evict() == NUM_BLOCKS


def out_done(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.swap_out([seq])
    d.wait()
    d.hold("out", "in")
    assert [d.manager.block(b).device for b in seq.block_ids] == ["device+host"] * NUM_BLOCKS


def swapped(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.swap_out([seq])
    d.wait()
    assert d.evict() == NUM_BLOCKS
    d.hold("out", "in")
    assert [d.manager.block(b).device for b in seq.block_ids] == ["host"] * NUM_BLOCKS


def half_loaded(d: Flight, seq: kvmem.Sequence) -> None:
    """Some blocks on the device, others not."""
    d.manager.swap_out([seq])
    d.wait()
    d.evict(d.rng.choice((1, 2)))
    d.hold("out", "in")
    where = {d.manager.block(b).device for b in seq.block_ids}
    assert where == {"host", "device+host"}


def half_loaded_in_flight(d: Flight, seq: kvmem.Sequence) -> None:
    """Some blocks never left, the others are on their way back."""
    half_loaded(d, seq)
    assert 0 < d.manager.swap_in([seq]).num_blocks < NUM_BLOCKS
    d.to_the_copy("in", half=True)


def in_queued(d: Flight, seq: kvmem.Sequence) -> None:
    swapped(d, seq)
    assert d.manager.swap_in([seq]).num_blocks == NUM_BLOCKS
    assert d.head("in") is not None


def in_half(d: Flight, seq: kvmem.Sequence) -> None:
    in_queued(d, seq)
    d.to_the_copy("in", half=True)


def in_done(d: Flight, seq: kvmem.Sequence) -> None:
    swapped(d, seq)
    d.release()
    d.manager.swap_in([seq]).wait(60)
    d.hold("out", "in")


def in_behind_out(d: Flight, seq: kvmem.Sequence) -> None:
    """Both copies queued: in again behind its own copy out, into other frames."""
    out_queued(d, seq)
    d.evict()
    assert d.manager.swap_in([seq]).num_blocks == NUM_BLOCKS


def in_behind_half_out(d: Flight, seq: kvmem.Sequence) -> None:
    in_behind_out(d, seq)
    d.to_the_copy("out", half=True)


STATES: tuple[Callable[[Flight, kvmem.Sequence], None], ...] = (
    out_queued, out_half, out_half_and_frames_gone, out_done, swapped, half_loaded,
    half_loaded_in_flight, in_queued, in_half, in_done, in_behind_out, in_behind_half_out,
)  # fmt: skip


# --- the acts -------------------------------------------------------------------------------------


def fork(d: Flight, seq: kvmem.Sequence) -> None:
    child, *others = d.fork(seq, 3)
    d.manager.append([seq, child], [50, 51])
    d.go(child, seq)
    d.free(others[0])


def fork_and_free_the_parent(d: Flight, seq: kvmem.Sequence) -> None:
    """The copy goes on for a child that was not there when it began."""
    (child,) = d.fork(seq)
    d.free(seq)
    d.manager.verify()
    d.manager.append([child], [51])
    d.go(child)


def fork_and_free_both(d: Flight, seq: kvmem.Sequence) -> None:
    (child,) = d.fork(seq)
    d.free(seq, child)
    d.go(d.create(others_tokens()))


def copy_on_write(d: Flight, seq: kvmem.Sequence) -> None:
    """The child writes into the half block that it shares; its parent stays where it is."""
    (child,) = d.fork(seq)
    d.manager.append([child], [51])
    copies = d.manager.stats().blocks_copied_on_write
    d.go(child)
    assert d.manager.stats().blocks_copied_on_write == copies + 1


def write_in_place(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.append([seq], [50])
    d.go(seq)


def write_past_the_block(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.append([seq], list(range(60, 67)), counts=[7])
    d.go(seq)


def truncate_into_a_block(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.truncate([seq], 6)
    d.manager.append([seq], [50])
    d.go(seq)


def truncate_to_a_block(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.truncate([seq], 8)
    d.manager.append([seq], [50])
    d.go(seq)


def truncate_to_nothing(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.truncate([seq], 0)
    d.manager.append([seq], [7, 8, 9], counts=[3])
    d.go(seq)


def free_and_take_all(d: Flight, seq: kvmem.Sequence) -> None:
    """What it held goes to another at once, in both tiers."""
    d.free(seq)
    d.manager.verify()
    other = d.create(others_tokens())
    d.go(other)
    d.manager.swap_out([other])  # and so do its host frames


def free_unpublished_and_take_all(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.reset()
    free_and_take_all(d, seq)


def free_in_its_step(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.append([seq], [50])
    step = d.manager.step([seq])
    d.manager.free([seq])
    d.live.remove(seq)
    step.cancel()
    d.go(d.create(others_tokens()))


def abort_its_step(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.append([seq], [50])
    d.manager.step([seq]).cancel()
    d.manager.verify()
    d.go(seq)


def pin(d: Flight, seq: kvmem.Sequence) -> None:
    on_device = d.manager.block(seq.block_ids[0]).frame_ids[0] != 0
    if not on_device:
        with pytest.raises(kvmem.PinError):
            d.manager.pin(seq)
        return
    with d.pin(seq):
        if seq.state == "RESIDENT":
            d.manager.swap_out([seq])
        d.evict()
        assert d.manager.block(seq.block_ids[0]).frame_ids[0] != 0
        d.manager.append([seq], [50])
        d.go(seq)


def swap_again(d: Flight, seq: kvmem.Sequence) -> None:
    for _ in range(3):
        if seq.state == "SWAPPED":
            d.manager.swap_in([seq])
        else:
            d.manager.swap_out([seq])
            d.evict(d.rng.choice((0, 1, BLOCKS)))
        d.manager.verify()
    d.manager.append([seq], [50])
    d.go(seq)


def compute_again(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.swap_out([seq], "recompute")
    assert seq.state == "WAITING"
    d.go(seq)


def evict_both_tiers(d: Flight, seq: kvmem.Sequence) -> None:
    d.evict()
    d.manager.evict(BLOCKS, "host")
    d.manager.append([seq], [50])
    d.go(seq)


def reset(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.reset()
    assert d.manager.match(tokens_of(PROMPT)).num_tokens == 0
    d.manager.append([seq], [50])
    d.go(seq)


def another_reads_it(d: Flight, seq: kvmem.Sequence) -> None:
    """A hit on blocks that are on their way."""
    reader = d.create(tokens_of(PROMPT + 3))
    assert reader.num_cached == 8
    d.go(reader)


def accept(d: Flight, seq: kvmem.Sequence) -> None:
    d.manager.accept([seq], [d.rng.randint(0, 2)], [70])
    d.go(seq)


ACTS: tuple[Callable[[Flight, kvmem.Sequence], None], ...] = (
    fork, fork_and_free_the_parent, fork_and_free_both, copy_on_write, write_in_place,
    write_past_the_block, truncate_into_a_block, truncate_to_a_block, truncate_to_nothing,
    free_and_take_all, free_unpublished_and_take_all, free_in_its_step, abort_its_step, pin,
    swap_again, compute_again, evict_both_tiers, reset, another_reads_it, accept,
)  # fmt: skip


# --- acts on the other owner of a block that goes out ---------------------------------------------


def twin_writes(d: Flight, seq: kvmem.Sequence, twin: kvmem.Sequence) -> None:
    d.manager.append([twin], [50])
    d.go(twin)


def twin_writes_where_it_is_alone(d: Flight, seq: kvmem.Sequence, twin: kvmem.Sequence) -> None:
    """The copy out is for one that is gone; the block is written in place behind it."""
    d.free(seq)
    copies = d.manager.stats().blocks_copied_on_write
    d.manager.append([twin], [50])
    d.go(twin)
    assert d.manager.stats().blocks_copied_on_write == copies


def twin_is_cut_and_writes(d: Flight, seq: kvmem.Sequence, twin: kvmem.Sequence) -> None:
    d.manager.truncate([twin], 9)
    d.manager.append([twin], [50, 51], counts=[2])
    d.go(twin)


def twin_forks_and_all_write(d: Flight, seq: kvmem.Sequence, twin: kvmem.Sequence) -> None:
    (child,) = d.fork(twin)
    d.manager.append([child, twin, seq], [50, 51, 52])
    d.go(child, twin, seq)


def twin_goes(d: Flight, seq: kvmem.Sequence, twin: kvmem.Sequence) -> None:
    d.free(twin)
    d.evict()
    d.go(d.create(others_tokens()))


def both_go(d: Flight, seq: kvmem.Sequence, twin: kvmem.Sequence) -> None:
    d.free(twin, seq)
    d.manager.evict(BLOCKS, "host")
    d.go(d.create(others_tokens()))


def twin_follows(d: Flight, seq: kvmem.Sequence, twin: kvmem.Sequence) -> None:
    """Swapped out as well: nothing is copied twice, whoever was first."""
    assert d.manager.swap_out([twin]).num_blocks == 0
    d.evict()
    d.manager.append([twin, seq], [50, 51])
    d.go(twin, seq)


TWIN_ACTS: tuple[Callable[[Flight, kvmem.Sequence, kvmem.Sequence], None], ...] = (
    twin_writes, twin_writes_where_it_is_alone, twin_is_cut_and_writes, twin_forks_and_all_write,
    twin_goes, both_go, twin_follows,
)  # fmt: skip


# --- the grids ------------------------------------------------------------------------------------


def finish(d: Flight, counts: Counter[str]) -> None:
    """Everything comes back, is read, goes again; both tiers are empty at the end."""
    d.release()
    d.manager.verify()
    d.check_content()
    d.manager.swap_out(d.live, how="auto")
    for seq in list(d.live):
        if seq.num_drafts:
            d.manager.accept([seq], [0], [80])
        else:
            d.manager.append([seq], [80])
        d.step([seq])
        d.manager.swap_out([seq], how="auto")
    d.check_content()
    d.manager.verify()
    counts["accesses checked"] += d.device.clocks.num_checked


def made(d: Flight, drafts: int) -> kvmem.Sequence:
    """A sequence that has computed its prompt, and some drafts."""
    seq = d.create(tokens_of(PROMPT - drafts))
    if drafts:
        d.manager.append([seq], [90] * drafts, counts=[drafts], draft=True)
    with d.manager.step([seq]) as step:
        if d.rng.random() < 0.5:
            d.run(step)
        else:
            d.write(step)  # its kernels may not have begun when the next call comes
    return seq


@pytest.mark.parametrize("mode", MODES)
def test_every_act_in_every_state(mode: str, seed: int) -> None:
    counts: Counter[str] = Counter()
    for i, state in enumerate(STATES):
        for j, act in enumerate(ACTS):
            number = seed + 100 * i + j
            try:
                with Flight(mode, random.Random(number)) as d:
                    seq = made(d, 2 if act is accept else 0)
                    state(d, seq)
                    counts["copies in flight"] += any(d.head(n) is not None for n in ("out", "in"))
                    act(d, seq)
                    d.manager.verify()
                    finish(d, counts)
            except BaseException as error:
                error.add_note(f"{mode}: {act.__name__} in {state.__name__}, seed {number}")
                raise
            counts["runs"] += 1
    print(mode, dict(counts))
    assert counts["runs"] == len(STATES) * len(ACTS)
    assert counts["copies in flight"] >= 8 * len(ACTS)


@pytest.mark.parametrize("mode", MODES)
def test_the_other_owner_of_a_block_that_goes_out(mode: str, seed: int) -> None:
    counts: Counter[str] = Counter()
    states = (out_queued, out_half, out_done)
    for i, state in enumerate(states):
        for j, act in enumerate(TWIN_ACTS):
            number = seed + 100 * i + j
            try:
                with Flight(mode, random.Random(number)) as d:
                    seq = made(d, 0)
                    (twin,) = d.fork(seq)
                    state(d, seq)
                    act(d, seq, twin)
                    d.manager.verify()
                    finish(d, counts)
            except BaseException as error:
                error.add_note(f"{mode}: {act.__name__} in {state.__name__}, seed {number}")
                raise
            counts["runs"] += 1
    print(mode, dict(counts))
    assert counts["runs"] == len(states) * len(TWIN_ACTS)
