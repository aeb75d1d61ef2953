"""Putting the double where a Manager looks for a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvmem.store.cpu import CopyHook
from kvmem.store.cuda import api
from kvmem.store.cuda.api import Cuda
from kvmem.store.cuda.cost_figures import DIRECTIONS, Costs, Figures
from kvmem.store.cuda.cost_model import CostModel
from kvmem.store.cuda.device import CudaDevice
from kvmem.store.device import Stream
from tests.cuda_double.faults import Faults
from tests.cuda_double.kernels import KernelDevice, double_kernels
from tests.cuda_double.memory import Memory, cells
from tests.cuda_double.runtime import Runtime
from tests.cuda_double.streams import Streams
from tests.cuda_double.torch_cuda import TorchCuda

MODES = ("eager", "late", "random")
ORDINAL = 3  # not the current GPU: every call has to go there by itself


#: Seconds: a batch beats copies from four runs on, and gathering a batch from seven.
FIGURES: Figures = {
    (way, direction): Costs(per_call, per_run, 1e-11, 0.0)
    for way, per_call, per_run in (("copies", 0, 2e-6), ("batch", 3e-6, 1e-6), ("staged", 9e-6, 0))
    for direction in DIRECTIONS
}


@dataclass
class Double:
    """One GPU that isn't there."""

    streams: Streams
    memory: Memory
    torch: TorchCuda
    runtime: Runtime
    cuda: Cuda
    #: Whether tensors count as the GPU's: the double's, and torch's own, lie on the CPU.
    owns_tensors: bool = False

    @classmethod
    def new(cls, seed: int, mode: str = "random", capacity: int = 1 << 40) -> Double:
        """A GPU with so many bytes."""
        memory, faults = Memory(capacity), Faults()
        streams = Streams(seed, mode, cells)
        streams.origin, streams.bounds = memory.origin, memory.check_bounds
        torch_cuda = TorchCuda(streams, memory, ORDINAL, faults)
        runtime = Runtime(streams, memory, torch_cuda, faults)

        def empty(num_bytes: int, pinned: bool) -> torch.Tensor:
            torch_cuda.begin("pinned memory" if pinned else "memory")
            handle = torch_cuda.current_stream(ORDINAL).cuda_stream
            origin = None if pinned else streams.last_owner(handle)
            made = memory.empty(num_bytes, pinned, origin)
            streams.forget(made.data_ptr(), num_bytes)
            return made

        kernels: Any = KernelDevice(streams, torch_cuda)
        cuda = Cuda(
            ORDINAL,
            torch_cuda=torch_cuda,
            runtime=runtime,
            kernels=kernels,
            device=torch.device("cpu"),
            empty=empty,
        )
        made = cls(streams, memory, torch_cuda, runtime, cuda)
        cuda.owns = lambda tensor: made.owns_tensors  # type: ignore[method-assign]
        return made

    def check(self) -> None:
        """Run what is left, and raise for all that was wrong up to now."""
        for handle in list(self.streams.queues):
            self.streams.let_go(handle)
        for handle in list(self.streams.queues):
            self.streams.settle(handle)
        assert not self.streams.found, self.streams.found[:3]
        faults = self.runtime.faults
        assert faults.lost or not faults.last_error, "an error that the next launch would tell"

    def device(self, *, sync: bool = False) -> HeldDevice:
        """A new device of this GPU."""
        return HeldDevice(self.cuda, sync=sync)


class HeldDevice(CudaDevice):
    """A CudaDevice for tests, as the CPU's: ``hold`` and ``release`` stop and start a copy stream;
    ``hook`` is called before each copy and may raise."""

    def __init__(self, cuda: Cuda, **options: Any) -> None:
        super().__init__(cuda, **options)
        runtime: Any = cuda.runtime
        self.streams: Streams = runtime._streams
        self.hook: CopyHook | None = None
        self._copy = self.copies.copy
        self.copies.copy = self._copy_hooked  # type: ignore[method-assign]

    def _copy_hooked(
        self, stream: Stream, queue: Any, target: Any, to: Any, source: Any, origin: Any
    ) -> None:
        if self.hook is not None:
            self.hook(stream, to, origin)
        self._copy(stream, queue, target, to, source, origin)

    def measure(self) -> CostModel:
        """No clock tells anything here: figures in which each way wins somewhere."""
        return CostModel(FIGURES, "made up")

    def hold(self, stream: Stream) -> None:
        """Keep a stream from starting its next entry."""
        self.streams.hold(self.stream(stream).cuda_stream)

    def release(self, stream: Stream) -> None:
        """Let it go on."""
        self.streams.let_go(self.stream(stream).cuda_stream)


def install(monkeypatch: pytest.MonkeyPatch, seed: int, mode: str) -> list[Double]:
    """Each Manager on "cuda" gets a double of its own from here on; they are listed."""
    made: list[Double] = []
    numbers = itertools.count(seed)

    def open_double(name: str) -> Cuda:
        made.append(Double.new(next(numbers), mode))
        return made[-1].cuda

    monkeypatch.setattr(api, "open_cuda", open_double)
    monkeypatch.setattr("kvmem.store.cuda.device.CudaDevice", HeldDevice)
    double_kernels(monkeypatch)
    return made
