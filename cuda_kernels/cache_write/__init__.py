"""Writing freshly computed K/V rows into their slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels import checks
from cuda_kernels.cuda.array import DeviceArray, device_of
from cuda_kernels.dtypes import FP8_E4M3, StorageDtype, kv_storage_dtype, storage_dtype
from cuda_kernels.plane import plane_of


def write_kv(
    arena: NDArray[Any] | DeviceArray,
    key: NDArray[Any] | DeviceArray,
    value: NDArray[Any] | DeviceArray,
    *,
    dtype: str,
    key_offset: int,
    value_offset: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    slot_mapping: NDArray[np.int64] | DeviceArray,
    value_arena: NDArray[Any] | DeviceArray | None = None,
    layout: str = "HND",
    kv_dtype: str | None = None,
    key_scale: NDArray[np.float32] | DeviceArray | None = None,
    value_scale: NDArray[np.float32] | DeviceArray | None = None,
    check: bool = True,
    stream: int = 0,
) -> None:
    """Store row ``t`` of key and value in slot ``slot_mapping[t]``; -1 skips the row.

    ``arena`` is ``[frames, frame_elements]`` of the storage dtype, C-contiguous; ``key`` is
    ``[num_tokens, num_kv_heads, head_dim]`` and ``value`` ``[num_tokens, num_kv_heads,
    value_dim]`` of the same dtype, of any strides. A slot is ``frame * block_size + offset``
    (int32 or int64). A frame holds the key plane ``[num_kv_heads, block_size, head_dim]`` at
    ``key_offset`` elements and the value plane likewise at ``value_offset``; the latter in
    ``value_arena`` if it is given, an array like ``arena`` with as many frames. With ``layout``
    "NHD" the planes are ``[block_size, num_kv_heads, ...]`` instead.

    With ``kv_dtype`` "fp8_e4m3" the arenas are uint8 and hold ``key / key_scale`` and ``value /
    value_scale``, float32 ``[num_kv_heads]`` from 1e-12 to 1e12 (None: 1), divided in float32 and
    rounded once, ties to even. What is above 448 then, infinity too, is stored as 448, NaN as NaN.

    No two rows may name one slot: that is the caller's duty, and what a slot named twice holds is
    undefined. All slots are checked before the first write; TypeError or ValueError then leaves
    the arena as it was. With ``check=False`` arrays and slots are trusted. Releases the GIL.
    Cost: one pass over key and value, on the calling thread.

    Arrays may lie on a device (all of them, `DeviceArray`; rows of key and value contiguous): one
    kernel is queued on ``stream``, the handle of a CUDA stream; slots and scales are trusted. What
    it stores has the same bits as on the CPU.
    """
    storage = storage_dtype(dtype)
    stored = kv_storage_dtype(kv_dtype, storage)
    values = arena if value_arena is None else value_arena
    if check:
        device_of(
            arena=arena, key=key, value=value, slot_mapping=slot_mapping, value_arena=value_arena,
            key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip
        checks.layout(layout)
        _check(
            arena,
            values,
            key,
            value,
            (storage, stored),
            key_offset,
            value_offset,
            block_size,
            num_kv_heads,
            head_dim,
            value_dim,
            slot_mapping,
        )
        checks.kv_scales(stored, num_kv_heads, key_scale=key_scale, value_scale=value_scale)
    heads, size = int(num_kv_heads), int(block_size)
    work: Any = tuple(
        (rows, target, plane_of(layout, int(offset), heads, size, rows.shape[2]))
        for rows, target, offset in ((key, arena, key_offset), (value, values, value_offset))
    )
    if isinstance(slot_mapping, DeviceArray):
        from cuda_kernels.cache_write import cuda_call

        if stored.kind == FP8_E4M3:
            scales: Any = (key_scale, value_scale)
            cuda_call.write_fp8(slot_mapping, size, storage.kind, work[0], work[1], scales, stream)
            return
        cuda_call.write(slot_mapping, size, work[0], work[1], stream)
        return
    from cuda_kernels.cache_write import cpu

    slots = np.ascontiguousarray(slot_mapping, np.int64)
    if stored.kind == FP8_E4M3:
        from cuda_kernels.cache_write import fp8

        both: Any = (key_scale, value_scale)
        for (rows, target, plane), scale in zip(work, both, strict=True):
            fp8.write(target, rows, plane, size, slots, storage, scale)
        return
    for rows, target, plane in work:
        cpu.write(target, rows, plane, size, slots)


def _check(
    arena: Any,
    values: Any,
    key: Any,
    value: Any,
    storages: tuple[StorageDtype, StorageDtype],
    key_offset: int,
    value_offset: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    slot_mapping: Any,
) -> None:
    """Refuse what can't be written, before any of it is."""
    dtypes, stored = (storages[0].array_dtype,), (storages[1].array_dtype,)
    checks.array("arena", arena, stored, (None, None), contiguous=True)
    checks.writable("arena", arena)
    size = checks.integer("block_size", block_size, 1, 2**20)
    heads = checks.integer("num_kv_heads", num_kv_heads, 1, 2**20)
    dims = checks.integer("head_dim", head_dim, 1, 2**20)
    value_dims = checks.integer("value_dim", value_dim, 1, 2**20)
    frames, frame_elements = arena.shape
    checks.plane("key_offset", key_offset, heads, size, dims, frame_elements)
    checks.array("value_arena", values, stored, (frames, None), contiguous=True)
    checks.writable("value_arena", values)
    checks.plane("value_offset", value_offset, heads, size, value_dims, values.shape[1])
    checks.array("slot_mapping", slot_mapping, checks.INTEGER_DTYPES, (None,))
    tokens = slot_mapping.shape[0]
    checks.array("key", key, dtypes, (tokens, heads, dims))
    checks.array("value", value, dtypes, (tokens, heads, value_dims))
    if isinstance(slot_mapping, DeviceArray):
        return
    wrong = (slot_mapping < -1) | (slot_mapping >= frames * size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"slot_mapping[{at}] is {int(slot_mapping[at])}; a slot is -1 (skip) or 0 to "
            f"{frames * size - 1} ({frames} frames of {size} slots)"
        )
