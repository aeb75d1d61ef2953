"""Storage dtypes: how the bits of K, V and queries lie in NumPy arrays.

NumPy has no bfloat16, so both 16-bit floats travel as their bits in uint16 arrays and the dtype is
always named beside the array. Arithmetic is float32 everywhere.

K and V alone may also be stored as "fp8_e4m3" (uint8 arrays): one bit of sign, four of exponent,
three of mantissa; the largest number is 448, there is no infinity, NaN is 0x7F. They then go with a
scale a KV head: what is stored is the number divided by it, rounded once, ties to even; what is
larger saturates at 448, infinity too; NaN stays NaN.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Arrays as the annotations of compiled code name them: bits are those of a storage dtype.
Bits = NDArray[Any]
Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# Kinds as the compiled code sees them.
FLOAT32 = 0
BFLOAT16 = 1
FLOAT16 = 2
FP8_E4M3 = 3


@dataclass(frozen=True, slots=True)
class StorageDtype:
    """One storage dtype: its name, kind, the NumPy dtype of its arrays and of its bits."""

    name: str
    kind: int
    array_dtype: np.dtype[Any]
    bits_dtype: np.dtype[Any]
    nan_bits: int


STORAGE_DTYPES = {
    "float32": StorageDtype(
        "float32", FLOAT32, np.dtype(np.float32), np.dtype(np.uint32), 0x7FC00000
    ),
    "bfloat16": StorageDtype(
        "bfloat16", BFLOAT16, np.dtype(np.uint16), np.dtype(np.uint16), 0x7FC0
    ),
    "float16": StorageDtype("float16", FLOAT16, np.dtype(np.uint16), np.dtype(np.uint16), 0x7E00),
}


#: What K and V may be stored as beside the dtype that is computed in.
FP8 = StorageDtype("fp8_e4m3", FP8_E4M3, np.dtype(np.uint8), np.dtype(np.uint8), 0x7F)


def storage_dtype(name: str) -> StorageDtype:
    """Return the storage dtype called ``name``.

    Raises TypeError for anything but a string, ValueError for a name that is not supported.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"dtype must be a string, one of {', '.join(STORAGE_DTYPES)}; got {type(name).__name__}"
        )
    found = STORAGE_DTYPES.get(name)
    if found is None:
        near = difflib.get_close_matches(name, STORAGE_DTYPES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"dtype {name[:40]!r} is not supported by the cpu kernels; "
            f"supported: {', '.join(STORAGE_DTYPES)}{hint}"
        )
    return found


def kv_storage_dtype(name: str | None, computed: StorageDtype) -> StorageDtype:
    """Return what K and V are stored as, beside a dtype that is computed in; None: the same.

    Raises TypeError for anything but a string or None, ValueError for what can't be.
    """
    if name is None or name == computed.name:
        return computed
    if not isinstance(name, str):
        raise TypeError(f"kv_dtype must be a string or None; got {type(name).__name__}")
    if name != FP8.name:
        raise ValueError(
            f"kv_dtype {name[:40]!r} is not supported beside dtype {computed.name!r}; supported: "
            f"None (the same), {FP8.name!r}"
        )
    return FP8


def any_storage_dtype(name: str) -> StorageDtype:
    """Return a dtype that K and V can be stored as; raises as `storage_dtype`."""
    return FP8 if name == FP8.name else storage_dtype(name)


def nan_pattern(name: str) -> np.generic:
    """Return the quiet NaN of a storage dtype as bits, the pattern `fill_frames` poisons with."""
    dtype = any_storage_dtype(name)
    return dtype.bits_dtype.type(dtype.nan_bits)


def float_to_bits(values: NDArray[np.floating[Any]], name: str) -> NDArray[Any]:
    """Round to a storage dtype, ties to even; the result has the dtype's array dtype.

    For tests and input makers: plain NumPy, one pass over the array.
    """
    dtype = any_storage_dtype(name)
    single = np.ascontiguousarray(values, dtype=np.float32)
    if dtype.kind == FP8_E4M3:
        return _float_to_fp8(single)
    if dtype.kind == FLOAT32:
        return single
    if dtype.kind == FLOAT16:
        with np.errstate(over="ignore"):
            return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)


def bits_to_float(array: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Widen an array of a storage dtype to float32, exactly."""
    dtype = any_storage_dtype(name)
    if dtype.kind == FP8_E4M3:
        return FP8_VALUES[np.asarray(array)]
    if dtype.kind == FLOAT32:
        return np.asarray(array, dtype=np.float32)
    if dtype.kind == FLOAT16:
        return np.ascontiguousarray(array).view(np.float16).astype(np.float32)
    return (np.ascontiguousarray(array).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _fp8_values() -> Float32s:
    """The number that each of the 256 patterns of fp8_e4m3 stands for."""
    pattern = np.arange(256)
    exponent, mantissa = (pattern >> 3) & 15, pattern & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    size[(pattern & 0x7F) == 0x7F] = np.nan
    return np.where(pattern & 0x80, -size, size).astype(np.float32)


FP8_VALUES = _fp8_values()


def _float_to_fp8(single: Float32s) -> NDArray[np.uint8]:
    """The nearest of `FP8_VALUES`: by the quantum of each number's binade, not by its bits."""
    size = np.minimum(np.abs(single.astype(np.float64)), 448.0)
    finite = np.where(np.isnan(size), 0.0, size)
    exponent = np.maximum(np.frexp(finite)[1] - 1, -6)  # below 2**-6 the quantum stays
    steps = np.rint(np.ldexp(finite, 3 - exponent)).astype(np.int64)  # 8 to 16, below 8 subnormal
    bits = np.where(steps >= 8, (exponent + 6) * 8 + steps, steps)
    bits = np.where(np.isnan(size), FP8.nan_bits, bits) | (np.signbit(single) * 0x80)
    return np.where(np.isnan(single), FP8.nan_bits, bits).astype(np.uint8)
