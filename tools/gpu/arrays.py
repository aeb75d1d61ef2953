"""torch tensors as the arrays that the public functions of cuda_kernels take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cuda_kernels.cuda.array import DeviceArray

if TYPE_CHECKING:
    import torch

#: NumPy's dtype with the same bits, by the name of torch's.
BITS = {
    "float32": "float32", "bfloat16": "uint16", "float16": "uint16", "float8_e4m3fn": "uint8",
    "uint8": "uint8", "int32": "int32", "int64": "int64", "uint16": "uint16",
}  # fmt: skip


def device_array(tensor: torch.Tensor, device: Any) -> DeviceArray:
    """A tensor's memory as a DeviceArray of the same shape and strides; the tensor stays its owner.

    Raises TypeError for a dtype that no kernel takes.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in BITS:
        raise TypeError(f"tensor has dtype {name}; allowed: {', '.join(BITS)}")
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    return DeviceArray(
        tensor.data_ptr(), tuple(tensor.shape), np.dtype(BITS[name]), device, strides
    )
