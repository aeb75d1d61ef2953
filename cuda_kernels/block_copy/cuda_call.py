"""`copy_blocks` on a device: from checked arrays to one launch. Imports no CUDA library."""

from __future__ import annotations

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Claims, KernelSource, Launch

THREADS = 256
# Of 64 registers, 1,024 threads fill a processor; four loads are under way, one ends a row.
CLAIMS = Claims(max_registers=64, min_wide_loads=5)

#: The kernel by the bytes of an integer in the arrays of pairs, and of planes.
KERNELS = {
    (pair_bytes, plane_bytes): KernelSource(
        "cuda_kernels.block_copy.cuda_copy",
        "copy_blocks",
        ("int64",) * 10,
        THREADS,
        (("pair_bytes", pair_bytes), ("plane_bytes", plane_bytes)),
        claims=CLAIMS,
    )
    for pair_bytes in (4, 8)
    for plane_bytes in (4, 8)
}


def copy(
    arena: DeviceArray,
    block_size: int,
    pairs: tuple[DeviceArray, DeviceArray, DeviceArray],
    planes: tuple[DeviceArray, DeviceArray, DeviceArray],
    stream: int,
) -> None:
    """Launch for pairs (source, target, num_tokens) and planes (offset, rows, width)."""
    for names, arrays in (
        ("source, target and num_tokens", pairs),
        ("plane_offset, plane_rows and plane_width", planes),
    ):
        if len({array.dtype for array in arrays}) > 1:
            raise TypeError(f"{names} must have one dtype on a device")
    count, num_planes = pairs[0].shape[0], planes[0].shape[0]
    if count == 0 or num_planes == 0:
        return
    if num_planes > 65535:
        raise ValueError(f"plane_offset has {num_planes} planes; at most 65535 in one launch")
    addresses = (array.address for array in (*pairs, *planes))
    arguments = (arena.address, arena.strides[0], arena.itemsize, block_size, *addresses)
    kernel = KERNELS[pairs[0].itemsize, planes[0].itemsize]
    arena.device.launch(Launch(kernel, (count, num_planes, 1), arguments), stream)
