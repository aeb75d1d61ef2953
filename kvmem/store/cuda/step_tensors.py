"""The arrays of a step on the GPU: uploaded once, at their first use.

Two uploads a step at most: what the ledger planned (tokens, positions, slots, rows), and the table
of frames, for which somebody has to ask (attention does).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cuda_kernels.cuda.array import DeviceArray
from kvmem.errors import KVMemError
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.cuda.uploads import Upload
from kvmem.store.device import Stream
from kvmem.store.operands import Operands

NAMES = ("tokens", "positions", "slot_mapping", "seq_lens", "query_start", "last")
_TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class StepTensors:
    """One step's tensors. They stay until `release`.

    ``arrays`` has an array for each of `NAMES`, ``max_seq_len`` and ``max_query_len``.
    """

    def __init__(self, device: CudaDevice, arrays: Any) -> None:
        device.cuda.refuse_capture()
        self._device, self._arrays = device, arrays
        queue = device.stream(Stream.COMPUTE)
        with device.working("arrays of a step"):
            self._upload = device.uploads.upload(queue, [getattr(arrays, name) for name in NAMES])
        self._table: Upload | None = None
        self._made: dict[str, torch.Tensor] = {}
        self._operands: Operands | None = None  # made once: each layer asks twice

    def tensor(self, name: str) -> torch.Tensor:
        """One of `NAMES`, as a tensor on the GPU."""
        found = self._made.get(name)
        if found is None:
            dtype = _TORCH[getattr(self._arrays, name).dtype]
            found = self._made[name] = self._upload.tensor(NAMES.index(name), dtype)
        return found

    def patch(
        self, places: NDArray[np.int64], sources: NDArray[np.int64], values: torch.Tensor
    ) -> None:
        """Tokens that only the GPU knows: ``tokens[places[i]] = values[sources[i]]``, queued."""
        tokens, count = self.tensor("tokens"), len(places)
        first, origin = int(places[0]), int(sources[0])
        if all((np.diff(ids) == 1).all() for ids in (places, sources)):  # decoding, mostly
            tokens[first : first + count].copy_(values[origin : origin + count])
            return
        queue = self._device.stream(Stream.COMPUTE)
        upload = self._device.uploads.upload(queue, (places, sources))
        to, origins = (upload.tensor(i, torch.int64) for i in range(2))
        tokens.index_copy_(0, to, values.index_select(0, origins))
        upload.release(queue)

    def table(self, rows: NDArray[np.int32]) -> torch.Tensor:
        """The dense table ``[num_rows, max_blocks]``, from the host's at the first call."""
        found = self._made.get("block_table")
        if found is None:
            found = self._made["block_table"] = self._uploaded(rows).tensor(0, torch.int32)
        return found

    def operands(self, rows: NDArray[np.int32]) -> Operands:
        """What the kernels take, the table included. Not in a capture: see `refuse_capture`."""
        self._device.cuda.refuse_capture()
        if self._operands is not None:
            return self._operands
        table, starts = self._uploaded(rows).arrays
        _, _, slots, lengths, begins, _ = self._upload.arrays
        flat = DeviceArray(
            table.address, (table.shape[0] * table.shape[1],), table.dtype, table.device
        )
        longest, most = self._arrays.max_seq_len, self._arrays.max_query_len
        self._operands = Operands(slots, flat, starts, lengths, begins, longest, most)
        return self._operands

    def release(self) -> None:
        """Whoever read the tensors has given its work to COMPUTE."""
        try:
            queue = self._device.stream(Stream.COMPUTE)
            self._upload.release(queue)
            if self._table is not None:
                self._table.release(queue)
        except (KVMemError, RuntimeError):  # a failed device: its buffers are never used again
            return

    def _uploaded(self, rows: NDArray[np.int32]) -> Upload:
        if self._table is None:
            self._device.cuda.refuse_capture()
            dense = np.ascontiguousarray(rows)
            starts = np.arange(len(rows), dtype=np.int32) * np.int32(dense.shape[1])
            queue = self._device.stream(Stream.COMPUTE)
            with self._device.working("table of a step"):
                self._table = self._device.uploads.upload(queue, (dense, starts))
        return self._table
