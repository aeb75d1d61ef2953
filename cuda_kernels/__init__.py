"""The kernels of kvmem: attention over paged K/V and the moves of its bytes.

One folder per operation, each with a public function (checks, then launch), a ``spec`` (axes,
dtypes, tolerance, float64 reference, input maker) and a CPU twin in plain Numba. README.md
states the rules. Importing this package imports NumPy only: Numba is loaded, and a twin
compiled, at the first launch. It knows neither torch nor kvmem.
"""

from cuda_kernels.attention import paged_attention
from cuda_kernels.block_copy import copy_blocks
from cuda_kernels.cache_write import write_kv
from cuda_kernels.frames import fill_frames, gather_frames, move_frames, scatter_frames

PROJECT = "kvmem"

__all__ = [
    "PROJECT",
    "copy_blocks",
    "fill_frames",
    "gather_frames",
    "move_frames",
    "paged_attention",
    "scatter_frames",
    "write_kv",
]
