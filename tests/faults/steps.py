"""Steps of the random workload: planned, run with stamped K/V, ended or aborted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kvmem
from kvmem.store.device import Stream
from tests.faults.world import BodyFailed, Broken, Known, Opened, World, require, stamps


class Steps(World):
    """Operations on steps."""

    def op_step(self) -> None:
        if len(self.opened) >= 2:
            return self.op_end_step()
        chosen = self.pick(4)
        seqs = [k.seq for k in chosen]
        if not seqs:
            return None
        rng = self.rng
        fit = rng.choice(("all", "some", "some"))
        budget = rng.choice((None, None, 1, 3, 6))
        limits = None
        if rng.random() < 0.2:
            limits = [rng.randint(0, s.num_tokens - s.num_computed) for s in seqs]
        reserve = rng.choice((0, 0, 0, 1))
        opened = self.plan(seqs, fit, budget, limits, reserve)
        if opened is None:
            return None
        if rng.random() < 0.25:
            self.opened.append(opened)
        else:
            self.run_step(opened, abort=rng.random() < 0.2, at_once=True)
        return None

    def plan(
        self,
        seqs: list[kvmem.Sequence],
        fit: str,
        budget: int | None,
        limits: list[int] | None,
        reserve: int,
    ) -> Opened | None:
        """Plan a step; a refusal must agree with `can_fit` (R7) and change nothing (R8)."""
        plain = fit == "all" and budget is None and limits is None and reserve == 0
        num_failed = self.num_failed
        forecast = self.m.can_fit(seqs=seqs) if plain else None
        self.m.poll()
        before = {s.id: self.fields(self.known[s.id]) for s in seqs}
        nodes = self.node_paths() if self.deep() else None
        arrays = self.arrays()
        try:
            step = self.m.step(
                seqs, fit=fit, max_tokens=budget, num_tokens=limits, reserve_blocks=reserve
            )
        except (kvmem.OutOfBlocks, kvmem.SequenceTooLong) as error:
            require(fit == "all", "fit='some' raised")
            self.unchanged(arrays, "step")
            if forecast is not None and num_failed == self.num_failed:
                never = isinstance(error, kvmem.SequenceTooLong)
                require(forecast == ("never" if never else "later"), f"can_fit said {forecast}")
            return None
        if num_failed == self.num_failed:  # else what a failed copy took makes room, or needs some
            require(forecast in (None, "yes"), f"can_fit said {forecast}, yet it was planned (R7)")
        return Opened(step, before, nodes)

    def op_end_step(self) -> None:
        if self.opened:
            opened = self.opened.pop(self.rng.randrange(len(self.opened)))
            self.run_step(opened, abort=self.rng.random() < 0.25, at_once=False)

    def run_step(self, opened: Opened, *, abort: bool, at_once: bool) -> None:
        """Enter, check what is read, write stamps, read all back, leave or raise."""
        step = opened.step
        computed = [s.num_computed if not s.is_freed else -1 for s in step.seqs]
        self.let_arrive(step._plan)
        try:
            with step:
                self.write_and_read(opened)
                if abort:
                    raise BodyFailed
        except BodyFailed:
            self.check_restored(opened, at_once)
            return
        except kvmem.TransferError as error:
            self.check_given_up(opened, error)
            return
        for seq, first, count in zip(step.seqs, computed, step.host.num_tokens, strict=True):
            if not seq.is_freed:
                require(seq.num_computed == first + count, f"num_computed of {seq.id} after a step")

    def let_arrive(self, plan: Any) -> None:
        """Let streams go as far as the plan says that the step waits for, and no further."""
        if self.setup.sim is not None:  # its compute stream waits; only what is held never comes
            if self.held:
                self.let_go()
            return
        if not self.setup.racing:
            self.let_copies_end()
        elif Stream.IN not in self.held and self.held:
            self.store.wait("in", plan.step_after_in, 0.1)  # may itself wait for what is held
        out, into = self.store.retired()
        if plan.step_after_out > out or plan.step_after_in > into:
            self.let_go()

    def write_and_read(self, opened: Opened) -> None:
        """Stamp the step's tokens and compare every slot of its rows with its stamp."""
        step = opened.step
        every = {**self.known, **opened.freed}
        key, value = self.views()
        bs = self.setup.block_size
        table = step.block_table.numpy()
        rows, starts, lens = [], step.query_start.tolist(), step.seq_lens.tolist()
        slots, positions = step.slot_mapping.tolist(), step.positions.tolist()
        for i, seq in enumerate(step.seqs):
            k = every[seq.id]
            for at in range(starts[i], starts[i + 1]):
                self.check_slot(slots[at], int(table[i, positions[at] // bs]), positions[at])
            expected = stamps(k.namespace, k.tokens)
            first = positions[starts[i]]
            require(
                step.tokens[starts[i] : starts[i + 1]].tolist() == k.tokens[first : lens[i]],
                f"the step feeds other tokens of {seq.id}",
            )
            stored = first if slots[starts[i]] >= 0 else first + 1
            row = (seq.id, step._epoch)
            self.compare(key, value, table[i], expected[:stored], "before", row)
            rows.append(expected[first : lens[i]])
        stamp = np.concatenate(rows) if rows else np.zeros((0, 2), np.float32)
        one = torch.from_numpy(stamp.reshape(len(stamp), 1, 2).copy())
        step.write(0, one, one + 0.5)
        for i, seq in enumerate(step.seqs):
            k = every[seq.id]
            expected = stamps(k.namespace, k.tokens[: lens[i]])
            self.compare(key, value, table[i], expected, "after", (seq.id, step._epoch))
        self.attend(step, every)

    def attend(self, step: kvmem.Step, every: dict[int, Known]) -> None:
        """For a driver that also looks at what attention makes of the stamps."""

    def check_given_up(self, opened: Opened, error: kvmem.TransferError) -> None:
        """For a driver whose copies may fail."""
        raise Broken(f"a step was given up, though no copy fails here: {error}")

    def has_lost(self, number: int) -> bool:
        """Whether a failed copy ever took K/V of a sequence."""
        return False

    def check_restored(self, opened: Opened, at_once: bool) -> None:
        """After an abort all is as before, but a SWAPPED row stays RESIDENT (R8)."""
        for seq in opened.step.seqs:
            if seq.id in opened.freed or seq.id not in self.known or self.has_lost(seq.id):
                continue
            before, after = opened.before[seq.id], self.fields(self.known[seq.id])
            require(after[1:] == before[1:], f"sequence {seq.id} is {after}, was {before} (R8)")
            state = "RESIDENT" if before[0] == "SWAPPED" else before[0]
            require(after[0] == state, f"sequence {seq.id} is {after[0]} after an abort")
        if at_once and opened.nodes is not None:
            require(self.node_paths() <= opened.nodes, "an aborted step published (R5)")
