"""The plain twin of `paged_attention`: Numba loops alone, which LLVM vectorises as it can.

The second opinion that tests hold the vector twin (`cpu.py`) against: other loops, other order of
sums, other exponential, the same cuts.

A task walks one query tile's positions in splits of 1,024, cut at fixed positions; a split is
walked in tiles of 64 with the running-maximum softmax, and its partial result is folded into the
total in ascending order. A lone long row has too few tasks to fill the cores, so there each split
becomes a task of its own and the same fold comes after: the arithmetic, hence every bit, is the
same either way.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import njit, prange

from cuda_kernels.attention import tasks as cutting
from cuda_kernels.attention.partial import clear, finish, fold, partial_in
from cuda_kernels.attention.request import Request, clear_empty_rows
from cuda_kernels.attention.rows import Rows
from cuda_kernels.attention.split import Geometry, Rules, attend_split
from cuda_kernels.attention.tasks import (
    HEAD,
    NUM_TOKENS,
    ROW,
    SLOT,
    SPLIT,
    SPLIT_TOKENS,
    TOKEN,
    first_read,
)
from cuda_kernels.attention.tiles import PANEL, TILE_KEYS, tile_code
from cuda_kernels.dtypes import Bits, Float32s, Int64s
from cuda_kernels.launch import launch_parallel
from cuda_kernels.numeric import narrow, widen

# Query rows (tokens times heads of a group) a tile aims at.
TILE_ROWS = 64
# From this many tasks on, splits needn't be tasks of their own.
ENOUGH_TASKS = 64


@njit(cache=True, nogil=True)
def pack_query(packed: Float32s, query: Bits, kind: int, scales: Float32s, group: int) -> None:
    """query [token][head][dim] to float32 packed [kv head][token * group + g][dim], scaled by a
    number a KV head."""
    for token in range(query.shape[0]):
        for head in range(query.shape[1]):
            kv_head = head // group
            row = token * group + head - kv_head * group
            for d in range(query.shape[2]):
                packed[kv_head, row, d] = widen(query[token, head, d], kind) * scales[kv_head]


@njit(cache=True, nogil=True)
def unpack_output(out: Bits, result: Float32s, kind: int, num_tokens: int) -> None:
    """float32 [token][head][dim] to the bits of the storage dtype."""
    for token in range(num_tokens):
        for head in range(out.shape[1]):
            for d in range(out.shape[2]):
                out[token, head, d] = narrow(result[token, head, d], kind)


@tile_code
def padded_rows(num_tokens: int, group: int) -> int:
    """Query rows of a tile, made even: the inner loops take them in pairs."""
    return (num_tokens * group + 1) // 2 * 2


@tile_code
def run_task(
    task: Int64s,
    packed: Float32s,
    result: Float32s,
    lse: Float32s,
    scratch: Float32s,
    workspace: Float32s,
    arena: Bits,
    values: Bits,
    rows: Rows,
    geometry: Geometry,
    rules: Rules,
) -> None:
    """All splits of a query tile, folded and finished; or one split, left in the workspace."""
    row = task[ROW]
    head = task[HEAD]
    n = task[NUM_TOKENS]
    group = lse.shape[1] // packed.shape[0]
    tile_rows = padded_rows(n, group)
    panels = geometry.panels
    token = rows.query_start[row] + task[TOKEN]
    position = rows.seq_lens[row] - rows.query_start[row + 1] + token
    start = token * group * geometry.padded_dim
    query = packed[head, start : start + tile_rows * geometry.padded_dim]
    table = rows.table[rows.table_start[row] :]
    slopes = rules.slopes[head * group : (head + 1) * group]
    size = tile_rows * (panels * PANEL + 2)
    total = partial_in(scratch[:size], tile_rows, panels)
    clear(total)
    whole = task[SPLIT] < 0
    first = first_read(position, rules.window) // SPLIT_TOKENS if whole else task[SPLIT]
    last = (position + n - 1) // SPLIT_TOKENS if whole else first
    part = partial_in(
        scratch[size : 2 * size] if whole else workspace[task[SLOT]], tile_rows, panels
    )
    for split in range(first, last + 1):
        attend_split(
            part,
            query,
            tile_rows,
            n,
            position,
            head,
            split,
            scratch[2 * size :],
            arena,
            values,
            table,
            geometry,
            rules,
            slopes,
        )
        if whole:
            fold(total, part, tile_rows, panels)
    if whole:
        finish(
            result,
            lse,
            total,
            rules.sinks,
            tile_rows,
            n,
            group,
            token,
            head,
            panels,
            geometry.value_dim,
        )


@njit(parallel=True, cache=True, nogil=True)
def run_tasks(
    tasks: Int64s,
    scratch_size: int,
    packed: Float32s,
    result: Float32s,
    lse: Float32s,
    workspace: Float32s,
    arena: Bits,
    values: Bits,
    rows: Rows,
    geometry: Geometry,
    rules: Rules,
) -> None:
    """Run tasks on all threads of Numba's pool; each task has its own scratch."""
    for i in prange(tasks.shape[0]):
        scratch = np.empty(scratch_size, np.float32)
        run_task(
            tasks[i], packed, result, lse, scratch, workspace, arena, values, rows, geometry, rules
        )


