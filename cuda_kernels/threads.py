"""Running a C function on the calling thread, or on all threads of Numba's pool.

A twin hands over the address of a `numba.cfunc`. Numba would otherwise inline the whole twin into
its parallel caller and optimise it once more, which takes a third of a first call's time.
"""

from __future__ import annotations

from typing import Any

from numba import njit, prange
from numpy.typing import NDArray

from cuda_kernels.simd import address_of, call_address


@njit(cache=True, _nrt=False)
def address(array: NDArray[Any]) -> int:
    """The address of an array's first element: 0.2 us, a fifth of what NumPy takes to tell."""
    return address_of(array)


@njit(cache=True, nogil=True)
def call_here(function: int, argument: int) -> None:
    """Call `void f(int64)`, with the GIL released."""
    call_address(function, argument)


@njit(parallel=True, cache=True, nogil=True)
def call_on_all_threads(function: int, argument: int, num_threads: int) -> None:
    """Call `void f(int64)` once on each thread; returns when all have returned."""
    for _ in prange(num_threads):
        call_address(function, argument)
