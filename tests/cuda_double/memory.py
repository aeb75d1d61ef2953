"""Addresses: which of them are the GPU's, which are page-locked, and which were given back."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.cuda_double.streams import Touch

#: Accesses are told apart by so many bytes: planes of a frame start at multiples of them.
CELL_BYTES = 64


@dataclass(slots=True)
class Region:
    """Memory that the double handed out: of the GPU, or small and page-locked."""

    address: int
    num_bytes: int
    pinned: bool
    freed: bool = False
    origin: Touch | None = None  # of its last owner
    holds: list[Any] = field(default_factory=list)


class Memory:
    """Everything that was allocated; freed regions stay known, so that late use is told."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity, self.used = capacity, 0
        self._starts: list[int] = []
        self._regions: dict[int, Region] = {}
        self.registered: dict[int, int] = {}  # page-locked by the runtime: address -> bytes
        self.history: list[
            tuple[str, int, int]
        ] = []  # registered, unregistered: what, where, bytes

    def empty(self, num_bytes: int, pinned: bool, origin: Touch | None) -> torch.Tensor:
        """A uint8 tensor, its bytes 0xA5: nobody may count on zeros. Raises RuntimeError."""
        if not pinned and self.used + num_bytes > self.capacity:
            raise RuntimeError("CUDA out of memory (double)")  # torch.OutOfMemoryError is one
        whole = np.full(num_bytes + CELL_BYTES, 0xA5, np.uint8)
        shift = -whole.ctypes.data % CELL_BYTES
        array = whole[shift : shift + num_bytes]
        region = Region(array.ctypes.data, num_bytes, pinned, origin=origin)
        for start in [s for s in self._starts if region.address <= s < region.address + num_bytes]:
            self._forget(start)  # freed memory that the system gave out again
        bisect.insort(self._starts, region.address)
        self._regions[region.address] = region
        if not pinned:
            self.used += num_bytes
        weakref.finalize(whole, self._free, region)
        return torch.from_numpy(array)

    def _free(self, region: Region) -> None:
        region.freed = True
        if not region.pinned:
            self.used -= region.num_bytes

    def _forget(self, start: int) -> None:
        self._starts.remove(start)
        del self._regions[start]

    def region(self, address: int) -> Region | None:
        """What an address lies in."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        region = self._regions[self._starts[at]]
        return region if address < region.address + region.num_bytes else None

    def origin(self, number: int) -> Touch | None:
        """Whose memory a cell was before it was handed out."""
        region = self.region(number * CELL_BYTES)
        return None if region is None else region.origin

    def in_use(self) -> int:
        """Regions that were not given back."""
        return sum(not region.freed for region in self._regions.values())

    def check_bounds(self, address: int, num_bytes: int, what: str) -> None:
        """Raise AssertionError for memory handed out here that was given back, or is too short."""
        region = self.region(address)
        if region is not None and num_bytes:
            assert not region.freed, f"{what}: memory that was given back"
            end = region.address + region.num_bytes
            assert address + num_bytes <= end, f"{what}: past the end of its memory"

    def check_device(self, address: int, num_bytes: int, what: str) -> None:
        """Raise AssertionError unless these are bytes of the GPU, allocated and not given back."""
        region = self.region(address)
        assert region is not None and not region.pinned, f"{what}: {address:#x} is not the GPU's"
        assert not region.freed, f"{what}: memory of the GPU that was given back"
        assert address + num_bytes <= region.address + region.num_bytes, f"{what}: past its end"

    def is_locked(self, address: int, num_bytes: int) -> bool:
        """Whether the host's bytes are page-locked, so that a copy of them is asynchronous."""
        region = self.region(address)
        if region is not None:
            return region.pinned and not region.freed
        end = address + num_bytes
        touched = [(a, n) for a, n in self.registered.items() if a < end and address < a + n]
        if not touched:
            return False
        first, size = touched[0]
        inside = len(touched) == 1 and first <= address and end <= first + size
        assert inside, "a copy that lies in no single registration: CUDA refuses it"
        return True


def bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """The memory at an address."""
    kind: Any = ctypes.c_uint8 * num_bytes
    return np.frombuffer(kind.from_address(address), np.uint8)


def cells(address: int, num_bytes: int) -> range:
    """The cells that an access touches."""
    if not num_bytes:
        return range(0)
    return range(address // CELL_BYTES, (address + num_bytes - 1) // CELL_BYTES + 1)
