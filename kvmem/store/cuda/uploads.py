"""Small host arrays on their way to the GPU: page-locked memory, a twin on the GPU, one copy.

A buffer is used again when the GPU has passed the event that its last user recorded; until then
another one is taken, so nobody waits. In the steady state there are as many as steps and transfers
under way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cuda_kernels.cuda.array import DeviceArray
from kvmem.store.cuda.api import HOST_TO_DEVICE, Cuda
from kvmem.store.cuda.arena import keep_for_good

#: Arrays start at multiples of it; the smallest buffer.
ALIGNMENT, SMALLEST = 64, 4096


class _Buffer:
    """Page-locked memory and its twin on the GPU."""

    __slots__ = ("device", "event", "host", "host_bytes")

    def __init__(self, cuda: Cuda, queue: Any, num_bytes: int) -> None:
        self.host = cuda.empty(num_bytes, True)
        self.host_bytes: NDArray[np.uint8] = self.host.numpy()
        self.device = cuda.empty_on(queue, num_bytes)
        self.event: Any = cuda.new_event()


class Upload:
    """Arrays that a stream has on the GPU from here on, until `release`."""

    __slots__ = ("_buffer", "_places", "_queue", "_uploads", "arrays")

    def __init__(
        self,
        uploads: Uploads,
        queue: Any,
        buffer: _Buffer,
        places: list[int],
        arrays: list[DeviceArray],
    ) -> None:
        self._uploads, self._queue, self._places = uploads, queue, places
        self._buffer: _Buffer | None = buffer
        self.arrays = arrays  # as the kernels take them, in the order given

    def tensor(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """One of the arrays as a tensor of its shape. ~3 us."""
        assert self._buffer is not None, "released"
        array, place = self.arrays[index], self._places[index]
        size = int(np.prod(array.shape)) * array.itemsize
        return self._buffer.device[place : place + size].view(dtype).view(array.shape)

    def release(self, stream: Any) -> None:
        """All that reads the arrays was given to the torch stream; they are another's next. A
        second call: no-op. Raises RuntimeError when CUDA does; the buffer is not used again."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._uploads.give_back(buffer, stream)

    def __del__(self) -> None:
        """Dropped by a call that raised, which may have queued work with the arrays."""
        if self._buffer is not None:
            self._uploads.dropped.append((self._buffer, self._queue))


class Uploads:
    """The buffers of one GPU. Thread-safe."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = threading.Lock()
        self._free: dict[int, deque[_Buffer]] = {}  # by size, those asked for last behind
        #: All of them: one that was not given back may still be copied from, so none goes before
        #: the end.
        self._made: list[_Buffer] = []
        #: Those whose upload was never released, and the torch stream of its work.
        self.dropped: deque[tuple[_Buffer, Any]] = deque()

    @property
    def num_buffers(self) -> int:
        """How many were made."""
        return len(self._made)

    def upload(self, queue: Any, arrays: Sequence[NDArray[Any]]) -> Upload:
        """Queue one copy of C-contiguous arrays to the GPU on a torch stream.

        They may be written again at once. Raises CudaError. O(bytes).
        """
        while self.dropped:
            self.give_back(*self.dropped.popleft())
        places, end = [], 0
        for array in arrays:
            places.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self.take(queue, max(end, 1))
        for array, place in zip(arrays, places, strict=True):
            flat = array.reshape(-1).view(np.uint8)
            buffer.host_bytes[place : place + array.nbytes] = flat
        address = buffer.device.data_ptr()
        if end:
            source = buffer.host.data_ptr()
            try:
                self._cuda.copy_async(address, source, end, HOST_TO_DEVICE, queue)
            except RuntimeError:  # nothing was queued
                with self._lock:
                    self._free[len(buffer.host_bytes)].appendleft(buffer)
                raise
        found = [
            DeviceArray(address + place, array.shape, array.dtype, self._cuda.kernels)
            for array, place in zip(arrays, places, strict=True)
        ]
        return Upload(self, queue, buffer, places, found)

    def take(self, queue: Any, num_bytes: int) -> _Buffer:
        """A buffer of at least so many bytes that nothing on the GPU uses any more, for the work of
        a torch stream."""
        size = max(SMALLEST, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(size, deque())
            if free and free[0].event.query():
                return free.popleft()
        buffer = _Buffer(self._cuda, queue, size)
        self._made.append(buffer)
        return buffer

    def give_back(self, buffer: _Buffer, stream: Any) -> None:
        """Record the buffer's event on its last stream and keep it."""
        buffer.event.record(stream)
        with self._lock:
            self._free.setdefault(len(buffer.host_bytes), deque()).append(buffer)

    def close(self) -> None:
        """Drop all buffers; the streams are idle."""
        self._free.clear()
        self._made.clear()
        self.dropped.clear()

    def abandon(self) -> None:
        """The streams are not idle: the buffers stay for good."""
        keep_for_good(*self._made)
