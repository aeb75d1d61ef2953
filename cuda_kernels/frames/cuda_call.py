"""Moves and fills of frames on a device: from checked arrays to one launch.

Imports no CUDA library.
"""

from __future__ import annotations

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Claims, KernelSource, Launch

THREADS = 256
# A chunk keeps 256 threads busy for two rounds of four 16-byte loads each.
CHUNK_BYTES = 32768
# Of 64 registers, 1,024 threads fill a processor; four loads are under way, one ends a row.
CLAIMS = Claims(max_registers=64, min_wide_loads=5)

#: The kernel by the bytes of an id of the target, and of the source; 0: no ids.
KERNELS = {
    (target_id_bytes, source_id_bytes): KernelSource(
        "cuda_kernels.frames.cuda_move",
        "move_pieces",
        ("int64",) * 10,
        THREADS,
        (("target_id_bytes", target_id_bytes), ("source_id_bytes", source_id_bytes)),
        claims=CLAIMS,
    )
    for target_id_bytes in (0, 4, 8)
    for source_id_bytes in (0, 4, 8)
}

#: The kernel of fills by the bytes of an id.
FILL_KERNELS = {
    id_bytes: KernelSource(
        "cuda_kernels.frames.cuda_fill",
        "fill_frames",
        ("int64",) * 7,
        THREADS,
        (("id_bytes", id_bytes),),
        claims=Claims(max_registers=40, min_wide_loads=0),  # it loads ids alone
    )
    for id_bytes in (4, 8)
}


def move(
    target: tuple[DeviceArray, int, DeviceArray | None],
    origin: tuple[DeviceArray, int, DeviceArray | None],
    num_pieces: int,
    piece_bytes: int,
    max_blocks: int,
    stream: int,
) -> None:
    """Launch for target and origin, each as (rows, byte in a row, ids or None for all in turn)."""
    chunks = -(-piece_bytes // CHUNK_BYTES)
    if num_pieces * chunks == 0:
        return
    if num_pieces * chunks >= 2**32:
        raise ValueError(f"{num_pieces} pieces of {piece_bytes} bytes are too many for one launch")
    arguments: list[int] = []
    widths = []
    for rows, offset, ids in (target, origin):
        arguments += [rows.address + offset, rows.strides[0], 0 if ids is None else ids.address]
        widths.append(0 if ids is None else ids.itemsize)
    arguments += [num_pieces, piece_bytes, CHUNK_BYTES, chunks]
    grid = (min(max_blocks, num_pieces * chunks), 1, 1)
    target[0].device.launch(Launch(KERNELS[widths[0], widths[1]], grid, tuple(arguments)), stream)


def fill(arena: DeviceArray, ids: DeviceArray, pattern: int, max_blocks: int, stream: int) -> None:
    """Launch; byte k of a frame becomes byte k % 4 of the pattern."""
    frame_bytes = arena.shape[1] * arena.itemsize
    chunks = -(-frame_bytes // CHUNK_BYTES)
    count = ids.shape[0]
    if count * chunks == 0:
        return
    if count * chunks >= 2**32:
        raise ValueError(f"{count} frames of {frame_bytes} bytes are too many for one launch")
    arguments = (arena.address, frame_bytes, ids.address, count, pattern, CHUNK_BYTES, chunks)
    grid = (min(max_blocks, count * chunks), 1, 1)
    arena.device.launch(Launch(FILL_KERNELS[ids.itemsize], grid, arguments), stream)
