"""Numbers a query head (ALiBi, sinks) that stay on the GPU, as a captured graph needs them."""

from __future__ import annotations

import torch
from numpy.typing import ArrayLike

from cuda_kernels.cuda.array import DeviceArray
from kvmem.store.cuda.arrays import FLOAT32, device_array
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.cuda.uploads import Upload
from kvmem.store.device import Stream
from kvmem.store.tensors import head_vector


class Vectors:
    """The vectors of one store; a model has a few."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.kept: dict[bytes, Upload] = {}

    def on_gpu(
        self, name: str, vector: ArrayLike | torch.Tensor | None, num_heads: int
    ) -> DeviceArray | None:
        """A float32 tensor of the GPU as it lies there; of others a copy, made once for the same
        numbers. Raises as `head_vector`, and RuntimeError where that would copy in a capture."""
        if vector is None:
            return None
        cuda = self._device.cuda
        if isinstance(vector, torch.Tensor):
            plain = vector.dtype == torch.float32 and vector.is_contiguous()
            if cuda.owns(vector) and plain and tuple(vector.shape) == (num_heads,):
                return device_array(vector, FLOAT32, cuda.kernels)
            if vector.device.type != "cpu" and cuda.is_capturing():
                raise _not_there(name)
        numbers = head_vector(name, vector, num_heads)
        assert numbers is not None
        found = self.kept.get(numbers.tobytes())
        if found is None:
            if cuda.is_capturing():
                raise _not_there(name)
            queue = self._device.stream(Stream.COMPUTE)
            found = self._device.uploads.upload(queue, (numbers,))  # for good: never released
            self.kept[numbers.tobytes()] = found
        return found.arrays[0]


def _not_there(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} is not on the GPU yet, and nothing is copied there while a CUDA graph is captured:"
        f" run the step once before the capture, or give {name} as a contiguous float32 tensor of "
        "the GPU"
    )
