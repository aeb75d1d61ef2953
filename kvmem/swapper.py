"""Swapping sequences between the tiers, and choosing who has to go.

`swap_out` and `swap_in` only plan and submit; copies run on the store's streams while the engine
computes. Orderings are in the plans, so each may follow the other at once, and abort or free in
mid-flight is safe (R3, R6).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvmem.checks import choice
from kvmem.errors import OutOfBlocks, TierError
from kvmem.ledger import Refusal
from kvmem.ledger import decide as codes
from kvmem.ledger.state import RESIDENT, SWAPPED

if TYPE_CHECKING:
    from kvmem.plan import Plan
    from kvmem.runtime import Ids, Runtime
    from kvmem.sequence import Sequence

HOW = ("swap", "recompute", "auto")
Fits = Callable[[list["Sequence"]], str]


class Transfer:
    """Copies submitted together by one call. Dropping it changes nothing: the copies go on."""

    def __init__(self, runtime: Runtime, plan: Plan | None = None) -> None:
        self._runtime = runtime
        self._out = plan.out_id if plan else 0
        self._in = plan.in_id if plan else 0
        self.num_blocks = plan.num_out + plan.num_in if plan else 0

    @property
    def done(self) -> bool:
        """True when all copies have ended. Never waits. Raises ManagerClosed after close(),
        DeviceUnavailable when the device failed."""
        self._runtime.check_open()
        self._runtime.store.check_usable()
        out, into = self._runtime.store.retired()
        return self._out <= out and self._in <= into

    def wait(self, timeout: float | None = None) -> None:
        """Wait on the host until the copies have ended.

        Raises TimeoutError after `timeout` seconds (the copies go on), ValueError for a negative or
        NaN timeout, TransferError when a copy failed, ManagerClosed after close().
        """
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, int | float):
                raise TypeError(f"timeout is a {type(timeout).__name__}; allowed: seconds or None")
            if math.isnan(timeout) or timeout < 0:
                raise ValueError(f"timeout={timeout} s; allowed: None or a number >= 0")
        self._runtime.check_open()
        begin = time.monotonic()
        for direction, number in (("out", self._out), ("in", self._in)):
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))
            if number and not self._runtime.store.wait(direction, number, left):  # type: ignore[arg-type]
                elapsed = time.monotonic() - begin
                raise TimeoutError(
                    f"the transfer is not done after {elapsed:.3f} s (timeout={timeout}); it goes "
                    f"on, wait again"
                )

    def __repr__(self) -> str:
        runtime = self._runtime
        if runtime.closed or runtime.store.error is not None:
            return f"<Transfer {self.num_blocks} blocks, its Manager closed or failed>"
        return f"<Transfer {self.num_blocks} blocks {'done' if self.done else 'in flight'}>"


class Swapper:
    """Swap, prefetch and victims. Each method is called with the Manager's lock held."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def swap_out(self, seqs: list[Sequence], how: str) -> Transfer:
        """See Manager.swap_out."""
        choice("how", how, HOW)
        records = self._runtime.records(seqs)
        ledger = self._runtime.ledger
        if how == "recompute":
            return self._act("recompute", ledger.give_up, records, seqs)
        if how == "auto":
            return self._swap_or_give_up(records, seqs)
        self._refuse_open(records, seqs)
        states = ledger.state.sequences["state"][records]
        if self._runtime.config.host_blocks == 0 and (states == RESIDENT).any():
            raise TierError(
                "swap_out: the host tier is off; give Config host_blocks or host_memory, or use "
                "how='recompute'"
            )
        return self._act("swap_out", ledger.swap_out, records, seqs)

    def swap_in(self, seqs: list[Sequence]) -> Transfer:
        """See Manager.swap_in."""
        records = self._runtime.records(seqs)
        return self._act("swap_in", self._runtime.ledger.swap_in, records, seqs)

    def prefetch(self, seqs: list[Sequence]) -> Transfer:
        """See Manager.prefetch: those that fit, in order, in one transfer each."""
        records = self._runtime.records(seqs)
        transfer = Transfer(self._runtime)
        for i in range(len(seqs)):
            if self._runtime.ledger.state.sequences["state"][records[i]] != SWAPPED:
                continue
            try:
                one = self._act(
                    "prefetch", self._runtime.ledger.swap_in, records[i : i + 1], seqs[i : i + 1]
                )
            except OutOfBlocks:
                break
            transfer = _joined(transfer, one)
        return transfer

    def make_room(self, seqs: list[Sequence], how: str, fits: Fits) -> list[Sequence]:
        """See Manager.make_room; `fits` asks whether a step over a list would."""
        choice("how", how, HOW)
        todo = sorted(seqs, key=_rank)
        victims: list[Sequence] = []
        if fits(todo) == "never":
            todo = [seq for seq in todo if fits([seq]) != "never"]
        while todo and fits(todo) != "yes":
            worst = self._worst(todo)
            if worst is None:
                break
            if worst in todo:
                todo.remove(worst)
            if worst.state == "RESIDENT":
                try:
                    self.swap_out([worst], how)
                except (OutOfBlocks, TierError):  # how="swap" and no room there: R8 for the rest
                    break
                victims.append(worst)
        return victims

    def _worst(self, todo: list[Sequence]) -> Sequence | None:
        """Who goes next: lowest priority, then latest come, of the RESIDENT sequences and of
        `todo`, but never the best of `todo`, nobody before it and no one in an open step. One
        swapped in and not stepped since is spared while there is another (else two of them could
        keep each other from their step for ever, R9)."""
        state = self._runtime.ledger.state.sequences
        best = _rank(todo[0])
        waiting = {seq.id for seq in todo}
        candidates: list[tuple[bool, tuple[int, int], Sequence]] = []
        for seq in list(self._runtime.handles.values()):
            record = seq._record
            resident = bool(state["state"][record] == RESIDENT)
            if state["step"][record] or _rank(seq) <= best or not (resident or seq.id in waiting):
                continue
            fresh = resident and bool(state["fresh"][record])
            candidates.append((not fresh, _rank(seq), seq))
        return max(candidates, key=lambda one: one[:2], default=(True, best, None))[2]

    def _refuse_open(self, records: Ids, seqs: list[Sequence]) -> None:
        """Raise for the first sequence in an open step."""
        busy = np.flatnonzero(self._runtime.ledger.state.sequences["step"][records])
        if len(busy):
            refusal = Refusal(codes.IN_STEP, int(busy[0]), 0, 0)
            raise self._runtime.explain(refusal, seqs, "swap_out")

    def _swap_or_give_up(self, records: Ids, seqs: list[Sequence]) -> Transfer:
        ledger = self._runtime.ledger
        self._refuse_open(records, seqs)
        transfer = Transfer(self._runtime)
        for i in range(len(seqs)):
            one, handle = records[i : i + 1], seqs[i : i + 1]
            try:
                swapped = self._act("swap_out", ledger.swap_out, one, handle)
            except OutOfBlocks:  # also without a host tier, unless the sequence has no blocks
                self._act("recompute", ledger.give_up, one, handle)
            else:
                transfer = _joined(transfer, swapped)
        return transfer

    def _act(
        self, kind: str, act: Callable[[Ids], Plan], records: Ids, seqs: list[Sequence]
    ) -> Transfer:
        runtime = self._runtime
        try:
            plan = act(np.ascontiguousarray(records))
        except Refusal as refusal:
            raise runtime.explain(refusal, seqs, kind) from None
        runtime.submit(plan)
        ids = tuple(seq.id for seq in seqs)
        runtime.events.add(kind, ids, plan.num_out, plan.num_in)
        return Transfer(runtime, plan)


def _rank(seq: Sequence) -> tuple[int, int]:
    """Smaller is kept longer: higher priority, then earlier come."""
    return (-seq.priority, seq.id)


def _joined(one: Transfer, other: Transfer) -> Transfer:
    """A transfer that ends with both: ids of one direction end in order."""
    one._out = max(one._out, other._out)
    one._in = max(one._in, other._in)
    one.num_blocks += other.num_blocks
    return one
