"""Where the planes of a layer lie inside a frame: the only module that knows.

A frame is, per layer, a K plane ``[num_kv_heads, block_size, head_dim]`` and then a V plane
``[num_kv_heads, block_size, value_dim]``. The sizes come from ``kvmem.geometry``; this module turns
them into element offsets for the kernels and into strided views for people. Kernels and users see
offsets and strides only, so another order of planes touches this file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvmem.errors import ConfigError
from kvmem.geometry import FrameGeometry, uniform_frame
from kvmem.sim_options import SimOptions
from kvmem.storage_dtype import FP8, Scales

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}

#: The NumPy dtype that holds the bits of a storage dtype (NumPy has neither bfloat16 nor fp8_e4m3).
STORAGE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
    "fp8_e4m3": np.dtype(np.uint8),
}


class StoreConfig(Protocol):
    """What the store reads of a ``kvmem.Config``."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int | None: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kv_dtype(self) -> torch.dtype | None: ...
    @property
    def k_scale(self) -> Scales | None: ...
    @property
    def v_scale(self) -> Scales | None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def device_blocks(self) -> int: ...
    @property
    def host_blocks(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def sim(self) -> SimOptions | None: ...
    @property
    def sync(self) -> bool: ...
    @property
    def debug(self) -> bool: ...
    @property
    def zero_on_free(self) -> str: ...
    @property
    def numa_node(self) -> int | str | None: ...


@dataclass(frozen=True)
class Layout:
    """The planes of a frame of equal layers. Offsets and strides are in elements of ``dtype_name``.

    ``layers[i]`` is the pair (offset of K, offset of V) of layer i from the start of its frame.
    ``compute_name`` is the dtype of what is written and attended with.
    """

    geometry: FrameGeometry
    dtype_name: str
    layers: tuple[tuple[int, int], ...]
    compute_name: str

    @classmethod
    def build(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        block_size: int,
        dtype_name: str,
        compute_name: str | None = None,
    ) -> Layout:
        """The layout of ``num_layers`` equal layers; ``dtype_name`` is a key of TORCH_DTYPES, and
        so is ``compute_name`` (None: the same)."""
        element_bytes = TORCH_DTYPES[dtype_name].itemsize
        geometry = uniform_frame(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            block_size=block_size,
            element_bytes=element_bytes,
        )
        offsets: list[list[int]] = [[0, 0] for _ in range(num_layers)]
        for plane in geometry.planes:
            offsets[plane.layer][plane.is_value] = plane.offset_bytes // element_bytes
        layers = tuple((k, v) for k, v in offsets)
        return cls(geometry, dtype_name, layers, compute_name or dtype_name)

    @classmethod
    def of(cls, config: StoreConfig) -> Layout:
        """The layout of a config. Raises ``ConfigError`` for a dtype that can't be stored."""
        names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        computed = [name for dtype, name in names.items() if dtype != FP8]
        if names.get(config.dtype) not in computed:
            raise ConfigError(
                f"dtype {config.dtype} can't be computed in on device cpu; supported: "
                f"{', '.join(computed)}"
            )
        return cls.build(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            value_dim=config.head_dim if config.v_head_dim is None else config.v_head_dim,
            block_size=config.block_size,
            dtype_name=names[config.kv_dtype or config.dtype],
            compute_name=names[config.dtype],
        )

    @property
    def num_layers(self) -> int:
        """Layers of a frame."""
        return len(self.layers)

    @property
    def is_even(self) -> bool:
        """Whether each layer takes the same bytes of a frame, one behind the other."""
        step, rest = divmod(self.frame_elements, self.num_layers)
        return not rest and all(k == i * step for i, (k, _) in enumerate(self.layers))

    @property
    def num_kv_heads(self) -> int:
        """K/V heads of each layer."""
        return self.geometry.layers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one key."""
        return self.geometry.layers[0].head_dim

    @property
    def value_dim(self) -> int:
        """Elements of one value."""
        return self.geometry.layers[0].value_dim

    @property
    def block_size(self) -> int:
        """Tokens of a full block."""
        return self.geometry.block_size

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that K and V are stored as."""
        return TORCH_DTYPES[self.dtype_name]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The torch dtype of rows to write, of queries and of results."""
        return TORCH_DTYPES[self.compute_name]

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of an arena as kernels see it: float32, or an unsigned one for bits."""
        return STORAGE_DTYPES[self.dtype_name]

    @property
    def frame_bytes(self) -> int:
        """Bytes from one frame to the next."""
        return self.geometry.frame_bytes

    @property
    def frame_elements(self) -> int:
        """Elements from one frame to the next."""
        return self.frame_bytes // self.geometry.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.geometry.token_bytes

    def views(self, typed: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer in each frame of ``typed`` (``[frames, frame_elements]``).

        Returns strided views ``[frames, block_size, num_kv_heads, head_dim | value_dim]`` that
        share the memory; no copy.
        """
        key_offset, value_offset = self.layers[layer]
        return (
            self._plane(typed, key_offset, self.head_dim),
            self._plane(typed, value_offset, self.value_dim),
        )

    def _plane(self, typed: torch.Tensor, offset: int, width: int) -> torch.Tensor:
        shape = (typed.shape[0], self.block_size, self.num_kv_heads, width)
        strides = (typed.stride(0), width, self.block_size * width, 1)
        return typed.as_strided(shape, strides, typed.storage_offset() + offset)

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Every run of tokens of a frame, for the copy of filled slots only.

        Three int64 arrays of ``2 * num_layers`` planes: offset in elements, number of rows (each
        row is ``block_size`` tokens of one head) and elements of one token in such a row.
        """
        offsets, heads, widths = [], [], []
        for plane in self.geometry.planes:
            offsets.append(plane.offset_bytes // self.geometry.element_bytes)
            heads.append(plane.num_kv_heads)
            widths.append(plane.width)
        return np.array(offsets, np.int64), np.array(heads, np.int64), np.array(widths, np.int64)
