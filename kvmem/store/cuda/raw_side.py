"""The side of a GPU for raw tensors: no Manager, torch's current stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from cuda_kernels.cuda.array import DeviceArray
from kvmem.store.cuda.api import Cuda, open_cuda
from kvmem.store.cuda.arrays import device_array
from kvmem.store.raw_tensors import BITS


class GpuSide:
    """The tensors of one GPU; see `Side`. Launches of several threads go one after the other."""

    is_host = False

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        """What the tensors say of themselves."""
        return self._cuda.device

    def array(self, tensor: torch.Tensor) -> DeviceArray:
        """See `Side`."""
        return device_array(tensor, BITS[tensor.dtype], self._cuda.kernels)

    def frames(self, cache: torch.Tensor, frame_elements: int) -> DeviceArray:
        """See `Side`."""
        shape = (cache.shape[0], frame_elements)
        return DeviceArray(cache.data_ptr(), shape, BITS[cache.dtype], self._cuda.kernels)

    def launching(self) -> AbstractContextManager[dict[str, Any]]:
        """This GPU is the current one; kernels go to torch's current stream of the thread."""
        return self._launching()

    @contextmanager
    def _launching(self) -> Iterator[dict[str, Any]]:
        with self._lock, self._cuda.here():
            yield {"stream": int(self._cuda.current_stream().cuda_stream)}


@cache
def gpu_side(ordinal: int) -> GpuSide:
    """The side of a GPU by its ordinal, kept for the life of the process: so are the kernels that
    it has loaded. Raises DeviceUnavailable, MissingLibrary."""
    return GpuSide(open_cuda(f"cuda:{ordinal}"))
