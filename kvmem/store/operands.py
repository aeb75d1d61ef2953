"""The arrays of a step where the kernels of a GPU read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cuda_kernels.cuda.array import DeviceArray


class Operands(NamedTuple):
    """Slots and rows of a batch on the device; the last three arrays have one dtype."""

    slot_mapping: DeviceArray | None  # int64 [num_tokens]
    table: DeviceArray  # int32, flat
    table_start: DeviceArray  # [num_rows]
    seq_lens: DeviceArray  # [num_rows]
    query_start: DeviceArray  # [num_rows + 1]
    max_seq_len: int  # at least the largest of `seq_lens`
    max_query_len: int  # at least the most tokens of a row
    fixed: bool = False  # always at these addresses: a graph may be captured
