"""From torch tensors to the kernels and back: write, attend and copy-on-write on one arena.

Tensors are checked here against the layout; slots and copies were checked by the ledger. No tensor
is copied: 16-bit floats are viewed as uint16, because NumPy has no bfloat16. K and V in fp8_e4m3
are narrowed by the write and widened by attention, with the scales of the config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvmem.storage_dtype import Scales
from kvmem.store.arena import Arena
from kvmem.store.device import FrameIds
from kvmem.store.layout import Layout
from kvmem.store.tensors import TensorChecks, check_finite, head_vector


class Compute:
    """The kernels bound to the device arena of one store.

    ``check=True`` (debug) also checks slots, copies and NaN in what is written; else the slots of
    the ledger are trusted.
    """

    def __init__(
        self,
        layout: Layout,
        arena: Arena,
        *,
        check: bool,
        k_scale: Scales | None = None,
        v_scale: Scales | None = None,
    ) -> None:
        self._layout = layout
        self._tensors = TensorChecks(layout, torch.device("cpu"))
        self._arena = arena.elements(layout.storage_dtype)
        self._check = check
        self._planes = layout.rows()
        self._common: dict[str, Any] = {
            "dtype": layout.compute_name,
            "kv_dtype": layout.dtype_name,
            "block_size": layout.block_size,
            "num_kv_heads": layout.num_kv_heads,
            "head_dim": layout.head_dim,
            "value_dim": layout.value_dim,
        }
        scales = (("key_scale", k_scale), ("value_scale", v_scale))
        #: By layer, for the kernels.
        self._scales: list[dict[str, Any]] = [
            {name: np.array(given[i], np.float32) for name, given in scales if given is not None}
            for i in range(layout.num_layers)
        ]

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: NDArray[np.int64],
    ) -> None:
        """Store K and V of one layer; see ``Store.write``."""
        from cuda_kernels import write_kv

        key_offset, value_offset = self.check_write(layer, key, value, slot_mapping)
        write_kv(
            self._arena,
            self._array(key),
            self._array(value),
            key_offset=key_offset,
            value_offset=value_offset,
            slot_mapping=slot_mapping,
            check=self._check,
            **self._scales[layer],
            **self._common,
        )

    def check_write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: NDArray[np.int64]
    ) -> tuple[int, int]:
        """Refuse tensors that can't be written; the plane offsets of the layer."""
        offsets = self._tensors.check_layer(layer)
        self._tensors.check_rows(key, value, len(slot_mapping))
        if self._check:
            check_finite("key", key, slot_mapping)
            check_finite("value", value, slot_mapping)
        return offsets

    def output(
        self, query: torch.Tensor, num_tokens: int, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Where attention goes, after checking the query: ``out``, or a new tensor full of NaN."""
        shape = (num_tokens, self._tensors.check_query(query, num_tokens), self._layout.value_dim)
        if out is None:
            return torch.full(shape, torch.nan, dtype=self._layout.compute_dtype)
        self._tensors.check("out", out, shape)
        return out

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        table: NDArray[np.int32],
        table_start: NDArray[np.int64],
        seq_lens: NDArray[Any],
        query_start: NDArray[Any],
        scale: float | None,
        window: int | None,
        softcap: float | None,
        alibi: ArrayLike | torch.Tensor | None,
        sinks: ArrayLike | torch.Tensor | None,
        return_lse: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the rows of a batch over one layer; see ``Store.attend``."""
        from cuda_kernels import paged_attention

        layout = self._layout
        key_offset, value_offset = self._tensors.check_layer(layer)
        num_heads = self._tensors.check_query(query, int(query_start[-1]))
        shape = (query.shape[0], num_heads, layout.value_dim)
        if out is None:
            out = torch.empty(shape, dtype=layout.compute_dtype)
        else:
            self._tensors.check("out", out, shape)
        lse = torch.empty(shape[:2], dtype=torch.float32) if return_lse else None
        paged_attention(
            self._array(out),
            self._array(query),
            self._arena,
            key_offset=key_offset,
            value_offset=value_offset,
            table=table,
            table_start=table_start,
            seq_lens=seq_lens,
            query_start=query_start,
            scale=scale,
            window=window,
            softcap=softcap,
            alibi=head_vector("alibi", alibi, num_heads),
            sinks=head_vector("sinks", sinks, num_heads),
            lse=None if lse is None else lse.numpy(),
            check=True,  # scale, window and the like come from the user; cheap beside the work
            **self._scales[layer],
            **self._common,
        )
        return out if lse is None else (out, lse)

    def copy_on_write(
        self, source: FrameIds, target: FrameIds, tokens: FrameIds
    ) -> Callable[[], None]:
        """The launch that copies the filled slots of whole frames inside the arena (R3)."""

        def run() -> None:
            from cuda_kernels import copy_blocks

            offsets, heads, widths = self._planes
            copy_blocks(
                self._arena,
                source,
                target,
                tokens,
                block_size=self._layout.block_size,
                plane_offset=offsets,
                plane_rows=heads,
                plane_width=widths,
                check=self._check,
            )

        return run

    def _array(self, tensor: torch.Tensor) -> NDArray[Any]:
        """The tensor's memory as the NumPy storage dtype, no copy."""
        if tensor.dtype == torch.float32:
            return tensor.numpy()
        return tensor.view(torch.uint16).numpy()
