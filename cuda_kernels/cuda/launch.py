"""Launching kernels by `cuda.core`: raw addresses, a stream by its handle, little Python.

Numba's own dispatcher takes 36 to 70 us for a launch with fifteen arguments; this takes about one,
for what doesn't change between launches is kept: the loaded kernel, the configuration of a grid,
the stream's object.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

from cuda_kernels.cuda.compile import compile_kernel, require_distribution
from cuda_kernels.cuda.kernel import KernelSource, Launch

# Grids change with the batch; beyond this many of a kernel the oldest are made again.
_KEPT_CONFIGS = 4096


class _Loaded(NamedTuple):
    """A kernel on the device, which of its arguments are float32, a configuration for each grid."""

    kernel: Any
    floats: tuple[bool, ...]
    configs: dict[tuple[int, int, int], Any]


class GpuDevice:
    """One GPU by its ordinal, in its primary context (the one torch uses).

    Raises MissingLibrary without `cuda-core`, and cuda.core's error without a driver. Kernels are
    compiled, or read from the cache, at their first launch: do that before capturing a graph.
    Not locked: launches from several threads are the caller's to order.
    """

    def __init__(self, ordinal: int = 0, cache: Path | None = None) -> None:
        require_distribution("cuda-core")
        import cuda.core

        self._core: Any = cuda.core
        self._queue: Any = cuda.core.launch
        self._device = self._core.Device(ordinal)
        self._device.set_current()
        self.capability: tuple[int, int] = tuple(self._device.compute_capability)
        self._cache = cache
        self._kernels: dict[KernelSource, _Loaded] = {}
        self._streams: dict[int, Any] = {}

    def load(self, source: KernelSource) -> None:
        """Have a kernel ready, so that its first launch compiles and loads nothing."""
        self._kernels[source] = self._load(source)

    def launch(self, launch: Launch, stream: int) -> None:
        """Queue a launch on a stream (its handle; 0: the default stream). Returns at once."""
        source, grid, arguments = launch
        loaded = self._kernels.get(source)
        if loaded is None:
            loaded = self._kernels[source] = self._load(source)
        config = loaded.configs.get(grid)
        if config is None:
            config = self._config(loaded, source, grid)
        queue = self._streams.get(stream)
        if queue is None:
            queue = self._stream(stream)
        if loaded.floats:
            arguments = tuple(
                ctypes.c_float(a) if is_float else a  # type: ignore[misc]
                for a, is_float in zip(arguments, loaded.floats, strict=True)
            )
        self._queue(queue, config, loaded.kernel, *arguments)

    def _load(self, source: KernelSource) -> _Loaded:
        made = compile_kernel(source, self.capability, self._cache)
        code = self._core.ObjectCode.from_cubin(made.cubin)
        floats = tuple(kind == "float32" for kind in source.parameters)
        return _Loaded(code.get_kernel(source.name), floats if any(floats) else (), {})

    def _config(self, loaded: _Loaded, source: KernelSource, grid: tuple[int, int, int]) -> Any:
        if len(loaded.configs) >= _KEPT_CONFIGS:
            del loaded.configs[next(iter(loaded.configs))]
        made = self._core.LaunchConfig(grid=grid, block=(source.threads, 1, 1))
        loaded.configs[grid] = made
        return made

    def _stream(self, handle: int) -> Any:
        made = self._core.Stream.from_handle(handle) if handle else self._device.default_stream
        self._streams[handle] = made
        return made
