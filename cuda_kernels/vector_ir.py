"""LLVM IR that the vector intrinsics are put together from; no compiled code in sight.

Each function takes an IR builder ``b`` and IR values of type `FLOATS` (`LANES` float32), and
returns the value it wrote the instructions for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core.registry import cpu_target

from cuda_kernels.numeric import EXP2_TERMS, TANH_SMALL, TANH_TERMS
from cuda_kernels.simd import declare, pointer


def target_features() -> str:
    """LLVM's list of what the target of this process can do; part of Numba's cache key."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return str(features)


LANES = 16 if "+avx512f" in target_features() else 8
QUAD = 4

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
INT32S = ir.VectorType(INT32, LANES)
INT16 = ir.IntType(16)
INT16S = ir.VectorType(INT16, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
MINUS_INFINITY = float("-inf")
#: What numbers of fp8_e4m3 are multiplied by to be those that `load_fp8s` gives.
FP8_LOADED = 2.0**-8
_MAGIC = 1.5 * 2**23  # adding it rounds a float32 to an integer, kept in the low bits


def emit(build: Callable[..., Any]) -> Callable[[Any, Any, Any, Sequence[Any]], Any]:
    """The generator of an intrinsic whose IR needs only the builder and the arguments."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        result = build(builder, *arguments)
        return target.get_dummy_value() if result is None else result

    return generate


def constants(values: Sequence[Any], element: Any = FLOAT) -> Any:
    return ir.Constant(
        ir.VectorType(element, len(values)), [ir.Constant(element, v) for v in values]
    )


def splat(value: Any, element: Any = FLOAT) -> Any:
    return constants([value] * LANES, element)


def pick(b: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    return b.shuffle_vector(x, y, constants(lanes, INT32))


def spread(b: Any, scalar: Any) -> Any:
    none = ir.Constant(FLOATS, ir.Undefined)
    first = b.insert_element(none, scalar, ir.Constant(INT32, 0))
    return pick(b, first, none, [0] * LANES)


def muladd(b: Any, x: Any, y: Any, z: Any) -> Any:
    name = f"llvm.fmuladd.v{LANES}f32"
    return b.call(declare(b, name, FLOATS, [FLOATS] * 3), [x, y, z])


def greater(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def load(b: Any, address: Any, what: Any, align: int) -> Any:
    return b.load(pointer(b, address, what), align=align)


def widen_float16(b: Any, bits: Any) -> Any:
    """float16 bits to float32, exactly; in integers where there is no instruction for it."""
    features = target_features()
    if "+f16c" in features or "+fullfp16" in features or "+fp-armv8" in features:
        return b.fpext(b.bitcast(bits, HALVES), FLOATS)
    word = b.zext(bits, INT32S)
    size = b.shl(b.and_(word, splat(0x7FFF, INT32)), splat(13, INT32))
    scaled = b.bitcast(b.fmul(b.bitcast(size, FLOATS), splat(2.0**112)), INT32S)
    # Inf and NaN, whose exponent the product does not carry over.
    special = b.icmp_unsigned(">=", size, splat(0x7C00 << 13, INT32))
    exponent = b.select(special, splat(0x7F800000, INT32), splat(0, INT32))
    sign = b.shl(b.and_(word, splat(0x8000, INT32)), splat(16, INT32))
    return b.bitcast(b.or_(b.or_(scaled, exponent), sign), FLOATS)


def narrow_bfloat16(b: Any, value: Any) -> Any:
    """float32 to bfloat16, ties to even, as the upper halves of int32 lanes."""
    bits = b.bitcast(value, INT32S)
    even = b.and_(b.lshr(bits, splat(16, INT32)), splat(1, INT32))
    rounded = b.add(b.add(bits, splat(0x7FFF, INT32)), even)
    rounded = b.and_(rounded, splat(0xFFFF0000, INT32))
    return b.select(b.fcmp_unordered("uno", value, value), splat(0x7FC00000, INT32), rounded)


def narrow_float16(b: Any, value: Any) -> Any:
    """In integers, as `numeric.narrow_float16` does it: that one explains the steps."""
    bits = b.bitcast(value, INT32S)
    sign = b.and_(b.lshr(bits, splat(16, INT32)), splat(0x8000, INT32))
    size = b.and_(bits, splat(0x7FFFFFFF, INT32))
    aligned = b.bitcast(b.fadd(b.bitcast(size, FLOATS), splat(0.5)), INT32S)
    subnormal = b.sub(aligned, splat(0x3F000000, INT32))
    even = b.and_(b.lshr(size, splat(13, INT32)), splat(1, INT32))
    biased = b.add(b.sub(size, splat((112 << 23) - 0xFFF, INT32)), even)
    word = b.lshr(biased, splat(13, INT32))
    word = b.select(b.icmp_unsigned("<", size, splat(0x38800000, INT32)), subnormal, word)
    infinite = b.icmp_unsigned(">=", size, splat(0x47800000, INT32))
    word = b.select(infinite, splat(0x7C00, INT32), word)
    nan = b.icmp_unsigned(">", size, splat(0x7F800000, INT32))
    word = b.select(nan, splat(0x7E00, INT32), word)
    return b.trunc(b.or_(word, sign), INT16S)


def widen_fp8(b: Any, words: Any) -> Any:
    """fp8_e4m3 in the upper bytes of int16 lanes to float32 times `FP8_LOADED`, exactly.

    Seen as a float16 the bits are the number times 2**-8, subnormals too; NaN needs a hand.
    """
    size = b.and_(b.lshr(words, splat(1, INT16)), splat(0x3F80, INT16))
    nan = b.icmp_unsigned("==", size, splat(0x3F80, INT16))
    size = b.select(nan, splat(0x7E00, INT16), size)
    return widen_float16(b, b.or_(size, b.and_(words, splat(-0x8000, INT16))))


def narrow_fp8(b: Any, value: Any) -> Any:
    """float32 to fp8_e4m3 in int32 lanes, ties to even; what is larger than 448 saturates.

    As `numeric.narrow_float16` does it: a carry moves the exponent, and for what will be subnormal
    adding 2**14 aligns to its quantum, 2**-9.
    """
    bits = b.bitcast(value, INT32S)
    sign = b.and_(b.lshr(bits, splat(24, INT32)), splat(0x80, INT32))
    size = b.and_(bits, splat(0x7FFFFFFF, INT32))
    nan = b.icmp_unsigned(">", size, splat(0x7F800000, INT32))
    most = splat(0x43E00000, INT32)  # 448
    size = b.select(b.icmp_unsigned(">", size, most), most, size)
    aligned = b.bitcast(b.fadd(b.bitcast(size, FLOATS), splat(2.0**14)), INT32S)
    subnormal = b.sub(aligned, splat(0x46800000, INT32))
    even = b.and_(b.lshr(size, splat(20, INT32)), splat(1, INT32))
    biased = b.add(b.sub(size, splat((120 << 23) - 0x7FFFF, INT32)), even)
    word = b.lshr(biased, splat(20, INT32))
    word = b.select(b.icmp_unsigned("<", size, splat(0x3C800000, INT32)), subnormal, word)
    return b.or_(b.select(nan, splat(0x7F, INT32), word), sign)


def deal(b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """The even and the odd ones of 2 * LANES values in order."""
    even = list(range(0, 2 * LANES, 2))
    return pick(b, x, y, even), pick(b, x, y, [lane + 1 for lane in even])


def riffle(b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """`deal` undone."""
    lanes = [half for lane in range(LANES) for half in (lane, LANES + lane)]
    return pick(b, x, y, lanes[:LANES]), pick(b, x, y, lanes[LANES:])


def load_float32s(b: Any, address: Any) -> tuple[Any, Any]:
    """A pair of vectors from 2 * LANES float32."""
    second = b.add(address, ir.Constant(INT64, 4 * LANES))
    return load(b, address, FLOATS, 4), load(b, second, FLOATS, 4)


def load_float16s(b: Any, address: Any) -> tuple[Any, Any]:
    """A pair of vectors from 2 * LANES float16."""
    second = b.add(address, ir.Constant(INT64, 2 * LANES))
    first_bits, second_bits = load(b, address, INT16S, 2), load(b, second, INT16S, 2)
    return widen_float16(b, first_bits), widen_float16(b, second_bits)


def load_bfloat16s(b: Any, address: Any) -> tuple[Any, Any]:
    """The even and the odd ones of 2 * LANES bfloat16: the halves of int32 lanes."""
    bits = load(b, address, INT32S, 2)
    even = b.shl(bits, splat(16, INT32))
    odd = b.and_(bits, splat(0xFFFF0000, INT32))
    return b.bitcast(even, FLOATS), b.bitcast(odd, FLOATS)


def load_fp8s(b: Any, address: Any) -> tuple[Any, Any]:
    """The even and the odd ones of 2 * LANES fp8_e4m3, times `FP8_LOADED`."""
    words = load(b, address, INT16S, 1)
    return widen_fp8(b, b.shl(words, splat(8, INT16))), widen_fp8(b, words)


def store_float32s(b: Any, address: Any, x: Any, y: Any) -> None:
    """What `load_float32s` loads."""
    second = b.add(address, ir.Constant(INT64, 4 * LANES))
    b.store(x, pointer(b, address, FLOATS), align=4)
    b.store(y, pointer(b, second, FLOATS), align=4)


def store_float16s(b: Any, address: Any, x: Any, y: Any) -> None:
    """What `load_float16s` loads, rounded."""
    second = b.add(address, ir.Constant(INT64, 2 * LANES))
    b.store(narrow_float16(b, x), pointer(b, address, INT16S), align=2)
    b.store(narrow_float16(b, y), pointer(b, second, INT16S), align=2)


def store_fp8s(b: Any, address: Any, x: Any, y: Any) -> None:
    """The even and the odd ones of 2 * LANES float32, rounded."""
    word = b.or_(narrow_fp8(b, x), b.shl(narrow_fp8(b, y), splat(8, INT32)))
    b.store(b.trunc(word, INT16S), pointer(b, address, INT16S), align=1)


def store_bfloat16s(b: Any, address: Any, x: Any, y: Any) -> None:
    """What `load_bfloat16s` loads, rounded."""
    even = b.lshr(narrow_bfloat16(b, x), splat(16, INT32))
    b.store(b.or_(even, narrow_bfloat16(b, y)), pointer(b, address, INT32S), align=2)


def polynomial(b: Any, x: Any, terms: Sequence[float]) -> Any:
    """terms[0] + terms[1] * x + ..., by Horner."""
    value = splat(terms[-1])
    for term in reversed(terms[:-1]):
        value = muladd(b, value, x, splat(term))
    return value


def exp2(b: Any, x: Any) -> Any:
    """2**x for x <= 127; the whole part goes into the exponent, a polynomial does the rest."""
    shifted = b.fadd(x, splat(_MAGIC))
    fraction = b.fsub(x, b.fsub(shifted, splat(_MAGIC)))
    biased = b.add(b.bitcast(shifted, INT32S), splat(127, INT32))
    power = b.bitcast(b.shl(biased, splat(23, INT32)), FLOATS)
    value = b.fmul(polynomial(b, fraction, (1.0, *EXP2_TERMS)), power)
    return b.select(b.fcmp_ordered("<", x, splat(-126.0)), splat(0.0), value)


def fold(b: Any, value: Any, join: Callable[..., Any]) -> Any:
    """Join all lanes of a row (l % 4); every lane of the row gets the result."""
    step = LANES // 2
    while step >= QUAD:
        value = join(b, value, pick(b, value, value, [lane ^ step for lane in range(LANES)]))
        step //= 2
    return value


def tanh(b: Any, x: Any) -> Any:
    """A polynomial near 0, by 2**x elsewhere."""
    positive = b.fcmp_ordered(">=", x, splat(0.0))
    size = b.select(positive, x, b.fsub(splat(-0.0), x))
    square = b.fmul(x, x)
    near = muladd(b, b.fmul(x, square), polynomial(b, square, TANH_TERMS), x)
    # Past 20 tanh is 1 in float32; the bound keeps 2**x in range and lets NaN through.
    bounded = b.select(b.fcmp_ordered(">", size, splat(20.0)), splat(20.0), size)
    power = exp2(b, b.fmul(bounded, splat(2.0 * 1.4426950408889634)))
    far = b.fsub(splat(1.0), b.fdiv(splat(2.0), b.fadd(power, splat(1.0))))
    far = b.select(positive, far, b.fsub(splat(-0.0), far))
    return b.select(b.fcmp_ordered("<", size, splat(float(TANH_SMALL))), near, far)


def sum_each(b: Any, vectors: Sequence[Any]) -> Any:
    """The sums of eight vectors, each over its lanes, as a vector of eight.

    A butterfly: each round joins pairs of vectors and halves the lanes left of each.
    """
    left = list(vectors)
    step = LANES // 2
    while len(left) > 1:
        half = len(left) // 2
        kept = [(lane & ~step) + (LANES if lane & step else 0) for lane in range(LANES)]
        added = [lane + step for lane in kept]
        pairs = [(left[k], left[k + half]) for k in range(half)]
        left = [b.fadd(pick(b, x, y, kept), pick(b, x, y, added)) for x, y in pairs]
        step //= 2
    result = left[0]
    while step:
        swapped = pick(b, result, result, [lane ^ step for lane in range(LANES)])
        result = b.fadd(result, swapped)
        step //= 2
    # Vector k's sum stands in the lanes whose highest three bits, read as a number, are k.
    return pick(b, result, result, [k * (LANES // 8) for k in range(8)])
