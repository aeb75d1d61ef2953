"""Frames: moved between arenas (swap), by pieces to and from staging, filled (poison)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels import checks
from cuda_kernels.cuda.array import DeviceArray, device_of

_BYTE = (np.dtype(np.uint8),)
_PATTERNS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}
# Blocks of threads of a copy that shares the device with the compute, unless said otherwise.
MAX_BLOCKS = 32


def move_frames(
    target_arena: NDArray[np.uint8] | DeviceArray,
    target_ids: NDArray[np.int32] | DeviceArray,
    source_arena: NDArray[np.uint8] | DeviceArray,
    source_ids: NDArray[np.int32] | DeviceArray,
    *,
    check: bool = True,
    max_blocks: int = MAX_BLOCKS,
    stream: int = 0,
) -> None:
    """Copy frame ``source_ids[i]`` of one arena to frame ``target_ids[i]`` of another.

    The arenas are uint8 ``[frames, frame_bytes]``, C-contiguous, of equal frame_bytes and not
    overlapping; the ids are 1-D int32 or int64. The GIL is released for the whole copy, which
    runs on the calling thread alone: a store's worker calls it beside the compute.

    Frames of any size and at any address; whole multiples of 64 bytes at an address of that kind
    are fastest. Raises TypeError or ValueError before a byte is written; a target named twice is
    one. With ``check=False`` ids are trusted. Cost: the bytes at the speed of one large memcpy,
    past the caches: what is read back at once should go through `copy_blocks`.

    Arrays may lie where a device can reach them (all of them, `DeviceArray`): one kernel of at most
    ``max_blocks`` blocks of threads is queued on ``stream``, the handle of a CUDA stream; ids are
    trusted, and so is that the arenas don't overlap.
    """
    _move_frames(target_arena, target_ids, source_arena, source_ids, check, max_blocks, stream)


def _move_frames(
    target: Any, target_ids: Any, origin: Any, ids: Any, check: bool, max_blocks: int, stream: int
) -> None:
    """Checks, then the launch on a device or the twin."""
    on_device = isinstance(target, DeviceArray)
    if check:
        device_of(target_arena=target, target_ids=target_ids, source_arena=origin, source_ids=ids)
        checks.array("source_arena", origin, _BYTE, (None, None), contiguous=True)
        frame_bytes = origin.shape[1]
        checks.array("target_arena", target, _BYTE, (None, frame_bytes), contiguous=True)
        checks.writable("target_arena", target)
        checks.array("source_ids", ids, checks.INTEGER_DTYPES, (None,))
        checks.array("target_ids", target_ids, checks.INTEGER_DTYPES, (ids.shape[0],))
        checks.frame_ids("source_ids", ids, origin.shape[0], "source_arena")
        checks.frame_ids("target_ids", target_ids, target.shape[0], "target_arena")
        if not on_device:
            _refuse_repeated("target_ids", target_ids)
            if np.may_share_memory(origin, target):
                raise ValueError(
                    "source_arena and target_arena overlap; use copy_blocks inside one"
                )
    if on_device:
        from cuda_kernels.frames import cuda_call

        blocks = checks.integer("max_blocks", max_blocks, 1, 2**31 - 1)
        ends = (target, 0, target_ids), (origin, 0, ids)
        cuda_call.move(*ends, ids.shape[0], target.shape[1], blocks, stream)
        return
    from cuda_kernels import simd
    from cuda_kernels.frames import cpu

    move = cpu.move_plainly if simd.JIT_DISABLED else cpu.move
    move(target.reshape(-1), target_ids, origin.reshape(-1), ids, target.shape[1])


def gather_frames(
    staging: NDArray[np.uint8] | DeviceArray,
    arena: NDArray[np.uint8] | DeviceArray,
    ids: NDArray[np.int32] | DeviceArray,
    *,
    offset: int = 0,
    check: bool = True,
    max_blocks: int = MAX_BLOCKS,
    stream: int = 0,
) -> None:
    """Copy a piece of each frame of ``ids`` to staging, one behind the other.

    ``staging`` is uint8 ``[num_pieces, piece_bytes]``, ``arena`` uint8 ``[frames, frame_bytes]``,
    both C-contiguous and not overlapping; row ``i`` receives the ``piece_bytes`` from byte
    ``offset`` of frame ``ids[i]`` (1-D, int32 or int64, as long as staging). So the layers of a
    swap travel in few large copies, some layers at a time.

    Raises TypeError or ValueError before a byte is written. With ``check=False`` ids are trusted.
    Releases the GIL. Cost: one pass over the pieces, on the calling thread. Arrays may lie where a
    device can reach them (all of them): one kernel of at most ``max_blocks`` blocks of threads is
    queued on ``stream``, the handle of a CUDA stream, and ids are trusted.
    """
    _move_pieces(staging, arena, ids, offset, check, max_blocks, stream, gather=True)


def scatter_frames(
    arena: NDArray[np.uint8] | DeviceArray,
    ids: NDArray[np.int32] | DeviceArray,
    staging: NDArray[np.uint8] | DeviceArray,
    *,
    offset: int = 0,
    check: bool = True,
    max_blocks: int = MAX_BLOCKS,
    stream: int = 0,
) -> None:
    """Copy row ``i`` of staging to the piece at byte ``offset`` of frame ``ids[i]``.

    The reverse of `gather_frames`, with its shapes and rules; the rest of a frame keeps what
    it held. A frame named twice raises ValueError.
    """
    _move_pieces(staging, arena, ids, offset, check, max_blocks, stream, gather=False)


def _move_pieces(
    staging: Any,
    arena: Any,
    ids: Any,
    offset: int,
    check: bool,
    max_blocks: int,
    stream: int,
    *,
    gather: bool,
) -> None:
    """Both ways between staging and frames."""
    on_device = isinstance(arena, DeviceArray)
    if check:
        device_of(staging=staging, arena=arena, ids=ids)
        checks.array("arena", arena, _BYTE, (None, None), contiguous=True)
        checks.array("staging", staging, _BYTE, (None, None), contiguous=True)
        checks.writable("staging" if gather else "arena", staging if gather else arena)
        checks.plane("offset", offset, 1, 1, staging.shape[1], arena.shape[1])
        checks.array("ids", ids, checks.INTEGER_DTYPES, (staging.shape[0],))
        checks.frame_ids("ids", ids, arena.shape[0], "arena")
        if not on_device:
            if not gather:
                _refuse_repeated("ids", ids)
            if np.may_share_memory(staging, arena):
                raise ValueError("staging and arena overlap")
    if on_device:
        from cuda_kernels.frames import cuda_call

        blocks = checks.integer("max_blocks", max_blocks, 1, 2**31 - 1)
        ends = [(staging, 0, None), (arena, int(offset), ids)]
        target, origin = ends if gather else ends[::-1]
        count, size = staging.shape
        cuda_call.move(target, origin, count, size, blocks, stream)
        return
    from cuda_kernels.frames import cpu

    (cpu.gather if gather else cpu.scatter)(staging, arena, ids, int(offset))


def fill_frames(
    arena: NDArray[Any] | DeviceArray,
    ids: NDArray[np.int32] | DeviceArray,
    pattern: np.generic,
    *,
    check: bool = True,
    max_blocks: int = MAX_BLOCKS,
    stream: int = 0,
) -> None:
    """Fill each frame of ``ids`` with a repeated pattern of 1, 2 or 4 bytes.

    ``arena`` is ``[frames, frame_elements]`` of any dtype, C-contiguous; ``pattern`` is a NumPy
    scalar (`cuda_kernels.dtypes.nan_pattern` gives the NaN of a storage dtype). Releases the
    GIL. Raises TypeError or ValueError before a byte is written. Cost: one pass of stores.

    Both arrays may lie on a device (`DeviceArray`): one kernel of at most ``max_blocks`` blocks of
    threads is queued on ``stream``, the handle of a CUDA stream; ids are trusted. Frames at any
    address: all but their ends is stored 16 bytes at once.
    """
    if not isinstance(pattern, np.generic) or pattern.dtype.itemsize not in _PATTERNS:
        raise TypeError(
            f"pattern must be a numpy scalar of 1, 2 or 4 bytes, got {type(pattern).__name__}"
        )
    word = _PATTERNS[pattern.dtype.itemsize]
    if check:
        device_of(arena=arena, ids=ids)
        if not isinstance(arena, (np.ndarray, DeviceArray)):
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
    if isinstance(arena, DeviceArray):
        from cuda_kernels.frames import cuda_call

        blocks = checks.integer("max_blocks", max_blocks, 1, 2**31 - 1)
        repeated = int.from_bytes(pattern.tobytes() * (4 // word.itemsize), "little")
        cuda_call.fill(arena, ids, repeated, blocks, stream)  # type: ignore[arg-type]
        return
    from cuda_kernels.frames import cpu

    cpu.fill(arena.view(word), ids, pattern.view(word))


def _refuse_repeated(name: str, ids: NDArray[Any]) -> None:
    """Two copies into one frame would leave bytes that depend on their order (case 3)."""
    values, counts = np.unique(ids, return_counts=True)
    if values.size != ids.size:
        frame = int(values[int(np.argmax(counts))])
        raise ValueError(f"{name} names frame {frame} more than once; each target may appear once")