@tile_code
def run_merge(
    merge: Int64s,
    buffer: Float32s,
    result: Float32s,
    lse: Float32s,
    workspace: Float32s,
    rows: Rows,
    geometry: Geometry,
    rules: Rules,
    group: int,
) -> None:
    """Fold the splits of one query tile, in ascending order, and finish."""
    tile_rows = padded_rows(merge[NUM_TOKENS], group)
    total = partial_in(buffer, tile_rows, geometry.panels)
    clear(total)
    for k in range(merge[SPLIT]):
        part = partial_in(workspace[merge[SLOT] + k], tile_rows, geometry.panels)
        fold(total, part, tile_rows, geometry.panels)
    finish(
        result,
        lse,
        total,
        rules.sinks,
        tile_rows,
        merge[NUM_TOKENS],
        group,
        rows.query_start[merge[ROW]] + merge[TOKEN],
        merge[HEAD],
        geometry.panels,
        geometry.value_dim,
    )


@njit(cache=True, nogil=True)
def run_merges(
    merges: Int64s,
    result: Float32s,
    lse: Float32s,
    workspace: Float32s,
    rows: Rows,
    geometry: Geometry,
    rules: Rules,
    num_kv_heads: int,
) -> None:
    """Merge what ran as tasks of their own. Allocates here: `_nrt=False` code mustn't."""
    buffer = np.empty(workspace.shape[1], np.float32)
    group = lse.shape[1] // num_kv_heads
    for i in range(merges.shape[0]):
        run_merge(merges[i], buffer, result, lse, workspace, rows, geometry, rules, group)


def key_factors(request: Request) -> Float32s:
    """What queries are multiplied by: the scale, and what stored K was divided by."""
    factors = np.full(request.num_kv_heads, request.scale, np.float32)
    return factors if request.key_scale is None else factors * request.key_scale


def rules_of(request: Request, num_heads: int) -> Rules:
    """What bends the scores, for compiled code: neutral values where a feature is off."""
    alibi, sinks = request.alibi, request.sinks
    return Rules(
        request.window,
        np.float32(request.softcap),
        np.zeros(num_heads, np.float32) if alibi is None else np.ascontiguousarray(alibi),
        np.full(num_heads, -np.inf, np.float32) if sinks is None else np.ascontiguousarray(sinks),
    )


def geometry_of(request: Request) -> Geometry:
    """The layout of K and V, and the padded widths of the tiles."""
    return Geometry(
        request.kv_kind,
        *request.key,
        *request.value,
        request.block_size,
        (request.key.dims + 7) // 8 * 8,
        (request.value.dims + PANEL - 1) // PANEL,
    )


def attend(request: Request) -> None:
    """Run the twin; cost and guarantees are those of `paged_attention`."""
    rows = request.rows
    geometry, rules = geometry_of(request), rules_of(request, request.query.shape[1])
    num_tokens = int(rows.query_start[-1])
    num_heads = request.query.shape[1]
    num_kv_heads = request.num_kv_heads
    group = num_heads // num_kv_heads
    tile_tokens = max(1, TILE_ROWS // group)
    tile_rows = (tile_tokens * group + 1) // 2 * 2
    # One row more, zeros: the partner of an odd last row.
    packed = np.zeros((num_kv_heads, num_tokens * group + 1, geometry.padded_dim), np.float32)
    query = np.ascontiguousarray(request.query[:num_tokens])
    pack_query(packed, query, request.kind, key_factors(request), group)
    result = np.empty((num_tokens, num_heads, geometry.value_dim), np.float32)
    lse = np.empty((num_tokens, num_heads), np.float32)
    num_threads = numba.get_num_threads()
    tasks, merges, num_slots, _ = cutting.cut(
        rows.seq_lens, rows.query_start, num_kv_heads, tile_tokens, rules.window, ENOUGH_TASKS
    )
    part_size = tile_rows * (geometry.panels * PANEL + 2)
    scratch_size = 2 * part_size + TILE_KEYS * (
        geometry.padded_dim + geometry.panels * PANEL + tile_rows
    )
    workspace = np.empty((num_slots, part_size), np.float32)
    arguments = (
        cutting.deal(tasks, num_threads),
        scratch_size,
        packed.reshape(num_kv_heads, -1),
        result,
        lse,
        workspace,
        request.arena,
        request.values,
        rows,
        geometry,
        rules,
    )
    launch_parallel(run_tasks, *arguments)
    if merges.shape[0]:
        run_merges(merges, result, lse, workspace, rows, geometry, rules, num_kv_heads)
    out = np.empty(result.shape, request.out.dtype)
    if request.value_scale is not None:
        result *= np.repeat(request.value_scale, group)[:, None]
    unpack_output(out, result, request.kind, num_tokens)
    request.out[:num_tokens] = out
    if request.lse is not None:
        request.lse[:num_tokens] = lse
    clear_empty_rows(request)
