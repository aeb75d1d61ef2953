"""From torch CUDA tensors to the kernels: write, attend and copy-on-write on one arena.

Kernels go to torch's current stream of the calling thread, as torch's own work does: so a caller's
tensors need no care beyond what torch asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from cuda_kernels.cuda.array import DeviceArray
from kvmem.storage_dtype import Scales
from kvmem.store.cuda.arena import CudaArena
from kvmem.store.cuda.arrays import FLOAT32, device_array, workspace_for
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.cuda.uploads import Upload
from kvmem.store.device import FrameIds, Stream
from kvmem.store.layout import STORAGE_DTYPES, Layout
from kvmem.store.operands import Operands
from kvmem.store.tensors import TensorChecks, check_finite, head_vector


def _working(method: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels of a caller: an error of CUDA that lasts becomes ``DeviceUnavailable``."""

    @functools.wraps(method)
    def call(self: CudaCompute, *arguments: Any, **options: Any) -> Any:
        with self._device.working(method.__name__):
            return method(self, *arguments, **options)

    return call


class CudaCompute:
    """The kernels bound to the device arena of one store on a GPU.

    ``check=True`` (debug) refuses NaN in what is written, which waits for the GPU.
    """

    def __init__(
        self,
        layout: Layout,
        arena: CudaArena,
        device: CudaDevice,
        *,
        check: bool,
        k_scale: Scales | None = None,
        v_scale: Scales | None = None,
    ) -> None:
        self._layout, self._device, self._check = layout, device, check
        self._kernels = device.cuda.kernels
        self._tensors = TensorChecks(layout, device.cuda.device)
        shape = (arena.num_frames, layout.frame_elements)
        self._arena = DeviceArray(arena.address, shape, layout.storage_dtype, self._kernels)
        self._bits = STORAGE_DTYPES[layout.compute_name]
        self._common: dict[str, Any] = {
            "dtype": layout.compute_name,
            "kv_dtype": layout.dtype_name,
            "block_size": layout.block_size,
            "num_kv_heads": layout.num_kv_heads,
            "head_dim": layout.head_dim,
            "value_dim": layout.value_dim,
        }
        queue = device.stream(Stream.COMPUTE)
        self._planes = device.uploads.upload(queue, layout.rows())  # for good: never released
        scales = [(n, s) for n, s in (("key", k_scale), ("value", v_scale)) if s is not None]
        self._kept: list[Upload] = []
        #: By layer, for the kernels.
        self._scales: list[dict[str, Any]] = [{} for _ in range(layout.num_layers)]
        for i in range(layout.num_layers if scales else 0):
            upload = device.uploads.upload(queue, [np.array(s[i], np.float32) for _, s in scales])
            self._kept.append(upload)
            named = zip(scales, upload.arrays, strict=True)
            self._scales[i] = {f"{name}_scale": array for (name, _), array in named}

    @_working
    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: NDArray[np.int64],
        on_device: Any = None,
    ) -> None:
        """Store K and V of one layer; see ``Store.write``. Slots that are not there yet are
        uploaded first."""
        from cuda_kernels import write_kv

        key_offset, value_offset = self._tensors.check_layer(layer)
        self._tensors.check_rows(key, value, len(slot_mapping))
        if self._check:
            check_finite("key", key, slot_mapping)
            check_finite("value", value, slot_mapping)
        queue, upload = self._device.stream(Stream.COMPUTE), None
        if on_device is None:
            upload = self._device.uploads.upload(queue, (slot_mapping,))
        slots = on_device.slot_mapping if upload is None else upload.arrays[0]
        with self._device.cuda.here():
            write_kv(
                self._arena,
                self._array(key),
                self._array(value),
                key_offset=key_offset,
                value_offset=value_offset,
                slot_mapping=slots,
                check=False,
                stream=queue.cuda_stream,
                **self._scales[layer],
                **self._common,
            )
        if upload is not None:
            upload.release(queue)

    @_working
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
        on_device: Operands | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the rows of a batch over one layer's paged K/V; see ``Store.attend``."""
        from cuda_kernels import paged_attention

        layout, cuda = self._layout, self._device.cuda
        key_offset, value_offset = self._tensors.check_layer(layer)
        num_heads = self._tensors.check_query(query, int(query_start[-1]))
        shape = (query.shape[0], num_heads, layout.value_dim)
        if out is None:
            out = query.new_empty(shape)
        else:
            self._tensors.check("out", out, shape)
        lse = query.new_empty(shape[:2], dtype=torch.float32) if return_lse else None
        queue, uploads = self._device.stream(Stream.COMPUTE), []
        if on_device is None:
            upload = self._upload_rows(queue, table, table_start, seq_lens, query_start)
            uploads.append(upload)
            flat, *rows = upload.arrays
            on_device = Operands(
                None, flat, rows[0], rows[1], rows[2], int(max(seq_lens, default=0))
            )
        rules: dict[str, Any] = {}
        for name, vector in (("alibi", alibi), ("sinks", sinks)):
            rules[name] = None
            numbers = head_vector(name, vector, num_heads)
            if numbers is not None:
                uploads.append(self._device.uploads.upload(queue, (numbers,)))
                rules[name] = uploads[-1].arrays[0]
        longest = on_device.max_seq_len
        workspace = workspace_for(query, layout.num_kv_heads, layout.value_dim, longest, window)
        with cuda.here():
            paged_attention(
                self._array(out),
                self._array(query),
                self._arena,
                key_offset=key_offset,
                value_offset=value_offset,
                table=on_device.table,
                table_start=on_device.table_start,
                seq_lens=on_device.seq_lens,
                query_start=on_device.query_start,
                scale=scale,
                window=window,
                softcap=softcap,
                lse=None if lse is None else self._array(lse, FLOAT32),
                check=True,  # scale, window and the like come from the user
                stream=queue.cuda_stream,
                max_seq_len=longest,
                workspace=None if workspace is None else self._array(workspace, FLOAT32),
                **rules,
                **self._scales[layer],
                **self._common,
            )
        for upload in uploads:
            upload.release(queue)
        return out if lse is None else (out, lse)

    def copy_on_write(
        self, source: FrameIds, target: FrameIds, tokens: FrameIds
    ) -> Callable[[], None]:
        """The launch that copies the filled slots of whole frames inside the arena (R3)."""

        def run() -> None:
            from cuda_kernels import copy_blocks

            queue = self._device.stream(Stream.COMPUTE)
            upload = self._device.uploads.upload(queue, (source, target, tokens))
            offsets, heads, widths = self._planes.arrays
            copy_blocks(
                self._arena,
                *upload.arrays,
                block_size=self._layout.block_size,
                plane_offset=offsets,
                plane_rows=heads,
                plane_width=widths,
                check=False,
                stream=queue.cuda_stream,
            )
            upload.release(queue)

        return run

    def _upload_rows(
        self,
        queue: Any,
        table: NDArray[np.int32],
        table_start: NDArray[Any],
        seq_lens: NDArray[Any],
        query_start: NDArray[Any],
    ) -> Upload:
        """Rows given as host arrays: the kernels want one dtype for all but the table."""
        starts = (np.ascontiguousarray(a, np.int64) for a in (table_start, seq_lens, query_start))
        return self._device.uploads.upload(queue, (np.ascontiguousarray(table), *starts))

    def _array(self, tensor: torch.Tensor, dtype: np.dtype[Any] | None = None) -> DeviceArray:
        return device_array(tensor, self._bits if dtype is None else dtype, self._kernels)
