"""Float arithmetic that compiled twins share: 16-bit conversions, exp and tanh that vectorise.

The functions are branch-free on purpose: LLVM turns the loops that call them into vector code,
which it can't do for the C library's expf and tanhf. `contract` (fused multiply-add) is the only
fast-math flag: results keep one order of operations, so they don't depend on the place of a
value in a tile, and NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from cuda_kernels.dtypes import BFLOAT16, FLOAT32, FP8_E4M3

_LOG2_E = np.float32(1.4426950408889634)
_HALF = np.float32(0.5)
_ONE = np.float32(1)
_TWO = np.float32(2)
# Below this e**x leaves the normal float32 numbers; such a weight is 0.
_EXP_FLOOR = np.float32(-87.0)
_EXP_CEILING = np.float32(88.0)
# 2**f - 1 over f on [-0.5, 0.5], fitted at Chebyshev nodes; relative error 6e-9.
_E1 = np.float32(0.693147188)
_E2 = np.float32(0.240226509)
_E3 = np.float32(0.055503571)
_E4 = np.float32(0.00961805667)
_E5 = np.float32(0.00133908674)
_E6 = np.float32(0.000154614475)
# tanh(x) = x + x**3 * q(x**2) for |x| <= 0.625, fitted likewise; relative error 2e-8.
TANH_SMALL = np.float32(0.625)
_T0 = np.float32(-0.333333286)
_T1 = np.float32(0.133327328)
_T2 = np.float32(-0.053844989)
_T3 = np.float32(0.0209681871)
_T4 = np.float32(-0.00605369752)
# The same, for the vector code.
EXP2_TERMS = tuple(float(term) for term in (_E1, _E2, _E3, _E4, _E5, _E6))
TANH_TERMS = tuple(float(term) for term in (_T0, _T1, _T2, _T3, _T4))
_TWO_POW_112 = np.float32(2.0**112)
_TWO_POW_120 = np.float32(2.0**120)

inner = njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")


@inner
def exp(x: np.float32) -> np.float32:
    """e**x for float32 x <= 88; 0 below -87; NaN for NaN. Relative error about 1e-7 near 0."""
    bounded = x if x < _EXP_CEILING else (_EXP_CEILING if x >= _EXP_CEILING else x)
    t = bounded * _LOG2_E
    whole = np.floor(t + _HALF)
    f = t - whole
    tail = _E1 + f * (_E2 + f * (_E3 + f * (_E4 + f * (_E5 + f * _E6))))
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if x < _EXP_FLOOR else (_ONE + f * tail) * power


@inner
def tanh(x: np.float32) -> np.float32:
    """tanh of a float32, relative error about 2e-7."""
    size = np.float32(abs(x))
    z = x * x
    small = x + x * z * (_T0 + z * (_T1 + z * (_T2 + z * (_T3 + z * _T4))))
    big = _ONE - _TWO / (exp(_TWO * size) + _ONE)
    signed = -big if x < np.float32(0) else big
    return small if size < TANH_SMALL else signed


@inner
def widen_bfloat16(bits: np.unsignedinteger[Any]) -> np.float32:
    """bfloat16 bits (any unsigned integer) to float32, exactly."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inner
def widen_float16(bits: np.unsignedinteger[Any]) -> np.float32:
    """float16 bits (any unsigned integer) to float32, exactly, subnormals too.

    The shifted bits read as a float32 are the value times 2**-112; Inf and NaN, whose exponent
    the product would not carry over, get the float32 exponent by OR.
    """
    word = np.uint32(bits)
    special = (word & np.uint32(0x7C00)) == np.uint32(0x7C00)
    scaled = np.uint32((word & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * _TWO_POW_112
    exponent = np.uint32(0x7F800000) if special else np.uint32(0)
    sign = np.uint32((word & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(np.float32(scaled).view(np.uint32) | exponent | sign).view(np.float32)


@inner
def widen_fp8(bits: np.unsignedinteger[Any]) -> np.float32:
    """fp8_e4m3 bits (any unsigned integer) to float32, exactly, subnormals too.

    As `widen_float16`, with another distance between the exponents' biases.
    """
    word = np.uint32(bits)
    size = np.uint32(word & np.uint32(0x7F))
    scaled = np.uint32(size << np.uint32(20)).view(np.float32) * _TWO_POW_120
    found = np.float32(scaled).view(np.uint32)
    if size == np.uint32(0x7F):
        found = np.uint32(0x7FC00000)
    sign = np.uint32((word & np.uint32(0x80)) << np.uint32(24))
    return np.uint32(found | sign).view(np.float32)


@inner
def widen(bits: np.unsignedinteger[Any], kind: int) -> np.float32:
    """Bits of a storage dtype (by its kind) to float32."""
    if kind == FLOAT32:
        return np.uint32(bits).view(np.float32)
    if kind == BFLOAT16:
        return widen_bfloat16(bits)
    if kind == FP8_E4M3:
        return widen_fp8(bits)
    return widen_float16(bits)


@inner
def narrow_bfloat16(value: np.float32) -> np.uint32:
    """float32 to bfloat16 bits in a uint32, ties to even; any NaN becomes the quiet NaN."""
    bits = np.float32(value).view(np.uint32)
    even = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
    return np.uint32(0x7FC0) if value != value else rounded


@inner
def narrow_float16(value: np.float32) -> np.uint32:
    """float32 to float16 bits in a uint32, ties to even; overflow is Inf, NaN the quiet NaN.

    Normal results are rounded in integers (a carry moves the exponent, up to Inf); subnormal ones
    by the float adder, which aligns them to 2**-24 when 0.5 is added.
    """
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    aligned = np.float32(size.view(np.float32) + _HALF).view(np.uint32)
    subnormal = np.uint32(aligned - np.uint32(0x3F000000))
    even = np.uint32((size >> np.uint32(13)) & np.uint32(1))
    biased = np.uint32(size - np.uint32(112 << 23) + np.uint32(0xFFF) + even)
    result = np.uint32(biased >> np.uint32(13))
    if size < np.uint32(0x38800000):
        result = subnormal
    if size >= np.uint32(0x47800000):
        result = np.uint32(0x7C00)
    if size > np.uint32(0x7F800000):
        result = np.uint32(0x7E00)
    return np.uint32(result | sign)


@inner
def narrow(value: np.float32, kind: int) -> np.uint32:
    """float32 to the bits of a storage dtype (by its kind), in a uint32."""
    if kind == FLOAT32:
        return np.float32(value).view(np.uint32)
    if kind == BFLOAT16:
        return narrow_bfloat16(value)
    return narrow_float16(value)
