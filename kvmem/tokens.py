"""Token input in all its forms as one int32 array, checked before anything else happens.

int32 arrays and tensors are the native form and are not copied; other integer arrays are checked
and narrowed; lists cost a conversion (about 20 ns a token).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvmem.checks import shown

TokenArray: TypeAlias = NDArray[np.int32]
MAX_TOKEN = 2**31 - 1
_INT32 = np.dtype(np.int32)


def token_array(name: str, tokens: object, *, check_values: bool = True) -> TokenArray:
    """`tokens` as a one-dimensional int32 array. O(tokens).

    Takes a NumPy array, a CPU tensor, a list or tuple of ints in [0, 2**31). Raises TypeError for
    another type, ValueError for a wrong shape or value, naming the first bad index. With
    `check_values=False` an int32 array may hold negative ones: the caller looks for them.
    """
    if isinstance(tokens, np.ndarray):  # first: asking for a Tensor costs more
        array = tokens
    elif isinstance(tokens, torch.Tensor):
        if tokens.device.type != "cpu":
            raise ValueError(f"{name} is a tensor on {tokens.device}; allowed: cpu (this device)")
        array = _from_tensor(name, tokens)
    elif isinstance(tokens, list | tuple):
        array = _from_list(name, tokens)
    else:
        raise TypeError(
            f"{name} must be an int array, a tensor or a list of ints, not {type(tokens).__name__}"
        )
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions, shape {array.shape}; allowed: 1")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; allowed: integers, best int32")
    is_native = array.dtype == _INT32
    if not is_native or check_values:
        check_token_values(name, array)
    if is_native and array.flags.carray:
        return array
    # To compiled code a read-only array is another type: another compilation, of seconds.
    return np.require(array, np.int32, ("C_CONTIGUOUS", "ALIGNED", "WRITEABLE"))


def check_token_values(name: str, array: NDArray[Any]) -> None:
    """Raise ValueError, naming the first bad index, unless all are in [0, 2**31). O(tokens)."""
    if not len(array):
        return
    if array.min() < 0 or (array.dtype != _INT32 and array.max() > MAX_TOKEN):
        bad = int(np.flatnonzero((array < 0) | (array > MAX_TOKEN))[0])
        raise ValueError(f"{name}[{bad}] is out of range; allowed: 0 to 2**31 - 1")


def _from_tensor(name: str, tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor as an array; some dtypes and layouts have none."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.layout != torch.strided:
        raise TypeError(
            f"{name} is a tensor of {tensor.dtype}, {tensor.layout}; allowed: a dense tensor of "
            f"integers, best int32"
        )
    return np.asarray(tensor.detach().numpy())


def _from_list(name: str, tokens: list[object] | tuple[object, ...]) -> NDArray[np.int64]:
    if not tokens:
        return np.zeros(0, np.int64)
    kinds = set(map(type, tokens))
    if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        for i, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise TypeError(f"{name}[{i}] is a {type(token).__name__}; allowed: int")
    try:
        return np.array(tokens, np.int64)
    except OverflowError:
        bad = next(i for i, t in enumerate(tokens) if not 0 <= int(t) <= MAX_TOKEN)  # type: ignore[call-overload]
        raise ValueError(f"{name}[{bad}] is out of range; allowed: 0 to 2**31 - 1") from None


def count_array(name: str, counts: object, length: int, what: str) -> NDArray[np.int64]:
    """`counts` as int64 `[length]`, each in [0, 2**31); an int stands for all. O(length)."""
    allowed = f"integers 0 to 2**31 - 1, one per {what}"
    if isinstance(counts, bool):
        raise TypeError(f"{name} is a bool; allowed: {allowed}")
    if isinstance(counts, int | np.integer):
        if not 0 <= counts <= MAX_TOKEN:
            raise ValueError(f"{name}={shown(counts)}; allowed: {allowed}")
        return np.full(length, int(counts), np.int64)
    if isinstance(counts, torch.Tensor) and counts.device.type == "cpu":
        array = _from_tensor(name, counts)
    elif isinstance(counts, list | tuple | np.ndarray):
        try:
            array = np.asarray(counts)
        except ValueError:  # lists of unequal length
            raise ValueError(f"{name} is ragged; allowed: {allowed}") from None
    else:
        raise TypeError(f"{name} is {shown(counts)}; allowed: {allowed}")
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; allowed: {allowed}")
    if array.shape != (length,):
        raise ValueError(f"{name} has shape {array.shape}; allowed: ({length},), one per {what}")
    bad = np.flatnonzero((array < 0) | (array > MAX_TOKEN))
    if len(bad):
        raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}; allowed: {allowed}")
    return array.astype(np.int64)


def namespace_key(namespace: object) -> bytes:
    """A namespace as bytes that tell None, str and bytes apart. Its content is never shown."""
    if namespace is None:
        return b""
    if isinstance(namespace, str):
        return b"s" + namespace.encode("utf-8", "surrogatepass")
    if isinstance(namespace, bytes):
        return b"b" + namespace
    raise TypeError(f"namespace must be str, bytes or None, not {type(namespace).__name__}")
