"""What `paged_attention` hands to a twin once all is checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.attention.tasks import Rows
from cuda_kernels.dtypes import Bits


class Plane(NamedTuple):
    """Where K or V of the layer lie in a frame, in elements; rows of `dims` are contiguous."""

    offset: int
    head_stride: int
    token_stride: int
    dims: int


class Request(NamedTuple):
    """A checked call; arrays of the storage dtype hold its bits (`dtypes.py`)."""

    out: Bits
    query: Bits
    arena: Bits
    values: Bits
    lse: NDArray[np.float32] | None
    rows: Rows
    kind: int
    key: Plane
    value: Plane
    block_size: int
    num_kv_heads: int
    scale: float
    window: int  # 0: none
    softcap: float  # 0: none
    alibi: NDArray[np.float32] | None
    sinks: NDArray[np.float32] | None


def address(array: NDArray[Any]) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def plane(layout: str, offset: int, num_heads: int, block_size: int, dims: int) -> Plane:
    """The plane of a layout: "HND" is ``[heads, block, dims]``, "NHD" ``[block, heads, dims]``."""
    if layout == "HND":
        return Plane(offset, block_size * dims, dims, dims)
    return Plane(offset, dims, num_heads * dims, dims)


def clear_empty_rows(request: Request) -> None:
    """Rows of length 0 attend to nothing: zeros, log-sum-exp -inf."""
    lens = request.rows.seq_lens
    if lens.all():
        return
    for row in np.flatnonzero(lens == 0):
        start, stop = request.rows.query_start[row : row + 2]
        request.out[start:stop] = 0
        if request.lse is not None:
            request.lse[start:stop] = -np.inf
