"""torch custom ops over raw tensors and tables, for engines with block tables of their own.

A cache is a strided view ``[frames, block_size, num_kv_heads, dim]`` as ``Manager.kv(layer)``
returns it: planes ``[num_kv_heads, block_size, dim]`` at one distance. Outside a Manager::

    cache = torch.zeros(frames, num_kv_heads, block_size, head_dim).transpose(1, 2)

The ops see no Manager: nothing keeps a caller from writing frames that a sequence shares (R3).
float32, bfloat16, float16; caches also torch.float8_e4m3fn, with a scale a K/V head. Registered
with ``torch.library``, so that ``torch.compile`` and FakeTensors take them; no autograd.

All tensors of a call lie on one device, the CPU or a GPU. On a GPU the kernels are queued on
torch's current stream and nothing waits for it: so shapes, dtypes and strides are checked, but
what the tensors hold is trusted. A slot, frame id, length or scale out of its range reads or writes
memory of others there. The first call on a GPU compiles, or loads; do one before a graph is
captured. Not run on a GPU yet (docs/cuda.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import cuda_kernels
from kvmem.errors import ShapeError
from kvmem.store.raw_tensors import (
    DTYPE_NAMES,
    Caches,
    Plane,
    Side,
    caches_of,
    integers,
    one_dtype,
    plane_of,
    require,
    scales_of,
    side_of,
)

__all__ = ["copy_blocks", "paged_attention", "write_kv"]

_PAIRS = ("source", "target", "num_tokens")


@torch.library.custom_op("kvmem::paged_attention", mutates_args=())
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_seq_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the tokens of each row to the row's positions; returns ``(out, lse)``.

    Caches have the query's dtype, or are torch.float8_e4m3fn: what they hold is then multiplied by
    ``k_scale`` and ``v_scale``, float32 ``[num_kv_heads]`` (None: 1).

    ``query`` ``[num_tokens, num_heads, head_dim]``; ``block_table`` int32 ``[rows, columns]`` of
    frame ids, of which row ``i`` uses the first ``ceil(seq_lens[i] / block_size)``; ``seq_lens``
    ``[rows]`` and ``query_start`` ``[rows + 1]`` int32 or int64: row ``i`` has the query tokens
    from ``query_start[i]`` to ``query_start[i + 1]``, the last of its positions. ``alibi`` (slopes)
    and ``sinks`` (logits, in the denominator and the lse) are float32 ``[num_heads]``. ``out`` is
    ``[num_tokens, num_heads, value_dim]`` of the query's dtype, ``lse`` the natural log-sum-exp,
    float32 ``[num_tokens, num_heads]``; tokens past ``query_start[-1]`` give zeros.
    ``max_seq_len``, at least the largest of ``seq_lens``, spares memory on a GPU: without it rows
    are taken to be as long as the table is wide.

    Raises ShapeError for a tensor of wrong shape, dtype, device or stride, TypeError for a table
    of wrong dtype, ValueError for a bad number, on the CPU also for a bad id or length. Cost: as
    ``cuda_kernels.paged_attention``; tables, lengths and starts that aren't contiguous, and on a
    GPU of two dtypes, are copied. There a small batch takes up to a few hundred MB from torch's
    allocator to cut long rows over blocks of threads.
    """
    side = side_of("key_cache", key_cache)
    caches = caches_of(side, key_cache, value_cache)
    require(side, "query", query, (None, None, caches.head_dim), caches.computed)
    num_tokens, num_heads = query.shape[:2]
    rules = {"alibi": alibi, "sinks": sinks}
    for name, vector in rules.items():
        if vector is not None:
            require(side, name, vector, (num_heads,), (torch.float32,))
            rules[name] = vector.detach().contiguous()
    rows, longest = _rows(side, block_table, seq_lens, query_start, caches, max_seq_len)
    out = query.new_zeros((num_tokens, num_heads, caches.value_dim))
    lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    tensors = {"lse": lse, **rows, **rules, **scales_of(side, caches, k_scale, v_scale)}
    if not side.is_host:
        tensors["workspace"] = _workspace(query, caches, longest, window)
    named: dict[str, Any] = {n: None if t is None else side.array(t) for n, t in tensors.items()}
    with side.launching() as options:
        cuda_kernels.paged_attention(
            side.array(out),
            side.array(query),
            caches.arena,
            **named,
            scale=scale,
            window=window,
            softcap=softcap,
            dtype=DTYPE_NAMES[query.dtype],
            max_seq_len=longest,
            **options,
            **caches.geometry(),
        )
    return out, lse


