"""Swapping sequences between the tiers, and choosing who has to go.

`swap_out` and `swap_in` only plan and submit; copies run on the store's streams while the engine
computes. Orderings are in the plans, so each may follow the other at once, and abort or free in
mid-flight is safe (R3, R6).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from kvmem.checks import choice
from kvmem.errors import OutOfBlocks, TierError
from kvmem.ledger import Ledger, Refusal
from kvmem.ledger import decide as codes
from kvmem.ledger.state import DEVICE, HOST, RESIDENT, SWAPPED

if TYPE_CHECKING:
    from kvmem.plan import Plan
    from kvmem.runtime import Ids, Runtime
    from kvmem.sequence import Sequence

HOW = ("swap", "recompute", "auto")
log = logging.getLogger(__name__)


class Transfer:
    """Copies submitted together by one call. Dropping it changes nothing: the copies go on."""

    def __init__(self, runtime: Runtime, plan: Plan | None = None) -> None:
        self._runtime = runtime
        self._out = plan.out_id if plan else 0
        self._in = plan.in_id if plan else 0
        rounds = (*plan.earlier, plan) if plan else ()
        self._parts = [(HOST, part.out_id) for part in rounds]  # (tier, id), joined ones too
        self._parts += [(DEVICE, part.in_id) for part in rounds]
        self.num_blocks = plan.num_out + plan.num_in if plan else 0

    @property
    def done(self) -> bool:
        """True when all copies have ended, failed ones too. Never waits. Raises ManagerClosed after
        close(), DeviceUnavailable when the device failed."""
        self._runtime.check_open()
        self._runtime.store.check_usable()
        out, into = self._runtime.store.retired()
        return self._out <= out and self._in <= into

    def wait(self, timeout: float | None = None) -> None:
        """Wait on the host until the copies have ended.

        Raises TimeoutError after `timeout` seconds (the copies go on), ValueError for a negative or
        NaN timeout, TransferError when a copy failed (`lost` tells whose K/V), ManagerClosed after
        close().
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
        with self._runtime.entered():
            self._runtime.losses.check_transfers(self._parts)

    def __repr__(self) -> str:
        runtime = self._runtime
        if runtime.closed or runtime.store.error is not None:
            return f"<Transfer {self.num_blocks} blocks, its Manager closed or failed>"
        return f"<Transfer {self.num_blocks} blocks {'done' if self.done else 'in flight'}>"


