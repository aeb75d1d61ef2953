"""Times the ways of a transfer on the GPU at hand, for the cost model."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from kvmem.store.arena import Arena
from kvmem.store.cuda.api import Cuda
from kvmem.store.cuda.arena import CudaArena
from kvmem.store.cuda.copies import Copies, Sides
from kvmem.store.cuda.cost_figures import Direction, Key, Way
from kvmem.store.cuda.cost_model import MEASURED_BYTES, CostModel, open_model
from kvmem.store.cuda.pinning import pin
from kvmem.store.device import Stream


class Bench:
    """Memory of both tiers to copy between, for as long as the measurement takes.

    Runs lie apart on the GPU and side by side on the host.
    """

    def __init__(self, cuda: Cuda, copies: Copies, streams: dict[Stream, Any]) -> None:
        self._copies = copies
        self._queues: dict[Direction, Any] = {"out": streams[Stream.OUT], "in": streams[Stream.IN]}
        self._gpu = CudaArena(cuda, "measured device", 1, 2 * MEASURED_BYTES)
        self._host = Arena("measured host", 1, MEASURED_BYTES)
        self._pinned = pin(cuda.runtime, self._host.bytes)

    def time_copy(self, way: Way, direction: Direction, run_bytes: int, num_runs: int) -> float:
        """Seconds from the start of submitting to the end of the copy. Raises CudaError, and
        NotImplementedError for a way that is not there."""
        apart = np.arange(num_runs, dtype=np.int32)
        gpu = self._gpu.pieces(2 * MEASURED_BYTES // run_bytes)
        host = self._host.pieces(MEASURED_BYTES // run_bytes)
        sides = Sides(gpu, 2 * apart, host, apart)
        queue = self._queues[direction]
        queue.synchronize()
        begin = time.perf_counter()
        self._copies.go(way, direction, queue, sides)
        queue.synchronize()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Give the memory back; where a copy was refused, others of its transfer are under way."""
        for queue in self._queues.values():
            with contextlib.suppress(RuntimeError):  # the GPU is lost: nothing runs there
                queue.synchronize()
        self._pinned.unpin()
        self._host.close()
        self._gpu.close()


def measured_model(cuda: Cuda, copies: Copies, streams: dict[Stream, Any]) -> CostModel:
    """The cost model of a GPU, from the cache or measured now (half a second at most).

    Raises what a copy raises that is no refusal of a way.
    """
    opened: list[Bench] = []

    def time_copy(way: Way, direction: Direction, run_bytes: int, num_runs: int) -> float:
        if not opened:
            opened.append(Bench(cuda, copies, streams))
        return opened[0].time_copy(way, direction, run_bytes, num_runs)

    with cuda.here():
        try:
            return open_model(_key(cuda), time_copy)
        finally:
            for bench in opened:
                bench.close()


def _key(cuda: Cuda) -> Key:
    """What figures are good for: this card with this driver and runtime."""
    facts = cuda.torch.get_device_properties(cuda.ordinal)
    return Key(
        device=str(facts.name),
        uuid=str(getattr(facts, "uuid", "")),
        driver=str(cuda.call("cudaDriverGetVersion")),
        runtime=str(cuda.call("cudaRuntimeGetVersion")),
    )
