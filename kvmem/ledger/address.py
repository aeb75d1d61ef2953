"""Arrays passed by address: one word stands for a whole named tuple of arrays.

Numba passes a tuple of arrays by value, seven words an array: 4 us for the 21 arrays of the ledger
when Python calls, and 150 words on the stack of each inner call, which costs more than most of
those do. So Python passes one int64 array with the address and shape of each array (0.25 us), the
first line of an entry point makes an *opened* tuple of it, and compiled functions pass that on as a
single pointer. `opened.blocks` is an array again, read from the words where it is used; the words
don't change during a call, and LLVM is told so.

The addresses hold while the arrays live and are not replaced: whoever owns the tuple keeps both,
and makes new addresses when an array grows. Under NUMBA_DISABLE_JIT=1 they are the tuple itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, register_model
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import from_dtype
from numpy.typing import NDArray

from .jit import JIT_DISABLED

Addresses: TypeAlias = Any  # int64 [arrays * WORDS], or the tuple itself without compilation
Layout: TypeAlias = dict[str, tuple[np.dtype[Any], int]]  # field -> dtype, number of dimensions
Arrays = TypeVar("Arrays", bound=tuple[NDArray[Any], ...])

WORDS = 3  # address, rows, columns


def addresses_of(arrays: Arrays, layout: Layout) -> Addresses:
    """The addresses of a named tuple of C-contiguous arrays. O(arrays)."""
    if JIT_DISABLED:
        return arrays
    words = np.zeros((len(arrays), WORDS), np.int64)
    for i, (array, (dtype, ndim)) in enumerate(zip(arrays, layout.values(), strict=True)):
        assert array.dtype == dtype and array.ndim == ndim and array.flags.c_contiguous
        words[i, 0] = array.ctypes.data
        words[i, 1 : 1 + ndim] = array.shape
    return words.reshape(-1)


def opener(kind: type[Arrays], layout: Layout) -> Callable[[Addresses], Arrays]:
    """The function that compiled code calls to get the tuple `kind` back from its addresses."""
    if JIT_DISABLED:
        return lambda arrays: arrays
    result = OpenedType(kind.__name__, layout)

    @intrinsic
    def opened(typing_context: Any, addresses: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.bitcast(words, cgutils.voidptr_t)

        return result(addresses), build

    return opened


class OpenedType(numba.types.Type):
    """A named tuple of arrays that is passed as a pointer to their words."""

    def __init__(self, name: str, layout: Layout) -> None:
        super().__init__(name=f"Opened({name})")
        self.names = list(layout)
        self.arrays = [
            numba.types.Array(from_dtype(dtype), ndim, "C") for dtype, ndim in layout.values()
        ]
        self.sizes = [dtype.itemsize for dtype, _ in layout.values()]


@register_model(OpenedType)
class _OpenedModel(models.OpaqueModel):
    """An i8 pointer."""


@infer_getattr
class _OpenedAttributes(AttributeTemplate):
    key = OpenedType

    def generic_resolve(self, opened: OpenedType, name: str) -> Any:
        return opened.arrays[opened.names.index(name)]


@lower_getattr_generic(OpenedType)
def _read_array(context: Any, builder: Any, opened: OpenedType, value: Any, name: str) -> Any:
    """The array of a field, from its words; it owns nothing."""
    i = opened.names.index(name)
    kind = opened.arrays[i]
    intp = context.get_value_type(numba.types.intp)
    words = builder.bitcast(value, intp.as_pointer())

    def word(k: int) -> Any:
        load = builder.load(cgutils.gep_inbounds(builder, words, WORDS * i + k))
        load.set_metadata("invariant.load", builder.module.add_metadata([]))
        return load

    array = make_array(kind)(context, builder)
    size = context.get_constant(numba.types.intp, opened.sizes[i])
    shape = [word(1 + axis) for axis in range(kind.ndim)]
    strides = [size] if kind.ndim == 1 else [builder.mul(shape[1], size), size]
    data = builder.inttoptr(word(0), array.data.type)
    populate_array(array, data, shape, strides, size, meminfo=None)
    return array._getvalue()
