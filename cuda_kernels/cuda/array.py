"""Arrays in a device's memory, as the public functions take them: an address and its geometry.

A `DeviceArray` owns nothing; whoever made it keeps the memory alive until the work is done. What
it holds can't be looked at from here, so checks end at shapes, dtypes and strides: slots, tables
and frame ids on the device are trusted, as with ``check=False``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from cuda_kernels.cuda.kernel import Device


class Flags(NamedTuple):
    """The two of NumPy's flags that checks ask for."""

    c_contiguous: bool
    writeable: bool


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array at ``address`` of ``device``; strides are in bytes (empty: C-contiguous).

    ``dtype`` is that of the NumPy array with the same bits: uint16 for bfloat16 and float16.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: Device
    strides: tuple[int, ...] = ()
    writeable: bool = True

    def __post_init__(self) -> None:
        if not self.strides:
            object.__setattr__(self, "strides", self._packed())

    def _packed(self) -> tuple[int, ...]:
        """Strides in C order."""
        return tuple(
            math.prod(self.shape[i + 1 :]) * self.dtype.itemsize for i in range(len(self.shape))
        )

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def flags(self) -> Flags:
        """Contiguous in C order, and writable, as NumPy names them."""
        packed = 0 in self.shape or all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(self.shape, self.strides, self._packed(), strict=True)
        )
        return Flags(packed, self.writeable)


def device_of(**arrays: Any) -> Device | None:
    """The device of the arrays given by name; None if all are NumPy arrays (or None).

    Raises TypeError if some are on a device and others aren't, or on different devices.
    """
    found = {name: a.device for name, a in arrays.items() if isinstance(a, DeviceArray)}
    if not found:
        return None
    first, device = next(iter(found.items()))
    for name, array in arrays.items():
        if array is None:
            continue
        if not isinstance(array, DeviceArray):
            raise TypeError(
                f"{name} must be a DeviceArray as {first} is, got {type(array).__name__}"
            )
        if array.device is not device:
            raise TypeError(f"{name} and {first} are arrays of different devices")
    return device
