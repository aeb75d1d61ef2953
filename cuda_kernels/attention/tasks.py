"""Cutting a batch into tasks, and checking its tables: the integer half of the attention twin."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cuda_kernels.attention.rows import Rows
from cuda_kernels.dtypes import Int64s

# Long contexts are cut here, at fixed positions, never by batch or thread count.
SPLIT_TOKENS = 1024

# Columns of a task.
ROW = 0
HEAD = 1  # KV head
TOKEN = 2  # first token of the query tile, counted from the row's first
NUM_TOKENS = 3
SPLIT = 4  # -1: the task does all splits; in a merge: how many splits
SLOT = 5  # place of the partial result in the workspace; -1: none
NUM_COLUMNS = 6

compiled = njit(cache=True, nogil=True)


@compiled
def first_read(position: int, window: int) -> int:
    """The first position that a query at `position` attends to; window 0 means all."""
    return max(0, position - window + 1) if window > 0 else 0


@compiled
def find_fault(
    rows: Rows, block_size: int, window: int, num_frames: int
) -> tuple[int, int, int, int]:
    """Find the first row that can't be attended; one pass over the part of the tables in use.

    Returns (fault, row, a, b): 0 none; 1 table too short (columns needed, start); 2 bad frame id
    (column, id); 3 more query tokens than the row is long (tokens, length); 4 negative length;
    5 query_start falls.
    """
    for row in range(rows.seq_lens.shape[0]):
        length = rows.seq_lens[row]
        tokens = rows.query_start[row + 1] - rows.query_start[row]
        if length < 0:
            return 4, row, length, 0
        if tokens < 0:
            return 5, row, tokens, 0
        if length == 0 or tokens == 0:
            continue
        if tokens > length:
            return 3, row, tokens, length
        columns = (length + block_size - 1) // block_size
        start = rows.table_start[row]
        if start < 0 or start + columns > rows.table.shape[0]:
            return 1, row, columns, start
        for column in range(first_read(length - tokens, window) // block_size, columns):
            frame = np.int64(rows.table[start + column])
            if frame < 0 or frame >= num_frames:
                return 2, row, column, int(frame)
    return 0, 0, 0, 0


@compiled
def _put(
    records: Int64s,
    index: int,
    row: int,
    head: int,
    token: int,
    num_tokens: int,
    split: int,
    slot: int,
) -> None:
    """Write one record, or only count where there is no room."""
    if index >= records.shape[0]:
        return
    records[index, ROW] = row
    records[index, HEAD] = head
    records[index, TOKEN] = token
    records[index, NUM_TOKENS] = num_tokens
    records[index, SPLIT] = split
    records[index, SLOT] = slot


@compiled
def _cut(
    tasks: Int64s,
    merges: Int64s,
    seq_lens: Int64s,
    query_start: Int64s,
    num_kv_heads: int,
    tile_tokens: int,
    window: int,
    by_split: bool,
) -> tuple[int, int, int, int]:
    """Fill tasks and merges; return the numbers of each, of slots, of positions.

    With `by_split`, a tile that reads several splits becomes a task for each, and one merge.
    """
    num_tasks = 0
    num_merges = 0
    slots = 0
    positions = 0
    for row in range(seq_lens.shape[0]):
        tokens = query_start[row + 1] - query_start[row]
        if seq_lens[row] == 0:
            continue
        for token in range(0, tokens, tile_tokens):
            n = min(tile_tokens, tokens - token)
            position = seq_lens[row] - tokens + token
            low = first_read(position, window)
            positions += num_kv_heads * (position + n - low)
            first = low // SPLIT_TOKENS
            count = (position + n - 1) // SPLIT_TOKENS - first + 1
            for head in range(num_kv_heads):
                if not by_split or count == 1:
                    _put(tasks, num_tasks, row, head, token, n, -1, -1)
                    num_tasks += 1
                    continue
                _put(merges, num_merges, row, head, token, n, count, slots)
                num_merges += 1
                for k in range(count):
                    _put(tasks, num_tasks, row, head, token, n, first + k, slots)
                    num_tasks += 1
                    slots += 1
    return num_tasks, num_merges, slots, positions


@compiled
def survey(seq_lens: Int64s, query_start: Int64s) -> tuple[int, bool]:
    """The most query tokens of a row; whether any row is empty."""
    longest = 0
    empty = False
    for row in range(seq_lens.shape[0]):
        longest = max(longest, query_start[row + 1] - query_start[row])
        empty |= seq_lens[row] == 0
    return longest, empty


@compiled
def cut(
    seq_lens: Int64s,
    query_start: Int64s,
    num_kv_heads: int,
    tile_tokens: int,
    window: int,
    enough: int,
) -> tuple[Int64s, Int64s, int, int]:
    """Cut a batch into tasks of (row, KV head, query tile[, split]).

    Splits become tasks only where there are fewer than ``enough`` tasks without; the result is
    the same to the last bit. Returns ``[n, NUM_COLUMNS]`` records of tasks and of merges, the
    number of partial results in the workspace, and the positions of a KV head that tasks load.
    """
    none = np.empty((0, NUM_COLUMNS), np.int64)
    by_split = False
    num_tasks, num_merges, num_slots, num_positions = _cut(
        none, none, seq_lens, query_start, num_kv_heads, tile_tokens, window, by_split
    )
    if num_tasks < enough:
        by_split = True
        num_tasks, num_merges, num_slots, num_positions = _cut(
            none, none, seq_lens, query_start, num_kv_heads, tile_tokens, window, by_split
        )
    tasks = np.empty((num_tasks, NUM_COLUMNS), np.int64)
    merges = np.empty((num_merges, NUM_COLUMNS), np.int64)
    _cut(tasks, merges, seq_lens, query_start, num_kv_heads, tile_tokens, window, by_split)
    return tasks, merges, num_slots, num_positions


def deal(tasks: NDArray[np.int64], num_threads: int) -> NDArray[np.int64]:
    """Deal tasks like cards to so many hands, where each thread takes one stretch of them.

    Late tiles of a prompt read more than early ones.
    """
    if num_threads == 1 or tasks.shape[0] <= num_threads:
        return tasks
    hands = [np.arange(hand, tasks.shape[0], num_threads) for hand in range(num_threads)]
    return tasks[np.concatenate(hands)]
