"""Steps of the state machine: planned against the model, written with stamps, read back, ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import note

import kvmem
from kvmem import OutOfBlocks, SequenceTooLong
from tests.machine.bench import Bench, Dice, gathered
from tests.machine.model import HEAD_DIM, LAYERS, Floats, ModelSequence, Planner, RowPlan

ANSWERS = {"": "yes", "room": "later", "never": "never"}  # of can_fit, by why a step is refused
BEFORE = ("state", "computed", "stored", "cached", "queried", "fresh")


class Boom(Exception):
    """Raised in a step's body."""


class OpenStep:
    """A step whose body is under way."""

    def __init__(self, step: kvmem.Step, rows: list[RowPlan], late: bool) -> None:
        self.step, self.rows, self.late = step, rows, late
        lengths = [row.computed + row.num_tokens for row in rows]
        self.stamps = [row.seq.rows[:n].copy() for row, n in zip(rows, lengths, strict=True)]


class StepCalls(Bench):
    """What a machine can do with steps."""

    def plan(
        self, seqs: list[ModelSequence], dice: Dice, fit: str, *, serving: bool = False
    ) -> bool:
        """Plan and enter, or see it refused; when serving, without limits that stop progress."""
        budget = dice.choice([None, None, 1, 3, 6, 30])
        reserve = dice.choice([0, 0, 0, 0, 1, 2])
        limits = None
        if serving:
            reserve = 0
        elif dice.chance(0.2):
            limits = [dice.randint(0, len(seq.tokens) - seq.computed) for seq in seqs]
        world = self.model.world()
        planner = Planner(self.model, world, budget=budget, reserve=reserve)
        rows = planner.plan(seqs, limits)
        refusal = planner.refusal(rows)
        handles = [seq.handle for seq in seqs]
        note(f"step {[seq.id for seq in seqs]} {fit=} {budget=} {limits=} {reserve=}")
        if budget is None and limits is None and reserve == 0:
            assert self.manager.can_fit(seqs=handles) == ANSWERS[refusal]  # R7
        before = self.counts()
        wanted: dict[str, Any] = {
            "max_tokens": budget,
            "num_tokens": limits,
            "fit": fit,
            "reserve_blocks": reserve,
        }
        if fit == "all" and refusal:
            self.reach(f"refused: {refusal}")
            kind = OutOfBlocks if refusal == "room" else SequenceTooLong
            with pytest.raises(kind):
                self.manager.step(handles, **wanted)
            assert self.counts() == before
            return False
        self.enter(self.manager.step(handles, **wanted), rows, late=dice.chance(0.4))
        return True

    def enter(self, step: kvmem.Step, rows: list[RowPlan], late: bool) -> OpenStep:
        """Compare the plan with the model's, take it over, enter and write."""
        model = self.model
        left = [(row.seq.handle, row.reason) for row in rows if row.reason != "planned"]
        assert step.left_out == left
        planned = [row for row in rows if row.reason == "planned"]
        assert step.seqs == [row.seq.handle for row in planned]
        model.counts["steps"] += 1
        for row in rows:
            self.reach(f"row: {row.reason}")
        for row in planned:
            self.begin_row(row, step)
        opened = OpenStep(step, planned, late)
        self.open.append(opened)
        self.check_plan(opened)
        self.let_go_what_it_waits_for(step)
        step.__enter__()
        if not late:
            self.write(opened)
        return opened

    def let_go_what_it_waits_for(self, step: kvmem.Step) -> None:
        """Held copies stay held unless the plan says that the step waits for them: what it forgot
        to wait for then surely comes too late (R3, R6)."""
        out, into = self.store.retired()
        plan = step._plan
        if plan.step_after_out > out or plan.step_after_in > into:
            self.let_copies_go()

    def begin_row(self, row: RowPlan, step: kvmem.Step) -> None:
        seq = row.seq
        row.before = {name: getattr(seq, name) for name in BEFORE}
        if seq.state == "SWAPPED":
            self.model.counts["swap_ins"] += 1
        if seq.state != "RESIDENT":
            seq.fresh = True
        if not seq.queried:
            seq.queried, seq.cached = True, 0
        if row.found:
            self.reach("hit: whole" if row.stored > row.computed else "hit: part")
        seq.cached += len(row.found) * self.model.block_size
        seq.state, seq.computed, seq.stored = "RESIDENT", row.computed, row.stored
        seq.step = step
        if row.copy_source:
            self.model.copy_sources.append(row.copy_source)
            self.model.counts["blocks_copied_on_write"] += 1

    def check_plan(self, opened: OpenStep) -> None:
        """Tokens, positions, slots and tables of a step are what the model says."""
        step, size = opened.step, self.model.block_size
        tokens, positions, lengths, last, at = [], [], [], [], 0
        stored = []
        for row in opened.rows:
            end = row.computed + row.num_tokens
            tokens += row.seq.tokens[row.computed : end]
            positions += range(row.computed, end)
            stored += [p < row.stored for p in range(row.computed, end)]
            lengths.append(end)
            at += row.num_tokens
            if end == len(row.seq.tokens):
                last.append(at - 1)
        assert step.tokens.tolist() == tokens
        assert step.positions.tolist() == positions
        assert step.seq_lens.tolist() == lengths
        assert step.last.tolist() == last
        assert step.num_tokens == at and len(step.ready) == len(last)
        table, slots = step.block_table.numpy(), step.slot_mapping.tolist()
        rows = np.repeat(np.arange(len(opened.rows)), [row.num_tokens for row in opened.rows])
        for i, row, position, slot, done in zip(
            range(at), rows.tolist(), positions, slots, stored, strict=True
        ):
            frame = int(table[row, position // size])
            expected = -1 if done else frame * size + position % size
            assert slot == expected, f"slot of token {i}"
        written = [slot for slot in slots if slot >= 0]
        assert len(set(written)) == len(written), "two tokens in one slot"

    def write(self, opened: OpenStep) -> None:
        step = opened.step
        parts = [r[row.computed :] for row, r in zip(opened.rows, opened.stamps, strict=True)]
        new = torch.from_numpy(np.concatenate([*parts, np.zeros((0, 4 * HEAD_DIM), np.float32)]))
        for layer in range(LAYERS):
            start = layer * 2 * HEAD_DIM
            step.write(
                layer,
                new[:, None, start : start + HEAD_DIM],
                new[:, None, start + HEAD_DIM : start + 2 * HEAD_DIM],
            )

    def read_back(self, opened: OpenStep) -> None:
        """All K/V of the step's sequences is in place, through its tables and through attend."""
        step, size = opened.step, self.model.block_size
        content = gathered(self.device_views)
        table = step.block_table.numpy()
        for i, rows in enumerate(opened.stamps):
            frames = table[i, : self.model.blocks_for(len(rows))]
            found = content[frames].reshape(-1, content.shape[-1])[: len(rows)]
            assert np.array_equal(found, rows), f"row {i} of the step reads other K/V"
            assert len(rows) <= len(frames) * size
        layer = step.host.epoch % LAYERS
        query = torch.ones(step.num_tokens, 2, HEAD_DIM)
        out, lse = step.attend(layer, query, return_lse=True)
        expected = [
            attention(rows, layer)[:, row.computed :]
            for row, rows in zip(opened.rows, opened.stamps, strict=True)
        ]
        reference = np.concatenate([*expected, np.zeros((HEAD_DIM + 1, 0))], axis=1).T
        for head in range(2):
            np.testing.assert_allclose(out[:, head], reference[:, :HEAD_DIM], atol=1e-5)
            np.testing.assert_allclose(lse[:, head], reference[:, HEAD_DIM], atol=1e-5)

    def end_at(self, index: int, *, fails: bool) -> None:
        """Leave a step, with an exception in its body or without."""
        opened = self.open.pop(index)
        if opened.late and not fails:
            self.write(opened)
        if not (opened.late and fails):
            self.read_back(opened)
        if fails:
            try:
                raise Boom
            except Boom as boom:
                opened.step.__exit__(Boom, boom, boom.__traceback__)
        else:
            opened.step.__exit__(None, None, None)
        for row in opened.rows if not fails else reversed(opened.rows):
            row.seq.step = None
            if row.copy_source:
                self.model.copy_sources.remove(row.copy_source)
            if fails:
                self.put_back(row)
            else:
                self.commit(row)
            if row.seq in self.model.ending:
                self.model.ending.remove(row.seq)
        if not fails:
            self.check_published(opened)

    def commit(self, row: RowPlan) -> None:
        seq, counts = row.seq, self.model.counts
        counts["prefix_hit_tokens"] += len(row.found) * self.model.block_size
        if not row.before["queried"]:
            counts["prefix_query_tokens"] += seq.num_known
        seq.computed += row.num_tokens
        seq.stored = max(seq.stored, seq.computed)
        seq.fresh = False
        self.model.note_published(seq)

    def put_back(self, row: RowPlan) -> None:
        seq = row.seq
        for name in ("computed", "stored", "cached", "queried"):
            setattr(seq, name, row.before[name])
        if row.before["state"] == "WAITING":
            seq.state, seq.fresh = "WAITING", False
        elif row.before["state"] == "RESIDENT":
            seq.fresh = row.before["fresh"]
        if seq not in self.model.ending:
            assert self.model.world().table(seq) == row.table, "an aborted step changed a table"

    def check_published(self, opened: OpenStep) -> None:
        """What a step computed is findable, unless a published block stands in its place."""
        world = self.model.world()
        for row in opened.rows:
            if row.seq not in self.model.live or not row.seq.publish:
                continue
            chains = row.seq.full_chains(self.model.block_size)
            count = int(world.ledger.state.sequences["num_published"][row.seq.record])
            for chain in chains[: count + 1]:
                assert chain in world.cached, "a computed block was not published"


def attention(rows: Floats, layer: int) -> Any:
    """For a query of ones, at each position: V weighted over all up to it, then the log-sum-exp:
    float64 `[HEAD_DIM + 1, positions]`."""
    start = layer * 2 * HEAD_DIM
    key = rows[:, start : start + HEAD_DIM].astype(np.float64)
    value = rows[:, start + HEAD_DIM : start + 2 * HEAD_DIM].astype(np.float64)
    weight = np.exp(key.sum(1) * HEAD_DIM**-0.5)
    total = np.cumsum(weight)
    mixed = np.cumsum(weight[:, None] * value, axis=0) / total[:, None]
    return np.concatenate([mixed.T, np.log(total)[None, :]])
