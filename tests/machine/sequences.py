"""Calls on sequences: made, grown, drafted, forked, cut, given back. None needs room."""

from __future__ import annotations

import numpy as np
import pytest

from tests.machine.bench import (
    MAX_LIVE,
    NAMESPACES,
    Bench,
    Dice,
    has_live,
    has_room,
    operation,
)
from tests.machine.model import ModelSequence, keys_of

DIGEST = bytes(range(16))


class SequenceCalls(Bench):
    """What a machine can do with sequences."""

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

    @operation(4, has_room)
    def fork(self, dice: Dice) -> None:
        seq = self.pick(dice)
        if seq.step:
            with pytest.raises(RuntimeError):
                self.manager.fork(seq.handle)
            return
        for child in self.manager.fork(seq.handle, dice.randint(1, 2)):
            self.model.live.append(seq.copy_for(child))

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
