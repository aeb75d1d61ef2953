"""Copying the filled slots of blocks inside one arena: copy-on-write."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels import checks


def copy_blocks(
    arena: NDArray[Any],
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    num_tokens: NDArray[np.int32],
    *,
    block_size: int,
    plane_offset: NDArray[np.int64],
    plane_rows: NDArray[np.int64],
    plane_width: NDArray[np.int64],
    check: bool = True,
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
    """
    if check:
        _check(arena, source, target, num_tokens, block_size, plane_offset, plane_rows, plane_width)
    from cuda_kernels.block_copy import cpu

    cpu.copy(arena, source, target, num_tokens, block_size, plane_offset, plane_rows, plane_width)


def _check(
    arena: NDArray[Any],
    source: NDArray[np.int32],
    target: NDArray[np.int32],
    num_tokens: NDArray[np.int32],
    block_size: int,
    plane_offset: NDArray[np.int64],
    plane_rows: NDArray[np.int64],
    plane_width: NDArray[np.int64],
) -> None:
    """Refuse what would write outside a frame or depend on the order of the pairs."""
    if not isinstance(arena, np.ndarray):
        raise TypeError(f"arena must be a numpy array, got {type(arena).__name__}")
    checks.array("arena", arena, (arena.dtype,), (None, None), contiguous=True)
    checks.writable("arena", arena)
    size = checks.integer("block_size", block_size, 1, 2**20)
    frames, frame_elements = arena.shape
    checks.array("source", source, checks.INTEGER_DTYPES, (None,))
    pairs = source.shape[0]
    checks.array("target", target, checks.INTEGER_DTYPES, (pairs,))
    checks.array("num_tokens", num_tokens, checks.INTEGER_DTYPES, (pairs,))
    checks.frame_ids("source", source, frames, "arena")
    checks.frame_ids("target", target, frames, "arena")
    wrong = (num_tokens < 0) | (num_tokens > size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"num_tokens[{at}] is {int(num_tokens[at])}; allowed: 0 to {size}")
    checks.array("plane_offset", plane_offset, checks.INTEGER_DTYPES, (None,))
    planes = plane_offset.shape[0]
    checks.array("plane_rows", plane_rows, checks.INTEGER_DTYPES, (planes,))
    checks.array("plane_width", plane_width, checks.INTEGER_DTYPES, (planes,))
    for p in range(planes):
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
