"""Running a C function on the calling thread, or on all threads of Numba's pool.

A twin hands over the address of a `numba.cfunc`. Numba would otherwise inline the whole twin into
its parallel caller and optimise it once more, which takes a third of a first call's time.
"""

from __future__ import annotations

from numba import njit, prange

from cuda_kernels.simd import call_address


@njit(cache=True, nogil=True)
def call_here(function: int, argument: int) -> None:
    """Call `void f(int64)`, with the GIL released."""
    call_address(function, argument)


@njit(parallel=True, cache=True, nogil=True)
def call_on_all_threads(function: int, argument: int, num_threads: int) -> None:
    """Call `void f(int64)` once on each thread; returns when all have returned."""
    for _ in prange(num_threads):
        call_address(function, argument)
