"""What a caller's tensors must be, whatever device computes with them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvmem.errors import ShapeError
from kvmem.store.layout import Layout


class TensorChecks:
    """Checks against a layout; ``device`` is the torch device that tensors have to be on."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device

    def check_layer(self, layer: int) -> tuple[int, int]:
        """The offsets of K and V of a layer. Raises TypeError, ShapeError."""
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"layer must be an int, got {type(layer).__name__}")
        if not 0 <= layer < self._layout.num_layers:
            raise ShapeError(
                f"layer {layer} does not exist; this config has layers 0 to "
                f"{self._layout.num_layers - 1}"
            )
        return self._layout.layers[layer]

    def check_rows(self, key: torch.Tensor, value: torch.Tensor, num_tokens: int) -> None:
        """K and V of so many tokens. Raises TypeError, ShapeError."""
        rows = (num_tokens, self._layout.num_kv_heads)
        self.check("key", key, (*rows, self._layout.head_dim))
        self.check("value", value, (*rows, self._layout.value_dim))

    def check_query(self, query: torch.Tensor, num_tokens: int) -> int:
        """The number of query heads. Raises TypeError, ShapeError."""
        layout = self._layout
        if not isinstance(query, torch.Tensor):
            raise TypeError(f"query must be a torch.Tensor, got {type(query).__name__}")
        if query.dim() != 3:
            raise ShapeError(
                f"query has shape {tuple(query.shape)}; expected [num_tokens, num_heads, "
                f"{layout.head_dim}]"
            )
        num_heads = query.shape[1]
        if num_heads == 0 or num_heads % layout.num_kv_heads:
            raise ShapeError(
                f"query has {num_heads} heads, which is no multiple of the {layout.num_kv_heads} "
                "K/V heads of this config"
            )
        self.check("query", query, (num_tokens, num_heads, layout.head_dim))
        return num_heads

    def check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Type, shape, dtype, device, and no gradient. Raises TypeError, ShapeError."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        expected = self._layout.compute_dtype
        if tensor.dtype != expected:
            raise ShapeError(
                f"{name} has dtype {tensor.dtype}; expected {expected}, the dtype of this config: "
                "convert it first"
            )
        if tensor.device != self._device:
            raise ShapeError(
                f"{name} is on device {tensor.device}; expected {self._device}: move it first"
            )
        if tensor.requires_grad:
            raise ShapeError(
                f"{name} requires grad; a cache is not differentiable: pass {name}.detach()"
            )


def check_finite(name: str, tensor: torch.Tensor, slot_mapping: NDArray[np.int64]) -> None:
    """Refuse NaN in rows that are stored; a skipped row may hold anything."""
    bad = torch.isnan(tensor).flatten(1).any(1).cpu().numpy() & (slot_mapping >= 0)
    if bad.any():
        raise ShapeError(
            f"{name} holds NaN in row {int(np.argmax(bad))} of {len(bad)}; only numbers are stored "
            "(checked with debug=True): look at the layer that computed it"
        )


def head_vector(
    name: str, vector: ArrayLike | torch.Tensor | None, num_heads: int
) -> NDArray[np.float32] | None:
    """One float32 number for each query head, on the host. Raises TypeError, ValueError."""
    if vector is None:
        return None
    if isinstance(vector, torch.Tensor):
        vector = vector.detach().to("cpu", torch.float32).numpy()
    try:
        array = np.ascontiguousarray(vector, dtype=np.float32)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be numbers, one a query head, not {type(vector).__name__}"
        ) from None
    if array.shape != (num_heads,):
        raise ValueError(
            f"{name} has shape {array.shape}; expected ({num_heads},), one number a query head"
        )
    return array
