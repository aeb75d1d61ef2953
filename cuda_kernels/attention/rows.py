"""The rows of a batch as arrays; no Numba in here, for a launch on a device needs none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    """The rows of a batch: ragged frame tables, lengths, query tokens."""

    table: NDArray[np.int32]
    table_start: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    query_start: NDArray[np.int64]
