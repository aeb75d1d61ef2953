"""Transfers: the copies of plans between the tiers, one stream a direction (R3, R6, R11).

A transfer is what one plan copies one way: one submission, one ticket, one fence. Copies out wait
for the last writer, copies in for the last reader of their targets; whoever needs what arrives
waits for the fence, on its own stream. A copy in may be cut by layers: then each slice has a fence
of its own, and the first layers compute while later ones are under way.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import numpy as np

from kvmem.errors import CorruptEntry
from kvmem.plan import Plan
from kvmem.store.arena import ArenaBase
from kvmem.store.checks import Checks
from kvmem.store.device import Device, Fence, Fills, FrameIds, Moved, Stream, Ticket, num_runs
from kvmem.store.layout import Layout
from kvmem.store.order import Ids, StepFences, TransferQueue, check_frames, check_order, own_copy
from kvmem.store.transfer_clock import TransferObserver, copy_watched

#: Tier ids, as in the ledger's records.
DEVICE, HOST = 0, 1


class Slice(NamedTuple):
    """Some layers of a transfer have arrived when the fence is reached."""

    first_layer: int
    fence: Fence


class Parts(NamedTuple):
    """What a plan copies, checked, in arrays of the store's own."""

    out: Ids
    into: Ids
    fills: FrameIds


