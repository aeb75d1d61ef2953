"""Which blocks a failed copy took: the transfers in flight, by block, frame and generation.

A copy can fail long after it was planned, when its block has moved on: swapped in from a host copy
that never came about, copied on write, swapped out again. So each plan's transfers are kept until
they are known to be done, and a failure is followed through those planned after it. Plain Python:
it costs a few microseconds a plan with copies, and a failure is rare.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvmem.plan import Plan

from .state import DEVICE, HOST, State

Ids = NDArray[np.int32]
_NONE: Ids = np.zeros(0, np.int32)


@dataclass(slots=True)
class Rows:
    """Copies of one kind in one plan, by block, with the frames as the plan left them."""

    blocks: Ids
    device: Ids
    device_generation: Ids
    host: Ids
    host_generation: Ids

    @classmethod
    def of(cls, state: State, blocks: Ids, device: Ids, host: Ids, generation: Ids) -> Rows:
        """`generation` is that of the host frames in the plan."""
        at = int(state.pools["first"][DEVICE]) + device
        return cls(blocks, device, state.frames["generation"][at], host, generation)


@dataclass(slots=True)
class Flight:
    """The transfers of one plan, until they are known to be done."""

    out_id: int  # 0: none
    in_id: int
    last_out: int  # issued when the plan was made: the flight is over when these are done
    last_in: int
    epoch: int  # the last step planned before it
    out: Rows | None = None
    into: Rows | None = None
    copied: Rows | None = None  # targets of copies on write, which have no host frame
    copy_source: Ids = field(default_factory=lambda: _NONE)  # their sources, blocks


@dataclass(slots=True)
class Failure:
    """What the failure of one transfer means."""

    unsaved: Ids  # blocks whose host copy never came about
    lost: Ids  # blocks whose K/V is lost
    epoch: int  # the last step that was not planned over it
    first_in: int  # the first copy in that may have brought wrong bytes
    num_blocks: int  # that it moved


class Flights:
    """The transfers in flight of one ledger, in the order of their plans."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, state: State, plan: Plan, epoch: int) -> None:
        """Note a plan just sealed. O(copies)."""
        ledger = state.ledger[0]
        flights = self._flights
        while flights and (
            flights[0].last_out <= ledger["retired_out"]
            and flights[0].last_in <= ledger["retired_in"]
        ):
            flights.popleft()
        if not (len(plan.out_device) or len(plan.in_device) or (len(plan.copy_source) and flights)):
            return
        flight = Flight(
            plan.out_id, plan.in_id, int(ledger["last_out"]), int(ledger["last_in"]), epoch
        )
        holder = state.frames["block"]
        first_device, first_host = (int(state.pools["first"][tier]) for tier in (DEVICE, HOST))
        if len(plan.out_device):
            blocks = holder[first_host + plan.out_host]
            stays = holder[first_device + plan.out_device] == blocks  # else it is departing
            device = np.where(stays, plan.out_device, 0).astype(np.int32)
            flight.out = Rows.of(state, blocks, device, plan.out_host, plan.out_generation)
        if len(plan.in_device):
            blocks = holder[first_device + plan.in_device]
            flight.into = Rows.of(state, blocks, plan.in_device, plan.in_host, plan.in_generation)
        if len(plan.copy_source):
            flight.copy_source = holder[first_device + plan.copy_source]
            blocks = holder[first_device + plan.copy_target]
            none = np.zeros_like(blocks)
            flight.copied = Rows.of(state, blocks, plan.copy_target, none, none)
        flights.append(flight)

    def failed(self, state: State, tier: int, transfer_id: int) -> Failure:
        """What the failure of a transfer to `tier` means now. O(flights)."""
        number = "in_id" if tier == DEVICE else "out_id"
        later = list(self._flights)
        while later and getattr(later[0], number) != transfer_id:
            later.pop(0)
        if not later:
            return Failure(_NONE, _NONE, 0, sys.maxsize, 0)
        flight = later[0]
        unsaved: list[int] = []
        spoiled: set[int] = set()  # blocks with wrong bytes on the device, or no bytes at all
        rows = flight.into if tier == DEVICE else flight.out
        assert rows is not None
        for i, b in enumerate(rows.blocks.tolist()):
            if not b:
                continue
            if tier == DEVICE or not _holds(state, DEVICE, b, rows, i):
                spoiled.add(b)
            elif _holds(state, HOST, b, rows, i) and _was_last(state, b, transfer_id):
                unsaved.append(b)
        for one in later:  # the source of a copy may be gone by now
            if one.copied is not None:
                for source, target in zip(one.copy_source, one.copied.blocks, strict=True):
                    if int(source) in spoiled:
                        spoiled.add(int(target))
        lost = [b for b in sorted(spoiled) if _is_same(state, b, later)]
        return Failure(
            unsaved=np.array(unsaved, np.int32),
            lost=np.array(lost, np.int32),
            epoch=flight.epoch,
            first_in=next((one.in_id for one in later if one.in_id), sys.maxsize),
            num_blocks=len(rows.blocks),
        )


def _holds(state: State, tier: int, b: int, rows: Rows, i: int) -> bool:
    """True when block `b` is in the frame that row `i` says, and was there all the time."""
    if tier == DEVICE:
        f, generation = int(rows.device[i]), int(rows.device_generation[i])
        now = int(state.blocks["device_frame"][b])
    else:
        f, generation = int(rows.host[i]), int(rows.host_generation[i])
        now = int(state.blocks["host_frame"][b])
    if f == 0 or now != f:
        return False
    held = int(state.frames["generation"][int(state.pools["first"][tier]) + f])
    return (held ^ generation) & 0xFFFFFFFF == 0  # of 32 bits, signed in a plan


def _was_last(state: State, b: int, transfer_id: int) -> bool:
    """True when no later copy out wrote the host frame of block `b`."""
    h = int(state.pools["first"][HOST]) + int(state.blocks["host_frame"][b])
    return int(state.frames["fence_out"][h]) == transfer_id


def _is_same(state: State, b: int, flights: list[Flight]) -> bool:
    """True when block id `b` still means the block that these flights moved: it holds a frame that
    one of them gave it. An id is used again only after all frames were given up."""
    for flight in flights:
        for rows in (flight.out, flight.into, flight.copied):
            if rows is None:
                continue
            for i in np.flatnonzero(rows.blocks == b).tolist():
                if _holds(state, DEVICE, b, rows, i) or _holds(state, HOST, b, rows, i):
                    return True
    return False
