"""The ways of a transfer between the tiers.

    copies   one cudaMemcpyAsync for each run of frames that follow each other in both arenas
    batch    one cudaMemcpyBatchAsync for all runs
    staged   a kernel gathers the frames side by side in a buffer of the GPU (or scatters them from
             there), and one copy goes for each run of frames that follow each other on the host

A copy engine is fastest on long runs; a call for each of many short ones costs more than the bytes.
Which way is taken is measured (`cost_model.py`), never assumed. No copy spans two registrations of
page-locked memory (`Pinned.split`).
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cuda_kernels.cuda.array import DeviceArray
from kvmem.store.cuda.api import DEVICE_TO_HOST, HOST_TO_DEVICE, Cuda, CudaError
from kvmem.store.cuda.arena import keep_for_good
from kvmem.store.cuda.cost_figures import WAYS, Direction, Way
from kvmem.store.cuda.cost_model import CostModel
from kvmem.store.cuda.pinning import Pinned
from kvmem.store.cuda.uploads import Uploads
from kvmem.store.device import FrameIds, Memory, Stream, num_runs, run_starts

#: Bytes of the buffer that frames are gathered in, one for each direction that needs it.
STAGING_BYTES = 16 << 20
#: cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported.
TOO_OLD = (36, 801)
_BYTES = np.dtype(np.uint8)


class Sides(NamedTuple):
    """A transfer by where its frames lie, whatever its direction."""

    gpu: Memory
    gpu_ids: FrameIds
    host: Memory
    host_ids: FrameIds

    def by_host(self) -> Sides:
        """The same pairs, so that those that follow each other on the host stand together."""
        order = np.argsort(self.host_ids, kind="stable")
        return self._replace(gpu_ids=self.gpu_ids[order], host_ids=self.host_ids[order])


class Copies:
    """Queues the transfers of one GPU. Thread-safe.

    ``model`` chooses the way (None: copies), ``host`` says what of the host arena, which starts at
    ``host_address``, is page-locked.
    """

    def __init__(self, cuda: Cuda, uploads: Uploads) -> None:
        self._cuda, self._uploads = cuda, uploads
        self._lock = threading.Lock()  # the pieces of one transfer stay together
        self.model: CostModel | None = None
        self._pinned: Pinned | None = None
        self._host_address = 0
        self._attributes: Any = None
        self._staging: dict[Direction, torch.Tensor] = {}  # tensors, each used on one stream only
        self.num_chosen: dict[Way, int] = dict.fromkeys(WAYS, 0)  # transfers, for `stats`

    def serve(self, pinned: Pinned, address: int) -> None:
        """Copies go from and to this host memory from now on."""
        self._pinned, self._host_address = pinned, address

    @property
    def locked_bytes(self) -> int:
        """What of the host memory is page-locked."""
        return self._pinned.num_bytes if self._pinned is not None else 0

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
        of ``stream``. Raises CudaError. O(pairs), a call for each run at most."""
        if not len(target_ids):
            return
        direction: Direction = "out" if stream is Stream.OUT else "in"
        if direction == "out":
            sides = Sides(source, source_ids, target, target_ids)
        else:
            sides = Sides(target, target_ids, source, source_ids)
        with self._lock:
            way = self._choose(direction, sides)
            if way == "staged" and not self._has_buffer(direction, queue):
                way = "copies"  # slower, and needs no memory
            self.num_chosen[way] += 1
            self.go(way, direction, queue, sides)

    def go(self, way: Way, direction: Direction, queue: Any, sides: Sides) -> None:
        """Queue a transfer by one way. Raises CudaError, NotImplementedError."""
        if way == "staged":
            self._stage(direction, queue, sides)
        elif way == "batch":
            self._batch(direction, queue.cuda_stream, self._runs(sides))
        else:
            self._copy_each(direction, queue.cuda_stream, self._runs(sides))

    def _choose(self, direction: Direction, sides: Sides) -> Way:
        size = sides.gpu.frame_bytes
        found_runs = num_runs(sides.gpu_ids, sides.host_ids)
        if self.model is None or found_runs == 1:
            return "copies"
        host_runs = found_runs
        if size <= STAGING_BYTES:
            ordered = np.sort(sides.host_ids)
            host_runs = min(found_runs, num_runs(ordered, ordered))
        num_bytes = len(sides.gpu_ids) * size
        return self.model.choose(direction, found_runs, num_bytes, num_host_runs=host_runs)

    def _runs(self, sides: Sides) -> tuple[list[int], list[int], list[int]]:
        """Addresses on the GPU, on the host, and bytes, of the pieces that one copy can be."""
        size = sides.gpu.frame_bytes
        first = run_starts(sides.gpu_ids, sides.host_ids)
        sizes = np.diff(np.append(first, len(sides.gpu_ids))) * size
        gpu = sides.gpu.address + sides.gpu_ids[first].astype(np.int64) * size
        host = sides.host.address + sides.host_ids[first].astype(np.int64) * size
        if self._pinned is not None and len(self._pinned.cuts):
            offsets = host - self._host_address
            run, starts, sizes = self._pinned.split(offsets, sizes)
            gpu, host = gpu[run] + starts - offsets[run], self._host_address + starts
        return gpu.tolist(), host.tolist(), sizes.tolist()

    def _copy_each(
        self, direction: Direction, handle: int, runs: tuple[list[int], list[int], list[int]]
    ) -> None:
        number = DEVICE_TO_HOST if direction == "out" else HOST_TO_DEVICE
        kind = self._cuda.runtime.cudaMemcpyKind(number)
        for gpu, host, size in zip(*runs, strict=True):
            target, source = (host, gpu) if direction == "out" else (gpu, host)
            self._cuda.call("cudaMemcpyAsync", target, source, size, kind, handle)

    def _batch(
        self, direction: Direction, handle: int, runs: tuple[list[int], list[int], list[int]]
    ) -> None:
        runtime = self._cuda.runtime
        if not hasattr(runtime, "cudaMemcpyBatchAsync"):
            raise NotImplementedError("no cudaMemcpyBatchAsync before CUDA 12.8")
        if self._attributes is None:
            attributes = runtime.cudaMemcpyAttributes()
            order = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            attributes.srcAccessOrder = order
            self._attributes = attributes
        gpu, host, sizes = runs
        targets, sources = (host, gpu) if direction == "out" else (gpu, host)
        try:
            self._cuda.call(
                "cudaMemcpyBatchAsync", targets, sources, sizes, len(sizes),
                [self._attributes], [0], 1, handle,
            )  # fmt: skip
        except CudaError as error:
            if error.code not in TOO_OLD:
                raise
            raise NotImplementedError("the driver has no cudaMemcpyBatchAsync") from error

    def _stage(self, direction: Direction, queue: Any, sides: Sides) -> None:
        """Buffer by buffer: the next one overwrites the last, in the order of the stream."""
        from cuda_kernels import gather_frames, scatter_frames

        sides, size = sides.by_host(), sides.gpu.frame_bytes
        staging, handle = self._buffer(direction, queue).data_ptr(), queue.cuda_stream
        frames = self._rows(sides.gpu.address, sides.gpu.num_frames, size)
        step = max(1, STAGING_BYTES // size)
        for begin in range(0, len(sides.gpu_ids), step):
            part = slice(begin, begin + step)
            count = len(sides.gpu_ids[part])
            rows = self._rows(staging, count, size)
            buffer = _Buffer(staging, count, size)
            numbers = np.arange(count, dtype=np.int32)
            runs = self._runs(Sides(buffer, numbers, sides.host, sides.host_ids[part]))
            upload = self._uploads.upload(queue, (sides.gpu_ids[part],))
            try:
                if direction == "out":
                    gather_frames(rows, frames, upload.arrays[0], check=False, stream=handle)
                    self._copy_each(direction, handle, runs)
                else:
                    self._copy_each(direction, handle, runs)
                    scatter_frames(frames, upload.arrays[0], rows, check=False, stream=handle)
            finally:
                upload.release(queue)

    def _buffer(self, direction: Direction, queue: Any) -> torch.Tensor:
        """The buffer of a direction. Raises MemoryError, RuntimeError at the first call."""
        if direction not in self._staging:
            self._staging[direction] = self._cuda.empty_on(queue, STAGING_BYTES)
        return self._staging[direction]

    def _has_buffer(self, direction: Direction, queue: Any) -> bool:
        """Whether there is one: the GPU may have no memory left for it."""
        try:
            self._buffer(direction, queue)
        except (MemoryError, RuntimeError):
            return False
        return True

    def _rows(self, address: int, count: int, size: int) -> DeviceArray:
        """Frames as the kernels see them."""
        return DeviceArray(address, (count, size), _BYTES, self._cuda.kernels)

    def close(self) -> None:
        """Drop the buffers; the streams are idle."""
        self._staging.clear()

    def abandon(self) -> None:
        """The streams are not idle: the buffers stay for good."""
        keep_for_good(*self._staging.values())


class _Buffer:
    """A staging buffer, as a copy takes it."""

    name, num_pieces = "staging", 1

    def __init__(self, address: int, num_frames: int, frame_bytes: int) -> None:
        self.address, self.num_frames, self.frame_bytes = address, num_frames, frame_bytes

    @property
    def bytes(self) -> NDArray[np.uint8]:
        raise TypeError("a staging buffer lies on the GPU")
