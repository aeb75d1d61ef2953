"""Where the GPU would run a kernel, its CPU twin runs, in the order of the stream.

The launches themselves, and what the GPU would be given, are the business of tests/ptx. Here what
the arrays of a call touch counts: it is told to the clocks, for a table when the kernel starts,
since it may still be on its way before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cuda_kernels
from cuda_kernels.attention import cpu as twin
from cuda_kernels.attention import cuda_call as attention
from cuda_kernels.attention.request import Request
from cuda_kernels.attention.rows import Rows
from cuda_kernels.block_copy import cuda_call as block_copy
from cuda_kernels.cache_write import cuda_call as cache_write
from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Launch
from cuda_kernels.dtypes import STORAGE_DTYPES
from cuda_kernels.frames import cuda_call as frames
from cuda_kernels.plane import Plane
from tests.cuda_double.memory import bytes_at
from tests.cuda_double.streams import Span, Streams
from tests.cuda_double.torch_cuda import TorchCuda


class KernelDevice:
    """What the arrays of one double name as their device."""

    def __init__(self, streams: Streams, torch_cuda: TorchCuda) -> None:
        self.streams, self.torch = streams, torch_cuda

    def launch(self, launch: Launch, stream: int) -> None:
        raise AssertionError(f"{launch.source.name} is not doubled")


def view(array: DeviceArray) -> NDArray[Any]:
    """The memory of a DeviceArray as NumPy sees it."""
    if 0 in array.shape:
        return np.zeros(array.shape, array.dtype)
    reach = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    flat = bytes_at(array.address, reach + array.itemsize)
    return np.ndarray(array.shape, array.dtype, flat, 0, array.strides)


def span(array: DeviceArray) -> Span:
    """From the first to the last byte of an array."""
    if 0 in array.shape:
        return array.address, 0
    reach = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return array.address, reach + array.itemsize


def rows_of(arena: DeviceArray, ids: NDArray[Any], offset: int = 0, size: int = 0) -> list[Span]:
    """What some frames of an arena take, or a piece of each."""
    stride = arena.strides[0]
    return [(arena.address + int(i) * stride + offset, size or stride) for i in np.unique(ids)]


def plane_spans(
    arena: DeviceArray, used: NDArray[Any], plane: Plane, num_heads: int, block_size: int
) -> list[Span]:
    """One plane of some frames."""
    last = (num_heads - 1) * plane.head_stride + (block_size - 1) * plane.token_stride
    size = arena.itemsize
    return rows_of(arena, used, plane.offset * size, (last + plane.dims) * size)


def _streams(array: DeviceArray) -> Streams:
    device: Any = array.device
    streams: Streams = device.streams
    if device.torch.current_device() != device.torch.ordinal:
        streams.found.append("a kernel on another GPU")
    return streams


def _move(target: Any, origin: Any, num_pieces: int, piece_bytes: int, *rest: int) -> None:
    """`frames.cuda_call.move`."""
    _, stream = rest
    sides = []
    for rows, offset, ids in (target, origin):
        numbers = np.arange(num_pieces) if ids is None else None
        sides.append((rows, offset, ids, numbers))

    def place(side: Any) -> tuple[list[Span], NDArray[Any]]:
        rows, offset, ids, numbers = side
        numbers = view(ids) if numbers is None else numbers
        spans = [(rows.address + int(i) * rows.strides[0] + offset, piece_bytes) for i in numbers]
        return spans, numbers

    def spans() -> tuple[list[Span], list[Span]]:
        tables = [span(side[2]) for side in sides if side[2] is not None]
        return place(sides[1])[0] + tables, place(sides[0])[0]

    def run() -> None:
        targets, sources = place(sides[0])[0], place(sides[1])[0]
        for (to, count), (origin_at, _) in zip(targets, sources, strict=True):
            bytes_at(to, count)[:] = bytes_at(origin_at, count)

    _streams(target[0]).work(stream, "move kernel", run, spans)


def _write(slots: DeviceArray, block_size: int, key: Any, value: Any, *rest: Any) -> None:
    """`cache_write.cuda_call.write`, where nothing is narrowed."""
    stream = rest[-1]
    num_tokens, num_heads, _ = key[0].shape
    if not num_tokens:
        return

    def run() -> None:
        numbers = view(slots)
        kept = np.flatnonzero(numbers >= 0)
        frames_of, offsets = numbers[kept] // block_size, numbers[kept] % block_size
        for rows, arena, plane in (key, value):
            heads, dims = np.arange(num_heads), np.arange(plane.dims)
            at = plane.offset + offsets[:, None, None] * plane.token_stride
            at = at + heads[None, :, None] * plane.head_stride + dims
            view(arena)[frames_of[:, None, None], at] = view(rows)[kept]

    spans = _written(slots, block_size, key, value)
    _streams(slots).work(stream, "write kernel", run, spans)


def _write_fp8(
    slots: DeviceArray, block_size: int, kind: int, key: Any, value: Any, scales: Any, stream: int
) -> None:
    """`cache_write.cuda_call.write_fp8`."""
    if not key[0].shape[0]:
        return

    def run() -> None:
        names = [name for name, storage in STORAGE_DTYPES.items() if storage.kind == kind]
        given = zip(("key_scale", "value_scale"), scales, strict=True)
        cuda_kernels.write_kv(
            view(key[1]), view(key[0]), view(value[0]), value_arena=view(value[1]),
            dtype=names[0], kv_dtype="fp8_e4m3",
            key_offset=key[2].offset, value_offset=value[2].offset,
            block_size=block_size, num_kv_heads=key[0].shape[1],
            head_dim=key[0].shape[2], value_dim=value[0].shape[2], slot_mapping=view(slots),
            **{name: view(scale) for name, scale in given if scale is not None},
        )  # fmt: skip

    spans = _written(slots, block_size, key, value)
    _streams(slots).work(stream, "write kernel", run, spans)


def _written(
    slots: DeviceArray, block_size: int, key: Any, value: Any
) -> Callable[[], tuple[list[Span], list[Span]]]:
    """What a write kernel reads and writes, by the slots when it starts."""

    def spans() -> tuple[list[Span], list[Span]]:
        used = view(slots)
        used = used[used >= 0] // block_size
        writes = []
        for rows, arena, plane in (key, value):
            writes += plane_spans(arena, used, plane, rows.shape[1], block_size)
        return [span(slots)], writes

    return spans


def _copy(arena: DeviceArray, block_size: int, pairs: Any, planes: Any, stream: int) -> None:
    """`block_copy.cuda_call.copy`."""

    def spans() -> tuple[list[Span], list[Span]]:
        source, target, _ = map(view, pairs)
        reads = rows_of(arena, source) + [span(a) for a in (*pairs, *planes)]
        return reads, rows_of(arena, target)

    def run() -> None:
        source, target, tokens = map(view, pairs)
        offsets, rows, widths = map(view, planes)
        cuda_kernels.copy_blocks(
            view(arena), source, target, tokens, block_size=block_size,
            plane_offset=offsets, plane_rows=rows, plane_width=widths,
        )  # fmt: skip

    _streams(arena).work(stream, "copy on write", run, spans)


def _attend(request: Request, options: Any) -> None:
    """`attention.cuda_call.attend`: the twin over the same memory, results at once."""
    stream, size = options.stream, request.block_size
    rows: Any = request.rows
    arenas: Any = ((request.arena, request.key), (request.values, request.value))

    def spans() -> tuple[list[Span], list[Span]]:
        table, starts, lengths = map(view, (rows.table, rows.table_start, rows.seq_lens))
        used = [table[s : s + -(-n // size)] for s, n in zip(starts, lengths, strict=True)]
        every = np.concatenate(used) if used else np.zeros(0, np.int32)
        reads = [span(a) for a in (rows.table, rows.table_start, rows.seq_lens, rows.query_start)]
        for arena, plane in arenas:
            reads += plane_spans(arena, every, plane, request.num_kv_heads, size)
        return reads, []

    def run() -> None:
        begins = (np.ascontiguousarray(view(a), np.int64) for a in rows[1:4])
        found = {
            name: view(array) if isinstance(array, DeviceArray) else array
            for name, array in request._asdict().items()
        }
        found["rows"] = Rows(view(rows.table), *begins)
        twin.attend(Request(**found))

    _streams(rows.table).work(stream, "attention kernel", run, spans)


def double_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the twins where the launches are made, until the test ends."""
    monkeypatch.setattr(frames, "move", _move)
    monkeypatch.setattr(block_copy, "copy", _copy)
    monkeypatch.setattr(cache_write, "write", _write)
    monkeypatch.setattr(cache_write, "write_fp8", _write_fp8)
    monkeypatch.setattr(attention, "attend", _attend)
