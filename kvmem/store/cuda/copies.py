"""The ways of a transfer between the tiers, and which one goes which way.

    copies   one cudaMemcpyAsync for each run of frames that follow each other in both arenas
    batch    one cudaMemcpyBatchAsync for all runs of a transfer
    kernel   `move_frames`: threads of the GPU read and write the page-locked memory themselves

A copy engine is fastest on long runs; a call for each of many short ones costs more than the bytes.
Which way is taken is measured (`cost_model.py`), never assumed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvmem.store.cuda.api import DEVICE_TO_HOST, HOST_TO_DEVICE, Cuda
from kvmem.store.cuda.uploads import Uploads
from kvmem.store.device import FrameIds, Memory, Stream

WAYS = ("copies", "batch", "kernel")


class Runs(NamedTuple):
    """Contiguous pieces of a transfer: addresses and sizes in bytes, as lists of int."""

    targets: list[int]
    sources: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, target: Memory, target_ids: FrameIds, source: Memory, source_ids: FrameIds) -> Runs:
        """Join pairs that follow each other in both memories. O(pairs)."""
        size = target.frame_bytes
        first = np.ones(len(target_ids), np.bool_)
        first[1:] = (np.diff(target_ids) != 1) | (np.diff(source_ids) != 1)
        starts = np.flatnonzero(first)
        lengths = np.diff(np.append(starts, len(target_ids)))
        return cls(
            (target.address + target_ids[starts].astype(np.int64) * size).tolist(),
            (source.address + source_ids[starts].astype(np.int64) * size).tolist(),
            (lengths * size).tolist(),
        )


class Copies:
    """Queues transfers of one GPU, by the way that is chosen for each."""

    def __init__(self, cuda: Cuda, uploads: Uploads) -> None:
        self._cuda, self._uploads = cuda, uploads
        self._attributes: Any = None
        self.way = "copies"

    def copy(
        self,
        stream: Stream,
        queue: Any,
        target: Memory,
        target_ids: FrameIds,
        source: Memory,
        source_ids: FrameIds,
    ) -> None:
        """Queue ``source[source_ids[i]] -> target[target_ids[i]]`` on ``queue``, the torch stream
        of ``stream``. Raises CudaError."""
        if not len(target_ids):
            return
        if self.way == "kernel":
            self._by_kernel(queue, target, target_ids, source, source_ids)
            return
        runs = Runs.of(target, target_ids, source, source_ids)
        if self.way == "batch":
            self._by_batch(queue.cuda_stream, runs)
        else:
            self._by_copies(stream, queue.cuda_stream, runs)

    def _by_copies(self, stream: Stream, handle: int, runs: Runs) -> None:
        kind: Any = DEVICE_TO_HOST if stream is Stream.OUT else HOST_TO_DEVICE
        kind = self._cuda.runtime.cudaMemcpyKind(kind)
        for target, source, size in zip(*runs, strict=True):
            self._cuda.call("cudaMemcpyAsync", target, source, size, kind, handle)

    def _by_batch(self, handle: int, runs: Runs) -> None:
        runtime = self._cuda.runtime
        if self._attributes is None:
            self._attributes = runtime.cudaMemcpyAttributes()
            order = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            self._attributes.srcAccessOrder = order
        count = len(runs.sizes)
        self._cuda.call(
            "cudaMemcpyBatchAsync", runs.targets, runs.sources, runs.sizes, count,
            [self._attributes], [0], 1, handle,
        )  # fmt: skip

    def _by_kernel(
        self,
        queue: Any,
        target: Memory,
        target_ids: FrameIds,
        source: Memory,
        source_ids: FrameIds,
    ) -> None:
        from cuda_kernels import move_frames

        upload = self._uploads.upload(queue, (target_ids, source_ids))
        move_frames(
            self._rows(target), upload.arrays[0], self._rows(source), upload.arrays[1],
            check=False, stream=queue.cuda_stream,
        )  # fmt: skip
        upload.release(queue)

    def _rows(self, memory: Memory) -> Any:
        """An arena, or the pieces of one, as the kernels see it."""
        from cuda_kernels.cuda.array import DeviceArray

        shape = (memory.num_frames, memory.frame_bytes)
        return DeviceArray(memory.address, shape, np.dtype(np.uint8), self._cuda.kernels)
