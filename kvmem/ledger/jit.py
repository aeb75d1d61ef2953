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
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

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


def _wrap(value: int) -> int:
    return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63) if JIT_DISABLED else value


#: The value as 64 bits hold it: what compiled integers do by themselves, and Python's do not.
wrap = compiled(_wrap)


def _prefetch_in_python(array: Any, i: int) -> None:
    """Nothing to ask for."""


def _prefetch(typing_context: Any, array: Any, i: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        struct = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, struct.strides)[0]
        pointer = builder.bitcast(struct.data, cgutils.voidptr_t)
        at = builder.gep(pointer, [builder.mul(stride, arguments[1])])
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(hint, [at, flag(0), flag(3), flag(1)])  # to read, to keep, data
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), build


#: `prefetch(array, i)` asks for the cache line where row `i` of an array begins.
prefetch = _prefetch_in_python if JIT_DISABLED else intrinsic(_prefetch)
