"""Raw tensors, of the host or of a GPU, checked and taken apart for the kernels.

A call's tensors all lie on one side. The ops of `kvmem.ops` are written once: a side makes of a
tensor what the kernels take there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvmem.errors import ShapeError
from kvmem.storage_dtype import DTYPES, FP8, FP8_NAME
from kvmem.store.layout import STORAGE_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CACHE_NAMES = {**DTYPE_NAMES, FP8: FP8_NAME}
INTEGERS: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}
#: The NumPy dtype with the bits of a tensor's.
BITS = {**{dtype: STORAGE_DTYPES[name] for dtype, name in CACHE_NAMES.items()}, **INTEGERS}


class Side(Protocol):
    """Where the tensors of a call lie. What the tensors of a GPU hold is not looked at."""

    @property
    def device(self) -> torch.device: ...
    @property
    def is_host(self) -> bool: ...
    def array(self, tensor: torch.Tensor) -> Any:
        """The tensor's memory as the kernels take it, no copy; the tensor must be kept."""

    def frames(self, cache: torch.Tensor, frame_elements: int) -> Any:
        """``[frames, frame_elements]`` from the cache's first element on."""

    def launching(self) -> AbstractContextManager[dict[str, Any]]:
        """What kernels are called in, and what they are called with."""


class Host:
    """Memory of the host, as NumPy arrays."""

    device = torch.device("cpu")
    is_host = True

    def array(self, tensor: torch.Tensor) -> Any:
        """See `Side`."""
        plain = tensor.detach()
        bits = BITS[plain.dtype]
        if bits.kind == "u":  # NumPy has no name for these numbers
            plain = plain.view(torch.uint8 if bits.itemsize == 1 else torch.uint16)
        return plain.numpy()

    def frames(self, cache: torch.Tensor, frame_elements: int) -> Any:
        """See `Side`. The last row may reach past the storage by what follows the plane in a frame;
        kernels touch planes only, and this array never leaves the op."""
        bits = self.array(cache)
        strides = (frame_elements * bits.itemsize, bits.itemsize)
        return np.lib.stride_tricks.as_strided(bits, (len(bits), frame_elements), strides)

    def launching(self) -> AbstractContextManager[dict[str, Any]]:
        """See `Side`."""
        return nullcontext({})


HOST = Host()


def side_of(name: str, tensor: torch.Tensor) -> Side:
    """The side that a tensor lies on. Raises ShapeError for one that is no CPU or CUDA tensor,
    DeviceUnavailable where the GPU's kernels can't be launched."""
    if tensor.device.type == "cpu":
        return HOST
    if tensor.device.type == "cuda":
        from kvmem.store.cuda.raw_side import gpu_side

        return gpu_side(tensor.device.index)
    raise ShapeError(f"{name} is on {tensor.device}; the ops take CPU and CUDA tensors")


class Plane(NamedTuple):
    """A cache view, taken apart: ``[frames, frame_elements]`` from the first plane on."""

    arena: Any
    block_size: int
    num_kv_heads: int
    width: int


class Caches(NamedTuple):
    """Key and value cache of a layer, taken apart."""

    arena: Any
    value_arena: Any
    kv_dtype: str
    computed: tuple[torch.dtype, ...]  # what queries and rows to write may have
    block_size: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    def geometry(self) -> dict[str, Any]:
        """The keyword arguments that kernels share."""
        named = self._asdict()
        del named["arena"], named["computed"]
        return named | {"key_offset": 0, "value_offset": 0}


def caches_of(side: Side, key_cache: torch.Tensor, value_cache: torch.Tensor) -> Caches:
    """Take a layer's two caches apart, or raise ShapeError."""
    key = plane_of(side, "key_cache", key_cache)
    value = plane_of(side, "value_cache", value_cache)
    if key_cache.dtype != value_cache.dtype or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ShapeError(
            f"key_cache {tuple(key_cache.shape)} of {key_cache.dtype} and value_cache "
            f"{tuple(value_cache.shape)} of {value_cache.dtype} must agree in dtype, frames, "
            f"block_size and num_kv_heads"
        )
    return Caches(
        key.arena,
        value.arena,
        CACHE_NAMES[key_cache.dtype],
        tuple(DTYPE_NAMES) if key_cache.dtype == FP8 else (key_cache.dtype,),
        key.block_size,
        key.num_kv_heads,
        key.width,
        value.width,
    )


def plane_of(side: Side, name: str, cache: torch.Tensor) -> Plane:
    """Take one cache view apart, or raise ShapeError."""
    require(side, name, cache, (None, None, None, None), tuple(CACHE_NAMES))
    frames, block_size, heads, width = cache.shape
    plane_elements = block_size * heads * width
    inner = (width, block_size * width, 1)
    # The stride of an axis of length 1 says nothing, so any will do.
    plain = all(
        cache.stride(axis) == want or cache.shape[axis] == 1
        for axis, want in zip((1, 2, 3), inner, strict=True)
    )
    frame_elements = plane_elements if frames == 1 else cache.stride(0)
    if cache.numel() == 0 or not plain or frame_elements < plane_elements:
        raise ShapeError(
            f"{name} of shape {tuple(cache.shape)} and strides {cache.stride()} is no view of "
            f"frames with planes [num_kv_heads, block_size, dim]; expected strides "
            f"(frame_elements, {inner[0]}, {inner[1]}, 1), as Manager.kv(layer) returns"
        )
    return Plane(side.frames(cache, frame_elements), block_size, heads, width)


def scales_of(side: Side, caches: Caches, *scales: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What fp8 is multiplied by, by the kernels' names; refused beside other caches."""
    given: dict[str, torch.Tensor] = {}
    for name, tensor in zip(("key_scale", "value_scale"), scales, strict=True):
        if tensor is None:
            continue
        if caches.kv_dtype != FP8_NAME:
            raise ShapeError(
                f"{name[0]}_scale needs caches of {FP8}; these are {caches.kv_dtype}: leave it out"
            )
        require(side, f"{name[0]}_scale", tensor, (caches.num_kv_heads,), (torch.float32,))
        given[name] = tensor.detach().contiguous()
    return given


def require(
    side: Side,
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    allowed: tuple[torch.dtype, ...],
) -> None:
    """Refuse a tensor of another device, dtype or shape (None = any)."""
    _require_device(side, name, tensor)
    if tensor.dtype not in allowed:
        raise ShapeError(
            f"{name} has dtype {tensor.dtype}; expected {' or '.join(str(d) for d in allowed)}"
        )
    matches = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not matches:
        wanted = "[" + ", ".join("any" if want is None else str(want) for want in shape) + "]"
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; expected {wanted}")


def integers(
    side: Side,
    name: str,
    tensor: torch.Tensor,
    dims: int,
    dtypes: tuple[torch.dtype, ...] = tuple(INTEGERS),
) -> torch.Tensor:
    """An integer tensor, contiguous; a copy only of one that isn't."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d) for d in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {allowed}")
    _require_device(side, name, tensor)
    if tensor.dim() != dims:
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; expected {dims} dimension(s)")
    return tensor.contiguous()


def one_dtype(side: Side, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Integer tensors as the kernels of the side want them: a GPU's all int32 or all int64."""
    if side.is_host or len({tensor.dtype for tensor in tensors}) == 1:
        return tensors
    return tuple(tensor.to(torch.int64) for tensor in tensors)


def _require_device(side: Side, name: str, tensor: torch.Tensor) -> None:
    if tensor.device != side.device:
        raise ShapeError(
            f"{name} is on {tensor.device}; the caches of this call are on {side.device}: all "
            f"tensors must be there"
        )
