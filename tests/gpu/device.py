"""A real GPU behind the interface of `tests/ptx/device.py`, so that both take the same tests.

Arrays are copied to buffers of torch's; a launch is waited for, and what it wrote comes back into
the NumPy arrays. Around each buffer lie guard bytes that no kernel may touch, and what isn't
writable must be as it was.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Launch

#: The sanitizer sees accesses past an allocation only if nothing of ours lies there.
GUARD_BYTES = 0 if os.environ.get("KVMEM_GPU_SANITIZER") == "1" else 4096
_GUARD, _UNKNOWN = 0xA5, 0xFF  # 0xFF: NaN in each storage dtype


@dataclass(frozen=True, slots=True)
class Mapped:
    """An array and the buffer it was copied to, from byte ``start``."""

    whole: NDArray[Any]
    buffer: Any
    start: int
    writable: bool
    initialised: bool


class TorchDevice:
    """Buffers at a place of torch's, launches by ``gpu``; ``launched`` keeps what was launched."""

    is_real = True

    def __init__(self, gpu: Any, place: str = "cuda") -> None:
        import torch

        self.torch, self.gpu, self.place = torch, gpu, place
        self.capability = gpu.capability
        self.buffers: list[Mapped] = []
        self.launched: list[tuple[Launch, None]] = []

    def array(
        self,
        values: NDArray[Any],
        *,
        writable: bool = False,
        initialised: bool = True,
        misaligned: int = 0,
    ) -> DeviceArray:
        """Copy an array's memory to the device, a view's with the array it is a view of."""
        whole = values
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        assert whole.flags.c_contiguous
        size, start = whole.nbytes, GUARD_BYTES + misaligned
        buffer = self.torch.full(
            (max(start + size + GUARD_BYTES, 16),),
            _GUARD,
            dtype=self.torch.uint8,
            device=self.place,
        )
        if size:
            part = buffer[start : start + size]
            if initialised:
                part.copy_(self.torch.from_numpy(_bytes(whole).copy()))
            else:
                part.fill_(_UNKNOWN)
        self.buffers.append(Mapped(whole, buffer, start, writable, initialised))
        shift = values.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        place = buffer.data_ptr() + start + (shift if values.size else 0)
        return DeviceArray(place, values.shape, values.dtype, self, values.strides)

    def launch(self, launch: Launch, stream: int) -> None:
        """Launch, wait, take back what was written, look at all guards."""
        self.gpu.launch(launch, stream)
        if self.place == "cuda":
            self.torch.cuda.synchronize()
        self.launched.append((launch, None))
        for mapped in self.buffers:
            self._take_back(mapped)

    def _take_back(self, mapped: Mapped) -> None:
        found = mapped.buffer.cpu().numpy()
        end = mapped.start + mapped.whole.nbytes
        assert (found[: mapped.start] == _GUARD).all(), "a kernel wrote before a buffer"
        assert (found[end:][:GUARD_BYTES] == _GUARD).all(), "a kernel wrote behind a buffer"
        inside = found[mapped.start : end]
        if mapped.writable:
            _bytes(mapped.whole)[:] = inside
        elif mapped.initialised:
            assert np.array_equal(inside, _bytes(mapped.whole)), "a kernel wrote to an input"

    def clear(self) -> None:
        """Forget all buffers, keep the kernels."""
        self.buffers.clear()
        self.launched.clear()


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
