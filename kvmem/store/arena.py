"""Arenas: the memory of one tier, exact to the byte.

An arena is one uint8 matrix ``[num_frames, frame_bytes]``, frame-major. Its memory is an anonymous
private mapping, not ``torch.empty(pin_memory=True)``: a caching allocator rounds such a request up
to a power of two, so 5 GiB asked would be 8 GiB taken. Huge pages are advised because paged reads
touch many pages (12-25 % faster attention where they are granted).
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from kvmem.errors import ConfigError, ManagerClosed

# A private mapping: a forked child must never write into its parent's cache.
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE


class ArenaBase(ABC):
    """What every arena says of itself, whatever its memory is: ``num_frames`` frames of
    ``frame_bytes`` bytes, one behind the other."""

    def __init__(self, name: str, num_frames: int, frame_bytes: int) -> None:
        self.name = name
        self.num_pieces = 1  # in which accesses to a frame are told apart, see Pieces
        self.num_frames = num_frames
        self.frame_bytes = frame_bytes
        self.num_bytes = num_frames * frame_bytes

    @property
    @abstractmethod
    def address(self) -> int:
        """Of the first byte. Raises ``ManagerClosed`` after ``close``, as all that follow."""

    @property
    @abstractmethod
    def bytes(self) -> NDArray[np.uint8]:
        """uint8 ``[num_frames, frame_bytes]``, of memory that the host can read at once."""

    @property
    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The whole memory as a torch.uint8 tensor ``[num_frames, frame_bytes]``."""

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """The same memory as a tensor ``[num_frames, frame_bytes / itemsize]`` of ``dtype``."""
        return self.tensor.view(dtype)

    def pieces(self, count: int) -> Pieces:
        """The same memory with each frame in so many equal pieces."""
        return Pieces(self, count)

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the memory was given back."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. A second call: no-op."""


class Arena(ArenaBase):
    """Host memory: exact, zeroed, page-aligned.

    All views share the memory, none copies. A page costs physical memory when it is first written.

    Raises ``ConfigError`` when the operating system refuses the mapping.
    """

    def __init__(self, name: str, num_frames: int, frame_bytes: int) -> None:
        super().__init__(name, num_frames, frame_bytes)
        try:
            self._memory: mmap.mmap | None = mmap.mmap(
                -1, self.num_bytes, flags=_FLAGS, prot=_PROTECTION
            )
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"{name} arena: {num_frames} frames of {frame_bytes} bytes = {self.num_bytes} "
                f"bytes were refused by the system ({error}); ask for fewer blocks"
            ) from error
        self._advise("MADV_HUGEPAGE")
        flat = np.frombuffer(self._memory, dtype=np.uint8)
        self._bytes: NDArray[np.uint8] | None = flat.reshape(num_frames, frame_bytes)

    def _advise(self, advice: str) -> None:
        """Give the system a hint about this memory; a system without that hint is fine."""
        value = getattr(mmap, advice, None)
        if value is None or self._memory is None:
            return
        try:
            self._memory.madvise(value)
        except OSError:
            return

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The whole memory, uint8 ``[num_frames, frame_bytes]``.

        Raises ``ManagerClosed`` after ``close``.
        """
        if self._bytes is None:
            raise ManagerClosed(f"{self.name} arena is closed; make a new Manager")
        return self._bytes

    @property
    def address(self) -> int:
        """Of the first byte, a multiple of the page size."""
        return int(self.bytes.ctypes.data)

    @property
    def tensor(self) -> torch.Tensor:
        """The same memory as a torch.uint8 tensor ``[num_frames, frame_bytes]``."""
        return torch.from_numpy(self.bytes)

    def elements(self, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """The same memory as ``[num_frames, frame_bytes / itemsize]`` of a storage dtype."""
        return self.bytes.view(dtype)

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._bytes is None

    def close(self) -> None:
        """Give the memory back. Views that a user still holds stay valid and read as zeros.

        The mapping itself ends with its last view, so no view can ever dangle.
        """
        self._bytes = None
        self._advise("MADV_DONTNEED")
        self._memory = None


class Pieces:
    """An arena whose frames are pieces of another's: piece p of frame f is frame f * count + p.

    Has what copies ask of an arena. ``num_pieces`` of an arena says into how many its accesses are
    split where a device checks them.
    """

    num_pieces = 1

    def __init__(self, arena: ArenaBase, count: int) -> None:
        self.name = arena.name
        self.num_frames = arena.num_frames * count
        self.frame_bytes = arena.frame_bytes // count
        self._arena = arena

    @property
    def address(self) -> int:
        """Of the first byte. Raises ``ManagerClosed`` after ``close``."""
        return self._arena.address

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """uint8 ``[num_frames, frame_bytes]``. Raises ``ManagerClosed`` after ``close``."""
        return self._arena.bytes.reshape(self.num_frames, self.frame_bytes)
