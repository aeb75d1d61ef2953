"""Vectors of float32 in compiled code: one value is `LANES` lanes, in registers.

LLVM's own vectorisation of loops is fickle (README.md lists its moods). A `Floats` value is a
vector by type, so the code that uses it reads like scalar code and compiles as it is written:
`<16 x float>` on processors with AVX-512, `<8 x float>` elsewhere, which LLVM lowers to one AVX
register, or to two of SSE or NEON. No instruction of one vendor is named here.

Storage dtypes are told apart by the *type* of a tag argument, so that a kernel is compiled once
for each of them with no branch inside: `FLOAT32_TAG`, `BFLOAT16_TAG`, `FLOAT16_TAG`, `FP8_TAG`.

The attention twin works on *quads*, four query rows side by side: lane `l` of a vector of scores
belongs to row `l % 4` and to position `l // 4`, and `QUAD_STEP` positions fill a vector.

Products and sums are fused where the processor can (`llvm.fmuladd`), nothing else is reordered:
the same code gives the same bits wherever a value stands. NaN stays NaN unless said otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from cuda_kernels import vector_ir as vir
from cuda_kernels.simd import Typed, pointer

LANES = vir.LANES
VECTOR_BYTES = 4 * LANES
PAIR = 2 * LANES
QUAD = vir.QUAD
QUAD_STEP = LANES // QUAD

FLOAT32_TAG = np.float32(0)
BFLOAT16_TAG = np.uint16(0)
FLOAT16_TAG = np.int16(0)
FP8_TAG = np.uint8(0)
_TAG_BYTES = {types.float32: 4, types.uint16: 2, types.int16: 2, types.uint8: 1}
_LOADS = {
    types.float32: vir.load_float32s,
    types.uint16: vir.load_bfloat16s,
    types.int16: vir.load_float16s,
    types.uint8: vir.load_fp8s,
}
_STORES = {
    types.float32: vir.store_float32s,
    types.uint16: vir.store_bfloat16s,
    types.int16: vir.store_float16s,
    types.uint8: vir.store_fp8s,
}
#: What numbers of fp8_e4m3 are multiplied by to be those that `load_pair` gives.
FP8_LOADED = vir.FP8_LOADED


class FloatsType(types.Type):
    """`LANES` float32 values in registers."""

    def __init__(self) -> None:
        super().__init__(f"Floats{LANES}")


floats = FloatsType()
eight = types.UniTuple(floats, 8)


@register_model(FloatsType)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, vir.FLOATS)


# Memory.


@intrinsic
def tag_bytes(context: Any, tag: Any) -> Typed:
    """Bytes of an element of the tag's storage dtype: a constant in the code."""
    size = _TAG_BYTES[tag]
    return types.int64(tag), vir.emit(lambda b, _: ir.Constant(vir.INT64, size))


@intrinsic
def load(context: Any, address: Any) -> Typed:
    """`LANES` float32 at any address."""
    return floats(types.int64), vir.emit(lambda b, a: vir.load(b, a, vir.FLOATS, 4))


@intrinsic
def store(context: Any, address: Any, value: Any) -> Typed:
    """Store `LANES` float32 at any address."""

    def build(b: Any, address: Any, value: Any) -> None:
        b.store(value, pointer(b, address, vir.FLOATS), align=4)

    return types.void(types.int64, floats), vir.emit(build)


@intrinsic
def load_pair(context: Any, address: Any, tag: Any) -> Typed:
    """`PAIR` elements of the tag's storage dtype at any address, widened exactly.

    Which of them stands in which lane of which vector is the dtype's own affair: for bfloat16
    and fp8_e4m3 the one vector has the even, the other the odd ones, which takes no shuffle.
    `store_pair` puts them back, and a dot product of two pairs doesn't care. Numbers of fp8_e4m3
    come multiplied by `FP8_LOADED`, and are stored as they are.
    """

    def build(b: Any, address: Any, _: Any) -> Any:
        return cgutils.pack_array(b, _LOADS[tag](b, address))

    return types.UniTuple(floats, 2)(types.int64, tag), vir.emit(build)


@intrinsic
def store_pair(context: Any, address: Any, x: Any, y: Any, tag: Any) -> Typed:
    """Store a pair as `PAIR` elements, rounded to the tag's storage dtype, ties to even."""

    def build(b: Any, address: Any, x: Any, y: Any, _: Any) -> None:
        _STORES[tag](b, address, x, y)

    return types.void(types.int64, floats, floats, tag), vir.emit(build)


