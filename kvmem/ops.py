"""torch custom ops over raw tensors and tables, for engines with block tables of their own.

A cache is a strided view ``[frames, block_size, num_kv_heads, dim]`` as ``Manager.kv(layer)``
returns it: planes ``[num_kv_heads, block_size, dim]`` at one distance. Outside a Manager::

    cache = torch.zeros(frames, num_kv_heads, block_size, head_dim).transpose(1, 2)

The ops see no Manager: they check shapes, slots and tables, and nothing else keeps a caller from
writing frames that a sequence shares (R3). In this version tensors live on the CPU; float32,
bfloat16, float16; caches also torch.float8_e4m3fn, with a scale a K/V head. Registered with
``torch.library``, so that ``torch.compile`` and FakeTensors take them; no autograd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import cuda_kernels
from kvmem.errors import ShapeError
from kvmem.storage_dtype import FP8, FP8_NAME

__all__ = ["copy_blocks", "paged_attention", "write_kv"]

_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_CACHE_NAMES = {**_DTYPE_NAMES, FP8: FP8_NAME}


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

    Raises ShapeError for a tensor of wrong shape, dtype, device or stride, TypeError for a table
    of wrong dtype, ValueError for a bad id, length or number. Cost: as
    ``cuda_kernels.paged_attention``; a table that isn't contiguous is copied.
    """
    caches = _caches(key_cache, value_cache)
    _require("query", query, (None, None, caches.head_dim), caches.computed)
    table = _integers("block_table", block_table, 2, (torch.int32,))
    rows = table.shape[0]
    lengths = _integers("seq_lens", seq_lens, 1)
    starts = _integers("query_start", query_start, 1)
    if lengths.shape[0] != rows or starts.shape[0] != rows + 1:
        raise ShapeError(
            f"block_table has {rows} rows, so seq_lens must have {rows} and query_start "
            f"{rows + 1} elements; got {lengths.shape[0]} and {starts.shape[0]}"
        )
    _require_columns(lengths, table.shape[1], caches.block_size)
    num_tokens, num_heads = query.shape[:2]
    for name, vector in (("alibi", alibi), ("sinks", sinks)):
        if vector is not None:
            _require(name, vector, (num_heads,), (torch.float32,))
    out = query.new_zeros((num_tokens, num_heads, caches.value_dim))
    lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=torch.float32)
    cuda_kernels.paged_attention(
        _bits(out),
        _bits(query),
        caches.arena,
        table=np.ascontiguousarray(table).reshape(-1),
        table_start=np.arange(rows, dtype=np.int64) * table.shape[1],
        seq_lens=lengths,
        query_start=starts,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi=None if alibi is None else alibi.detach().numpy(),
        sinks=None if sinks is None else sinks.detach().numpy(),
        lse=lse.numpy(),
        dtype=_DTYPE_NAMES[query.dtype],
        **_scales(caches, k_scale, v_scale),
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
    value_dim]`` of the caches' dtype, any strides; ``slot_mapping`` int32 or int64
    ``[num_tokens]``. Which of two tokens with one slot stays is undefined. Caches of
    torch.float8_e4m3fn hold ``key / k_scale`` and ``value / v_scale``, float32 ``[num_kv_heads]``
    (None: 1), rounded, ties to even; above 448 they saturate, NaN stays NaN.

    Raises ShapeError, TypeError or ValueError as ``paged_attention``, before a byte is written.
    """
    caches = _caches(key_cache, value_cache)
    slots = _integers("slot_mapping", slot_mapping, 1)
    shape = (slots.shape[0], caches.num_kv_heads)
    _require("key", key, (*shape, caches.head_dim), caches.computed)
    _require("value", value, (*shape, caches.value_dim), (key.dtype,))
    cuda_kernels.write_kv(
        caches.arena,
        _bits(key),
        _bits(value),
        slot_mapping=slots,
        dtype=_DTYPE_NAMES[key.dtype],
        **_scales(caches, k_scale, v_scale),
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
    pair (i, i) does nothing. All is checked before a byte is written.
    """
    arrays: dict[str, Any] = {
        name: _integers(name, tensor, 1)
        for name, tensor in (("source", source), ("target", target), ("num_tokens", num_tokens))
    }
    planes = [_plane(f"caches[{k}]", cache) for k, cache in enumerate(caches)]
    none = np.zeros(0, np.int64)
    for plane in planes:  # the pairs are checked against each cache, then any is written
        cuda_kernels.copy_blocks(
            plane.arena,
            **arrays,
            block_size=plane.block_size,
            plane_offset=none,
            plane_rows=none,
            plane_width=none,
        )
    for plane in planes:
        cuda_kernels.copy_blocks(
            plane.arena,
            **arrays,
            block_size=plane.block_size,
            plane_offset=np.zeros(1, np.int64),
            plane_rows=np.array([plane.num_kv_heads]),
            plane_width=np.array([plane.width]),
            check=False,
        )


