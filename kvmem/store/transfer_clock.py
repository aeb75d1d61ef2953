"""Timing of transfers for whoever watches, by notes on the copy's own stream.

A note before the copy takes the time when its stream came to it, one behind it when the bytes had
moved: waits for fences are not part of it. Where nobody watches there are no notes. A device whose
streams do not run on the host (CUDA) has to time with events instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvmem.store.device import Device, FrameIds, Memory, Moved, Stream, Ticket

#: Called when a transfer has ended, on the thread that moved it: direction ("out": device to host,
#: "in"), blocks, bytes, seconds. Must be quick and must not raise.
TransferObserver = Callable[[str, int, int, float], None]


class TransferClock:
    """The two notes of one transfer."""

    __slots__ = ("_begin", "_blocks", "_bytes", "_direction", "_observers")

    def __init__(
        self, observers: tuple[TransferObserver, ...], direction: str, blocks: int, num_bytes: int
    ) -> None:
        self._observers = observers
        self._direction = direction
        self._blocks = blocks
        self._bytes = num_bytes
        self._begin = 0.0

    def start(self) -> None:
        """The stream has come to the copy."""
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """The copy has ended."""
        seconds = time.perf_counter() - self._begin
        for observer in self._observers:
            observer(self._direction, self._blocks, self._bytes, seconds)


def copy_watched(
    observers: tuple[TransferObserver, ...],
    device: Device,
    stream: Stream,
    target: Memory,
    target_ids: FrameIds,
    source: Memory,
    source_ids: FrameIds,
    ticket: Ticket,
    moved: Moved | None = None,
) -> None:
    """``device.copy_async``, between the two notes of a clock where somebody watches."""
    if moved is None:
        moved = Moved.whole(target, target_ids, source_ids)
    if not observers:
        device.copy_async(stream, target, target_ids, source, source_ids, ticket, moved)
        return
    clock = TransferClock(observers, stream.name.lower(), moved.frames, moved.num_bytes)
    device.launch(stream, clock.start)
    device.copy_async(stream, target, target_ids, source, source_ids, ticket, moved)
    device.launch(stream, clock.stop)