class Room:
    """A step to be planned over `seqs`, and what it would find on the device (R7)."""

    def __init__(
        self,
        ledger: Ledger,
        seqs: list[Sequence],
        limits: Ids | None,
        max_tokens: int | None,
        reserve: int,
    ) -> None:
        self._ledger = ledger
        self._limits = None
        if limits is not None:
            self._limits = {seq.id: int(n) for seq, n in zip(seqs, limits, strict=True)}
        self._max_tokens = max_tokens
        self._reserve = reserve

    def fits(self, seqs: list[Sequence]) -> str:
        """Whether a step over these would fit: "yes", "later" or "never"."""
        rows, limits = self._rows(seqs)
        return self._ledger.fits(
            rows, num_tokens=limits, max_tokens=self._max_tokens, reserve=self._reserve
        )

    def lacking(self, seqs: list[Sequence]) -> int:
        """The device blocks that are missing for a step over these."""
        rows, limits = self._rows(seqs)
        return self._ledger.lacking(
            rows, num_tokens=limits, max_tokens=self._max_tokens, reserve=self._reserve
        )

    def _rows(self, seqs: list[Sequence]) -> tuple[Ids, Ids | None]:
        rows = np.array([seq._record for seq in seqs], np.int32)
        if self._limits is None:
            return rows, None
        return rows, np.array([self._limits[seq.id] for seq in seqs], np.int32)


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

    def swap_in(self, seqs: list[Sequence], by_layer: int = 0) -> Transfer:
        """See Manager.swap_in; 0 layers a fence: one for all."""
        records = self._runtime.records(seqs)
        return self._act("swap_in", self._runtime.ledger.swap_in, records, seqs, by_layer)

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

    def make_room(self, seqs: list[Sequence], how: str, room: Room) -> list[Sequence]:
        """See Manager.make_room."""
        choice("how", how, HOW)
        todo = sorted(seqs, key=_rank)
        victims: dict[Sequence, str] = {}  # and what became of each
        stuck: dict[Sequence, str] = {}  # how="swap": no host room for these, and why
        if room.fits(todo) == "never":
            todo = [seq for seq in todo if room.fits([seq]) != "never"]
        blocked = self._take_blocked(todo, room)
        best = todo[0] if todo else None
        while todo and room.fits(todo) != "yes":
            worst = self._worst(todo, blocked, stuck)
            if worst is None:
                break
            if worst in todo:
                todo.remove(worst)
            if worst.state == "RESIDENT":
                try:
                    self.swap_out([worst], how)
                except (OutOfBlocks, TierError) as error:  # a smaller one may still find room
                    stuck[worst] = str(error)
                else:
                    victims[worst] = "swap" if worst.state == "SWAPPED" else "recompute"
        self._tell_room(best, room.fits(todo) == "yes", victims, stuck)
        return list(victims)

    def _take_blocked(self, todo: list[Sequence], room: Room) -> set[Sequence]:
        """Take those out of `todo` whom pins keep from their step, whoever else goes, as far as
        they are the best: they would have all others go in vain, and wait for them. O(blocks) for
        each, nothing without pins."""
        ledger, blocked = self._runtime.ledger, set()
        blocks = ledger.state.blocks
        while todo and len(self._runtime.pins) and room.fits(todo[:1]) != "yes":
            record = todo[0]._record
            may_go = (blocks["num_resident"] > 0) & (blocks["num_pins"] == 0)
            may_go[ledger.table_of(record)] = may_go[ledger.look_up(record)] = False
            if room.lacking(todo[:1]) <= np.count_nonzero(may_go):
                break
            blocked.add(todo.pop(0))
        return blocked

    def _tell_room(
        self,
        best: Sequence | None,
        fits: bool,
        victims: dict[Sequence, str],
        stuck: dict[Sequence, str],
    ) -> None:
        """Say what `make_room` did: an event, and a line in the log."""
        if victims:
            ids = tuple(seq.id for seq in victims)
            self._runtime.events.add("make_room", ids, how=tuple(victims.values()))
        if best is not None and (victims or not fits) and log.isEnabledFor(logging.DEBUG):
            log.debug(
                "make_room for sequence %d: %s; %s%s",
                best.id,
                ", ".join(f"{seq.id} ({how})" for seq, how in victims.items()) or "nobody went",
                "it fits" if fits else "it does not fit",
                "".join(f"; {seq.id} stays: {why}" for seq, why in stuck.items()),
            )

    def _worst(
        self, todo: list[Sequence], blocked: set[Sequence], stuck: Collection[Sequence]
    ) -> Sequence | None:
        """Who goes next: those `blocked`, then lowest priority, then latest come, of the RESIDENT
        sequences and of `todo`, but never the best of `todo`, nobody before it, no one in an open
        step and none of those `stuck`. One swapped in and not stepped since is spared while there
        is another (else two of them could keep each other from their step for ever, R9)."""
        state = self._runtime.ledger.state.sequences
        best = _rank(todo[0])
        waiting = {seq.id for seq in todo}
        candidates: list[tuple[bool, bool, tuple[int, int], Sequence]] = []
        for seq in list(self._runtime.handles.values()):
            record, rank = seq._record, _rank(seq)
            resident = bool(state["state"][record] == RESIDENT)
            if state["step"][record] or not (resident or seq.id in waiting) or seq in stuck:
                continue
            if rank > best or seq in blocked:
                fresh = resident and bool(state["fresh"][record])
                candidates.append((seq in blocked, not fresh, rank, seq))
        return max(candidates, key=lambda one: one[:3], default=(True, True, best, None))[3]

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
        self,
        kind: str,
        act: Callable[[Ids], Plan],
        records: Ids,
        seqs: list[Sequence],
        by_layer: int = 0,
    ) -> Transfer:
        runtime = self._runtime
        try:
            plan = act(np.ascontiguousarray(records))
        except Refusal as refusal:
            raise runtime.explain(refusal, seqs, kind) from None
        if by_layer and plan.in_id:
            plan.in_layers = by_layer
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
    one._parts += other._parts
    one.num_blocks += other.num_blocks
    return one
