"""The decorators of compiled ledger functions (design section 5): every njit option is here.

`_nrt=False` leaves out Numba's reference counting, which otherwise costs an atomic pair per array
argument and call (measured 127 ns against 2 ns for taking one block). It is a semi-private option
and holds only for functions that allocate nothing, which is so for the whole ledger; where a Numba
release refuses it, the functions are compiled without it and are slower, not wrong.

Functions that only compiled code calls have no Python wrapper, which takes a fifth off the first
compilation. Under NUMBA_DISABLE_JIT=1 all run as plain Python (coverage, debugging, seeded faults).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

JIT_DISABLED: bool = bool(numba.config.DISABLE_JIT)


def entry_point(function: Function) -> Function:
    """Compile a function that Python calls, at its first call; cached on disk, without the GIL."""
    return _njit(function)


def compiled(function: Function) -> Function:
    """Compile a function that only compiled functions call."""
    return _njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _njit(function: Function, **wrappers: bool) -> Function:
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", **wrappers}
    try:
        return cast(Function, numba.njit(_nrt=False, **options)(function))
    except (KeyError, TypeError, numba.errors.NumbaError):
        return cast(Function, numba.njit(**options)(function))
