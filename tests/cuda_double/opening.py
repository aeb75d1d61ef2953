"""Putting the double where a Manager looks for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvmem.store.cuda import api
from kvmem.store.cuda.api import Cuda
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.device import Stream
from tests.cuda_double.kernels import KernelDevice, double_kernels
from tests.cuda_double.memory import Memory, cells
from tests.cuda_double.runtime import Runtime
from tests.cuda_double.streams import Streams
from tests.cuda_double.torch_cuda import TorchCuda

MODES = ("eager", "late", "random")
ORDINAL = 3  # not the current GPU: every call has to go there by itself


@dataclass
class Double:
    """One GPU that isn't there."""

    streams: Streams
    memory: Memory
    torch: TorchCuda
    runtime: Runtime
    cuda: Cuda

    @classmethod
    def new(cls, seed: int, mode: str = "random", capacity: int = 1 << 40) -> Double:
        """A GPU with so many bytes."""
        memory = Memory(capacity)
        streams = Streams(seed, mode, cells)
        torch_cuda = TorchCuda(streams, memory, ORDINAL)
        runtime = Runtime(streams, memory, torch_cuda)

        def empty(num_bytes: int, pinned: bool) -> torch.Tensor:
            made = memory.empty(num_bytes, pinned)
            streams.forget(made.data_ptr(), num_bytes)
            return made

        kernels: Any = KernelDevice(streams)
        cuda = Cuda(
            ORDINAL,
            torch_cuda=torch_cuda,
            runtime=runtime,
            kernels=kernels,
            device=torch.device("cpu"),
            empty=empty,
        )
        return cls(streams, memory, torch_cuda, runtime, cuda)

    def device(self, *, sync: bool = False) -> HeldDevice:
        """A new device of this GPU."""
        return HeldDevice(self.cuda, sync=sync)


class HeldDevice(CudaDevice):
    """A CudaDevice whose copy streams a test can stop."""

    @property
    def _queues(self) -> Streams:
        runtime: Any = self.cuda.runtime
        streams: Streams = runtime._streams
        return streams

    def hold(self, stream: Stream) -> None:
        """Keep a stream from starting its next entry."""
        self._queues.held.add(self.stream(stream).cuda_stream)

    def release(self, stream: Stream) -> None:
        """Let it go on."""
        self._queues.held.discard(self.stream(stream).cuda_stream)


def install(monkeypatch: pytest.MonkeyPatch, seed: int, mode: str) -> list[Double]:
    """Each Manager on "cuda" gets a double of its own from here on; they are listed."""
    made: list[Double] = []

    def open_double(name: str) -> Cuda:
        made.append(Double.new(seed + len(made), mode))
        return made[-1].cuda

    monkeypatch.setattr(api, "open_cuda", open_double)
    monkeypatch.setattr("kvmem.store.cuda.device.CudaDevice", HeldDevice)
    double_kernels(monkeypatch)
    return made
