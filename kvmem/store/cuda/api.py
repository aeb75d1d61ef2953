"""What is asked of torch.cuda and of CUDA's runtime, for one GPU: the seam where a double goes in.

Tests hand in doubles of both modules (tests/cuda_double); nothing else in this package imports
either. Streams and events are torch's, so that an engine's own streams fit; copies, fills and
page-locking are the runtime's, with raw addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from kvmem.errors import DeviceUnavailable

if TYPE_CHECKING:
    from cuda_kernels.cuda.kernel import Device as KernelDevice

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind


class CudaError(RuntimeError):
    """A call of CUDA's runtime that was refused: ``code`` and its name."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({code})")
        self.code = code


class Cuda:
    """One GPU by its ordinal.

    ``torch_cuda`` is the module torch.cuda, ``runtime`` the module cuda.bindings.runtime,
    ``kernels`` what launches kernels, ``device`` what tensors of this GPU say of themselves.
    ``empty(num_bytes, pinned)`` makes a uint8 tensor, on the GPU or in small page-locked memory.
    """

    def __init__(
        self,
        ordinal: int,
        *,
        torch_cuda: Any,
        runtime: Any,
        kernels: KernelDevice,
        device: torch.device,
        empty: Callable[[int, bool], torch.Tensor],
    ) -> None:
        self.ordinal = ordinal
        self.torch, self.runtime = torch_cuda, runtime
        self.kernels, self.device, self.empty = kernels, device, empty

    # --- the runtime ----------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the runtime. Returns what it returns behind the error code: nothing, one, or a
        tuple. Raises CudaError, with the runtime's memory of the error cleared."""
        code, *results = getattr(self.runtime, name)(*arguments)
        if int(code):
            self.runtime.cudaGetLastError()
            raise CudaError(name, int(code), getattr(code, "name", "error"))
        if len(results) < 2:
            return results[0] if results else None
        return tuple(results)

    def copy_async(
        self, target: int, source: int, num_bytes: int, direction: int, queue: Any
    ) -> None:
        """Queue one copy on a torch stream; ``direction`` is one of the two above. Raises
        CudaError."""
        kind = self.runtime.cudaMemcpyKind(direction)
        with self.here():
            self.call("cudaMemcpyAsync", target, source, num_bytes, kind, queue.cuda_stream)

    def is_lost(self, handle: int) -> bool:
        """Whether an error lasts: the stream does not even answer (the context is gone)."""
        success, not_ready = 0, 600
        (code,) = self.runtime.cudaStreamQuery(handle)
        self.runtime.cudaGetLastError()  # "not ready" would be the next launch's error else
        return int(code) not in (success, not_ready)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on this GPU."""
        return tensor.device == self.device

    # --- torch's streams ------------------------------------------------------------------------

    def here(self) -> AbstractContextManager[Any]:
        """This GPU as the current one, the caller's restored at the end."""
        context: AbstractContextManager[Any] = self.torch.device(self.ordinal)
        return context

    def current_stream(self) -> Any:
        """The stream that torch's work of this thread goes to."""
        return self.torch.current_stream(self.ordinal)

    def new_stream(self) -> Any:
        """A stream whose work is preferred where both could run: copies, next to compute."""
        return self.torch.Stream(device=self.ordinal, priority=-1)

    def empty_on(self, queue: Any, num_bytes: int) -> torch.Tensor:
        """Memory of the GPU for the work of a torch stream: what torch hands out may still be in
        use by its last owner, on the stream that it is allocated on, and on no other."""
        with self.torch.stream(queue):
            return self.empty(num_bytes, False)

    def new_event(self, *, timing: bool = False) -> Any:
        """An event, not recorded. Its first record fixes the GPU."""
        return self.torch.Event(enable_timing=timing)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return bool(self.torch.is_current_stream_capturing())

    def refuse_capture(self) -> None:
        """Raise RuntimeError while the current stream is captured."""
        if self.is_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and a plain step's arrays would be baked into it; "
                "plan the step with Manager.step(seqs, into=buffers), buffers from "
                "Manager.graph_buffers"
            )


def open_cuda(name: str) -> Cuda:
    """The GPU of a device name, "cuda" (torch's current one) or "cuda:1".

    Raises DeviceUnavailable where torch has no CUDA, or no such GPU, and says what to install.
    """
    if torch.version.cuda is None:
        raise DeviceUnavailable(
            f"device={name!r} needs a torch with CUDA; torch {torch.__version__} has none: install "
            "a CUDA build of torch, or use device='cpu'"
        )
    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            f"device={name!r}: torch finds no usable GPU (no driver, none visible, or a driver too "
            "old for its CUDA); `kvmem doctor` says more"
        )
    _, _, number = name.partition(":")
    ordinal = int(number) if number else torch.cuda.current_device()
    count = torch.cuda.device_count()
    if ordinal >= count:
        raise DeviceUnavailable(f"device={name!r} does not exist; allowed: cuda:0 to {count - 1}")
    from cuda_kernels.cuda.compile import require_distribution
    from cuda_kernels.cuda.launch import GpuDevice

    require_distribution("cuda-bindings")
    from cuda.bindings import runtime

    device = torch.device("cuda", ordinal)

    def empty(num_bytes: int, pinned: bool) -> torch.Tensor:
        if pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    with torch.cuda.device(ordinal):
        kernels = GpuDevice(ordinal)
    return Cuda(
        ordinal,
        torch_cuda=torch.cuda,
        runtime=runtime,
        kernels=kernels,
        device=device,
        empty=empty,
    )
