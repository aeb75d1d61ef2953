"""`write_kv` on a device: from checked arrays to one launch. Imports no CUDA library."""

from __future__ import annotations

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Claims, KernelSource, Launch
from cuda_kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32
from cuda_kernels.plane import Plane

THREADS = 128
# Of 64 registers, 1,024 threads fill a processor; four loads are under way, one ends a row.
CLAIMS = Claims(max_registers=64, min_wide_loads=5)

#: The kernel by the bytes of a slot.
KERNELS = {
    slot_bytes: KernelSource(
        "cuda_kernels.cache_write.cuda_write",
        "write_kv",
        ("int64",) * 19,
        THREADS,
        (("slot_bytes", slot_bytes),),
        claims=CLAIMS,
    )
    for slot_bytes in (4, 8)
}

#: The kernel for K and V stored as fp8_e4m3 by the dtype of the rows.
FP8_KERNELS = {
    kind: KernelSource(
        "cuda_kernels.cache_write.cuda_write_fp8",
        "write_kv_fp8",
        ("int64",) * 22,
        THREADS,
        (("kind", kind),),
        claims=Claims(max_registers=64, min_wide_loads=1),  # a piece's
    )
    for kind in (FLOAT32, BFLOAT16, FLOAT16)
}


def write(
    slots: DeviceArray,
    block_size: int,
    key: tuple[DeviceArray, DeviceArray, Plane],
    value: tuple[DeviceArray, DeviceArray, Plane],
    stream: int,
) -> None:
    """Launch for key and value, each as (rows, arena, plane of the layer)."""
    num_tokens, num_heads, _ = key[0].shape
    if num_tokens == 0:
        return
    arguments = [slots.address, block_size, num_heads]
    for name, (rows, arena, plane) in (("key", key), ("value", value)):
        size = rows.itemsize
        _check_rows(name, rows)
        arguments += [rows.address, rows.strides[0], rows.strides[1], rows.shape[2] * size]
        arguments += [arena.address + plane.offset * size, arena.strides[0]]
        arguments += [plane.token_stride * size, plane.head_stride * size]
    launch = Launch(KERNELS[slots.itemsize], (num_tokens, 2, 1), tuple(arguments))
    slots.device.launch(launch, stream)


def write_fp8(
    slots: DeviceArray,
    block_size: int,
    kind: int,
    key: tuple[DeviceArray, DeviceArray, Plane],
    value: tuple[DeviceArray, DeviceArray, Plane],
    scales: tuple[DeviceArray | None, DeviceArray | None],
    stream: int,
) -> None:
    """Launch for rows of a dtype by its kind, arenas of bytes; a scale a head, or None: 1."""
    num_tokens, num_heads, _ = key[0].shape
    if num_tokens == 0:
        return
    arguments = [slots.address, slots.itemsize, block_size, num_heads]
    for name, (rows, arena, plane), scale in zip(
        ("key", "value"), (key, value), scales, strict=True
    ):
        _check_rows(name, rows)
        arguments += [rows.address, rows.strides[0], rows.strides[1], rows.shape[2]]
        arguments += [0 if scale is None else scale.address]
        arguments += [arena.address + plane.offset, arena.strides[0]]
        arguments += [plane.token_stride, plane.head_stride]
    launch = Launch(FP8_KERNELS[kind], (num_tokens, 2, 1), tuple(arguments))
    slots.device.launch(launch, stream)


def _check_rows(name: str, rows: DeviceArray) -> None:
    """Refuse rows whose elements don't lie side by side."""
    if rows.strides[2] != rows.itemsize and rows.shape[2] > 1:
        raise ValueError(
            f"{name} must have contiguous rows; got a stride of {rows.strides[2]} bytes "
            f"between elements of {rows.itemsize}"
        )
