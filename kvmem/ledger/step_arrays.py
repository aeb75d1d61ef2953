"""`StepArrays`: what a planned step hands to kernels and engines, as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class StepArrays:
    """The arrays of one planned step; rows are the planned sequences in the order given."""

    epoch: int
    rows: NDArray[Any]  # ROW, one a sequence asked for, planned or not
    tokens: NDArray[np.int64]  # [num_tokens]
    positions: NDArray[np.int64]  # [num_tokens]
    slot_mapping: NDArray[np.int64]  # [num_tokens]
    seq_lens: NDArray[np.int32]  # [num_rows]: context length, this step's tokens included
    query_start: NDArray[np.int32]  # [num_rows + 1]
    table_start: NDArray[np.int64]  # [num_rows]: of each row in `frame_table`
    frame_table: NDArray[np.int32]  # the flat table of device frames at planning
    last: NDArray[np.int64]  # [num_ready]: the token whose logits are sampled
    is_ready: NDArray[np.bool_]  # [num_rows]: the row's last pending token is in this step
    num_tokens: NDArray[np.int32]  # [num_rows]
