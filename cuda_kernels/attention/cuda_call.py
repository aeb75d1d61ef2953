"""`paged_attention` on a device: from a checked request to one launch. Imports no CUDA library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Claims, KernelSource, Launch
from cuda_kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32

if TYPE_CHECKING:
    from cuda_kernels.attention.request import Request

THREADS = 128
_INTEGERS = 32
#: Most dims of a kernel -> how many query heads of one KV head a block of threads may take.
HEADS = {128: (1, 4, 8), 256: (1, 4), 512: (1,)}
#: Query heads, most dims -> most registers: with 128 a processor takes four blocks, with 168 three.
_REGISTERS = {
    (1, 128): 128, (4, 128): 184, (8, 128): 216, (1, 256): 168, (4, 256): 168, (1, 512): 168,
}  # fmt: skip
#: The kernel by storage dtype, query heads a block, most dims.
KERNELS = {
    (kind, heads, width): KernelSource(
        "cuda_kernels.attention.cuda_decode",
        "attend",
        ("int64",) * _INTEGERS + ("float32",) * 2,
        THREADS,
        (("kind", kind), ("heads", heads), ("width", width)),
        claims=Claims(_REGISTERS[heads, width], min_wide_loads=1),  # the loop over a row of K
    )
    for kind in (FLOAT32, BFLOAT16, FLOAT16)
    for width, choices in HEADS.items()
    for heads in choices
}


def kernel_for(kind: int, group: int, dims: int) -> tuple[int, int, int]:
    """The key of the kernel for a group of query heads; ValueError for too many dims.

    It takes as many heads as divide the group: they share each read of K and V.
    """
    widths = [width for width in HEADS if dims <= width]
    if not widths:
        raise ValueError(
            f"head_dim and value_dim may be at most {max(HEADS)} on a device, got {dims}"
        )
    width = min(widths)
    heads = max(h for h in HEADS[width] if group % h == 0)
    return kind, heads, width


def attend(request: Request, stream: int) -> None:
    """Launch for a request whose arrays all lie on one device."""
    query: Any = request.query
    out: Any = request.out
    rows: Any = request.rows
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    starts = (rows.table_start, rows.seq_lens, rows.query_start)
    if len({array.dtype for array in starts}) > 1:
        raise TypeError("table_start, seq_lens and query_start must have one dtype on a device")
    group = num_heads // request.num_kv_heads
    key = kernel_for(request.kind, group, max(head_dim, request.value.dims))
    heads = key[1]
    if num_heads // heads > 65535:
        raise ValueError(f"query has {num_heads} heads; at most 65535 blocks of {heads} heads")
    lse: Any = request.lse
    size = query.itemsize
    arguments: list[int | float] = [query.address, *query.strides, out.address, *out.strides]
    arguments += [0, 0, 0] if lse is None else [_address(lse), *lse.strides]
    arenas: Any = ((request.arena, request.key), (request.values, request.value))
    for arena, plane in arenas:
        arguments += [arena.address + plane.offset * size, arena.strides[0]]
        arguments += [plane.head_stride * size, plane.token_stride * size]
    arguments += [rows.table.address, *(array.address for array in starts)]
    arguments += [starts[0].itemsize, rows.seq_lens.shape[0], request.block_size]
    arguments += [head_dim, request.value.dims]
    arguments += [group // heads, request.window, _address(request.alibi), _address(request.sinks)]
    arguments += [request.scale, request.softcap]
    launch = Launch(KERNELS[key], (num_tokens, num_heads // heads, 1), tuple(arguments))
    query.device.launch(launch, stream)


def _address(array: object) -> int:
    """Where an array lies; 0 if it isn't given."""
    return array.address if isinstance(array, DeviceArray) else 0
