"""Whole frames: moved between arenas (swap out, swap in), or filled with a pattern (poison)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels import checks

_BYTE = (np.dtype(np.uint8),)
_PATTERNS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}


def move_frames(
    target_arena: NDArray[np.uint8],
    target_ids: NDArray[np.int32],
    source_arena: NDArray[np.uint8],
    source_ids: NDArray[np.int32],
    *,
    check: bool = True,
) -> None:
    """Copy frame ``source_ids[i]`` of one arena to frame ``target_ids[i]`` of another.

    The arenas are uint8 ``[frames, frame_bytes]``, C-contiguous, of equal frame_bytes and not
    overlapping; the ids are 1-D int32 or int64. The GIL is released for the whole copy, which
    runs on the calling thread alone: a store's worker calls it beside the compute.

    Frames of any size and at any address; whole multiples of 64 bytes at an address of that kind
    are fastest. Raises TypeError or ValueError before a byte is written; a target named twice is
    one. With ``check=False`` ids are trusted. Cost: the bytes at the speed of one large memcpy,
    past the caches: what is read back at once should go through `copy_blocks`.
    """
    if check:
        source = checks.array("source_arena", source_arena, _BYTE, (None, None), contiguous=True)
        frame_bytes = source.shape[1]
        checks.array("target_arena", target_arena, _BYTE, (None, frame_bytes), contiguous=True)
        checks.writable("target_arena", target_arena)
        checks.array("source_ids", source_ids, checks.INTEGER_DTYPES, (None,))
        checks.array("target_ids", target_ids, checks.INTEGER_DTYPES, (source_ids.shape[0],))
        checks.frame_ids("source_ids", source_ids, source.shape[0], "source_arena")
        checks.frame_ids("target_ids", target_ids, target_arena.shape[0], "target_arena")
        _refuse_repeated("target_ids", target_ids)
        if np.may_share_memory(source_arena, target_arena):
            raise ValueError("source_arena and target_arena overlap; use copy_blocks inside one")
    from cuda_kernels import simd
    from cuda_kernels.frames import cpu

    move = cpu.move_plainly if simd.JIT_DISABLED else cpu.move
    move(target_arena, target_ids, source_arena, source_ids)


def fill_frames(
    arena: NDArray[Any], ids: NDArray[np.int32], pattern: np.generic, *, check: bool = True
) -> None:
    """Fill each frame of ``ids`` with a repeated pattern of 1, 2 or 4 bytes.

    ``arena`` is ``[frames, frame_elements]`` of any dtype, C-contiguous; ``pattern`` is a NumPy
    scalar (`cuda_kernels.dtypes.nan_pattern` gives the NaN of a storage dtype). Releases the
    GIL. Raises TypeError or ValueError before a byte is written. Cost: one pass of stores.
    """
    if not isinstance(pattern, np.generic) or pattern.dtype.itemsize not in _PATTERNS:
        raise TypeError(
            f"pattern must be a numpy scalar of 1, 2 or 4 bytes, got {type(pattern).__name__}"
        )
    word = _PATTERNS[pattern.dtype.itemsize]
    if check:
        if not isinstance(arena, np.ndarray):
            raise TypeError(f"arena must be a numpy array, got {type(arena).__name__}")
        checks.array("arena", arena, (arena.dtype,), (None, None), contiguous=True)
        checks.writable("arena", arena)
        checks.array("ids", ids, checks.INTEGER_DTYPES, (None,))
        checks.frame_ids("ids", ids, arena.shape[0], "arena")
        if arena.shape[1] * arena.itemsize % word.itemsize:
            raise ValueError(
                f"pattern has {word.itemsize} bytes, which does not divide a frame of "
                f"{arena.shape[1] * arena.itemsize} bytes"
            )
    from cuda_kernels.frames import cpu

    cpu.fill(arena.view(word), ids, pattern.view(word))


def _refuse_repeated(name: str, ids: NDArray[Any]) -> None:
    """Two copies into one frame would leave bytes that depend on their order (case 3)."""
    values, counts = np.unique(ids, return_counts=True)
    if values.size != ids.size:
        frame = int(values[int(np.argmax(counts))])
        raise ValueError(f"{name} names frame {frame} more than once; each target may appear once")
