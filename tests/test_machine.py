"""A Hypothesis state machine: the real Manager against the naive model of `tests/model.py`.

Every rule is one call an engine can make. After each one `verify()` passes, the counts of
`stats()` are what the model counted (R10), and every block that is somewhere, in either tier, holds
the stamps of the tokens it stands for (R4, R11). At the end all is let go and both tiers are empty
(DRAIN, R9).

`KVMEM_PROFILE=ci` runs 300 machines of 100 steps, else 40 of 60. `KVMEM_SEED` repeats a run.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    rule,
    run_state_machine_as_test,
)

import kvmem
from kvmem import OutOfBlocks, SequenceTooLong, TierError
from kvmem.store.device import Stream
from tests.machine.bench import (
    CONFIGS,
    MAX_LIVE,
    OPERATIONS,
    Dice,
    has_live,
    has_room,
    operation,
)
from tests.machine.steps import StepCalls
from tests.model import (
    ModelSequence,
    Planner,
    keys_of,
    root_of,
)
from tests.model import after as chained

RUNS, STEPS = (300, 100) if os.environ.get("KVMEM_PROFILE") == "ci" else (40, 60)
NAMESPACES = (None, "a", b"a")
DIGEST = bytes(range(16))

DICE = st.integers(0, 2**24 - 1).map(Dice)


class KVMachine(StepCalls):
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
        getattr(self, name)(dice)

    # --- sequences --------------------------------------------------------------------------------

    @operation(4, lambda self: len(self.model.live) < MAX_LIVE)
    def create(self, dice: Dice) -> None:
        """A new prompt, mostly one that begins like another."""
        self.add(dice)

    def add(self, dice: Dice) -> ModelSequence:
        size = self.model.block_size
        tokens = dice.tokens(dice.randint(0, 2 * size + 3))
        namespace = dice.choice(NAMESPACES) if dice.chance(0.2) else None
        if self.model.live and dice.chance(0.7):
            like = self.pick(dice)
            shared = dice.randint(0, min(len(like.tokens), 3 * size + 1))
            tokens = like.tokens[:shared] + tokens[: dice.randint(0, 5)]
            namespace = namespace or like.namespace
        extras = []
        if dice.chance(0.15) and len(tokens) > 2:
            start = dice.randint(0, 2)
            digest = DIGEST if dice.chance(0.7) else DIGEST[::-1]
            extras = [(start, dice.randint(1, len(tokens) - start), digest)]
        publish, priority = not dice.chance(0.1), dice.randint(-1, 1)
        limit = dice.randint(0, len(tokens)) if dice.chance(0.1) else None
        handle = self.manager.create(
            np.array(tokens, np.int32),
            namespace=namespace,  # type: ignore[arg-type]
            priority=priority,
            extras=extras,
            publish=publish,
            max_cached=limit,
        )
        keys = keys_of(tokens, extras)
        seq = ModelSequence(handle, namespace, tokens, keys, publish, limit, priority)
        found, _ = self.model.hits(seq, self.model.world())
        seq.cached = len(found) * size
        self.model.live.append(seq)
        return seq

    @operation(6, has_live)
    def append(self, dice: Dice) -> None:
        self.add_tokens(self.some(dice, idle=False), dice)

    def add_tokens(self, seqs: list[ModelSequence], dice: Dice) -> None:
        """One token each, or some of them ragged. Few outgrow the device."""
        most = self.model.device_blocks * self.model.block_size + dice.choice([-1, -1, -1, 1])
        seqs = [seq for seq in seqs if not seq.drafts and len(seq.tokens) < most]
        handles = [seq.handle for seq in seqs]
        each = [1] * len(seqs)
        if dice.chance(0.3):
            each = [dice.randint(0, 3) for _ in seqs]
            tokens = dice.tokens(sum(each))
            self.manager.append(handles, tokens, counts=each)
        else:
            tokens = dice.tokens(len(seqs))
            self.manager.append(handles, tokens)
        for seq, count in zip(seqs, each, strict=True):
            seq.extend(tokens[:count])
            tokens = tokens[count:]

    @operation(2, has_live)
    def draft(self, dice: Dice) -> None:
        self.add_drafts(self.pick(dice), dice)

    def add_drafts(self, seq: ModelSequence, dice: Dice) -> None:
        tokens = dice.tokens(dice.randint(1, 4))
        self.manager.append([seq.handle], tokens, counts=[len(tokens)], draft=True)
        seq.extend(tokens)
        seq.drafts += len(tokens)
        with pytest.raises(ValueError):
            self.manager.append([seq.handle], [1])

    @operation(4, has_live)
    def accept(self, dice: Dice) -> None:
        seq, token = self.pick(dice), dice.tokens(1)
        if seq.step:
            with pytest.raises(RuntimeError):
                self.manager.accept([seq.handle], [0], token)
            return
        keep = dice.randint(0, seq.drafts + 1)
        if keep > seq.drafts:
            with pytest.raises(ValueError):
                self.manager.accept([seq.handle], [keep], token)
            keep = seq.drafts
        self.manager.accept([seq.handle], [keep], token)
        seq.cut(seq.num_known + keep)
        seq.drafts = 0
        seq.extend(token)
        if seq.state == "RESIDENT":
            self.model.note_published(seq)

    @operation(4, has_live)
    def speculate(self, dice: Dice) -> None:
        """Drafts, a step that computes them, and how many hold."""
        seq = self.pick(dice)
        if not seq.step and len(self.open) < 2:
            self.add_drafts(seq, dice)
            self.plan_and_end([seq], dice)
            self.accept(dice)

    @operation(4, has_room)
    def fork(self, dice: Dice) -> None:
        seq = self.pick(dice)
        if seq.step:
            with pytest.raises(RuntimeError):
                self.manager.fork(seq.handle)
            return
        for child in self.manager.fork(seq.handle, dice.randint(1, 2)):
            self.model.live.append(seq.copy_for(child))

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

    @operation(4, has_live)
    def truncate(self, dice: Dice) -> None:
        seq = self.pick(dice)
        length = max(0, len(seq.tokens) - dice.randint(0, 2 + self.model.block_size))
        if seq.step:
            with pytest.raises(RuntimeError):
                self.manager.truncate([seq.handle], length)
            return
        self.manager.truncate([seq.handle], length)
        seq.cut(length)

    @operation(8, has_live)
    def free(self, dice: Dice) -> None:
        self.give_back(self.some(dice, idle=False, most=2))

    def give_back(self, seqs: list[ModelSequence]) -> None:
        """free."""
        self.manager.free([seq.handle for seq in seqs])
        for seq in seqs:
            self.model.live.remove(seq)
            if seq.step:
                self.model.ending.append(seq)

    # --- steps ------------------------------------------------------------------------------------

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

    # --- tiers ------------------------------------------------------------------------------------

    @operation(10, has_live)
    def swap_out(self, dice: Dice) -> None:
        how = dice.choice(["swap", "swap", "swap", "auto", "recompute"])
        seqs = self.some(dice, idle=dice.chance(0.8))
        note(f"swap_out {[seq.id for seq in seqs]} {how}")
        handles = [seq.handle for seq in seqs]
        if any(seq.step for seq in seqs):
            with pytest.raises((RuntimeError, TierError)):
                self.manager.swap_out(handles, how)
            return
        resident = [seq for seq in seqs if seq.state == "RESIDENT"]
        error = self.swap_error(resident) if how == "swap" else None
        if error is not None:
            before = self.counts()
            with pytest.raises(error) as caught:
                self.manager.swap_out(handles, how)
            assert self.counts() == before
            assert error is TierError or caught.value.tier == "host"
            return
        transfer = self.manager.swap_out(handles, how)
        self.note_swapped_out(seqs, how)
        if self.config.sync:
            assert transfer.done

    def swap_error(self, resident: list[ModelSequence]) -> Any:
        """Why swapping these out is refused, by sets of blocks."""
        if not resident:
            return None
        if self.model.host_blocks == 0:
            return TierError
        world = self.model.world()
        blocks = {b for seq in resident for b in world.table(seq)}
        need = sum(1 for b in blocks if not world.host_frame[b])
        room = self.model.host_free(world) + len(self.model.host_evictable(world) - blocks)
        return OutOfBlocks if need > room else None

    def note_swapped_out(self, seqs: list[ModelSequence], how: str) -> None:
        """Take over what a swap out did; with "auto" the Manager chose, sequence by sequence."""
        counts = self.model.counts
        for seq in seqs:
            state = seq.handle.state
            if how == "recompute":
                assert state == "WAITING"
            if state == seq.state:
                continue
            assert seq.state == "RESIDENT" or how != "swap"
            if state == "WAITING":
                assert how != "swap"
                seq.give_up()
                counts["recomputes"] += 1
            else:
                assert state == "SWAPPED"
                seq.state = state
                counts["swap_outs"] += 1

    def missing(self, seqs: list[ModelSequence]) -> bool:
        """True when bringing these back has no room (R7)."""
        world = self.model.world()
        blocks = {b for seq in seqs for b in world.table(seq)}
        evictable = self.model.device_evictable(world)
        take = sum(1 for b in blocks if not world.device_frame[b])
        return take > self.model.device_free(world) + len(evictable - blocks)

    @operation(6, has_live)
    def swap_in(self, dice: Dice) -> None:
        self.bring_back(self.some(dice, idle=False), softly=False)

    @operation(2, has_live)
    def prefetch(self, dice: Dice) -> None:
        self.bring_back(self.some(dice, idle=False), softly=True)

    def bring_back(self, seqs: list[ModelSequence], *, softly: bool) -> None:
        handles = [seq.handle for seq in seqs]
        swapped = [seq for seq in seqs if seq.state == "SWAPPED"]
        if not softly:
            if self.missing(swapped):
                before = self.counts()
                with pytest.raises(OutOfBlocks):
                    self.manager.swap_in(handles)
                assert self.counts() == before
                return
            self.manager.swap_in(handles)
        else:
            self.manager.prefetch(handles)
        came = [seq for seq in swapped if seq.handle.state == "RESIDENT"]
        assert came == swapped[: len(came)]
        for seq in came:
            seq.state, seq.fresh = "RESIDENT", True
            self.model.counts["swap_ins"] += 1
        if len(came) < len(swapped):
            assert softly and self.missing([swapped[len(came)]])

    @operation(3, has_live)
    def make_room(self, dice: Dice) -> None:
        self.ask_for_room(self.some(dice, idle=True), dice.choice(["auto", "recompute"]))

    def ask_for_room(self, seqs: list[ModelSequence], how: str) -> list[ModelSequence]:
        """make_room; the victims."""
        if not seqs:
            return []
        best = min(seq.rank for seq in seqs)
        victims = self.manager.make_room([seq.handle for seq in seqs], how=how)
        gone = [seq for seq in self.model.live if seq.handle in victims]
        assert len(gone) == len(victims)
        for seq in gone:
            assert seq.rank > best and seq.state == "RESIDENT" and not seq.step
        self.note_swapped_out(gone, how)
        assert all(seq.state != "RESIDENT" for seq in gone)
        return gone

    @operation(4)
    def evict(self, dice: Dice) -> None:
        count, tier = dice.randint(0, 3), dice.choice(["device", "host"])
        before = self.manager.stats()
        able = (before.device if tier == "device" else before.host).evictable
        assert self.manager.evict(count, tier) == min(count, able)
        after = self.manager.stats()
        gone = getattr(after, f"evicted_{tier}") - getattr(before, f"evicted_{tier}")
        assert gone == min(count, able)

    @operation(2, lambda self: not self.config.sync)
    def hold(self, dice: Dice) -> None:
        """Copies of a stream stay queued until the next step begins or they are let go."""
        self.store.device.hold(dice.choice([Stream.OUT, Stream.IN]))

    @operation(1)
    def settled(self, dice: Dice) -> None:
        self.count_all()

    def count_all(self) -> None:
        """Wait for all copies; then what was planned is what was counted at the device (R10)."""
        self.let_copies_go()
        self.wait_all()
        self.manager.poll()
        stats = self.manager.stats()
        assert (stats.bytes_out, stats.bytes_in) == (stats.bytes_out_done, stats.bytes_in_done)

    # --- the cache --------------------------------------------------------------------------------

    @operation(2, has_live)
    def match(self, dice: Dice) -> None:
        seq = self.pick(dice)
        namespace = seq.namespace if dice.chance(0.7) else dice.choice(NAMESPACES)
        found = self.lookup(seq.tokens, namespace)
        match = self.manager.match(seq.tokens, namespace)  # type: ignore[arg-type]
        frames = self.model.world().device_frame
        size = self.model.block_size
        assert match.num_tokens == len(found) * size
        assert match.on_device == sum(1 for b in found if frames[b]) * size
        assert match.num_tokens == match.on_device + match.on_host

    def lookup(self, tokens: list[int], namespace: object) -> list[int]:
        """The cached blocks of a prompt."""
        chains, chain = [], root_of(namespace)
        for token in tokens:
            chain = chained(chain, token)
            chains.append(chain)
        count = len(tokens) // self.model.block_size
        return self.model.path(chains, 0, count, self.model.world())

    @operation(3, has_live)
    def pin(self, dice: Dice) -> None:
        if len(self.model.pins) >= 2:
            return
        seq, prompt, world = self.pick(dice), dice.chance(0.5), self.model.world()
        if prompt:
            blocks = self.lookup(seq.tokens, seq.namespace)
        else:
            count = int(world.ledger.state.sequences["num_published"][seq.record])
            blocks = world.table(seq)[:count]
        on_device = [bool(world.device_frame[b]) for b in blocks]
        blocks = blocks[: on_device.index(False)] if False in on_device else blocks
        if not blocks:
            with pytest.raises(kvmem.PinError):
                self.manager.pin(
                    seq.tokens if prompt else seq.handle,
                    namespace=seq.namespace,  # type: ignore[arg-type]
                )
            return
        if prompt:
            pin = self.manager.pin(seq.tokens, namespace=seq.namespace)  # type: ignore[arg-type]
        else:
            pin = self.manager.pin(seq.handle)
        assert pin.num_tokens == len(blocks) * self.model.block_size
        self.model.pins.append((pin, blocks, [world.node_rows[b] for b in blocks]))

    @operation(2, lambda self: self.model.pins)
    def release(self, dice: Dice) -> None:
        pin, _, _ = self.model.pins.pop(dice.randrange(len(self.model.pins)))
        pin.release()
        with pytest.raises(kvmem.PinError):
            pin.release()

    @operation(1)
    def reset(self, dice: Dice) -> None:
        namespace = dice.choice(NAMESPACES)
        everything = namespace is None
        if self.open:
            with pytest.raises(RuntimeError):
                self.manager.reset(None if everything else namespace)  # type: ignore[arg-type]
            return
        self.manager.reset(None if everything else namespace)  # type: ignore[arg-type]
        self.model.forget_published(namespace, everything=everything)

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
        most = self.model.device_blocks * self.model.block_size
        ends = {}
        for seq in self.model.live:
            if seq.drafts:
                self.manager.accept([seq.handle], [0], [1])
                seq.cut(seq.num_known)
                seq.extend([1])
                if seq.state == "RESIDENT":
                    self.model.note_published(seq)
            if 0 < len(seq.tokens) <= most:
                ends[seq] = min(most, len(seq.tokens) + dice.randint(0, 3))
        self.give_back([seq for seq in self.model.live if seq not in ends])
        bound, turns = sum(ends.values()), 0
        while ends:
            turns += 1
            assert turns <= bound, f"no end after {bound} turns"
            self.serve_turn(ends, dice)
            self.holds()

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

    # --- can_fit ----------------------------------------------------------------------------------

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
        rows = Planner(self.model, self.model.world(), budget=None, reserve=0).plan(
            [*seqs, new], None
        )
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_machine() -> None:
    run_state_machine_as_test(
        KVMachine,
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
