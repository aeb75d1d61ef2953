"""Token ids that a model sampled on the GPU, kept for the next step and copied to the host."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvmem.store.cuda.api import DEVICE_TO_HOST
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.cuda.events import look_until
from kvmem.store.device import Stream

_BYTES = 8  # of a token id here


class Sampled:
    """A copy of a 1-D tensor of token ids, behind what COMPUTE was given: the caller may write the
    tensor again at once. ``values`` int64 ``[n]`` on the GPU, until `release`."""

    def __init__(self, device: CudaDevice, tensor: torch.Tensor) -> None:
        self._device = device
        num_bytes = len(tensor) * _BYTES
        queue = device.stream(Stream.COMPUTE)
        self._buffer = device.uploads.take(queue, max(num_bytes, 1))
        self.values = self._buffer.device[:num_bytes].view(torch.int64)
        self.values.copy_(tensor)
        if num_bytes:
            target, source = self._buffer.host.data_ptr(), self._buffer.device.data_ptr()
            device.cuda.copy_async(target, source, num_bytes, DEVICE_TO_HOST, queue)
        self._buffer.event.record(queue)

    def arrived(self) -> bool:
        """Whether the values are on the host; never waits."""
        return bool(self._buffer.event.query())

    def wait(self) -> None:
        """Wait on the host until they are. Raises what made the device fail."""
        look_until(self.arrived, lambda: self._device.check("sampled tokens"))

    def on_host(self) -> NDArray[np.int64]:
        """The values, once they have arrived; a copy."""
        num_bytes = len(self.values) * _BYTES
        found: NDArray[np.int64] = self._buffer.host_bytes[:num_bytes].view(np.int64).copy()
        return found

    def release(self) -> None:
        """All that reads ``values`` was given to COMPUTE."""
        self._device.uploads.give_back(self._buffer, self._device.stream(Stream.COMPUTE))
