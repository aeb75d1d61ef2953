"""The double of the module cuda.bindings.runtime: copies, fills, page-locking, errors.

Each function returns a tuple that starts with an error code, as the real ones do. ``fail(name, n,
error)`` makes the n-th call of a name fail.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from tests.cuda_double.faults import Error, Faults
from tests.cuda_double.memory import Memory, bytes_at
from tests.cuda_double.streams import Streams
from tests.store.cuda.fake_cudart import is_mapped

Returned = tuple[Any, ...]


class Runtime:
    """CUDA's runtime over the double's memory and streams."""

    cudaError_t = Error
    cudaHostRegisterPortable = 1
    cudaHostRegisterDefault = 0

    def __init__(self, streams: Streams, memory: Memory, torch_cuda: Any, faults: Faults) -> None:
        self._streams, self._memory, self._torch = streams, memory, torch_cuda
        self.faults, self.calls = faults, faults.calls

    # --- faults ---------------------------------------------------------------------------------

    def fail(self, name: str, nth: int, error: Error) -> None:
        """Let the nth call of a function from now on (the next is 1) fail."""
        self.faults.fail(name, nth, error)

    def _begin(self, name: str) -> Error:
        needs_context = name != "cudaHostUnregister"  # portable: any context will do
        here = self._torch.current_device() == self._torch.ordinal
        if needs_context and not here:
            self._streams.found.append(f"{name} on another GPU")
        assert here or not needs_context, f"{name} on another GPU"
        if "Async" in name:
            self._torch.not_captured(name)
        error = self.faults.begin(name)
        if self.faults.lost and not self._streams.dead:
            self._streams.die()
        return error

    def cudaGetLastError(self) -> Returned:
        faults = self.faults
        found, faults.last_error = faults.last_error, faults.lost or Error.cudaSuccess
        return (found,)

    def cudaStreamQuery(self, handle: int) -> Returned:
        """ "Not ready" is remembered as an error is, and would be told by the next launch."""
        if self.faults.lost:
            return (self.faults.lost,)
        if not self._streams.queues[handle]:
            return (Error.cudaSuccess,)
        self.faults.last_error = Error.cudaErrorNotReady
        return (Error.cudaErrorNotReady,)

    # --- copies ---------------------------------------------------------------------------------

    @staticmethod
    def cudaMemcpyKind(kind: int) -> int:
        return kind

    class cudaMemcpySrcAccessOrder(enum.IntEnum):
        cudaMemcpySrcAccessOrderStream = 1

    class cudaMemcpyAttributes:
        srcAccessOrder = 0

    def cudaMemcpyAsync(
        self, target: int, source: int, count: int, kind: int, handle: int
    ) -> Returned:
        error = self._begin("cudaMemcpyAsync")
        if not error:
            self._copy(target, source, count, kind, handle)
        return (error,)

    def cudaMemcpyBatchAsync(
        self,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        count: int,
        attributes: list[Any],
        first: list[int],
        num_attributes: int,
        handle: int,
    ) -> Returned:
        error = self._begin("cudaMemcpyBatchAsync")
        assert len(targets) == len(sources) == len(sizes) == count > 0
        assert [a.srcAccessOrder for a in attributes] == [1] and (first, num_attributes) == ([0], 1)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            if not error:
                on_gpu = self._memory.region(target)
                to_gpu = on_gpu is not None and not on_gpu.pinned
                self._copy(target, source, size, 1 if to_gpu else 2, handle)
        return (error,)

    def _copy(self, target: int, source: int, count: int, kind: int, handle: int) -> None:
        """A copy runs whole, late; from pageable memory it has read its source when it returns."""
        assert count > 0
        on_gpu, on_host = (target, source) if kind == 1 else (source, target)
        locked = self._memory.is_locked(on_host, count)
        region = self._memory.region(on_host)
        assert region is None or region.pinned, "a copy between host and device inside the GPU"

        def run() -> None:
            self._memory.check_device(on_gpu, count, "copy")
            if locked:
                assert self._memory.is_locked(on_host, count), "page-locked memory was unlocked"
            if given is not None:
                same = np.array_equal(given, bytes_at(source, count))
                assert same, "the host wrote page-locked memory that a copy had yet to read"
            bytes_at(target, count)[:] = bytes_at(source, count)

        def spans() -> Any:
            return [(source, count)], [(target, count)]

        given = None
        if region is not None and kind == 1:
            given = bytes_at(source, count).copy()

        way = "to the GPU" if kind == 1 else "from the GPU"
        self._streams.work(handle, f"copy of {count} bytes {way}", run, spans)
        if not locked:
            self._streams.settle(handle)

    def cudaMemcpy(self, target: int, source: int, count: int, kind: int) -> Returned:
        error = self._begin("cudaMemcpy")
        if not error:
            self._memory.check_device(target if kind == 1 else source, count, "cudaMemcpy")
            self._streams.touch_host("cudaMemcpy", [(source, count)], [(target, count)])
            bytes_at(target, count)[:] = bytes_at(source, count)
        return (error,)

    def cudaMemsetAsync(self, target: int, value: int, count: int, handle: int) -> Returned:
        error = self._begin("cudaMemsetAsync")
        if error:
            return (error,)
        assert 0 <= value <= 255 and count > 0

        def run() -> None:
            self._memory.check_device(target, count, "memset")
            bytes_at(target, count)[:] = value

        self._streams.work(handle, "memset", run, lambda: ([], [(target, count)]))
        return (error,)

    # --- page-locking ---------------------------------------------------------------------------

    def cudaHostRegister(self, address: int, count: int, flags: int) -> Returned:
        error = self._begin("cudaHostRegister")
        for other, size in self._memory.registered.items():
            if not error and address < other + size and other < address + count:
                error = self.faults.last_error = Error.cudaErrorHostMemoryAlreadyRegistered
        if not error:
            self._memory.registered[address] = count
            self._memory.history.append(("registered", address, count))
        return (error,)

    def cudaHostUnregister(self, address: int) -> Returned:
        error = self._begin("cudaHostUnregister")
        if not error and address not in self._memory.registered:
            error = self.faults.last_error = Error.cudaErrorHostMemoryNotRegistered
        if not error:
            mapped = is_mapped(address, self._memory.registered[address])
            assert mapped, "unmapped while it was page-locked"
            count = self._memory.registered.pop(address)
            self._memory.history.append(("unregistered", address, count))
        return (error,)

    def cudaDeviceGetPCIBusId(self, length: int, device: int) -> Returned:
        assert (length, device) == (32, self._torch.ordinal)
        return (Error.cudaSuccess, b"0000:65:00.0")

    def cudaRuntimeGetVersion(self) -> Returned:
        return (Error.cudaSuccess, 13000)

    def cudaDriverGetVersion(self) -> Returned:
        return (Error.cudaSuccess, 13000)
