"""Checks that the public functions of all operations share: types, shapes, ranges.

Each raises TypeError for a wrong Python type or array dtype and ValueError for a wrong value,
with the parameter's name, what came, what is allowed; never the contents of an array.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.dtypes import FP8_E4M3, StorageDtype

# Of a plane: [heads, block, dims], or [block, heads, dims].
LAYOUTS = ("HND", "NHD")
# Of what stored K and V are multiplied by; the products with scores stay finite float32 numbers.
MIN_SCALE, MAX_SCALE = 1e-12, 1e12
INTEGER_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def integer(name: str, value: Any, minimum: int, maximum: int = 2**62) -> int:
    """Return ``value`` as an int within [minimum, maximum]; bools and floats are refused."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got a bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} must be an integer from {minimum} to {maximum}, got {number}")
    return number


def array(
    name: str,
    value: Any,
    dtypes: Sequence[np.dtype[Any]],
    shape: Sequence[int | None],
    *,
    contiguous: bool = False,
) -> NDArray[Any]:
    """Return ``value`` if it is an array of one of the dtypes and of the shape (None = any).

    An array on a device is one too; what it holds can't be checked.
    """
    if not isinstance(value, (np.ndarray, DeviceArray)):
        raise TypeError(f"{name} must be a numpy array, got {type(value).__name__}")
    if value.dtype not in dtypes:
        allowed = " or ".join(str(d) for d in dtypes)
        raise TypeError(f"{name} must have dtype {allowed}, got {value.dtype}")
    matches = value.ndim == len(shape) and all(
        want is None or have == want for have, want in zip(value.shape, shape, strict=True)
    )
    if not matches:
        wanted = "[" + ", ".join("any" if want is None else str(want) for want in shape) + "]"
        raise ValueError(f"{name} must have shape {wanted}, got {list(value.shape)}")
    if contiguous and not value.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous; got strides {list(value.strides)}")
    return value  # type: ignore[return-value]


def writable(name: str, value: NDArray[Any] | DeviceArray) -> None:
    """Refuse a read-only array where the operation writes."""
    if not value.flags.writeable:
        raise ValueError(f"{name} is read-only, but this operation writes to it")


def plane(name: str, offset: Any, rows: int, block_size: int, width: int, frame: int) -> int:
    """Return ``offset`` if a plane [rows, block_size, width] at it lies inside a frame."""
    start = integer(name, offset, 0)
    end = start + rows * block_size * width
    if end > frame:
        raise ValueError(
            f"{name} {start} puts a plane of {rows} x {block_size} x {width} elements past the "
            f"frame's end: {end} > {frame}"
        )
    return start


def layout(value: Any) -> None:
    """Refuse a name of a plane's layout that isn't known."""
    if not isinstance(value, str):
        raise TypeError(f"layout must be a string, 'HND' or 'NHD'; got {type(value).__name__}")
    if value not in LAYOUTS:
        raise ValueError(f"layout must be 'HND' or 'NHD', got {value[:40]!r}")


def kv_scales(stored: StorageDtype, heads: int, **scales: Any) -> None:
    """Refuse scales, by name, of K and V that aren't stored with one; float32 ``[heads]``.

    Of scales on a device it can't be checked what they hold.
    """
    for name, values in scales.items():
        if values is None:
            continue
        if stored.kind != FP8_E4M3:
            raise ValueError(f"{name} needs kv_dtype 'fp8_e4m3'; K and V are {stored.name}")
        array(name, values, (np.dtype(np.float32),), (heads,), contiguous=True)
        if isinstance(values, DeviceArray):
            continue
        wrong = ~((values >= MIN_SCALE) & (values <= MAX_SCALE))
        if wrong.any():
            raise ValueError(
                f"{name}[{int(np.argmax(wrong))}] is not a number from {MIN_SCALE} to {MAX_SCALE}"
            )


def frame_ids(name: str, ids: NDArray[Any] | DeviceArray, num_frames: int, limit_name: str) -> None:
    """Refuse ids outside [0, num_frames). One vectorised pass; ids on a device are trusted."""
    if isinstance(ids, DeviceArray) or ids.size == 0:
        return
    wrong = (ids < 0) | (ids >= num_frames)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{name}[{at}] is frame {int(ids[at])}, but {limit_name} has frames 0 to "
            f"{num_frames - 1}"
        )
