"""A device for the public functions of cuda_kernels that interprets what a GPU would be given.

It compiles a launch's kernel as `GpuDevice` does (same source, same compiler, same cache file), and
runs the PTX in that file on buffers at made-up addresses.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.compile import Compiled, MissingLibrary, compile_for_each, require_library
from cuda_kernels.cuda.kernel import KernelSource, Launch
from tests.ptx.machine import Buffer, Counts, Kernel
from tools.kernel_table import CAPABILITIES

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "cuda"
_FIRST = 0x7F1000000000
_STRIDE = 1 << 33  # from buffer to buffer: an address that is off by much hits nothing


def missing() -> str:
    """Why kernels can't be compiled here; empty if they can."""
    try:
        for name in ("numba-cuda", "cuda-core"):
            importlib.metadata.version(name)
        for library in ("nvrtc", "nvvm", "nvJitLink"):
            require_library(library)
    except (importlib.metadata.PackageNotFoundError, MissingLibrary) as error:
        return f"CUDA kernels can't be compiled: {error}"
    return ""


needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing() or "present")


class InterpretedDevice:
    """Launches run at once, in the interpreter; ``launched`` keeps what was."""

    #: What a kernel is compiled for at once: the tests want it for all of these before long.
    together: ClassVar[tuple[tuple[int, int], ...]] = CAPABILITIES

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.buffers: list[Buffer] = []
        self.kernels: dict[KernelSource, tuple[Compiled, Kernel]] = {}
        self.launched: list[tuple[Launch, Counts]] = []

    def array(
        self,
        values: NDArray[Any],
        *,
        writable: bool = False,
        initialised: bool = True,
        misaligned: int = 0,
    ) -> DeviceArray:
        """Map an array's memory; a launch changes it in place if it is writable.

        Strided arrays are mapped with the array they are a view of.
        """
        whole = values
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        assert whole.flags.c_contiguous
        address = _FIRST + len(self.buffers) * _STRIDE + misaligned
        known = None if initialised else np.zeros(whole.nbytes, np.bool_)
        self.buffers.append(
            Buffer(f"buffer {len(self.buffers)}", address, whole, writable, initialised, known)
        )
        shift = values.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        shift = shift if values.size else 0
        return DeviceArray(address + shift, values.shape, values.dtype, self, values.strides)

    def compiled(self, source: KernelSource) -> tuple[Compiled, Kernel]:
        """The kernel as a GPU would get it, and decoded."""
        if source not in self.kernels:
            wanted = {self.capability, *self.together}
            found = compile_for_each(source, sorted(wanted), CACHE)
            made = found[sorted(wanted).index(self.capability)]
            self.kernels[source] = made, Kernel(made.ptx.decode())
        return self.kernels[source]

    def launch(self, launch: Launch, stream: int) -> None:
        """Run a launch to its end."""
        _, kernel = self.compiled(launch.source)
        threads = (launch.source.threads, 1, 1)
        counts = kernel.run(launch.grid, threads, launch.arguments, self.buffers)
        self.launched.append((launch, counts))

    def clear(self) -> None:
        """Forget all buffers, keep the kernels."""
        self.buffers.clear()
        self.launched.clear()