@copy_blocks.register_fake
def _copy_blocks_fake(
    caches: list[torch.Tensor],
    source: torch.Tensor,
    target: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    return None


class _Plane(NamedTuple):
    """A cache view, taken apart: ``[frames, frame_elements]`` from the first plane on."""

    arena: NDArray[Any]
    block_size: int
    num_kv_heads: int
    width: int


class _Caches(NamedTuple):
    """Key and value cache of a layer, taken apart."""

    arena: NDArray[Any]
    value_arena: NDArray[Any]
    kv_dtype: str
    computed: tuple[torch.dtype, ...]  # what queries and rows to write may have
    block_size: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    def geometry(self) -> dict[str, Any]:
        """The keyword arguments that kernels share."""
        named = self._asdict()
        del named["arena"], named["computed"]
        return named | {"key_offset": 0, "value_offset": 0}


def _scales(caches: _Caches, *scales: torch.Tensor | None) -> dict[str, Any]:
    """The keyword arguments of what fp8 is multiplied by; refused beside other caches."""
    given: dict[str, Any] = {}
    for name, tensor in zip(("key_scale", "value_scale"), scales, strict=True):
        if tensor is None:
            continue
        if caches.kv_dtype != FP8_NAME:
            raise ShapeError(
                f"{name[0]}_scale needs caches of {FP8}; these are {caches.kv_dtype}: leave it out"
            )
        _require(f"{name[0]}_scale", tensor, (caches.num_kv_heads,), (torch.float32,))
        given[name] = tensor.detach().contiguous().numpy()
    return given


def _caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> _Caches:
    """Take a layer's two caches apart."""
    key = _plane("key_cache", key_cache)
    value = _plane("value_cache", value_cache)
    if key_cache.dtype != value_cache.dtype or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ShapeError(
            f"key_cache {tuple(key_cache.shape)} of {key_cache.dtype} and value_cache "
            f"{tuple(value_cache.shape)} of {value_cache.dtype} must agree in dtype, frames, "
            f"block_size and num_kv_heads"
        )
    return _Caches(
        key.arena,
        value.arena,
        _CACHE_NAMES[key_cache.dtype],
        tuple(_DTYPE_NAMES) if key_cache.dtype == FP8 else (key_cache.dtype,),
        key.block_size,
        key.num_kv_heads,
        key.width,
        value.width,
    )


def _plane(name: str, cache: torch.Tensor) -> _Plane:
    """Take one cache view apart, or raise ShapeError."""
    _require(name, cache, (None, None, None, None), tuple(_CACHE_NAMES))
    frames, block_size, heads, width = cache.shape
    plane_elements = block_size * heads * width
    inner = (width, block_size * width, 1)
    # The stride of an axis of length 1 says nothing, so any will do.
    plain = all(
        cache.stride(axis) == want or cache.shape[axis] == 1
        for axis, want in zip((1, 2, 3), inner, strict=True)
    )
    frame_elements = plane_elements if frames == 1 else cache.stride(0)
    if cache.numel() == 0 or not plain or frame_elements < plane_elements:
        raise ShapeError(
            f"{name} of shape {tuple(cache.shape)} and strides {cache.stride()} is no view of "
            f"frames with planes [num_kv_heads, block_size, dim]; expected strides "
            f"(frame_elements, {inner[0]}, {inner[1]}, 1), as Manager.kv(layer) returns"
        )
    # The array's last row may reach past the storage by what follows the plane in a frame; the
    # kernels touch planes only, and this array never leaves the op.
    bits = _bits(cache)
    strides = (frame_elements * bits.itemsize, bits.itemsize)
    arena = np.lib.stride_tricks.as_strided(bits, (frames, frame_elements), strides)
    return _Plane(arena, block_size, heads, width)


def _require(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    allowed: tuple[torch.dtype, ...],
) -> None:
    """Refuse a tensor of another device, dtype or shape (None = any)."""
    if tensor.device.type != "cpu":
        raise ShapeError(
            f"{name} is on {tensor.device}; in this version the ops take CPU tensors: "
            f"move it with .cpu()"
        )
    if tensor.dtype not in allowed:
        raise ShapeError(
            f"{name} has dtype {tensor.dtype}; expected {' or '.join(str(d) for d in allowed)}"
        )
    matches = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not matches:
        wanted = "[" + ", ".join("any" if want is None else str(want) for want in shape) + "]"
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; expected {wanted}")


def _integers(
    name: str,
    tensor: torch.Tensor,
    dims: int,
    dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64),
) -> NDArray[Any]:
    """An integer tensor as a NumPy array, no copy."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d) for d in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {allowed}")
    if tensor.device.type != "cpu":
        raise ShapeError(f"{name} is on {tensor.device}; in this version the ops take CPU tensors")
    if tensor.dim() != dims:
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; expected {dims} dimension(s)")
    array: NDArray[Any] = tensor.numpy()
    return array


def _require_columns(lengths: NDArray[Any], columns: int, block_size: int) -> None:
    """Refuse a length that reaches past the row's last column (case 69)."""
    needed = -(-lengths.astype(np.int64) // block_size)
    short = needed > columns
    if short.any():
        row = int(np.argmax(short))
        raise ValueError(
            f"block_table has {columns} columns, but row {row} needs {int(needed[row])} for "
            f"seq_lens[{row}] {int(lengths[row])} in blocks of {block_size}"
        )


def _bits(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's memory as the NumPy storage dtype of the kernels, no copy."""
    plain = tensor.detach()
    if plain.dtype != torch.float32:
        plain = plain.view(torch.uint8 if plain.dtype == FP8 else torch.uint16)
    array: NDArray[Any] = plain.numpy()
    return array
