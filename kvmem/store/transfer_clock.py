"""Timing of transfers for whoever watches. Where nobody watches nothing is timed."""

from __future__ import annotations

from collections.abc import Callable

from kvmem.store.device import Device, FrameIds, Memory, Moved, Stream, Ticket

#: Called when a transfer has ended, on the thread that moved or polled it: direction ("out": device
#: to host, "in"), blocks, bytes, seconds. Must be quick and must not raise.
TransferObserver = Callable[[str, int, int, float], None]


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
    """``device.copy_async``, timed where somebody watches."""
    counted = Moved.whole(target, target_ids, source_ids) if moved is None else moved

    def queue() -> None:
        device.copy_async(stream, target, target_ids, source, source_ids, ticket, counted)

    def told(seconds: float) -> None:
        for observer in observers:
            observer(stream.name.lower(), counted.frames, counted.num_bytes, seconds)

    if observers:
        device.timed(stream, queue, told)
    else:
        queue()
