"""One call of the vector twin as a record: addresses, strides in bytes, sizes, rules.

Addresses instead of arrays: so one compiled version serves arrays of every layout, and a call
passes one argument instead of twenty. The arrays must outlive the call; `cpu.attend` sees to it.
"""

from __future__ import annotations

import numpy as np
from numba import from_dtype, types

_INTEGERS = (
    # [token][head][dim]; lse [token][head], 0: not wanted
    *("query", "query_token", "query_head"),
    *("out", "out_token", "out_head"),
    *("lse", "lse_token", "lse_head"),
    # the plane of KV head 0 in frame 0, and the way to other frames, heads, positions
    *("key", "key_frame", "key_head", "key_token"),
    *("value", "value_frame", "value_head", "value_token"),
    # rows: int32 table; int64 starts and lengths
    *("table", "table_start", "seq_lens", "query_start"),
    *("block_size", "head_dim", "value_dim", "group"),
    # a float32 a head in units of log2(e), 0: off
    *("window", "slopes", "sinks"),
    # a float32 a KV head, 0: none; 1 where K and V are loaded as even and odd elements, but queries
    # and results in order
    *("key_scales", "value_scales", "dealt"),
    # tasks and merges (tasks.py), partial results, next task to take
    *("tasks", "num_tasks", "merges", "num_merges", "workspace", "slot_bytes", "ticket"),
    # of queries and results; of K and V
    *("scratch_bytes", "kind", "kv_kind", "kv_bytes"),
)
CALL = np.dtype(
    [(name, np.int64) for name in _INTEGERS] + [("scale", np.float32), ("softcap", np.float32)],
    align=True,
)
RECORD_POINTER = types.CPointer(from_dtype(CALL))
