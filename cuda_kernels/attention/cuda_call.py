"""`paged_attention` on a device: from a checked request to its launches. Imports no CUDA library.

Three kernels: two on tensor cores, for what they can do, and one on ordinary cores, for everything.
Tensor or ordinary hangs on dtype, sizes and addresses, never on the rows. Of the two on tensor
cores one takes rows with few query tokens and one those with many, which only the device can tell:
both are launched, and each leaves the other's rows alone. So a row's result has the same bits alone
and in a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cuda_kernels.cuda.array import DeviceArray
from cuda_kernels.cuda.kernel import Claims, KernelSource, Launch
from cuda_kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, FP8_E4M3

if TYPE_CHECKING:
    from cuda_kernels.attention.request import Request

THREADS = 128
#: Positions of a split: a fixed cut, so that results don't hang on who computes it. A power of 2.
SPLIT_TOKENS = 512
#: Enough blocks for each processor of the largest GPUs at hand (4 on each of 132).
WANTED_BLOCKS = 528
_MOST_BLOCKS = 65535
_INTEGERS = 39
#: Most dims of a kernel on ordinary cores -> how many heads of one KV head a block may take.
HEADS = {128: (1, 4, 8), 256: (1, 4), 512: (1,)}
#: Query heads a block -> blocks that a processor shall hold; how many registers those leave.
BLOCKS = {1: 5, 4: 3, 8: 3}
_REGISTERS = {5: 96, 4: 128, 3: 168, 2: 255}
#: The kernel on ordinary cores by dtype of K and V, query heads a block, most dims. Left to itself
#: the assembler spills a few registers for one more block that a processor can hold.
KERNELS = {
    (kind, heads, width): KernelSource(
        "cuda_kernels.attention.cuda_decode",
        "attend",
        ("int64",) * _INTEGERS + ("float32",) * 2,
        THREADS,
        (("kind", kind), ("heads", heads), ("width", width)),
        blocks=BLOCKS[heads],
        by_capability=kind == FP8_E4M3,  # how numbers are widened
        claims=Claims(_REGISTERS[BLOCKS[heads]], min_wide_loads=1),  # the loop over a row of K
    )
    for kind in (FLOAT32, BFLOAT16, FLOAT16, FP8_E4M3)
    for width, choices in HEADS.items()
    for heads in choices
}
_TENSOR_INTEGERS, _MERGE_INTEGERS, _PROMPT_INTEGERS = 39, 18, 33
#: Dims and eights of heads of a kernel on tensor cores -> blocks that a processor shall hold.
#: With 256 dims there is no room for the sums of 16 heads; with 64 and 96 few models share a KV
#: head among more than 8. They take a block for each 8 heads, which read the same K and V.
TENSOR_BLOCKS = {(64, 1): 4, (96, 1): 4, (128, 1): 4, (128, 2): 2, (256, 1): 2}


def _wide_loads(dims: int) -> int:
    """16-byte loads of K and V in fp8_e4m3, 16 positions a turn; V of 64 dims takes 8 bytes."""
    return 2 * -(-dims // 64) + (4 * -(-dims // 128) if dims > 64 else 0)


#: The kernel on tensor cores by dtype of K and V, dims, eights of heads.
TENSOR_KERNELS = {
    (kind, dims, tiles): KernelSource(
        "cuda_kernels.attention.cuda_decode_mma",
        "attend",
        ("int64",) * _TENSOR_INTEGERS + ("float32",) * 2,
        THREADS,
        (("kind", kind), ("dims", dims), ("tiles", tiles)),
        blocks=blocks,
        by_capability=kind == FP8_E4M3,
        # Of K and V, 16 positions a turn; some more of q.
        claims=Claims(
            _REGISTERS[blocks],
            min_wide_loads=_wide_loads(dims) if kind == FP8_E4M3 else dims // 8,
            tensor_cores=True,
        ),
    )
    for kind in (BFLOAT16, FLOAT16, FP8_E4M3)
    for (dims, tiles), blocks in TENSOR_BLOCKS.items()
}
#: From so many query tokens on a row is a prompt: 64 query rows in a group of 4, a whole tile.
PROMPT_TOKENS = 16
#: Query rows (tokens times heads of a KV head) of a block of the kernel for prompts.
PROMPT_ROWS = 64
#: Dims it can do -> blocks that a processor shall hold. With 256 q and sums take all registers.
PROMPT_BLOCKS = {64: 4, 96: 3, 128: 3}
#: The kernel for prompts, on tensor cores, by storage dtype and dims.
PROMPT_KERNELS = {
    (kind, dims): KernelSource(
        "cuda_kernels.attention.cuda_prefill",
        "attend_prompts",
        ("int64",) * _PROMPT_INTEGERS + ("float32",) * 2,
        THREADS,
        (("kind", kind), ("dims", dims)),
        blocks=blocks,
        # Copies of the first K, of V and the next K; q of two rows.
        claims=Claims(_REGISTERS[blocks], min_wide_loads=5 * dims // 32, tensor_cores=True),
    )
    for kind in (BFLOAT16, FLOAT16)
    for dims, blocks in PROMPT_BLOCKS.items()
}
_NO_PROMPTS = 2**62
_WIDEST = 2**31 - 2 * PROMPT_ROWS  # of a window, where its arithmetic takes 32 bits
#: The kernel that joins the splits of the other two, by storage dtype.
MERGE_KERNELS = {
    kind: KernelSource(
        "cuda_kernels.attention.cuda_merge",
        "merge",
        ("int64",) * _MERGE_INTEGERS,
        THREADS,
        (("kind", kind),),
        claims=Claims(64, min_wide_loads=0),
    )
    for kind in (FLOAT32, BFLOAT16, FLOAT16)
}


class DeviceOptions(NamedTuple):
    """What a caller may say about the work on a device; `paged_attention` explains it."""

    stream: int = 0
    max_seq_len: int | None = None
    workspace: DeviceArray | None = None
    cores: str = "auto"
    max_query_len: int | None = None


def kernel_for(kind: int, group: int, dims: int) -> tuple[int, int, int]:
    """The key of the kernel on ordinary cores for a group of heads; ValueError for too many dims.

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


