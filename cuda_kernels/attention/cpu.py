"""The CPU twin of `paged_attention`, in explicit vectors: the launch.

A batch is cut into tasks (`tasks.py`), each walks its rows' positions (`walk.py`) in tiles that
four query rows at a time are held against (`quad.py`). A lone long row has too few tasks to fill
the cores, so there each split of 1,024 positions becomes a task of its own and the same fold comes
after: the arithmetic, hence every bit, is the same either way.

Threads take the next task from a shared counter, so a core that other work slows down takes
fewer. `plain.py` is a second twin of independent arithmetic, which tests hold against this one.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import carray, cfunc, njit, types
from numpy.typing import NDArray

from cuda_kernels.attention import tasks as cutting
from cuda_kernels.attention.call import CALL, RECORD_POINTER
from cuda_kernels.attention.quad import ADDRESS_BYTES, num_chunks
from cuda_kernels.attention.request import Request, clear_empty_rows
from cuda_kernels.attention.room import scratch_size
from cuda_kernels.attention.state import state_bytes
from cuda_kernels.attention.tasks import NUM_COLUMNS
from cuda_kernels.attention.walk import run_merge, run_task
from cuda_kernels.dtypes import BFLOAT16, FP8_E4M3, Bits
from cuda_kernels.launch import launch_parallel
from cuda_kernels.plane import Plane
from cuda_kernels.simd import address_of, fetch_add
from cuda_kernels.threads import address, call_here, call_on_all_threads
from cuda_kernels.vectors import FP8_LOADED, QUAD

# Query rows (tokens times heads of a group) a tile aims at.
TILE_ROWS = 64
# From this many tasks on, splits needn't be tasks of their own.
ENOUGH_TASKS = 64
# A batch that loads fewer K/V values than this runs on the calling thread: waking the pool costs
# little on idle cores, but milliseconds where the engine's own threads fill them.
SMALL_WORK = 2**21
_LOG2_E = 1.4426950408889634


@cfunc(types.void(RECORD_POINTER), cache=True, error_model="numpy")
def take_tasks(calls: Any) -> None:
    """Run tasks until none is left; several threads may be at it."""
    call = carray(calls, 1)[0]
    scratch = np.empty(call.scratch_bytes, np.uint8)
    room = address_of(scratch)
    while True:
        index = fetch_add(call.ticket, 1)
        if index >= call.num_tasks:
            break
        run_task(call, call.tasks + index * NUM_COLUMNS * ADDRESS_BYTES, room)
    scratch[0] = 0  # Numba would free it after its last mention


@cfunc(types.void(RECORD_POINTER), cache=True, error_model="numpy")
def merge_all(calls: Any) -> None:
    """Merge the splits that ran as tasks of their own."""
    call = carray(calls, 1)[0]
    scratch = np.empty(call.scratch_bytes, np.uint8)
    room = address_of(scratch)
    for index in range(call.num_merges):
        run_merge(call, call.merges + index * NUM_COLUMNS * ADDRESS_BYTES, room)
    scratch[0] = 0


@njit(cache=True, nogil=True)
def sizes(tile_rows: int, head_dim: int, value_dim: int) -> tuple[int, int]:
    """Bytes of a task's scratch and of a partial result."""
    quads = (tile_rows + QUAD - 1) // QUAD
    return scratch_size(tile_rows, head_dim, value_dim), quads * state_bytes(num_chunks(value_dim))


def plane_fields(plane: Plane, arena: Bits) -> tuple[int, int, int, int]:
    """The plane of a record: address, and bytes from frame to frame, head to head, row to row."""
    size = arena.itemsize
    return (
        address(arena) + plane.offset * size,
        arena.strides[0],
        plane.head_stride * size,
        plane.token_stride * size,
    )


def in_log2(values: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """Natural logits in units of log2(e), which is what the exponentials here are to."""
    return None if values is None else np.multiply(values, _LOG2_E, dtype=np.float32)


def address_or_zero(array: NDArray[Any] | None) -> int:
    """The address of an optional array."""
    return 0 if array is None else address(array)


def scales(request: Request) -> tuple[float, float]:
    """What queries are multiplied by, and the softcap; both carry the change to base 2."""
    if request.softcap > 0:
        return request.scale / request.softcap, request.softcap * _LOG2_E
    return request.scale * _LOG2_E, 0.0


def as_loaded(scale: NDArray[np.float32] | None, request: Request) -> NDArray[np.float32] | None:
    """What numbers of K or V, as they are loaded, are multiplied by; a float32 a KV head."""
    if request.kv_kind != FP8_E4M3:
        return None
    ones = np.ones(request.num_kv_heads, np.float32)
    return np.multiply(ones if scale is None else scale, 1 / FP8_LOADED, dtype=np.float32)


def attend(request: Request) -> None:
    """Run the twin; cost and guarantees are those of `paged_attention`."""
    rows, query, out, lse = request.rows, request.query, request.out, request.lse
    group = query.shape[1] // request.num_kv_heads
    longest, empty = cutting.survey(rows.seq_lens, rows.query_start)
    if longest == 0:
        return
    if query.strides[2] != query.itemsize:
        query = np.ascontiguousarray(query)
    if out.strides[2] != out.itemsize:
        out = np.empty(out.shape, out.dtype)
    tile_tokens = max(1, min(TILE_ROWS // group, longest))
    num_threads = numba.get_num_threads()
    tasks, merges, num_slots, num_positions = cutting.cut(
        rows.seq_lens,
        rows.query_start,
        request.num_kv_heads,
        tile_tokens,
        request.window,
        ENOUGH_TASKS if num_threads > 1 else 0,
    )
    scratch_bytes, slot_bytes = sizes(tile_tokens * group, request.key.dims, request.value.dims)
    workspace = np.empty(num_slots * slot_bytes, np.uint8)
    ticket = np.zeros(1, np.int64)
    slopes, sinks = in_log2(request.alibi), in_log2(request.sinks)
    key_scale = as_loaded(request.key_scale, request)
    value_scale = as_loaded(request.value_scale, request)
    dealt = request.kv_kind == FP8_E4M3 and request.kind != BFLOAT16
    call = np.empty(CALL.itemsize // 8, np.int64)
    call.view(CALL)[0] = (
        *(address(query), *query.strides[:2]),
        *(address(out), *out.strides[:2]),
        *((0, 0, 0) if lse is None else (address(lse), *lse.strides)),
        *plane_fields(request.key, request.arena),
        *plane_fields(request.value, request.values),
        *(address(rows.table), address(rows.table_start)),
        *(address(rows.seq_lens), address(rows.query_start)),
        *(request.block_size, request.key.dims, request.value.dims, group),
        *(request.window, address_or_zero(slopes), address_or_zero(sinks)),
        *(address_or_zero(key_scale), address_or_zero(value_scale), dealt),
        *(address(tasks), tasks.shape[0], address(merges), merges.shape[0]),
        *(address(workspace), slot_bytes, address(ticket)),
        *(scratch_bytes, request.kind, request.kv_kind, request.arena.itemsize),
        *scales(request),
    )
    quads = (tile_tokens * group + QUAD - 1) // QUAD
    work = num_positions * quads * (request.key.dims + request.value.dims)
    if num_threads == 1 or work < SMALL_WORK:
        call_here(take_tasks.address, address(call))
    else:
        launch_parallel(call_on_all_threads, take_tasks.address, address(call), num_threads)
    if merges.shape[0]:
        call_here(merge_all.address, address(call))
    if out is not request.out:
        num_tokens = int(rows.query_start[-1])
        request.out[:num_tokens] = out[:num_tokens]
    if empty:
        clear_empty_rows(request)
