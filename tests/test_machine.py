"""A Hypothesis state machine: the real Manager against the naive model of `tests/machine/model.py`.

Every rule is one call an engine can make. After each one `verify()` passes, the counts of
`stats()` are what the model counted (R10), and every block that is somewhere, in either tier, holds
the stamps of the tokens it stands for (R4, R11). At the end all is let go and both tiers are empty
(DRAIN, R9).

`KVMEM_PROFILE=ci` runs 300 machines of 100 steps, else 40 of 60. `KVMEM_SEED` repeats a run.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from kvmem import OutOfBlocks, SequenceTooLong
from tests.machine.bench import (
    CONFIGS,
    COUNTED,
    MAX_LIVE,
    OPERATIONS,
    Dice,
    has_live,
    has_room,
    operation,
)
from tests.machine.model import ModelSequence, Planner
from tests.machine.sequences import SequenceCalls
from tests.machine.steps import ANSWERS, StepCalls
from tests.machine.tiers import TierCalls

RUNS, STEPS = (300, 100) if os.environ.get("KVMEM_PROFILE") == "ci" else (40, 60)

OUTCOMES = (
    *("row: planned", "row: idle", "row: budget", "row: room", "row: arriving", "row: never"),
    *("hit: whole", "hit: part", "refused: room", "refused: never"),
    *("can_fit: yes", "can_fit: later", "can_fit: never"),
    *("swap_out: OutOfBlocks", "swap_out: TierError", "swap_in: no room", "prefetch: some"),
)

DICE = st.integers(0, 2**24 - 1).map(Dice)


class KVMachine(SequenceCalls, TierCalls, StepCalls):
    """See the module."""

    @initialize(which=st.integers(0, len(CONFIGS) - 1), dice=DICE)
    def begin(self, which: int, dice: Dice) -> None:
        self.set_up(which)
        self.weights = {
            name: weight * dice.choice([0.2, 1, 3]) for name, (weight, _) in OPERATIONS.items()
        }

    @rule(dice=DICE)
    def act(self, dice: Dice) -> None:
        """One operation. Hypothesis' own choice of rules switches off half of them in each run and
        weighs all alike: of 100 rules 7 were steps. Here weights say how often, and vary by run."""
        self.whole = False
        able = [name for name, (_, able) in OPERATIONS.items() if able(self)]
        name = dice.choices(able, [self.weights[name] for name in able])[0]
        note(name)
        self.reach(name)
        getattr(self, name)(dice)

    # --- steps ------------------------------------------------------------------------------------

    @operation(12, lambda self: self.model.live and len(self.open) < 2)
    def step(self, dice: Dice) -> None:
        self.plan_and_end(self.some(dice, idle=True), dice)

    @operation(4, lambda self: self.model.live and len(self.open) < 2)
    def begin_step(self, dice: Dice) -> None:
        """A step that stays open."""
        self.plan(self.some(dice, idle=True), dice, dice.choice(["some", "all"]))

    def plan_and_end(self, seqs: list[ModelSequence], dice: Dice, fit: str = "") -> None:
        if dice.chance(0.85):  # those that can never fit are refused early and often enough
            most = self.model.device_blocks * self.model.block_size
            seqs = [seq for seq in seqs if len(seq.tokens) <= most]
        if dice.chance(0.6):
            self.add_tokens([s for s in seqs if s.computed == len(s.tokens)], dice)
        if dice.chance(0.5):
            gone = self.ask_for_room(seqs, dice.choice(["auto", "auto", "recompute"]))
            seqs = [seq for seq in seqs if seq not in gone]
        if self.plan(seqs, dice, fit or dice.choice(["some", "all"])):
            self.end_at(len(self.open) - 1, fails=dice.chance(0.15))

    @operation(9, lambda self: self.open)
    def end(self, dice: Dice) -> None:
        self.end_at(dice.randint(0, len(self.open) - 1), fails=dice.chance(0.3))

    # --- what engines do --------------------------------------------------------------------------

    @operation(8, lambda self: len(self.open) < 2)
    def prefill(self, dice: Dice) -> None:
        """One or two new prompts that come together, and their first step."""
        new = [self.add(dice) for _ in range(dice.randint(1, 2)) if len(self.model.live) < MAX_LIVE]
        self.plan_and_end(new, dice)

    @operation(10, lambda self: self.model.live and len(self.open) < 2)
    def turn(self, dice: Dice) -> None:
        """A turn of an engine: room, a step over all that may be planned, a token each."""
        seqs = [seq for seq in self.model.live if not seq.step]
        self.plan_and_end(seqs, dice, fit="some")
        self.add_tokens([seq for seq in seqs if seq.computed == len(seq.tokens)], dice)

    @operation(4, has_live)
    def speculate(self, dice: Dice) -> None:
        """Drafts, a step that computes them, and how many hold."""
        seq = self.pick(dice)
        if not seq.step and len(self.open) < 2:
            self.add_drafts(seq, dice)
            self.plan_and_end([seq], dice)
            self.accept(dice)

    @operation(6, has_room)
    def branch(self, dice: Dice) -> None:
        """A fork whose halves go on: the first to write copies the block they share."""
        seq = self.pick(dice)
        if seq.step or len(self.open) > 1:
            return
        self.model.live += [seq.copy_for(child) for child in self.manager.fork(seq.handle)]
        halves = dice.sample([seq, self.model.live[-1]], dice.randint(1, 2))
        self.add_tokens(halves, dice)
        self.plan_and_end(halves, dice)

    @operation(4, lambda self: len(self.open) < 2 and len(self.model.live) < MAX_LIVE)
    def fits_then_act(self, dice: Dice) -> None:
        """can_fit of a new prompt agrees with creating and stepping it right after (R7)."""
        seqs = self.some(dice, idle=True, most=2)
        tokens = self.pick(dice).tokens[: dice.randint(0, 9)] if self.model.live else []
        tokens = tokens + dice.tokens(dice.randint(1, 5))
        handles = [seq.handle for seq in seqs]
        answer = self.manager.can_fit(tokens=tokens, seqs=handles)
        new = ModelSequence(self.manager.create(tokens), None, list(tokens), list(tokens))
        self.model.live.append(new)
        new.cached = new.handle.num_cached
        rows = Planner(self.model, self.model.world(), budget=None, reserve=0).plan([*seqs, new])
        try:
            step = self.manager.step([*handles, new.handle])
        except OutOfBlocks:
            assert answer == "later"
        except SequenceTooLong:
            assert answer == "never"
        else:
            assert answer == "yes"
            self.enter(step, rows, late=False)
            self.end_at(len(self.open) - 1, fails=False)

    @operation(3)
    def ask(self, dice: Dice) -> None:
        """can_fit of tokens that nobody knows yet, on top of a step."""
        num_tokens = dice.randint(0, (self.model.device_blocks + 2) * self.model.block_size)
        seqs = self.some(dice, idle=True) if dice.chance(0.7) else []
        reserve = self.model.blocks_for(num_tokens)
        planner = Planner(self.model, self.model.world(), budget=None, reserve=reserve)
        expected = ANSWERS[planner.refusal(planner.plan(seqs))]
        assert self.manager.can_fit(num_tokens, seqs=[seq.handle for seq in seqs]) == expected
        self.reach(f"can_fit: {expected}")

    # --- progress ---------------------------------------------------------------------------------

    @operation(1.5, lambda self: self.model.live and not self.open)
    def serve(self, dice: Dice) -> None:
        """From whatever state: room, a step in order of rank, a token each, until all are done.

        Each turn the best sequence left computes a token at least and is nobody's victim, so all
        end within as many turns as they have tokens in the end.
        """
        for pin, _, _ in self.model.pins:
            pin.release()
        self.model.pins.clear()
        ends = {}
        for seq in self.model.live:
            if seq.drafts:
                self.manager.accept([seq.handle], [0], [1])
                seq.cut(seq.num_known)
                seq.extend([1])
                if seq.state == "RESIDENT":
                    self.model.note_published(seq)
            most = self.longest_served(seq)
            if 0 < len(seq.tokens) <= most:
                ends[seq] = min(most, len(seq.tokens) + dice.randint(0, 3))
        self.give_back([seq for seq in self.model.live if seq not in ends])
        bound, turns = sum(ends.values()), 0
        while ends:
            turns += 1
            assert turns <= bound, f"no end after {bound} turns"
            self.serve_turn(ends, dice)
            self.holds()

    def longest_served(self, seq: ModelSequence) -> int:
        """The tokens that the device can hold of a sequence: the copy of a shared, unfull block
        that it writes into takes a frame while the block keeps its own (the stated bound)."""
        model, size = self.model, self.model.block_size
        world = model.world()
        table = world.table(seq)
        copies = seq.stored % size and model.is_shared(table[seq.stored // size], world)
        return (model.device_blocks - bool(copies)) * size

    def serve_turn(self, ends: dict[ModelSequence, int], dice: Dice) -> None:
        """One turn over all that are not at their end."""
        todo = sorted(ends, key=lambda seq: seq.rank)
        gone = self.ask_for_room(todo, "auto")
        todo = [seq for seq in todo if seq not in gone]
        self.plan(todo, dice, "some", serving=True)
        self.end_at(0, fails=False)
        for seq in todo:
            if seq.computed == len(seq.tokens):
                if len(seq.tokens) >= ends[seq]:
                    del ends[seq]
                    self.give_back([seq])
                else:
                    self.manager.append([seq.handle], [0])
                    seq.extend([0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_machine() -> None:
    reached = KVMachine.reached
    reached.clear()
    run_state_machine_as_test(
        KVMachine,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(sorted(reached.items())))
    if RUNS >= 300:  # else chance alone may leave one out
        missed = [name for name in (*OPERATIONS, *COUNTED, *OUTCOMES) if not reached[name]]
        assert not missed, f"{missed} never happened: the run was no test of them"
