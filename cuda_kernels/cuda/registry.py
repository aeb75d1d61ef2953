"""The kernels that ship, for whatever has to go through all of them."""

from __future__ import annotations

import importlib

from cuda_kernels.cuda.kernel import KernelSource

#: Modules that describe kernels: each dict of `KernelSource`s in them counts, claims stated.
MODULES = (
    "cuda_kernels.cache_write.cuda_call",
    "cuda_kernels.block_copy.cuda_call",
    "cuda_kernels.frames.cuda_call",
    "cuda_kernels.attention.cuda_call",
)


def shipped_kernels() -> tuple[KernelSource, ...]:
    """Every kernel, module by module. Imports no CUDA library."""
    found: list[KernelSource] = []
    for name in MODULES:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, dict):
                found += (one for one in value.values() if isinstance(one, KernelSource))
    return tuple(found)
