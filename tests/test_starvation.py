"""`make_room` starves nobody: each sequence gets its turn within a bound, however small the tiers.

The loop is that of the README: make room for all, plan a step over all with `fit="some"`, append to
those that are ready. Only counts matter here, so nothing is computed in the steps.

The bound: the first in rank (priority, then who came first) among those with something to compute
is in every step. So a sequence is done at the latest when everyone before it had its own rounds,
counted from the moment it came, and then itself.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

import kvmem

PATIENCE = 3  # rounds without a token computed that are one too many


@dataclass
class Job:
    """A sequence, what it will grow to, and its rounds."""

    seq: kvmem.Sequence
    length: int  # tokens at its end
    came: int  # the round in which it came
    rounds: int  # steps it needs by itself, at most
    rank: tuple[int, int]  # smaller is first
    before: list[Job] = field(default_factory=list)  # of better rank when it came or since


class Loop:
    """An engine's loop over sequences that come and go."""

    def __init__(self, how: str, max_tokens: int, **settings: Any) -> None:
        self.manager = kvmem.Manager(
            kvmem.Config(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, **settings)
        )
        self.how, self.max_tokens = how, max_tokens
        self.jobs: list[Job] = []
        self.ended: list[Job] = []
        self.round = 0
        self.idle_rounds = 0
        self.num_victims = self.most_rounds = 0

    def create(self, tokens: list[int], new: int, priority: int = 0) -> Job:
        seq = self.manager.create(tokens, priority=priority)
        length = len(tokens) + new
        # given up once more just before it is first in rank, it is computed anew from its start
        job = Job(seq, length, self.round, -(-length // self.max_tokens) + new, (-priority, seq.id))
        for other in self.jobs:
            (job.before if other.rank < job.rank else other.before).append(
                other if other.rank < job.rank else job
            )
        self.jobs.append(job)
        return job

    def turn(self, seqs: list[kvmem.Sequence] | None = None) -> kvmem.Step:
        """One round; `seqs` in the order of the step, all of them in rank without it."""
        manager = self.manager
        chosen = [job.seq for job in sorted(self.jobs, key=lambda job: job.rank)]
        chosen = chosen if seqs is None else seqs
        self.round += 1
        victims = manager.make_room(chosen, max_tokens=self.max_tokens, how=self.how)
        self.num_victims += len(victims)
        with manager.step(chosen, max_tokens=self.max_tokens, fit="some") as step:
            pass
        self.idle_rounds = 0 if step.num_tokens else self.idle_rounds + 1
        manager.append(step.ready, [9] * len(step.ready))
        gone = [job for job in self.jobs if job.seq.num_tokens > job.length]
        for job in gone:
            self.most_rounds = max(self.most_rounds, self.round - job.came)
        manager.free([job.seq for job in gone])
        self.ended += gone
        self.jobs = [job for job in self.jobs if job not in gone]
        return step

    def close(self) -> None:
        self.manager.verify()
        self.manager.free([job.seq for job in self.jobs])
        self.manager.evict(1 << 20)
        self.manager.evict(1 << 20, "host")
        stats = self.manager.stats()
        assert stats.device.free == stats.device.total
        assert stats.host.free == stats.host.total
        self.manager.close()

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.manager.close()

    # --- what has to hold -------------------------------------------------------------------------

    def check_turn(self, step: kvmem.Step) -> None:
        """The first in rank was in the step; nobody waits longer than the bound."""
        everyone = [*self.jobs, *(job for job in self.ended if job.seq in step.seqs)]
        first = min(everyone, key=lambda job: job.rank)
        assert first.seq in step.seqs, f"round {self.round}: {first} left out: {step.left_out}"
        for job in self.jobs:
            bound = job.rounds + sum(other.rounds for other in job.before)
            assert self.round - job.came <= bound, f"{job.seq} waits longer than {bound} rounds"


def drawn(rng: random.Random, most: int) -> tuple[list[int], int]:
    """A prompt, often with a prefix that others have too, and how many tokens follow."""
    length = rng.randint(1, most - 1)
    prompt = [rng.choice((0, 0, 0, 1)) for _ in range(length)]
    return prompt, rng.randint(1, most - length)


@pytest.mark.parametrize("how", ["auto", "recompute"])
@pytest.mark.parametrize("host_blocks", [0, 2, 9])
def test_everyone_ends_within_the_bound(how: str, host_blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    total = most = 0
    for _ in range(4):
        blocks = rng.randint(2, 7)
        with Loop(
            how, rng.choice((1, 3, 8)), device_blocks=blocks, host_blocks=host_blocks
        ) as loop:
            to_come = 14
            while loop.jobs or to_come:
                if to_come and (not loop.jobs or rng.random() < 0.4):
                    to_come -= 1
                    loop.create(*drawn(rng, 2 * blocks), priority=rng.choice((0, 0, 1, -1)))
                loop.check_turn(loop.turn())
            total, most = total + loop.num_victims, max(most, loop.most_rounds)
    print(f"{total} victims, at most {most} rounds")
    assert total


def test_equal_priorities_end_in_the_order_of_coming() -> None:
    """All alike and each as long as the device: one after the other, whatever went out."""
    for how, host_blocks in (("auto", 0), ("auto", 5), ("recompute", 5), ("swap", 60)):
        with Loop(how, 64, device_blocks=6, host_blocks=host_blocks) as loop:
            jobs = [loop.create([i] * 6, 6) for i in range(8)]
            while loop.jobs:
                loop.check_turn(loop.turn())
            assert [job.seq.id for job in loop.ended] == [job.seq.id for job in jobs]


@pytest.mark.parametrize("how", ["auto", "recompute", "swap"])
def test_newcomers_of_equal_priority_never_starve_an_old_one(how: str, seed: int) -> None:
    """An old, long sequence; in each round someone short comes, who would always fit."""
    rng = random.Random(seed)
    with Loop(how, 8, device_blocks=8, host_blocks=200) as loop:
        for i in range(2):
            loop.create([50 + i] * 3, 2)
        old = loop.create([7] * 4, 12)  # it ends as long as the device
        for i in range(60):
            loop.create([100 + i] * rng.randint(1, 3), rng.randint(1, 2))
            loop.check_turn(loop.turn())
            if old not in loop.jobs:
                break
        assert old in loop.ended
        assert loop.round <= old.rounds + sum(job.rounds for job in old.before)
        while loop.jobs:
            loop.check_turn(loop.turn())
    assert loop.num_victims


@pytest.mark.parametrize("how", ["auto", "recompute", "swap"])
def test_one_that_pins_keep_from_its_step_keeps_nobody_else_waiting(how: str) -> None:
    """It is the first in rank and can't have its last block beside the pins: the others go on
    without losing what they have, and it goes on when the pin is gone."""
    with Loop(how, 64, device_blocks=8, host_blocks=20) as loop:
        m = loop.manager
        first = loop.create([1] * 8, 3)
        loop.create([2] * 8, 0)
        loop.turn()
        pin = m.pin([2] * 8)
        assert loop.jobs == [first]
        assert first.seq.state == "RESIDENT"
        others = [loop.create([3 + i] * 2, 2) for i in range(2)]
        recomputed = m.stats().recomputes
        for _ in range(12):
            assert loop.turn().num_tokens or others == loop.ended[1:]
        assert others == loop.ended[1:]
        assert m.stats().recomputes <= recomputed + 1
        assert first.seq.state != "RESIDENT"
        pin.release()
        loop.turn()
        assert loop.turn().seqs == [first.seq] or first in loop.ended


# --- a search for a state in which nobody moves ---------------------------------------------------


def could_end(loop: Loop, job: Job) -> bool:
    """Whether all its known tokens would fit beside the pins if everyone else went."""
    ledger, record = loop.manager._runtime.ledger, job.seq._record
    pinned = set((ledger.state.blocks["num_pins"] > 0).nonzero()[0].tolist())
    own = {*ledger.table_of(record).tolist(), *ledger.look_up(record).tolist()}
    copy_on_write = 1
    needed = ledger.blocks_for(job.seq.num_tokens) + len(pinned - own) + copy_on_write
    return bool(needed <= loop.manager.config.device_blocks)


@pytest.mark.parametrize("how", ["auto", "recompute", "swap"])
def test_no_state_is_found_in_which_nobody_moves(how: str, seed: int) -> None:
    """Random pools, prompts, priorities, pins, open steps, prefetches, swaps: a token is computed
    within a few rounds, or it is shown that nothing could be.

    With how="swap" only below the bound that `Config.plan` states, since swapping alone can get
    stuck above it: final blocks of the live ones <= host blocks + those of the longest.
    """
    turns = stuck = 0
    for number in range(seed, seed + 60):
        rng = random.Random(number)
        blocks = rng.randint(2, 8)
        host = 0 if how == "recompute" else rng.choice((0, 1, 3, 8))
        plan = [drawn(rng, 2 * blocks) for _ in range(rng.randint(2, 7))]
        if how == "swap":
            sizes = sorted(-(-(len(prompt) + new) // 2) for prompt, new in plan)
            host = sum(sizes[:-1])
        budget = rng.choice((1, 4, 16))
        with Loop(how, budget, device_blocks=blocks, host_blocks=host) as loop:
            for prompt, new in plan:
                loop.create(prompt, new, priority=rng.choice((0, 0, 1)))
            try:
                stuck += search(loop, rng, disturb=how != "swap")
            except AssertionError as error:
                error.add_note(f"script {number}: {blocks=} {host=} {budget=} {plan=}")
                raise
            turns += loop.round
    print(f"{turns} rounds, {stuck} of them with no room beside pins and open steps")


def search(loop: Loop, rng: random.Random, *, disturb: bool) -> int:
    """Turns until all have ended; how many of them could compute nothing."""
    pins: list[kvmem.Pin] = []
    stuck = 0
    opened: kvmem.Step | None = None
    while loop.jobs:
        held = {seq.id for seq in opened.seqs} if opened else set()
        seqs = [job.seq for job in sorted(loop.jobs, key=lambda job: job.rank)]
        seqs = [seq for seq in seqs if seq.id not in held]
        step = loop.turn(seqs)
        if not step.num_tokens and loop.idle_rounds >= PATIENCE:
            free = [job for job in loop.jobs if job.seq.id not in held]
            fitting = [job for job in free if could_end(loop, job)]
            assert opened or not fitting, (
                f"nobody moves, but {fitting[0].seq} could: {step.left_out}"
            )
            stuck += 1
            for pin in pins:
                pin.release()
            pins.clear()
            if opened:
                opened.cancel()
                opened = None
            loop.idle_rounds = 0
        if disturb or rng.random() < 0.3:
            opened = disturbed(loop, rng, opened, pins)
        assert loop.round < 3000, "it never ends"
    if opened:
        opened.cancel()
    for pin in pins:
        pin.release()
    return stuck


def disturbed(
    loop: Loop, rng: random.Random, opened: kvmem.Step | None, pins: list[kvmem.Pin]
) -> kvmem.Step | None:
    """What others do between two rounds; the step that is open afterwards."""
    manager = loop.manager
    if opened is not None and rng.random() < 0.5:
        opened.cancel()
        opened = None
    held = {seq.id for seq in opened.seqs} if opened else set()
    idle = [job.seq for job in loop.jobs if job.seq.id not in held]
    if not idle:
        return opened
    seq, act = rng.choice(idle), rng.random()
    if act < 0.1 and opened is None:
        opened = manager.step([seq], max_tokens=2, fit="some")
    elif act < 0.25:
        manager.prefetch([seq])
    elif act < 0.35:
        manager.swap_out([seq], "auto" if loop.how == "recompute" else "recompute")
    elif act < 0.45 and seq.state == "RESIDENT" and len(pins) < 2:
        with suppress(kvmem.PinError):  # nothing of it is published
            pins.append(manager.pin(seq))
    elif act < 0.6 and pins:
        pins.pop().release()
    return opened