class Transfers:
    """The queues of both directions. Guarded by the store's lock."""

    def __init__(
        self,
        device: Device,
        layout: Layout,
        arenas: tuple[ArenaBase, ArenaBase | None],
        steps: StepFences,
        *,
        checks: Checks | None,
        filler: Fills | None,
    ) -> None:
        self._device, self._layout = device, layout
        self._device_arena, self._host_arena = arenas
        self._steps, self._checks, self._filler = steps, checks, filler
        self.out = TransferQueue(device, Stream.OUT)
        self.into = TransferQueue(device, Stream.IN)
        self.observers: tuple[TransferObserver, ...] = ()  # who hears of transfers; mostly nobody
        self._slices: dict[int, list[Slice]] = {}  # of the transfers in that are cut, by id
        host = arenas[HOST]
        self._written = np.full(host.num_frames if host else 1, -1, np.int32)  # use of host frames

    def checked(self, plan: Plan, num_blocks: tuple[int, int]) -> Parts:
        """Own copies of a plan's arrays. ``ValueError`` or ``CorruptEntry`` for what can't be."""
        out = Ids.checked("out", plan.out_device, plan.out_host, plan.out_tokens, num_blocks)
        into = Ids.checked("in", plan.in_device, plan.in_host, plan.in_tokens, num_blocks)
        fills = own_copy(plan.fill_frames)
        check_frames("fill_frames", fills, num_blocks[DEVICE])
        self._check_generations(plan, into)
        self.check_order(plan)
        return Parts(out.in_runs(), into.in_runs(), fills)

    def check_order(self, plan: Plan) -> None:
        """``ValueError`` unless the plan comes next and waits for nothing that comes after it."""
        check_order(plan, last_out=self.out.last, last_in=self.into.last)

    def submit(self, plan: Plan, parts: Parts) -> None:
        """Queue what ``checked`` has let through; never waits."""
        if plan.out_id:
            if len(plan.out_generation):
                self._written[plan.out_host] = plan.out_generation
            self.submit_out(plan, parts.out, parts.fills)
        if plan.in_id:
            self.submit_in(plan, parts.into)

    def submit_out(self, plan: Plan, out: Ids, fills: FrameIds) -> None:
        """The copies out, then the fills of vacated frames, behind those who used them last."""
        device, source, target = self._device, self._device_arena, self._host_arena
        self.after(Stream.OUT, *self._steps.after(plan.out_after_step))
        self.after(Stream.OUT, self.into.fence(plan.out_after_in))
        if len(out.device) and target is not None:
            ticket = Ticket(Stream.OUT, plan.out_id)
            if self._checks is not None:
                note = partial(self._checks.record, out.device, out.host, out.tokens)
                device.launch(Stream.OUT, note, reads=((source, out.device),))
            copy_watched(
                self.observers, device, Stream.OUT, target, out.host, source, out.device, ticket
            )
            if self._checks is not None:
                device.launch(Stream.OUT, partial(self._checks.forget, out.host, ticket))
        if len(fills) and self._filler is not None:
            fill = partial(self._filler.fill, fills)
            device.launch(Stream.OUT, fill, writes=((source, fills),))
        self.out.record(plan.out_id)

    def submit_in(self, plan: Plan, into: Ids) -> None:
        """The copies in, in one piece or by layers, behind those who used their frames last."""
        device, source, target = self._device, self._host_arena, self._device_arena
        self.after(Stream.IN, *self._steps.after(plan.in_after_step))
        self.after(Stream.IN, self.out.fence(plan.in_after_out))
        if len(into.host) and source is not None:
            ticket = Ticket(Stream.IN, plan.in_id)
            if self._is_cut(plan):
                self._copy_by_layers(plan, into, source, ticket)
            else:
                copy_watched(
                    self.observers, device, Stream.IN, target, into.device, source, into.host,
                    ticket,
                )  # fmt: skip
            if self._checks is not None:
                compare = partial(self._checks.verify, into.host, into.device, into.tokens, ticket)
                device.launch(Stream.IN, compare, reads=((target, into.device),))
        self.into.record(plan.in_id)

    def _is_cut(self, plan: Plan) -> bool:
        """Whether a copy in goes by layers; checksums are of whole frames, so never with debug."""
        asked = 0 < plan.in_layers < self._layout.num_layers
        return asked and self._layout.is_even and self._checks is None

    def _copy_by_layers(self, plan: Plan, into: Ids, source: ArenaBase, ticket: Ticket) -> None:
        """A copy and a fence for every ``in_layers`` layers, first layers first. A layer of a frame
        is a frame of the arena's pieces, so no device knows of layers."""
        device, layers = self._device, self._layout.num_layers
        target, origin = self._device_arena.pieces(layers), source.pieces(layers)
        slices: list[Slice] = []
        for first in range(0, layers, plan.in_layers):
            behind = min(first + plan.in_layers, layers)
            run = np.arange(first, behind)
            to, origins = (
                cast(FrameIds, (ids[:, None].astype(np.int64) * layers + run).ravel())
                for ids in (into.device, into.host)
            )
            frames = len(into.host) if behind == layers else 0  # counted with the last slice
            moved = Moved(frames, len(to) * target.frame_bytes, num_runs(to, origins))
            copy_watched(
                self.observers, device, Stream.IN, target, to, origin, origins, ticket, moved
            )
            fence = device.new_fence(f"in transfer {plan.in_id}, layers {first} to {behind - 1}")
            device.record(Stream.IN, fence)
            slices.append(Slice(first, fence))
        self._forget_slices()
        self._slices[plan.in_id] = slices

    def arrivals(self, plan: Plan) -> tuple[list[Fence | None], list[Slice]]:
        """What COMPUTE has to wait for before the plan's step begins, and what before it touches
        a layer: the streams are FIFOs, so the last transfer's slices say it for all before it.
        ``ValueError`` for a transfer that was not submitted."""
        if plan.step_after_in > self.into.last or plan.step_after_out > self.out.last:
            raise ValueError("the plan's step waits for a transfer not submitted; submit first")
        fences = [self.into.fence(plan.step_after_in), self.out.fence(plan.step_after_out)]
        slices = self._slices.get(plan.step_after_in, []) if fences[0] is not None else []
        if slices and not len(plan.copy_source):  # copies on write read whole frames at once
            return [slices[0].fence, fences[1]], slices[1:]
        return fences, []

    def retired(self) -> tuple[int, int]:
        """The last out id and the last in id that are over, with all before them; never waits."""
        # first those in: when one is done, the copies out that it waited for are as well
        into = self.into.retired()
        return self.out.retired(), into

    def after(self, stream: Stream, *fences: Fence | None) -> None:
        """Order a stream after fences; None is a fence that was reached and forgotten."""
        for fence in filter(None, fences):
            self._device.wait(stream, fence)

    def _forget_slices(self) -> None:
        """Drop the slices of transfers that are over. O(transfers in flight)."""
        over = self.into.retired()
        self._slices = {number: s for number, s in self._slices.items() if number > over}

    def _check_generations(self, plan: Plan, into: Ids) -> None:
        """Raise ``CorruptEntry`` when a copy in would read another use of a host frame than the one
        that the plan means: a stale frame id (R11). A plan without generations is not checked."""
        if not len(plan.in_generation):
            return
        held = self._written[into.host]
        if len(plan.out_generation):  # its own copies out come first
            now = dict(zip(plan.out_host.tolist(), plan.out_generation.tolist(), strict=True))
            held = np.array([now.get(h, g) for h, g in zip(into.host.tolist(), held, strict=True)])
        wrong = np.flatnonzero(held != plan.in_generation)
        if len(wrong):
            row = int(wrong[0])
            raise CorruptEntry(
                f"in_generation: host frame {into.host[row]} holds its use {held[row]}, the plan "
                f"asks for use {plan.in_generation[row]} (R11); make a new Manager"
            )