def tensor_kernel_for(kind: int, group: int, dims: int) -> tuple[int, int, int] | None:
    """The key of the kernel on tensor cores for a group of heads, or None.

    Heads come in eights; larger groups than one block takes are cut.
    """
    tiles = max(
        (t for d, t in TENSOR_BLOCKS if d == dims and (t == 1 or group > 8)),
        default=0,
    )
    return (kind, dims, tiles) if tiles and kind != FLOAT32 else None


def workspace_elements(
    num_tokens: int, num_heads: int, value_dim: int, max_seq_len: int, window: int | None = None
) -> int:
    """float32 elements that `paged_attention` takes as ``workspace`` to cut rows over blocks."""
    return num_tokens * num_heads * num_splits(max_seq_len, window or 0) * (value_dim + 2)


def num_splits(max_seq_len: int, window: int) -> int:
    """The most splits that one token's positions can touch."""
    whole = -(-max_seq_len // SPLIT_TOKENS)
    if window:
        whole = min(whole, (window + SPLIT_TOKENS - 2) // SPLIT_TOKENS + 1)
    return max(whole, 1)


def attend(request: Request, options: DeviceOptions) -> None:
    """Launch for a request whose arrays all lie on one device."""
    query: Any = request.query
    rows: Any = request.rows
    if query.shape[0] == 0:
        return
    starts = (rows.table_start, rows.seq_lens, rows.query_start)
    if len({array.dtype for array in starts}) > 1:
        raise TypeError("table_start, seq_lens and query_start must have one dtype on a device")
    obstacle = "cores is 'ordinary'" if options.cores == "ordinary" else _obstacle(request)
    if not obstacle:
        prompts = _may_have_prompts(request, options)
        _attend_tensor(request, options, PROMPT_TOKENS if prompts else _NO_PROMPTS)
        if prompts:
            _attend_prompts(request, options)
    elif options.cores == "tensor":
        raise ValueError(f"cores='tensor' can't do this call: {obstacle}")
    else:
        _attend_ordinary(request, options)


def _obstacle(request: Request) -> str:
    """Why a call isn't one for tensor cores; empty if it is."""
    query: Any = request.query
    dims, size = query.shape[2], query.itemsize
    group = query.shape[1] // request.num_kv_heads
    possible = request.kind != FLOAT32 and request.value.dims == dims
    if not possible or tensor_kernel_for(request.kv_kind, group, dims) is None:
        known = sorted({d for d, _ in TENSOR_BLOCKS})
        return f"it needs bfloat16 or float16, and head_dim = value_dim one of {known}"
    if request.block_size % 16:
        return f"block_size {request.block_size} is not a multiple of 16"
    places = [query.address, *query.strides[:2], *_planes(request)]
    if query.strides[2] != size or any(place % 16 for place in places):
        return "an address or stride of query, K or V is not a multiple of 16 bytes"
    return ""


def _may_have_prompts(request: Request, options: DeviceOptions) -> bool:
    """Whether the kernel for prompts can do this call, and may have something to do."""
    query: Any = request.query
    rows: Any = request.rows
    num_tokens, most = query.shape[0], options.max_query_len
    if most is not None:
        num_tokens = min(num_tokens, most)
    if rows.seq_lens.shape[0] == 0 or request.kv_kind != request.kind:
        return False
    return num_tokens >= PROMPT_TOKENS and (request.kind, query.shape[2]) in PROMPT_KERNELS


def _attend_prompts(request: Request, options: DeviceOptions) -> None:
    """Rows with many tokens, on tensor cores: a block takes as many tokens as heads leave room."""
    query: Any = request.query
    rows: Any = request.rows
    num_tokens, num_heads, dims = query.shape
    group = num_heads // request.num_kv_heads
    blocks_per_head = -(-group // PROMPT_ROWS)
    heads = -(-group // blocks_per_head)
    tokens = PROMPT_ROWS // heads
    arguments = [query.address, *query.strides[:2], *_results(request), *_planes(request)]
    arguments += [*_rows(request), request.block_size, group, blocks_per_head]
    window = request.window if request.window < _WIDEST else 0
    arguments += [heads, tokens, PROMPT_TOKENS, window]
    arguments += [_address(request.alibi), _address(request.sinks)]
    # A row's tiles begin where tokens before it, in tiles, and rows before it end (`find_slot`).
    grid = (
        num_tokens // tokens + rows.seq_lens.shape[0],
        request.num_kv_heads * blocks_per_head,
        1,
    )
    source = PROMPT_KERNELS[request.kind, dims]
    launch = Launch(source, grid, (*arguments, request.scale, request.softcap))
    query.device.launch(launch, options.stream)


def _attend_tensor(request: Request, options: DeviceOptions, prompt_tokens: int) -> None:
    """On tensor cores, rows with fewer tokens than that: heads of one KV head in eights."""
    query: Any = request.query
    _, num_heads, dims = query.shape
    group = num_heads // request.num_kv_heads
    key = tensor_kernel_for(request.kv_kind, group, dims)
    assert key is not None
    blocks_per_head = -(-group // (8 * key[2]))
    blocks = request.num_kv_heads * blocks_per_head
    arguments = [query.address, *query.strides[:2], *_results(request), *_planes(request)]
    arguments += [*_rows(request), request.block_size, num_heads, group, blocks_per_head]
    arguments += [prompt_tokens, *_stored(request)]
    _launch(request, options, TENSOR_KERNELS[key], blocks, arguments, prompt_tokens)


def _attend_ordinary(request: Request, options: DeviceOptions) -> None:
    """On ordinary cores: as many heads a block as divide those of a KV head."""
    query: Any = request.query
    _, num_heads, head_dim = query.shape
    group = num_heads // request.num_kv_heads
    key = kernel_for(request.kv_kind, group, max(head_dim, request.value.dims))
    heads = key[1]
    arguments = [*_place(query), *_results(request), *_planes(request)]
    arguments += [*_rows(request), request.block_size, head_dim, request.value.dims, group // heads]
    arguments += _stored(request)
    _launch(request, options, KERNELS[key], num_heads // heads, arguments)


def _launch(
    request: Request,
    options: DeviceOptions,
    source: KernelSource,
    blocks: int,
    arguments: list[int],
    prompt_tokens: int = _NO_PROMPTS,
) -> None:
    """One kernel, `blocks` blocks a token; or with a workspace parts of rows, then the merge."""
    query: Any = request.query
    rows: Any = request.rows
    num_tokens, num_heads, _ = query.shape
    if blocks > _MOST_BLOCKS:
        raise ValueError(
            f"query has {num_heads} heads, {blocks} blocks; at most {_MOST_BLOCKS} on a device"
        )
    parts, splits = _parts(num_tokens * blocks, num_tokens * num_heads, request, options)
    partial = _address(options.workspace) if parts > 1 else 0
    bits = SPLIT_TOKENS.bit_length() - 1
    sinks = _address(request.sinks)
    rules = [request.window, _address(request.alibi), sinks]
    last = (bits, parts, partial, splits, request.scale, request.softcap)
    launch = Launch(source, (num_tokens, blocks, parts), (*arguments, *rules, *last))
    query.device.launch(launch, options.stream)
    if not partial:
        return
    joined = [partial, splits, request.value.dims, bits, *_results(request)]
    joined += [rows.seq_lens.address, rows.query_start.address, rows.seq_lens.itemsize]
    joined += [rows.seq_lens.shape[0], request.window, sinks, prompt_tokens]
    launch = Launch(MERGE_KERNELS[request.kind], (num_tokens, num_heads, 1), tuple(joined))
    query.device.launch(launch, options.stream)


def _parts(
    blocks: int, token_heads: int, request: Request, options: DeviceOptions
) -> tuple[int, int]:
    """Into how many parts each token's splits are dealt, and room for how many splits there is.

    One, without a workspace or where there are blocks enough: results have the same bits.
    """
    if options.workspace is None or options.max_seq_len is None:
        return 1, 1
    splits = num_splits(options.max_seq_len, request.window)
    parts = min(splits, WANTED_BLOCKS // blocks, _MOST_BLOCKS)
    if parts < 2:
        return 1, 1
    needed = token_heads * splits * (request.value.dims + 2)
    if options.workspace.shape[0] < needed:
        raise ValueError(
            f"workspace has {options.workspace.shape[0]} elements; {needed} are needed for rows of "
            f"up to {options.max_seq_len} positions (workspace_elements tells)"
        )
    return parts, splits


def _planes(request: Request) -> list[int]:
    """Where K and V of the layer lie: address, strides of frames, heads and tokens, in bytes."""
    found: list[int] = []
    arenas: Any = ((request.arena, request.key), (request.values, request.value))
    for arena, plane in arenas:
        size = arena.itemsize
        found += [arena.address + plane.offset * size, arena.strides[0]]
        found += [plane.head_stride * size, plane.token_stride * size]
    return found


def _stored(request: Request) -> list[int]:
    """The dtype of queries and results, and what K and V in fp8_e4m3 are multiplied by."""
    return [request.kind, _address(request.key_scale), _address(request.value_scale)]


def _results(request: Request) -> list[int]:
    """Where out and lse lie; zeros for the latter if it isn't asked for."""
    return [*_place(request.out), *([0, 0, 0] if request.lse is None else _place(request.lse))]


def _rows(request: Request) -> list[int]:
    """Where the table and the row arrays lie, bytes of an element of the latter, how many rows."""
    rows: Any = request.rows
    starts = (rows.table_start, rows.seq_lens, rows.query_start)
    addresses = [rows.table.address, *(array.address for array in starts)]
    return [*addresses, rows.seq_lens.itemsize, rows.seq_lens.shape[0]]


def _place(array: Any) -> list[int]:
    """Address and strides."""
    return [array.address, *array.strides]


def _address(array: object) -> int:
    """Where an array lies; 0 if it isn't given."""
    return array.address if isinstance(array, DeviceArray) else 0
