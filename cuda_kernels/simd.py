"""Raw memory for compiled code: addresses, 64-byte lines, prefetch, non-temporal stores, fences.

Numba's arrays give neither a hint to the cache nor a store that goes past it. The functions below
are LLVM instructions under a Python name, so they compile on every target; where a processor lacks
one, LLVM lowers it to what there is. An address is an int64 and is trusted: bounds are the
caller's duty, and nothing here keeps an array alive.

    target = address_of(arena)                     # once a call; the array must outlive its use
    for k in range(0, size, LINE_BYTES):           # size and target are multiples of 64
        store_line_past_cache(target + k, load_line(source + k))
    fence()                                        # before other threads are told
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

#: Instructions have no Python form; with NUMBA_DISABLE_JIT=1 other twins run (coverage, faults).
JIT_DISABLED = bool(numba.config.DISABLE_JIT)
LINE_BYTES = 64

_INT8 = ir.IntType(8)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_LINE = ir.VectorType(_INT64, LINE_BYTES // 8)

# What an intrinsic returns to Numba: the signature, and the function that writes its IR.
Typed = tuple[Any, Callable[[Any, Any, Any, Sequence[Any]], Any]]


class LineType(types.Type):
    """64 bytes in registers: one zmm, two ymm, or four 16-byte registers."""

    def __init__(self) -> None:
        super().__init__("Line")


line_type = LineType()


@register_model(LineType)
class _LineModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _LINE)


def pointer(builder: Any, address: Any, pointee: Any) -> Any:
    """IR: an int64 address as a pointer."""
    return builder.inttoptr(address, pointee.as_pointer())


def declare(builder: Any, name: str, result: Any, parameters: Sequence[Any]) -> Any:
    """IR: a function of LLVM's own, declared once a module."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, parameters), name)


@intrinsic
def address_of(context: Any, array: Any) -> Typed:
    """The address of an array's first element (int64). Free; takes no reference."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        view = target.make_array(signature.args[0])(target, builder, arguments[0])
        return builder.ptrtoint(view.data, _INT64)

    return types.int64(array), generate


@intrinsic
def load_line(context: Any, address: Any) -> Typed:
    """Load 64 bytes from any address."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return builder.load(pointer(builder, arguments[0], _LINE), align=1)

    return line_type(types.int64), generate


@intrinsic
def store_line(context: Any, address: Any, line: Any) -> Typed:
    """Store 64 bytes at any address."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], _LINE), align=1)
        return target.get_dummy_value()

    return types.void(types.int64, line_type), generate


@intrinsic
def store_line_past_cache(context: Any, address: Any, line: Any) -> Typed:
    """Store 64 bytes at a multiple of 64, without reading or keeping the line (non-temporal).

    Saves a third of a large copy's traffic, since an ordinary store first reads what it
    overwrites; costs where the bytes are read back soon. An address that is no multiple of 64
    kills the process. Other threads may see these stores late: `fence` before telling them.
    """

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        store = builder.store(arguments[1], pointer(builder, arguments[0], _LINE), align=LINE_BYTES)
        flag = builder.module.add_metadata([ir.Constant(_INT32, 1)])
        store.set_metadata("nontemporal", flag)
        return target.get_dummy_value()

    return types.void(types.int64, line_type), generate


@intrinsic
def copy_bytes(context: Any, target: Any, source: Any, size: Any) -> Typed:
    """memcpy of some bytes; not for ranges that overlap."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        into, source = (pointer(builder, where, _INT8) for where in arguments[:2])
        cgutils.raw_memcpy(builder, into, source, arguments[2], 1)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def fence(context: Any) -> Typed:
    """Order all stores before it, non-temporal ones too, before all later loads and stores.

    Sequentially consistent on purpose: on x86 a weaker fence is no instruction at all, since
    ordinary stores need none, and would leave non-temporal ones unordered. Tens of nanoseconds.
    """

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        builder.fence("seq_cst")
        return target.get_dummy_value()

    return types.void(), generate


def _prefetch(locality: int) -> Callable[[Any, Any, Any, Sequence[Any]], Any]:
    """The generator of a prefetch: locality 3 is every cache level, 2 leaves the first one out."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        byte = _INT8.as_pointer()
        parameters = [byte, _INT32, _INT32, _INT32]
        function = declare(builder, "llvm.prefetch.p0", ir.VoidType(), parameters)
        read, data = ir.Constant(_INT32, 0), ir.Constant(_INT32, 1)
        where = pointer(builder, arguments[0], _INT8)
        builder.call(function, [where, read, ir.Constant(_INT32, locality), data])
        return target.get_dummy_value()

    return generate


@intrinsic
def prefetch(context: Any, address: Any) -> Typed:
    """Ask for the line at an address, to be read in some microseconds (second-level cache).

    Any address is allowed: a prefetch of unmapped memory does nothing.
    """
    return types.void(types.int64), _prefetch(2)


@intrinsic
def prefetch_near(context: Any, address: Any) -> Typed:
    """Ask for the line at an address, to be read at once (first-level cache)."""
    return types.void(types.int64), _prefetch(3)


@intrinsic
def fetch_add(context: Any, address: Any, amount: Any) -> Typed:
    """Add to an int64 that threads share, and return what it was: one atomic instruction."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        where = pointer(builder, arguments[0], _INT64)
        return builder.atomic_rmw("add", where, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def call_address(context: Any, function: Any, argument: Any) -> Typed:
    """Call the C function `void f(int64)` at an address, such as a `numba.cfunc`'s."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64])
        builder.call(pointer(builder, arguments[0], kind), [arguments[1]])
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate
