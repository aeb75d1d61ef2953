"""Kernels on a device that queues them: operands are staged, each launch says what it touches.

A queued kernel runs after the call that launched it, so it must not read what its caller may change
by then (case 41): tensors, slots and table rows are copied here. On a GPU tensors are ordered by
their stream instead, and tables lie on the device; there only host arrays are staged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvmem.store.arena import Arena
from kvmem.store.compute import Compute
from kvmem.store.device import Access, Device, FrameIds, Stream
from kvmem.store.layout import Layout


class StagedCompute:
    """``Compute`` on the COMPUTE stream of a simulated device. Thread-safe.

    ``late_results``: an output is NaN until its kernel has run; else ``attend`` lets the stream run
    up to it (a torch tensor of the CPU has no fence), which orders nothing for the host (R6).
    """

    def __init__(
        self, compute: Compute, layout: Layout, device: Device, arena: Arena, *, late_results: bool
    ) -> None:
        self._compute, self._layout = compute, layout
        self._device, self._arena = device, arena
        self._late = late_results

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: NDArray[np.int64]
    ) -> None:
        """See ``Store.write``; wrong tensors and slots raise here, not when the kernel runs."""
        size, slots = self._layout.block_size, slot_mapping.copy()
        self._compute.check_write(layer, key, value, slots)
        used = slots[slots >= 0] // size
        if used.size and int(used.max()) >= self._arena.num_frames:
            raise ValueError(f"slot_mapping names frame {int(used.max())}, which does not exist")
        self._device.launch(
            Stream.COMPUTE,
            partial(self._compute.write, layer, key.clone(), value.clone(), slots),
            writes=(self._access(layer, _frames(used)),),
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        table: NDArray[np.int32],
        table_start: NDArray[np.int64],
        seq_lens: NDArray[Any],
        query_start: NDArray[Any],
        return_lse: bool,
        out: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See ``Store.attend``. Refused arguments raise here too, unless results are late."""
        out = self._compute.output(query, int(query_start[-1]), out)
        lse = torch.full(out.shape[:2], torch.nan) if return_lse else None
        lengths = -(-np.asarray(seq_lens, np.int64) // self._layout.block_size)
        rows = [table[s : s + n] for s, n in zip(table_start, lengths, strict=True)]
        staged = np.concatenate(rows) if rows else np.zeros(0, np.int32)
        operands = {
            "table": staged,
            "table_start": np.concatenate(([0], np.cumsum(lengths)[:-1])) if rows else table_start,
            "seq_lens": seq_lens.copy(),
            "query_start": query_start.copy(),
            **options,
        }
        refused: list[Exception] = []

        def run() -> None:
            try:
                found = self._compute.attend(
                    layer, staged_query, out=out, return_lse=return_lse, **operands
                )
            except (TypeError, ValueError) as error:
                if self._late:
                    raise
                refused.append(error)
                return
            if lse is not None:
                lse.copy_(found[1])

        staged_query = query.clone()
        reads = (self._access(layer, _frames(staged)),)
        self._device.launch(Stream.COMPUTE, run, reads=reads)
        if not self._late:
            self._device.settle(Stream.COMPUTE)
        if refused:
            raise refused[0]
        return out if lse is None else (out, lse)

    def _access(self, layer: int, frames: FrameIds) -> Access:
        """One layer of some frames."""
        count = self._arena.num_pieces
        return self._arena.pieces(count), frames * count + layer if count > 1 else frames


def _frames(ids: NDArray[Any]) -> FrameIds:
    return np.unique(ids).astype(np.int32)
