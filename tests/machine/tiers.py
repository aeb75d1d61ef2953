"""Calls on tiers and on what is cached in them: swapping, room, evictions, pins, resets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import note

import kvmem
from kvmem import OutOfBlocks, TierError
from kvmem.store.device import Stream
from tests.machine.bench import NAMESPACES, Bench, Dice, has_live, operation
from tests.machine.model import ModelSequence, root_of
from tests.machine.model import after as chained


class TierCalls(Bench):
    """What a machine can do with the tiers and the cache."""

    @operation(10, has_live)
    def swap_out(self, dice: Dice) -> None:
        how = dice.choice(["swap", "swap", "swap", "auto", "recompute"])
        seqs = self.some(dice, idle=dice.chance(0.8))
        self.swap_these_out(seqs, how)

    def swap_these_out(self, seqs: list[ModelSequence], how: str) -> None:
        note(f"swap_out {[seq.id for seq in seqs]} {how}")
        handles = [seq.handle for seq in seqs]
        if any(seq.step for seq in seqs):
            with pytest.raises((RuntimeError, TierError)):
                self.manager.swap_out(handles, how)
            return
        resident = [seq for seq in seqs if seq.state == "RESIDENT"]
        error = self.swap_error(resident) if how == "swap" else None
        if error is not None:
            self.reach(f"swap_out: {error.__name__}")
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
                self.reach("swap_in: no room")
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
            self.reach("prefetch: some")

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
            assert seq.state == "RESIDENT" and not seq.step
            assert seq.rank > best or self.model.pins  # one that pins keep from its step goes too
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

    @operation(3, lambda self: self.config.host_blocks and not self.config.sync)
    def cross(self, dice: Dice) -> None:
        """Copies both ways at once: blocks leave for host frames that arrivals still read (R6)."""
        swapped = [seq for seq in self.model.live if seq.state == "SWAPPED" and not seq.step]
        self.store.device.hold(dice.choice([Stream.IN, Stream.IN, Stream.OUT]))
        self.bring_back(dice.sample(swapped, min(len(swapped), dice.randint(1, 2))), softly=True)
        others = [seq for seq in self.model.live if seq not in swapped and not seq.step]
        self.manager.evict(dice.randint(0, self.config.host_blocks), "host")
        for seq in dice.sample(others, min(len(others), dice.randint(1, 3))):
            self.swap_these_out([seq], "swap")

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