@intrinsic
def deal(context: Any, x: Any, y: Any) -> Typed:
    """A pair in order as the even and the odd elements."""

    def build(b: Any, x: Any, y: Any) -> Any:
        return cgutils.pack_array(b, vir.deal(b, x, y))

    return types.UniTuple(floats, 2)(floats, floats), vir.emit(build)


@intrinsic
def deal_loaded(context: Any, x: Any, y: Any, tag: Any) -> Typed:
    """A pair as `load_pair` gave it, as the even and the odd elements, which it may be already."""

    def build(b: Any, x: Any, y: Any, _: Any) -> Any:
        pair = (x, y) if tag in (types.uint16, types.uint8) else vir.deal(b, x, y)
        return cgutils.pack_array(b, pair)

    return types.UniTuple(floats, 2)(floats, floats, tag), vir.emit(build)


@intrinsic
def riffle(context: Any, x: Any, y: Any) -> Typed:
    """The even and the odd elements as a pair in order."""

    def build(b: Any, x: Any, y: Any) -> Any:
        return cgutils.pack_array(b, vir.riffle(b, x, y))

    return types.UniTuple(floats, 2)(floats, floats), vir.emit(build)


@intrinsic
def load_int64(context: Any, address: Any) -> Typed:
    """One int64."""
    return types.int64(types.int64), vir.emit(lambda b, a: vir.load(b, a, vir.INT64, 8))


@intrinsic
def store_int64(context: Any, address: Any, value: Any) -> Typed:
    """Store one int64."""

    def build(b: Any, address: Any, value: Any) -> None:
        b.store(value, pointer(b, address, vir.INT64), align=8)

    return types.void(types.int64, types.int64), vir.emit(build)


@intrinsic
def load_int32(context: Any, address: Any) -> Typed:
    """One int32, as an int64."""

    def build(b: Any, address: Any) -> Any:
        return b.sext(vir.load(b, address, vir.INT32, 4), vir.INT64)

    return types.int64(types.int64), vir.emit(build)


@intrinsic
def load_float(context: Any, address: Any) -> Typed:
    """One float32."""
    return types.float32(types.int64), vir.emit(lambda b, a: vir.load(b, a, vir.FLOAT, 4))


@intrinsic
def store_float(context: Any, address: Any, value: Any) -> Typed:
    """Store one float32."""

    def build(b: Any, address: Any, value: Any) -> None:
        b.store(value, pointer(b, address, vir.FLOAT), align=4)

    return types.void(types.int64, types.float32), vir.emit(build)


# Arithmetic, lane by lane.


@intrinsic
def zeros(context: Any) -> Typed:
    """All lanes 0."""
    return floats(), vir.emit(lambda b: vir.splat(0.0))


@intrinsic
def spread(context: Any, scalar: Any) -> Typed:
    """All lanes one float32."""
    return floats(types.float32), vir.emit(vir.spread)


@intrinsic
def spread_at(context: Any, address: Any) -> Typed:
    """All lanes the float32 at an address."""
    return floats(types.int64), vir.emit(lambda b, a: vir.spread(b, vir.load(b, a, vir.FLOAT, 4)))


@intrinsic
def add(context: Any, x: Any, y: Any) -> Typed:
    """x + y."""
    return floats(floats, floats), vir.emit(lambda b, x, y: b.fadd(x, y))


@intrinsic
def subtract(context: Any, x: Any, y: Any) -> Typed:
    """x - y."""
    return floats(floats, floats), vir.emit(lambda b, x, y: b.fsub(x, y))


@intrinsic
def multiply(context: Any, x: Any, y: Any) -> Typed:
    """x * y."""
    return floats(floats, floats), vir.emit(lambda b, x, y: b.fmul(x, y))


@intrinsic
def divide(context: Any, x: Any, y: Any) -> Typed:
    """x / y."""
    return floats(floats, floats), vir.emit(lambda b, x, y: b.fdiv(x, y))


@intrinsic
def multiply_add(context: Any, x: Any, y: Any, z: Any) -> Typed:
    """x * y + z, fused where the processor can."""
    return floats(floats, floats, floats), vir.emit(vir.muladd)


@intrinsic
def greater(context: Any, x: Any, y: Any) -> Typed:
    """The greater of x and y; y where either is NaN."""
    return floats(floats, floats), vir.emit(vir.greater)


@intrinsic
def exp2(context: Any, x: Any) -> Typed:
    """2**x for x <= 127, relative error 1e-7; exactly 1 for 0, exactly 0 below -126."""
    return floats(floats), vir.emit(vir.exp2)


@intrinsic
def tanh(context: Any, x: Any) -> Typed:
    """tanh(x), relative error about 2e-7: a polynomial near 0, by 2**x elsewhere."""

    return floats(floats), vir.emit(vir.tanh)


