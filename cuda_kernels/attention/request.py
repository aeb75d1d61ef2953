"""What `paged_attention` hands to a twin once all is checked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.attention.rows import Rows
from cuda_kernels.dtypes import Bits
from cuda_kernels.plane import Plane


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
    kv_kind: int  # of arena and values; the rest is of `kind`
    key_scale: NDArray[np.float32] | None  # [num_kv_heads]
    value_scale: NDArray[np.float32] | None


def clear_empty_rows(request: Request) -> None:
    """Rows of length 0 attend to nothing: zeros, log-sum-exp -inf."""
    lens = request.rows.seq_lens
    for row in np.flatnonzero(lens == 0):
        start, stop = request.rows.query_start[row : row + 2]
        request.out[start:stop] = 0
        if request.lse is not None:
            request.lse[start:stop] = -np.inf
