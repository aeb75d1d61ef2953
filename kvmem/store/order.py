"""The order of transfers: ids 1, 2, 3, ... a direction, and which plans can't be.

A plan is checked before anything of it is queued: a worker has nobody to tell.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvmem.geometry import RESERVED_FRAMES
from kvmem.store.device import Device, Fence, FrameIds, Stream

if TYPE_CHECKING:
    from kvmem.plan import Plan


class Ids(NamedTuple):
    """The frames of one transfer and the filled slots of each, int32 arrays of one length."""

    device: FrameIds
    host: FrameIds
    tokens: FrameIds

    @classmethod
    def checked(
        cls,
        name: str,
        device: FrameIds,
        host: FrameIds,
        tokens: FrameIds,
        num_blocks: tuple[int, int],
    ) -> Ids:
        """Own copies of the arrays; ``ValueError`` unless each id is in range and lengths agree."""
        ids = cls(own_copy(device), own_copy(host), own_copy(tokens))
        if not len(ids.device) == len(ids.host) == len(ids.tokens):
            raise ValueError(
                f"{name} transfer has {len(ids.device)} device frames, {len(ids.host)} host "
                f"frames and {len(ids.tokens)} token counts; the three must be equal"
            )
        check_frames(f"{name}_device", ids.device, num_blocks[0])
        check_frames(f"{name}_host", ids.host, num_blocks[1])
        return ids

    def in_runs(self) -> Ids:
        """The same pairs, so that those that follow each other in both arenas stand together: by
        device frame. Their order is free, since no two copies of a transfer share a frame."""
        if len(self.device) < 2:
            return self
        order = np.argsort(self.device, kind="stable")
        return Ids(self.device[order], self.host[order], self.tokens[order])


class TransferQueue:
    """Fences of the transfers that are not known to be done. Guarded by the store's lock."""

    __slots__ = ("_device", "_first", "_stream", "last", "pending")

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self.pending: deque[Fence] = deque()
        self._first = 1  # the id of the first fence kept
        self.last = 0  # the last id recorded

    def record(self, transfer_id: int) -> None:
        """The transfer ``transfer_id`` is all that its stream was given up to now."""
        fence = self._device.new_fence(f"{self._stream.name.lower()} transfer {transfer_id}")
        self._device.record(self._stream, fence)
        self.pending.append(fence)
        self.last = transfer_id

    def fence(self, transfer_id: int) -> Fence | None:
        """What to wait for so that this transfer is done; None when it is known to be done."""
        self.retired()
        index = transfer_id - self._first
        return self.pending[index] if index >= 0 else None

    def submitted(self, transfer_id: int) -> Fence | None:
        """The same; ``ValueError`` for an id that was never recorded."""
        if not 0 <= transfer_id <= self.last:
            raise ValueError(
                f"{self._stream.name.lower()} transfer {transfer_id} was never submitted; the "
                f"last is {self.last}"
            )
        return self.fence(transfer_id)

    def retired(self) -> int:
        """The last id that is done. The stream is a FIFO, so all before it are done as well."""
        while self.pending and self._device.query(self.pending[0]):
            self.pending.popleft()
            self._first += 1
        return self._first - 1


class StepFences:
    """Fences of the steps that are open, or ended but not known to be done. Guarded by the store's
    lock.

    Steps end in any order, and a frame that two of them used carries the higher epoch only. So
    "after step n" is after step n and all earlier ones that have ended: the stream is a FIFO, so
    the one recorded last of these is enough.
    """

    __slots__ = ("_device", "_ended", "open")

    def __init__(self, device: Device) -> None:
        self._device = device
        self.open: dict[int, Fence] = {}
        self._ended: deque[tuple[int, Fence]] = deque()  # in the order of their fences

    def begin(self, epoch: int) -> None:
        """Make the fence of a step; a second call: no-op."""
        if epoch not in self.open:
            self.open[epoch] = self._device.new_fence(f"step {epoch}")

    def end(self, epoch: int) -> None:
        """Record the fence of an open step: all its work was given to COMPUTE. Else: no-op."""
        fence = self.open.pop(epoch, None)
        if fence is not None:
            self._device.record(Stream.COMPUTE, fence)
            if self._ended or not self._device.query(fence):  # else it is over already
                self._ended.append((epoch, fence))
                self._forget()

    def after(self, epoch: int) -> list[Fence]:
        """What to wait for so that nothing of steps up to ``epoch`` that have ended, and of
        ``epoch`` itself, is left to run."""
        self._forget()
        found = [self.open[epoch]] if epoch in self.open else []
        for ended, fence in reversed(self._ended):
            if ended <= epoch:
                return [*found, fence]
        return found

    def _forget(self) -> None:
        """Drop the fences that are reached: the stream is a FIFO, so they are the first ones."""
        while self._ended and self._device.query(self._ended[0][1]):
            self._ended.popleft()


def own_copy(ids: FrameIds) -> FrameIds:
    """A copy that the ledger can't change under a queued transfer (case 41)."""
    return np.array(ids, dtype=np.int32, order="C")


def check_frames(name: str, frames: FrameIds, limit: int) -> None:
    """``ValueError`` when a frame is reserved or behind the last one (case 69)."""
    if not len(frames):
        return
    low, high = int(frames.min()), int(frames.max())
    if low < RESERVED_FRAMES or high > limit:
        bad = low if low < RESERVED_FRAMES else high
        raise ValueError(f"{name} names frame {bad}; allowed: 1 to {limit}")


def check_order(plan: Plan, *, last_out: int, last_in: int) -> None:
    """``ValueError`` unless ids grow by one and nothing waits for what comes after it (R9).

    A plan's in transfer may wait for its out transfer, its step for both, nothing the other way
    round: so no cycle of waits can arise.
    """
    num_out = len(plan.out_device) + len(plan.fill_frames)
    for name, transfer_id, last, count in (
        ("out_id", plan.out_id, last_out, num_out),
        ("in_id", plan.in_id, last_in, len(plan.in_device)),
    ):
        if transfer_id not in (0, last + 1):
            raise ValueError(f"{name} is {transfer_id}; expected {last + 1}, or 0 for none")
        if count and not transfer_id:
            raise ValueError(f"{name} is 0 but the plan has {count} frames for it")
    last_step = plan.step_epoch - 1 if plan.step_epoch else sys.maxsize
    out_now, in_now = plan.out_id or last_out, plan.in_id or last_in
    for name, waited, limit in (
        ("out_after_in", plan.out_after_in, last_in),
        ("in_after_out", plan.in_after_out, out_now),
        ("step_after_in", plan.step_after_in, in_now),
        ("step_after_out", plan.step_after_out, out_now),
        ("out_after_step", plan.out_after_step, last_step),
        ("in_after_step", plan.in_after_step, last_step),
    ):
        if not 0 <= waited <= limit:
            raise ValueError(f"{name} is {waited}; the last that it may wait for is {limit}")
