"""Opcodes that compute a value of each thread from its own: arithmetic, logic, comparison.

Float32 is rounded once for each operation, fused multiply-adds too (by way of float64, which may
round twice in rare cases). The approximations `ex2`, `lg2`, `rcp`, `tanh` are exact here, within
float32. `.ftz` flushes what is subnormal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.decode import BITS, FLOATS, INTEGERS, SIGNED, Decoder, expect, only, type_of, unknown
from tests.ptx.errors import PtxError
from tests.ptx.program import Instruction, Pair
from tests.ptx.registers import TYPES, Mask
from tests.ptx.wave import Step, Wave

Values = NDArray[Any]
Function = Callable[..., Values]
_SMALLEST = np.float32(2.0**-126)


def flush(value: Values) -> Values:
    """Zeros of the same sign for what is subnormal in float32."""
    return np.where(np.abs(value) < _SMALLEST, np.copysign(np.float32(0), value), value)


def pointwise(ins: Instruction, kinds: tuple[str, ...], function: Function, result: str) -> Step:
    """A step that reads operands of given types and writes what the function makes of them."""
    expect(ins, len(kinds) + 1)
    target, sources = ins.operands[0], tuple(zip(ins.operands[1:], kinds, strict=True))
    dtype = TYPES[result]
    ftz = "ftz" in ins.modifiers

    def execute(wave: Wave, mask: Mask) -> None:
        values = [wave.read(operand, kind, mask) for operand, kind in sources]
        if ftz:
            values = [flush(v) if v.dtype == np.float32 else v for v in values]
        value = np.asarray(function(*values))
        if value.dtype != dtype:
            value = value.astype(dtype)
        wave.write(target, flush(value) if ftz and dtype == np.float32 else value, mask)

    return Step(ins, execute=execute)


def truncated(a: Values, b: Values) -> Values:
    """Integer division toward zero."""
    safe = np.where(b == 0, np.ones_like(b), b)
    quotient = a // safe
    return quotient + ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(quotient.dtype)


def high_product(a: Values, b: Values) -> Values:
    """The upper half of the product of integers."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide)) >> wide(bits)  # type: ignore[no-any-return]
    ua, ub = a.astype(np.uint64), b.astype(np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = ua & low, ua >> half, ub & low, ub >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    high = a1 * b1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, 0).astype(np.uint64)
        high = high - np.where(b < 0, ua, 0).astype(np.uint64)
    return high


def fused(a: Values, b: Values, c: Values) -> Values:
    """a * b + c, rounded once."""
    if a.dtype == np.float64:
        return a * b + c
    return (a.astype(np.float64) * b + c.astype(np.float64)).astype(np.float32)


# -- decoders -------------------------------------------------------------------------------------


def add_like(function: Function) -> Decoder:
    def decode(ins: Instruction) -> Step:
        kind = type_of(ins, FLOATS + INTEGERS)
        only(ins, {"rn", "ftz"} if kind in FLOATS else set())
        return pointwise(ins, (kind, kind), function, kind)

    return decode


def multiply_halves(a: Values, b: Values) -> Values:
    """Two float16 products in a word, each rounded once; subnormals are kept."""
    halves = (
        np.multiply(*(((x >> np.uint32(at)).astype(np.uint16)).view(np.float16) for x in (a, b)))
        for at in (0, 16)
    )
    low, high = (np.asarray(half).view(np.uint16).astype(np.uint32) for half in halves)
    return low | (high << np.uint32(16))


def multiply(ins: Instruction) -> Step:
    if ins.modifiers == ("rn", "f16x2"):
        return pointwise(ins, ("b32", "b32"), multiply_halves, "b32")
    kind = type_of(ins, FLOATS + INTEGERS)
    if kind in FLOATS:
        only(ins, {"rn", "ftz"})
        return pointwise(ins, (kind, kind), np.multiply, kind)
    mode = only(ins, {"lo", "hi", "wide"})
    if mode == {"wide"}:
        wide = widened(ins, kind)
        dtype = TYPES[wide]
        return pointwise(ins, (kind, kind), lambda a, b: a.astype(dtype) * b.astype(dtype), wide)
    if mode == {"hi"}:
        return pointwise(ins, (kind, kind), high_product, kind)
    if mode == {"lo"}:
        return pointwise(ins, (kind, kind), np.multiply, kind)
    raise unknown(ins, "one of .lo, .hi, .wide is needed")


def widened(ins: Instruction, kind: str) -> str:
    """The type of twice the width."""
    if kind[1:] not in ("16", "32"):
        raise unknown(ins, "only 16 and 32 bits can be widened")
    return f"{kind[0]}{2 * int(kind[1:])}"


