"""The arenas of a CUDA device: its own memory, and host memory that it may copy from.

Device memory comes from a pool of its own in torch's allocator (where torch has that), so it
fragments nobody's cache and ``close`` gives all of it back. Host memory is the exact mapping of
`kvmem.store.arena`, page-locked; it is unlocked before it is unmapped.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvmem.errors import ConfigError, DeviceUnavailable, ManagerClosed
from kvmem.store.arena import ArenaBase
from kvmem.store.cuda.api import DEVICE_TO_HOST, Cuda
from kvmem.store.device import FrameIds


class CudaArena(ArenaBase):
    """Zeroed device memory. Raises ``ConfigError`` when the device has not enough of it,
    ``DeviceUnavailable`` when it can't be written.

    The constructor waits until the zeros are there, so every stream sees them.
    """

    def __init__(self, cuda: Cuda, name: str, num_frames: int, frame_bytes: int) -> None:
        super().__init__(name, num_frames, frame_bytes)
        self._cuda = cuda
        self._pool, context = _own_pool(cuda)
        try:
            with cuda.here(), context:
                whole = cuda.empty(self.num_bytes, False)
        except (MemoryError, RuntimeError) as error:
            free, total = cuda.torch.mem_get_info(cuda.ordinal)
            raise ConfigError(
                f"{name} arena: {num_frames} frames of {frame_bytes} bytes = {self.num_bytes} "
                f"bytes were refused ({type(error).__name__}); the GPU has {free} of {total} bytes "
                "free: ask for fewer blocks"
            ) from error
        self._tensor: torch.Tensor | None = whole.view(num_frames, frame_bytes)
        try:
            self.fill(0, self.num_bytes, 0, cuda.current_stream().cuda_stream)
            cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise DeviceUnavailable(f"{name} arena: it was not zeroed: {error}") from error

    @property
    def tensor(self) -> torch.Tensor:
        """The whole memory as a torch.uint8 tensor ``[num_frames, frame_bytes]`` on the GPU."""
        if self._tensor is None:
            raise ManagerClosed(f"{self.name} arena is closed; make a new Manager")
        return self._tensor

    @property
    def address(self) -> int:
        """Of the first byte, as the device knows it."""
        return self.tensor.data_ptr()

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """Refused: the host can't read this memory. `read` copies from it."""
        raise TypeError(f"{self.name} arena lies on the GPU; read() copies frames to the host")

    def fill(self, offset: int, num_bytes: int, value: int, handle: int) -> None:
        """Set bytes, in the order of a stream. Raises CudaError."""
        with self._cuda.here():
            self._cuda.call("cudaMemsetAsync", self.address + offset, value, num_bytes, handle)

    def read(self, frames: FrameIds) -> NDArray[np.uint8]:
        """The bytes of some frames that nothing is writing any more, ``[len(frames),
        frame_bytes]``. For checks: a copy, and a wait, for each frame."""
        found = np.empty((len(frames), self.frame_bytes), np.uint8)
        with self._cuda.here():
            for row, frame in zip(found, frames.tolist(), strict=True):
                source = self.address + frame * self.frame_bytes
                target = row.ctypes.data
                kind = self._cuda.runtime.cudaMemcpyKind(DEVICE_TO_HOST)
                self._cuda.call("cudaMemcpy", target, source, self.frame_bytes, kind)
        return found

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._tensor is None

    def close(self) -> None:
        """Give the memory back once no view holds it. The device must be done with it."""
        self._tensor = self._pool = None

    def abandon(self) -> None:
        """Close without giving the memory back: the device is not done with it."""
        keep_for_good(self._tensor, self._pool)
        self.close()


def keep_for_good(*things: object) -> None:
    """Let things live as long as the process."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _own_pool(cuda: Cuda) -> tuple[Any, AbstractContextManager[Any]]:
    """A pool for one allocation, and the context that allocates from it."""
    if not hasattr(cuda.torch, "MemPool"):
        return None, nullcontext()
    with cuda.here():
        pool = cuda.torch.MemPool()
    return pool, cuda.torch.use_mem_pool(pool, device=cuda.ordinal)
