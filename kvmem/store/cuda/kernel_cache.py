"""The CUDA kernels that a config can come to need, made ahead of time; without a GPU if need be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cuda_kernels.attention.cuda_call import HEADS
from cuda_kernels.cuda.compile import cache_folder, compile_kernel
from cuda_kernels.cuda.kernel import KernelSource
from cuda_kernels.cuda.registry import shipped_kernels
from cuda_kernels.dtypes import kv_storage_dtype, storage_dtype
from kvmem.config import Config


class Filled(NamedTuple):
    """What `fill_kernel_cache` did."""

    num_compiled: int
    num_loaded: int  # were in the folder already
    folder: Path


def needed_kernels(config: Config) -> tuple[KernelSource, ...]:
    """The kernels for the config's dtypes and head sizes, for every number of query heads."""
    storage = storage_dtype(config.dtype_name)
    kinds = {storage.kind, kv_storage_dtype(config.kv_dtype_name, storage).kind}
    largest = max(config.head_dim, config.v_head_dim)
    width = min((w for w in HEADS if w >= largest), default=0)
    wanted = {"kind": kinds, "dims": {config.head_dim}, "width": {width}}
    return tuple(
        source
        for source in shipped_kernels()
        if all(value in wanted.get(name, {value}) for name, value in source.constants)
    )


def fill_kernel_cache(
    config: Config,
    capability: tuple[int, int],
    *,
    folder: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Filled:
    """Compile what a GPU of this compute capability, (9, 0) say, will be asked for, where it isn't
    in ``folder`` (None: the one that is looked in at run time).

    Needs no GPU and no driver. Raises MissingLibrary. Cost: 0.1 to 9 s a kernel, a minute or two.
    """
    needed, compiled = needed_kernels(config), 0
    for done, source in enumerate(needed):
        if progress is not None:
            progress(done, len(needed), source.name)
        compiled += not compile_kernel(source, capability, folder).from_cache
    return Filled(compiled, len(needed) - compiled, folder or cache_folder())
