"""`Fixed` on a GPU: one piece of its memory, filled by one copy a step from page-locked memory.

Page-locked twins come from a ring: one is written again when the GPU has passed its last copy. Who
lets go of the memory while copies may be under way leaves it with the device (`park`).
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cuda_kernels.cuda.array import DeviceArray
from kvmem.store.cuda.api import HOST_TO_DEVICE, Cuda
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.device import Stream
from kvmem.store.fixed import FixedArrays, FixedSizes, bytes_of, places_of
from kvmem.store.operands import Operands

_TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class _Twin:
    """The arrays in page-locked memory, and the event of their last copy."""

    __slots__ = ("arrays", "event", "host")

    def __init__(self, cuda: Cuda, sizes: FixedSizes) -> None:
        self.host = cuda.empty(bytes_of(sizes), True)
        self.arrays = FixedArrays(sizes, self.host.numpy())
        self.event: Any = cuda.new_event()


class FixedOnGpu:
    """The arrays of steps at fixed addresses of a GPU; see `kvmem.store.fixed`."""

    def __init__(self, device: CudaDevice, sizes: FixedSizes) -> None:
        self._device, self._sizes = device, sizes
        self._places = places_of(sizes)
        with device.cuda.here():
            self._memory = device.cuda.empty(bytes_of(sizes), False)
            self._ring = deque([_Twin(device.cuda, sizes)])
        self.arrays = self._ring[0].arrays
        self._rows_there = sizes.max_seqs  # of the table on the GPU that may not be zeros
        self._made = {name: self._view(name) for name in self._places}
        self._operands = {"on_device": self._as_operands()}
        weakref.finalize(self, device.park, self._memory, self._ring)

    def fill(self, arrays: Any, table: NDArray[np.int32]) -> None:
        """Queue the copy on COMPUTE, behind what it was given before. Raises DeviceUnavailable."""
        self._device.launch(Stream.COMPUTE, lambda: self._queue(arrays, table))

    def tensor(self, name: str) -> torch.Tensor:
        """One of the arrays on the GPU, without the row of the padding."""
        return self._made[name]

    def operands(self) -> dict[str, Any]:
        """The arrays as kernels take them."""
        return self._operands

    def check_outside_capture(self) -> None:
        """The copy belongs to a step, not to a graph."""
        if self._device.cuda.is_capturing():
            raise RuntimeError(
                "a step can't be entered while a CUDA graph is captured: its arrays would be "
                "copied by the graph; enter it first, capture inside its `with` block"
            )

    # --- inside ---------------------------------------------------------------------------------

    def _queue(self, arrays: Any, table: NDArray[np.int32]) -> None:
        device, cuda = self._device, self._device.cuda
        queue = device.stream(Stream.COMPUTE)
        twin = self._ring.popleft() if self._ring[0].event.query() else _Twin(cuda, self._sizes)
        try:
            rows = twin.arrays.fill(arrays, table)
            table_at, dtype, (_, columns), _ = self._places["block_table"]
            size = table_at + max(rows, self._rows_there) * columns * dtype.itemsize
            target, source = self._memory.data_ptr(), twin.host.data_ptr()
            cuda.copy_async(target, source, size, HOST_TO_DEVICE, queue)
            self._rows_there, self.arrays = rows, twin.arrays
            twin.event.record(queue)
        finally:
            self._ring.append(twin)

    def _view(self, name: str) -> torch.Tensor:
        start, dtype, shape, shown = self._places[name]
        stop = start + int(np.prod(shape)) * dtype.itemsize
        return self._memory[start:stop].view(_TORCH[dtype]).view(shape)[:shown]

    def _as_operands(self) -> Operands:
        """Of the shapes that kernels see: with the row of the padding."""
        found = {}
        for name, (start, dtype, shape, _) in self._places.items():
            at = self._memory.data_ptr() + start
            found[name] = DeviceArray(at, shape, dtype, self._device.cuda.kernels)
        dense = found["block_table"]
        entries = dense.shape[0] * dense.shape[1]
        return Operands(
            found["slot_mapping"],
            DeviceArray(dense.address, (entries,), dense.dtype, dense.device),
            found["table_start"],
            found["seq_lens"],
            found["query_start"],
            self._sizes.max_context,
            self._sizes.max_tokens,
            fixed=True,
        )
