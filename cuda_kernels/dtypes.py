"""Storage dtypes: how the bits of K, V and queries lie in NumPy arrays.

NumPy has no bfloat16, so both 16-bit floats travel as their bits in uint16 arrays and the dtype is
always named beside the array. Arithmetic is float32 everywhere.
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


def nan_pattern(name: str) -> np.generic:
    """Return the quiet NaN of a storage dtype as bits, the pattern `fill_frames` poisons with."""
    dtype = storage_dtype(name)
    return dtype.bits_dtype.type(dtype.nan_bits)


def float_to_bits(values: NDArray[np.floating[Any]], name: str) -> NDArray[Any]:
    """Round to a storage dtype, ties to even; the result has the dtype's array dtype.

    For tests and input makers: plain NumPy, one pass over the array.
    """
    dtype = storage_dtype(name)
    single = np.ascontiguousarray(values, dtype=np.float32)
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
    dtype = storage_dtype(name)
    if dtype.kind == FLOAT32:
        return np.asarray(array, dtype=np.float32)
    if dtype.kind == FLOAT16:
        return np.ascontiguousarray(array).view(np.float16).astype(np.float32)
    return (np.ascontiguousarray(array).astype(np.uint32) << np.uint32(16)).view(np.float32)