@intrinsic
def finite_or_zero(context: Any, x: Any) -> Typed:
    """x, but 0 for -inf: what may be subtracted from -inf."""

    def build(b: Any, x: Any) -> Any:
        return b.select(b.fcmp_ordered("==", x, vir.splat(vir.MINUS_INFINITY)), vir.splat(0.0), x)

    return floats(floats), vir.emit(build)


@intrinsic
def keep_between(context: Any, x: Any, place: Any, low: Any, high: Any) -> Typed:
    """x where low <= place <= high, -inf elsewhere, whatever x is there."""

    def build(b: Any, x: Any, place: Any, low: Any, high: Any) -> Any:
        inside = b.and_(b.fcmp_ordered(">=", place, low), b.fcmp_ordered("<=", place, high))
        return b.select(inside, x, vir.splat(vir.MINUS_INFINITY))

    return floats(floats, floats, floats, floats), vir.emit(build)


@intrinsic
def any_greater(context: Any, x: Any, y: Any) -> Typed:
    """Whether x > y in some lane."""

    def build(b: Any, x: Any, y: Any) -> Any:
        bits = b.bitcast(b.fcmp_ordered(">", x, y), ir.IntType(LANES))
        return b.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))

    return types.boolean(floats, floats), vir.emit(build)


# Across lanes: rows of a quad.


@intrinsic
def lane_places(context: Any) -> Typed:
    """Lane l holds l // 4: the position of its score, counted from the vector's first."""
    return floats(), vir.emit(lambda b: vir.constants([lane // QUAD for lane in range(LANES)]))


@intrinsic
def row_sums(context: Any, x: Any) -> Typed:
    """Each lane gets the sum of its row's lanes."""
    return floats(floats), vir.emit(lambda b, x: vir.fold(b, x, lambda b, p, q: b.fadd(p, q)))


@intrinsic
def row_maxima(context: Any, x: Any) -> Typed:
    """Each lane gets the maximum of its row's lanes."""
    return floats(floats), vir.emit(lambda b, x: vir.fold(b, x, vir.greater))


@intrinsic
def load_quad(context: Any, address: Any) -> Typed:
    """Four float32, one a row, in the lanes of the rows."""

    def build(b: Any, address: Any) -> Any:
        four = vir.load(b, address, ir.VectorType(vir.FLOAT, QUAD), 4)
        return vir.pick(b, four, four, [lane % QUAD for lane in range(LANES)])

    return floats(types.int64), vir.emit(build)


@intrinsic
def split_rows(context: Any, x: Any) -> Typed:
    """Four vectors, each all of one row's (first) value."""

    def build(b: Any, x: Any) -> Any:
        return cgutils.pack_array(b, [vir.pick(b, x, x, [row] * LANES) for row in range(QUAD)])

    return types.UniTuple(floats, QUAD)(floats), vir.emit(build)


@intrinsic
def eight_zeros(context: Any) -> Typed:
    """Eight vectors of zeros."""

    def build(b: Any) -> Any:
        return cgutils.pack_array(b, [vir.splat(0.0)] * 8)

    return eight(), vir.emit(build)


@intrinsic
def load_eight(context: Any, address: Any) -> Typed:
    """Eight vectors that lie one after the other."""

    def build(b: Any, address: Any) -> Any:
        places = [b.add(address, ir.Constant(vir.INT64, k * VECTOR_BYTES)) for k in range(8)]
        return cgutils.pack_array(b, [vir.load(b, place, vir.FLOATS, 4) for place in places])

    return eight(types.int64), vir.emit(build)


@intrinsic
def store_eight(context: Any, address: Any, vectors: Any) -> Typed:
    """Store eight vectors one after the other."""

    def build(b: Any, address: Any, vectors: Any) -> None:
        for k, vector in enumerate(cgutils.unpack_tuple(b, vectors)):
            place = b.add(address, ir.Constant(vir.INT64, k * VECTOR_BYTES))
            b.store(vector, pointer(b, place, vir.FLOATS), align=4)

    return types.void(types.int64, eight), vir.emit(build)


@intrinsic
def store_sums(context: Any, address: Any, vectors: Any) -> Typed:
    """Sum each of eight vectors over its lanes; store the eight sums.

    All eight are added up in the same order of lanes, so a sum doesn't depend on its place.
    """

    def build(b: Any, address: Any, vectors: Any) -> None:
        sums = vir.sum_each(b, cgutils.unpack_tuple(b, vectors))
        b.store(sums, pointer(b, address, sums.type), align=4)

    return types.void(types.int64, eight), vir.emit(build)