@paged_attention.register_fake
def _paged_attention_fake(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_seq_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = query.shape[:2]
    out = query.new_empty((*shape, value_cache.shape[3]))
    return out, query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("kvmem::write_kv", mutates_args=("key_cache", "value_cache"))
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store token ``t`` in slot ``slot_mapping[t]`` = frame * block_size + offset; -1 skips it.

    ``key`` ``[num_tokens, num_kv_heads, head_dim]`` and ``value`` ``[num_tokens, num_kv_heads,
    value_dim]`` of the caches' dtype, any strides (on a GPU the last one 1); ``slot_mapping``
    int32 or int64 ``[num_tokens]``. Which of two tokens with one slot stays is undefined. Caches of
    torch.float8_e4m3fn hold ``key / k_scale`` and ``value / v_scale``, float32 ``[num_kv_heads]``
    (None: 1), rounded, ties to even; above 448 they saturate, NaN stays NaN.

    Raises ShapeError, TypeError or ValueError as ``paged_attention``, before a byte is written.
    """
    side = side_of("key_cache", key_cache)
    caches = caches_of(side, key_cache, value_cache)
    slots = integers(side, "slot_mapping", slot_mapping, 1)
    shape = (slots.shape[0], caches.num_kv_heads)
    require(side, "key", key, (*shape, caches.head_dim), caches.computed)
    require(side, "value", value, (*shape, caches.value_dim), (key.dtype,))
    scales = scales_of(side, caches, k_scale, v_scale)
    with side.launching() as options:
        cuda_kernels.write_kv(
            caches.arena,
            side.array(key),
            side.array(value),
            slot_mapping=side.array(slots),
            dtype=DTYPE_NAMES[key.dtype],
            **{name: side.array(scale) for name, scale in scales.items()},
            **options,
            **caches.geometry(),
        )


@write_kv.register_fake
def _write_kv_fake(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    return None


@torch.library.custom_op("kvmem::copy_blocks", mutates_args=("caches",))
def copy_blocks(
    caches: list[torch.Tensor],
    source: torch.Tensor,
    target: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    """Copy the first ``num_tokens[i]`` slots of frame ``source[i]`` to ``target[i]`` in each cache.

    ``caches`` holds the key and value cache of every layer; the others are int32 or int64
    ``[pairs]``. A target named twice, or a frame that is source and target, raises ValueError; a
    pair (i, i) does nothing. All is checked before a byte is written; on a GPU shapes and dtypes.
    """
    if not caches:
        return
    side = side_of("caches[0]", caches[0])
    given = zip(_PAIRS, (source, target, num_tokens), strict=True)
    pairs = one_dtype(side, *(integers(side, name, tensor, 1) for name, tensor in given))
    planes = [plane_of(side, f"caches[{k}]", cache) for k, cache in enumerate(caches)]
    with side.launching() as options:
        common: Any = options | _arrays(side, dict(zip(_PAIRS, pairs, strict=True)))
        none = _arrays(side, _plane_tensors(side, None))
        for plane in planes:  # the pairs are checked against each cache, then any is written
            size = plane.block_size
            cuda_kernels.copy_blocks(plane.arena, block_size=size, **none, **common)
        made = {plane[1:]: _plane_tensors(side, plane) for plane in planes}
        for plane in planes:
            size, numbers = plane.block_size, _arrays(side, made[plane[1:]])
            cuda_kernels.copy_blocks(plane.arena, block_size=size, check=False, **numbers, **common)


@copy_blocks.register_fake
def _copy_blocks_fake(
    caches: list[torch.Tensor],
    source: torch.Tensor,
    target: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    return None


def _rows(
    side: Side,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    caches: Caches,
    max_seq_len: int | None,
) -> tuple[dict[str, torch.Tensor], int]:
    """The rows of a batch by the kernels' names, and how long the longest may be."""
    table = integers(side, "block_table", block_table, 2, (torch.int32,))
    rows, columns = table.shape
    lengths = integers(side, "seq_lens", seq_lens, 1)
    starts = integers(side, "query_start", query_start, 1)
    if lengths.shape[0] != rows or starts.shape[0] != rows + 1:
        raise ShapeError(
            f"block_table has {rows} rows, so seq_lens must have {rows} and query_start "
            f"{rows + 1} elements; got {lengths.shape[0]} and {starts.shape[0]}"
        )
    longest = columns * caches.block_size
    if max_seq_len is not None:
        if max_seq_len < 0:
            raise ValueError(f"max_seq_len={max_seq_len}; allowed: 0 or more")
        longest = min(longest, max_seq_len)
    if side.is_host:
        _require_columns(lengths.numpy(), columns, caches.block_size, max_seq_len)
    lengths, starts = one_dtype(side, lengths, starts)
    begins = torch.arange(rows, dtype=lengths.dtype, device=lengths.device).mul_(columns)
    named = {"table": table.view(-1), "table_start": begins}
    return named | {"seq_lens": lengths, "query_start": starts}, longest


def _require_columns(
    lengths: NDArray[Any], columns: int, block_size: int, max_seq_len: int | None
) -> None:
    """Refuse a length that reaches past the row's last column (case 69), or the maximum."""
    needed = -(-lengths.astype(np.int64) // block_size)
    short = needed > columns
    if short.any():
        row = int(np.argmax(short))
        raise ValueError(
            f"block_table has {columns} columns, but row {row} needs {int(needed[row])} for "
            f"seq_lens[{row}] {int(lengths[row])} in blocks of {block_size}"
        )
    if max_seq_len is not None and lengths.size and lengths.max() > max_seq_len:
        row = int(np.argmax(lengths))
        raise ValueError(f"max_seq_len={max_seq_len} is less than seq_lens[{row}] {lengths[row]}")


def _workspace(
    query: torch.Tensor, caches: Caches, longest: int, window: int | None
) -> torch.Tensor | None:
    from kvmem.store.cuda.arrays import workspace_for

    return workspace_for(query, caches.num_kv_heads, caches.value_dim, longest, window)


def _plane_tensors(side: Side, plane: Plane | None) -> dict[str, torch.Tensor]:
    """Offset, rows and width of a plane, or of none, for `copy_blocks`. Filled where they lie: a
    copy from the host would wait."""
    numbers = (0, 0, 0) if plane is None else (0, plane.num_kv_heads, plane.width)
    names = ("plane_offset", "plane_rows", "plane_width")
    shape = (0 if plane is None else 1,)
    return {
        name: torch.full(shape, number, dtype=torch.int64, device=side.device)
        for name, number in zip(names, numbers, strict=True)
    }


def _arrays(side: Side, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: side.array(tensor) for name, tensor in tensors.items()}
