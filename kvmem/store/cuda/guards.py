"""What vacated frames of a GPU are filled with, and what debug looks for there.

A fill is a memset on the OUT stream, so poison is the byte 0xFF: NaN in each storage dtype. There
are no checksums: they would need the bytes on the host in the order of a stream.
"""

from __future__ import annotations

import numpy as np

from kvmem.store.cuda.arena import CudaArena
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.device import FrameIds, Stream, run_starts

ZERO, POISON = 0x00, 0xFF


class CudaFiller:
    """Fills frames that hold nothing any more with one byte."""

    def __init__(self, device: CudaDevice, arena: CudaArena, value: int) -> None:
        self._device, self._arena, self._value = device, arena, value

    def fill(self, frames: FrameIds) -> None:
        """Queue a memset on OUT for each run of frames. To be called in a `launch` there."""
        handle = self._device.handle(Stream.OUT)
        ordered = np.sort(frames)
        starts = run_starts(ordered, ordered)
        counts = np.diff(np.append(starts, len(ordered)))
        size = self._arena.frame_bytes
        for first, count in zip(ordered[starts].tolist(), counts.tolist(), strict=True):
            self._arena.fill(first * size, count * size, self._value, handle)


class CudaGuards(CudaFiller):
    """Poison in all frames but the null frame, and what is wrong with it later."""

    def __init__(self, device: CudaDevice, arena: CudaArena) -> None:
        super().__init__(device, arena, POISON)
        every = np.arange(1, arena.num_frames, dtype=np.int32)
        device.launch(Stream.OUT, lambda: self.fill(every))
        device.stream(Stream.OUT).synchronize()

    def breaches(self) -> list[str]:
        """What is wrong with the guard frame, behind the last one, and with the null frame."""
        last = self._arena.num_frames - 1
        null, guard = self._arena.read(np.array([0, last], np.int32))
        found = []
        bad = np.flatnonzero(guard != POISON)
        if bad.size:
            found.append(f"device guard frame was written at byte {bad[0]}")
        bad = np.flatnonzero(null)
        if bad.size:
            found.append(f"device null frame 0 was written at byte {bad[0]}")
        return found

    def written(self, frames: FrameIds) -> list[str]:
        """Which of these frames, in quarantine since they were vacated, were written to."""
        found = []
        for frame, content in zip(frames.tolist(), self._arena.read(frames), strict=True):
            bad = np.flatnonzero(content != POISON)
            if bad.size:
                found.append(f"device frame {frame} was written at byte {bad[0]} while free")
        return found
