"""Tensors of a GPU as the kernels take them, and the room that attention may ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Device

FLOAT32 = np.dtype(np.float32)


def device_array(tensor: torch.Tensor, bits: np.dtype[Any], kernels: Device) -> DeviceArray:
    """A tensor's memory, no copy: ``bits`` is the NumPy dtype with its bits, ``kernels`` launches.

    The tensor has to live until the kernel that takes it was queued; from then on the order of its
    stream keeps the memory, as with torch's own work.
    """
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), bits, kernels, strides)


def workspace_for(
    query: torch.Tensor, num_kv_heads: int, value_dim: int, longest: int, window: int | None
) -> torch.Tensor | None:
    """float32 memory to cut rows of up to ``longest`` positions over blocks of threads, or None
    where the batch makes blocks enough by itself: a prompt would ask for gigabytes."""
    from cuda_kernels.attention.cuda_call import WANTED_BLOCKS, workspace_elements

    num_tokens, num_heads = query.shape[:2]
    if 2 * num_tokens * num_kv_heads > WANTED_BLOCKS:
        return None
    elements = workspace_elements(num_tokens, num_heads, value_dim, longest, window)
    return query.new_empty(elements, dtype=torch.float32)