def multiply_add(ins: Instruction) -> Step:
    kind = type_of(ins, INTEGERS)
    mode = only(ins, {"lo", "wide"})
    if mode == {"wide"}:
        wide = widened(ins, kind)
        dtype = TYPES[wide]
        return pointwise(
            ins, (kind, kind, wide), lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c, wide
        )
    if mode == {"lo"}:
        return pointwise(ins, (kind, kind, kind), lambda a, b, c: a * b + c, kind)
    raise unknown(ins, "one of .lo, .wide is needed")


def fused_multiply_add(ins: Instruction) -> Step:
    kind = type_of(ins, FLOATS)
    if "rn" not in only(ins, {"rn", "ftz"}):
        raise unknown(ins, ".rn is needed")
    return pointwise(ins, (kind, kind, kind), fused, kind)


def divided(a: Values, b: Values) -> Values:
    """a / b; every NaN becomes the same one, without a sign."""
    found = np.divide(a, b)
    return np.where(np.isnan(found), np.asarray(np.nan, found.dtype), found)


def divide_like(function: Function) -> Decoder:
    def decode(ins: Instruction) -> Step:
        kind = type_of(ins, INTEGERS + (FLOATS if ins.opcode == "div" else ()))
        if kind in FLOATS:
            only(ins, {"rn", "approx", "full", "ftz"})
            return pointwise(ins, (kind, kind), divided, kind)
        only(ins, set())
        step = pointwise(ins, (kind, kind), function, kind)
        inner = step.execute
        assert inner is not None

        def execute(wave: Wave, mask: Mask) -> None:
            zero = wave.full(ins.operands[2], kind, mask) == 0
            if (zero if mask is None else zero & mask).any():
                raise PtxError("an integer division by zero")
            inner(wave, mask)

        return Step(ins, execute=execute)

    return decode


def extreme(integers: Function, floats: Function, nans: Function) -> Decoder:
    def decode(ins: Instruction) -> Step:
        kind = type_of(ins, FLOATS + INTEGERS)
        given = only(ins, {"ftz", "NaN"} if kind in FLOATS else set())
        function = integers if kind in INTEGERS else nans if "NaN" in given else floats
        return pointwise(ins, (kind, kind), function, kind)

    return decode


def one(function: Function, kinds: tuple[str, ...], modifiers: set[str]) -> Decoder:
    """An opcode with one source of its own type."""

    def decode(ins: Instruction) -> Step:
        kind = type_of(ins, kinds)
        only(ins, modifiers)
        return pointwise(ins, (kind,), function, kind)

    return decode


def logic(function: Function, sources: int) -> Decoder:
    def decode(ins: Instruction) -> Step:
        kind = type_of(ins, (*BITS, "pred"))
        only(ins, set())
        return pointwise(ins, (kind,) * sources, function, kind)

    return decode


def shift(left: bool) -> Decoder:
    """Shifts by as much as the width or more leave zeros, or the sign."""

    def decode(ins: Instruction) -> Step:
        kind = type_of(ins, BITS if left else BITS + INTEGERS)
        only(ins, set())
        dtype = TYPES[kind]
        width = 8 * dtype.itemsize

        def function(value: Values, amount: Values) -> Values:
            by = np.minimum(amount, width - 1).astype(dtype)
            shifted = value << by if left else value >> by
            past = np.zeros_like(value) if left or dtype.kind == "u" else value >> (width - 1)
            return np.where(amount < width, shifted, past)

        return pointwise(ins, (kind, "u32"), function, kind)

    return decode


def count_bits(ins: Instruction) -> Step:
    kind = type_of(ins, ("b32", "b64"))
    only(ins, set())
    return pointwise(ins, (kind,), np.bitwise_count, "u32")


def insert_bits(ins: Instruction) -> Step:
    """`bfi`: the low bits of a in place of those of b from a position on."""
    kind = type_of(ins, ("b32", "b64"))
    only(ins, set())
    dtype = TYPES[kind]

    def function(a: Values, b: Values, position: Values, length: Values) -> Values:
        mask = shifted_ones(position, length, dtype)
        width = 8 * dtype.itemsize
        moved = a << np.minimum(position & np.uint32(255), width - 1).astype(dtype)
        return np.where((position & np.uint32(255)) < width, (b & ~mask) | (moved & mask), b)

    return pointwise(ins, (kind, kind, "u32", "u32"), function, kind)


def shifted_ones(position: Values, length: Values, dtype: np.dtype[Any]) -> Values:
    """A mask of `length` ones from a bit on, cut off at the type's width."""
    width = 8 * dtype.itemsize
    first = np.minimum(position & np.uint32(255), width)
    last = np.minimum(first + (length & np.uint32(255)), width)
    bit = np.arange(width, dtype=np.uint32)
    ones = (bit >= np.asarray(first)[..., None]) & (bit < np.asarray(last)[..., None])
    return (ones * (dtype.type(1) << bit.astype(dtype))).sum(axis=-1, dtype=dtype)


