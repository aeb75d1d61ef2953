"""What ``debug=True`` adds to the store: poison, guard frames, quarantine, checksums (R11).

A simulated device has the poison without ``debug`` too.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.dtypes import nan_pattern
from kvmem.errors import CorruptEntry
from kvmem.store.arena import Arena
from kvmem.store.device import FrameIds, Ticket
from kvmem.store.layout import Layout

#: Tokens of a host frame whose copy failed.
UNKNOWN = -2


class Filler:
    """Fills device frames that hold nothing any more, or not yet, with one pattern: zeros (R12)."""

    def __init__(self, device: Arena, pattern: np.generic) -> None:
        self._device = device
        self._pattern = pattern

    @classmethod
    def of_zeros(cls, layout: Layout, device: Arena) -> Filler:
        """What ``zero_on_free`` fills with."""
        return cls(device, nan_pattern(layout.dtype_name).dtype.type(0))

    def _bits(self, arena: Arena) -> NDArray[Any]:
        """The arena as unsigned words of the size of an element: NaN has equal bits only there."""
        return arena.bytes.view(self._pattern.dtype)

    def fill(self, frames: FrameIds) -> None:
        """Fill device frames: nobody reads there what was left."""
        from cuda_kernels import fill_frames

        fill_frames(self._bits(self._device), frames, self._pattern)


class Poison(Filler):
    """NaN in all frames at the start and in each device frame that is vacated."""

    def __init__(self, layout: Layout, device: Arena, host: Arena | None) -> None:
        super().__init__(device, nan_pattern(layout.dtype_name))
        self._host = host
        for arena in (device, host):
            if arena is not None:  # all but the null frame; the last one, the guard, must stay so
                self._bits(arena)[1:] = self._pattern


class Checks(Poison):
    """Guards and checksums of one store. Each method reads or writes whole frames: debug only.

    ``record`` runs on the out stream and ``verify`` on the in stream; the fences that order the
    copies order these too.
    """

    def __init__(self, layout: Layout, device: Arena, host: Arena | None) -> None:
        super().__init__(layout, device, host)
        num_host = host.num_frames if host is not None else 0
        self._sums: NDArray[np.uint32] = np.zeros(num_host, np.uint32)
        self._tokens: NDArray[np.int32] = np.full(num_host, -1, np.int32)

    def record(self, device_ids: FrameIds, host_ids: FrameIds, tokens: FrameIds) -> None:
        """Keep the checksum of what is about to go out, read at its source.

        Read before the copy: a frame that is written during its copy (a breach of R3) then differs.
        """
        for device_id, host_id, num_tokens in zip(device_ids, host_ids, tokens, strict=True):
            self._sums[host_id] = zlib.crc32(self._device.bytes[device_id])
            self._tokens[host_id] = num_tokens

    def forget(self, host_ids: FrameIds, ticket: Ticket) -> None:
        """After a copy out: where it failed, nothing is known of its targets."""
        if ticket.error is not None:
            self._tokens[host_ids] = UNKNOWN

    def verify(
        self, host_ids: FrameIds, device_ids: FrameIds, tokens: FrameIds, ticket: Ticket
    ) -> None:
        """Compare what has come in, at its target, unless that copy, or the one out before it,
        failed, which is told elsewhere. Raises ``CorruptEntry`` for the first breach."""
        if ticket.error is not None:
            return
        for host_id, device_id, num_tokens in zip(host_ids, device_ids, tokens, strict=True):
            held = int(self._tokens[host_id])
            if held == UNKNOWN:
                continue
            if held < num_tokens:
                raise CorruptEntry(
                    f"host frame {host_id} holds {max(held, 0)} tokens, {num_tokens} were asked "
                    "back (R11); recompute the sequence"
                )
            got = zlib.crc32(self._device.bytes[device_id])
            if got != self._sums[host_id]:
                raise CorruptEntry(
                    f"host frame {host_id} came back to device frame {device_id} with checksum "
                    f"{got:#010x}, it went out with {int(self._sums[host_id]):#010x} (R11); "
                    "recompute the sequence"
                )

    def breaches(self) -> list[str]:
        """What is wrong with guard and null frames; empty when nothing is.

        The guard lies behind the last frame of each arena; the null frame is frame 0.
        """
        found = []
        for arena in (self._device, self._host):
            if arena is None:
                continue
            guard = self._bits(arena)[-1]
            bad = np.flatnonzero(guard != self._pattern)
            if bad.size:
                found.append(f"{arena.name} guard frame was written at element {bad[0]}")
            bad = np.flatnonzero(arena.bytes[0])
            if bad.size:
                found.append(f"{arena.name} null frame 0 was written at byte {bad[0]}")
        return found

    def written(self, frames: FrameIds) -> list[str]:
        """Which of these device frames, in quarantine since they were vacated, were written to."""
        bits = self._bits(self._device)
        found = []
        for frame in frames.tolist():
            bad = np.flatnonzero(bits[frame] != self._pattern)
            if bad.size:
                found.append(f"device frame {frame} was written at element {bad[0]} while free")
        return found
