"""Copying the filled slots of blocks inside one arena: copy-on-write."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels import checks
from cuda_kernels.cuda.array import DeviceArray, device_of


def copy_blocks(
    arena: NDArray[Any] | DeviceArray,
    source: NDArray[np.int32] | DeviceArray,
    target: NDArray[np.int32] | DeviceArray,
    num_tokens: NDArray[np.int32] | DeviceArray,
    *,
    block_size: int,
    plane_offset: NDArray[np.int64] | DeviceArray,
    plane_rows: NDArray[np.int64] | DeviceArray,
    plane_width: NDArray[np.int64] | DeviceArray,
    check: bool = True,
    stream: int = 0,
) -> None:
    """Copy the first ``num_tokens[i]`` slots of frame ``source[i]`` to frame ``target[i]``.

    ``arena`` is ``[frames, frame_elements]`` of any dtype (uint8: elements are bytes),
    C-contiguous. A frame is a list of planes (per layer K, then V): plane ``p`` is
    ``[plane_rows[p], block_size, plane_width[p]]`` elements at ``plane_offset[p]``; of each of its
    rows the first ``num_tokens[i]`` slots are copied. Other slots of the target keep what they
    held. Arrays are 1-D int32 or int64.

    The result never depends on order (case 3): a pair (i, i) does nothing; else a target named
    twice, or a frame that is a source and a target, raises ValueError naming it. TypeError and
    ValueError come before a byte is written. With ``check=False`` all is trusted. Releases the
    GIL. Cost: the copied bytes, on the calling thread.

    Arrays may lie on a device (all of them, `DeviceArray`; pairs of one dtype, planes of one):
    one kernel is queued on ``stream``, the handle of a CUDA stream, and what they hold is trusted.
    """
    pairs: Any = (source, target, num_tokens)
    planes: Any = (plane_offset, plane_rows, plane_width)
    if check:
        device_of(
            arena=arena, source=source, target=target, num_tokens=num_tokens,
            plane_offset=plane_offset, plane_rows=plane_rows, plane_width=plane_width,
        )  # fmt: skip
        _check(arena, pairs, block_size, planes)
    if isinstance(arena, DeviceArray):
        from cuda_kernels.block_copy import cuda_call

        cuda_call.copy(arena, int(block_size), pairs, planes, stream)
        return
    from cuda_kernels.block_copy import cpu

    cpu.copy(arena, *pairs, block_size, *planes)


def _check(arena: Any, pairs: Any, block_size: int, planes: Any) -> None:
    """Refuse what would write outside a frame or depend on the order of the pairs."""
    source, target, num_tokens = pairs
    plane_offset, plane_rows, plane_width = planes
    if not isinstance(arena, (np.ndarray, DeviceArray)):
        raise TypeError(f"arena must be a numpy array, got {type(arena).__name__}")
    checks.array("arena", arena, (arena.dtype,), (None, None), contiguous=True)
    checks.writable("arena", arena)
    size = checks.integer("block_size", block_size, 1, 2**20)
    frames, frame_elements = arena.shape
    checks.array("source", source, checks.INTEGER_DTYPES, (None,))
    count = source.shape[0]
    checks.array("target", target, checks.INTEGER_DTYPES, (count,))
    checks.array("num_tokens", num_tokens, checks.INTEGER_DTYPES, (count,))
    checks.frame_ids("source", source, frames, "arena")
    checks.frame_ids("target", target, frames, "arena")
    checks.array("plane_offset", plane_offset, checks.INTEGER_DTYPES, (None,))
    num_planes = plane_offset.shape[0]
    checks.array("plane_rows", plane_rows, checks.INTEGER_DTYPES, (num_planes,))
    checks.array("plane_width", plane_width, checks.INTEGER_DTYPES, (num_planes,))
    if isinstance(arena, DeviceArray):
        return
    wrong = (num_tokens < 0) | (num_tokens > size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"num_tokens[{at}] is {int(num_tokens[at])}; allowed: 0 to {size}")
    for p in range(num_planes):
        rows = checks.integer(f"plane_rows[{p}]", plane_rows[p], 0, 2**20)
        width = checks.integer(f"plane_width[{p}]", plane_width[p], 0, 2**30)
        checks.plane(f"plane_offset[{p}]", plane_offset[p], rows, size, width, frame_elements)
    moving = source != target
    _check_pairs(source[moving], target[moving])


def _check_pairs(source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
    """Case 3: refuse pairs whose result would depend on the order they are copied in."""
    values, counts = np.unique(target, return_counts=True)
    if values.size != target.size:
        frame = int(values[int(np.argmax(counts))])
        raise ValueError(f"target names frame {frame} more than once; each target may appear once")
    both = np.intersect1d(source, target)
    if both.size:
        raise ValueError(
            f"frame {int(both[0])} is a source and a target; split the pairs into two calls"
        )