_ORDER: dict[str, Function] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_COMBINE: dict[str, Function] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor
}  # fmt: skip


def comparison(ins: Instruction, name: str, kind: str) -> Function:
    """A comparison by its name; with floats `ltu` holds for NaN and `lt` doesn't."""
    if kind in FLOATS:
        if name in ("num", "nan"):
            wanted = name == "nan"
            return lambda a, b: (np.isnan(a) | np.isnan(b)) == wanted
        loose = name.endswith("u") and name[:-1] in _ORDER
        function = _ORDER.get(name[:-1] if loose else name)
        if function is None or name in ("lo", "ls", "hi", "hs"):
            raise unknown(ins, f"comparison .{name} of floats is not known")
        chosen = function

        def compare(a: Values, b: Values) -> Values:
            odd = np.isnan(a) | np.isnan(b)
            return chosen(a, b) | odd if loose else chosen(a, b) & ~odd

        return compare
    if name not in _ORDER or (name in ("lo", "ls", "hi", "hs") and kind in SIGNED):
        raise unknown(ins, f"comparison .{name} of {kind} is not known")
    if kind in BITS and name not in ("eq", "ne"):
        raise unknown(ins, f"comparison .{name} of {kind} is not known")
    return _ORDER[name]


def set_predicate(ins: Instruction) -> Step:
    kind = type_of(ins, FLOATS + INTEGERS + BITS)
    names = [m for m in ins.modifiers[:-1] if m != "ftz"]
    if not names or len(names) > 2 or (len(names) == 2 and names[1] not in _COMBINE):
        raise unknown(ins, "comparison is not known")
    expect(ins, 2 + len(names))
    compare = comparison(ins, names[0], kind)
    target = ins.operands[0]
    both = target if isinstance(target, Pair) else None

    def execute(wave: Wave, mask: Mask) -> None:
        a = wave.read(ins.operands[1], kind, mask)
        b = wave.read(ins.operands[2], kind, mask)
        found = np.asarray(compare(a, b))
        other = ~found
        if len(names) == 2:
            third = wave.read(ins.operands[3], "pred", mask)
            combine = _COMBINE[names[1]]
            found, other = combine(found, third), combine(other, third)
        wave.write(both.first if both else target, found, mask)
        if both:
            wave.write(both.second, other, mask)

    return Step(ins, execute=execute)


def select(ins: Instruction) -> Step:
    kind = type_of(ins, FLOATS + INTEGERS + BITS)
    only(ins, set())
    return pointwise(ins, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b), kind)


def permute_bytes(ins: Instruction) -> Step:
    type_of(ins, ("b32",))
    only(ins, set())

    def function(a: Values, b: Values, selector: Values) -> Values:
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        found = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint64)
        for i in range(4):
            nibble = (selector.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
            byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            byte = np.where(nibble & np.uint64(8), sign, byte)
            found |= byte << np.uint64(8 * i)
        return found.astype(np.uint32)

    return pointwise(ins, ("b32", "b32", "b32"), function, "b32")


def negate(value: Values) -> Values:
    """Minus; of an integer, two's complement."""
    return -value if value.dtype.kind == "f" else (~value + value.dtype.type(1))


def _in_double(function: Function) -> Function:
    """Evaluate in float64 and round once."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


DECODERS: dict[str, Decoder] = {
    "add": add_like(np.add),
    "sub": add_like(np.subtract),
    "mul": multiply,
    "mad": multiply_add,
    "fma": fused_multiply_add,
    "div": divide_like(truncated),
    "rem": divide_like(lambda a, b: a - truncated(a, b) * b),
    "min": extreme(np.minimum, np.fmin, np.minimum),
    "max": extreme(np.maximum, np.fmax, np.maximum),
    "neg": one(negate, (*FLOATS, *SIGNED), {"ftz"}),
    "abs": one(np.abs, (*FLOATS, *SIGNED), {"ftz"}),
    "sqrt": one(np.sqrt, FLOATS, {"rn", "approx", "ftz"}),
    "rcp": one(lambda x: 1 / x, FLOATS, {"rn", "approx", "ftz"}),
    "ex2": one(_in_double(np.exp2), ("f32",), {"approx", "ftz"}),
    "lg2": one(_in_double(np.log2), ("f32",), {"approx", "ftz"}),
    "tanh": one(_in_double(np.tanh), ("f32",), {"approx"}),
    "and": logic(np.bitwise_and, 2),
    "or": logic(np.bitwise_or, 2),
    "xor": logic(np.bitwise_xor, 2),
    "not": logic(np.invert, 1),
    "shl": shift(left=True),
    "shr": shift(left=False),
    "popc": count_bits,
    "bfi": insert_bits,
    "setp": set_predicate,
    "selp": select,
    "prmt": permute_bytes,
}
