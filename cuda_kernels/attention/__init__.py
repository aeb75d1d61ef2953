"""Attention of new tokens over paged K/V."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels import checks
from cuda_kernels.cuda.array import DeviceArray, device_of
from cuda_kernels.dtypes import (
    FP8,
    STORAGE_DTYPES,
    StorageDtype,
    kv_storage_dtype,
    storage_dtype,
)
from cuda_kernels.plane import plane_of

if TYPE_CHECKING:
    from cuda_kernels.attention.rows import Rows

_FLOAT32 = np.dtype(np.float32)
# The NumPy dtype of a storage dtype's bits, by its kind.
STORAGE_BITS = {s.kind: s.bits_dtype for s in (*STORAGE_DTYPES.values(), FP8)}


def paged_attention(
    out: NDArray[Any] | DeviceArray,
    query: NDArray[Any] | DeviceArray,
    arena: NDArray[Any] | DeviceArray,
    *,
    dtype: str,
    key_offset: int,
    value_offset: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    table: NDArray[np.int32] | DeviceArray,
    table_start: NDArray[np.int64] | DeviceArray,
    seq_lens: NDArray[np.int64] | DeviceArray,
    query_start: NDArray[np.int64] | DeviceArray,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: NDArray[np.float32] | DeviceArray | None = None,
    sinks: NDArray[np.float32] | DeviceArray | None = None,
    lse: NDArray[np.float32] | DeviceArray | None = None,
    value_arena: NDArray[Any] | DeviceArray | None = None,
    layout: str = "HND",
    kv_dtype: str | None = None,
    key_scale: NDArray[np.float32] | DeviceArray | None = None,
    value_scale: NDArray[np.float32] | DeviceArray | None = None,
    check: bool = True,
    stream: int = 0,
    max_seq_len: int | None = None,
    workspace: DeviceArray | None = None,
    cores: str = "auto",
    max_query_len: int | None = None,
) -> None:
    """Attend each query token to the positions of its row up to its own; write ``out``.

    ``query`` is ``[num_tokens, num_heads, head_dim]`` and ``out`` ``[num_tokens, num_heads,
    value_dim]``, of any strides; ``arena`` is ``[frames, frame_elements]``, C-contiguous; all of
    the storage dtype. Query head ``h`` reads KV head ``h // (num_heads // num_kv_heads)``. A frame
    holds the key plane ``[num_kv_heads, block_size, head_dim]`` at ``key_offset`` elements and
    the value plane ``[num_kv_heads, block_size, value_dim]`` at ``value_offset``; the latter in
    ``value_arena`` if it is given, an array like ``arena`` with as many frames. With ``layout``
    "NHD" the planes are ``[block_size, num_kv_heads, ...]`` instead; the result has the same bits.

    Rows are ragged: block ``j`` of row ``i`` lies in frame ``table[table_start[i] + j]`` (int32);
    the row's tokens are ``query_start[i] <= t < query_start[i + 1]`` and are the last ones of its
    ``seq_lens[i]`` positions (int32 or int64). ``query_start`` begins at 0; tokens past its end
    are left alone. A row without tokens costs nothing; one of length 0 gives zeros and a
    log-sum-exp of -inf.

    score = q . k * ``scale`` (None: head_dim ** -0.5); then ``softcap * tanh(score / softcap)``;
    then ALiBi, ``- alibi[head] * (query position - key position)``; then the mask: causal, and with
    ``window`` only the last ``window`` positions, its own included. ``sinks[head]`` is a logit
    that enters the softmax's denominator only. ``alibi`` and ``sinks`` are float32
    ``[num_heads]``. ``lse``, float32 ``[num_tokens, num_heads]``, receives the natural logarithm
    of the denominator ``out`` was divided by: with sinks, they are included.

    With ``kv_dtype`` "fp8_e4m3" the arenas are uint8, and what they hold is multiplied by
    ``key_scale`` and ``value_scale``, float32 ``[num_kv_heads]`` from 1e-12 to 1e12 (None: 1): the
    scales go to queries and results, so they cost nothing.

    Arithmetic is float32. A token's result depends, bit for bit, neither on the other rows, nor on
    how the row was cut into steps (on a device with a limit, see below), nor on frames, nor on the
    number of threads. NaN or Inf past a row's length, in other frames, or at positions a token
    doesn't attend to reaches no result.

    Raises TypeError or ValueError before a byte is written. ``check=False`` trusts arrays and
    tables. Cost: the K/V of each row once for every 64 query rows of a KV head, and 2 *
    (head_dim + value_dim) flops a query head and position (for heads and tokens in fours), on
    Numba's threads with the GIL released; scratch of 100 KB or so a thread.

    Arrays may lie on a device (all of them, `DeviceArray`; the row arrays of one dtype, head_dim
    and value_dim at most 512, rows below 2**31 positions): kernels are queued on ``stream``, the
    handle of a CUDA stream, and what the row arrays and scales hold is trusted.
    ``cores`` picks the kernels: "tensor" cores (bfloat16 and float16, K and V so or in fp8_e4m3,
    head_dim = value_dim one of 64, 96, 128, 256, block_size a multiple of 16, addresses and strides
    of q, K and V multiples of 16 bytes), "ordinary" ones (every call), or "auto", the former where
    possible. The two round differently.

    On tensor cores with up to 128 dims, K and V of the queries' dtype, a row with 16 tokens or more
    (`cuda_call.PROMPT_TOKENS`) is a prompt: K and V are read once for 64 tokens times heads of a KV
    head, by a kernel that rounds otherwise than the one for rows with fewer. So a token keeps its
    bits however a row is cut into steps of 16 and more, or into steps of fewer, but not from the
    one to the other. ``max_query_len``, at least the most tokens of a row, spares a launch where
    none is a prompt.
    All other rows: K and V are read once for each token and up to 16 heads, a block of threads
    each; unless ``max_seq_len``, at least the largest of ``seq_lens``, and ``workspace``, float32
    on the device, are given: then long rows of small batches are cut over many blocks, with the
    same bits (`cuda_call.workspace_elements` tells the size; until the work is done the workspace
    belongs to it). The CPU ignores these options.
    """
    storage = storage_dtype(dtype)
    stored = kv_storage_dtype(kv_dtype, storage)
    values = arena if value_arena is None else value_arena
    if check:
        device_of(
            query=query, out=out, arena=arena, value_arena=value_arena, table=table,
            table_start=table_start, seq_lens=seq_lens, query_start=query_start,
            alibi=alibi, sinks=sinks, lse=lse, workspace=workspace,
            key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip
        checks.layout(layout)
        _check_arrays(
            out,
            query,
            arena,
            values,
            (storage, stored),
            key_offset,
            value_offset,
            block_size,
            num_kv_heads,
            head_dim,
            value_dim,
        )
        checks.kv_scales(stored, num_kv_heads, key_scale=key_scale, value_scale=value_scale)
        _check_rules(query.shape[1], scale, window, softcap, alibi, sinks)
        if lse is not None:
            checks.array("lse", lse, (_FLOAT32,), query.shape[:2])
            checks.writable("lse", lse)
        _check_rows(query.shape[0], table, table_start, seq_lens, query_start)
        _check_options(max_seq_len, max_query_len, workspace, cores)
    heads, size = int(num_kv_heads), int(block_size)
    arrays: Any = (out, query, arena, values)
    starts: Any = (table_start, seq_lens, query_start)
    rules = (
        storage.kind,
        plane_of(layout, int(key_offset), heads, size, int(head_dim)),
        plane_of(layout, int(value_offset), heads, size, int(value_dim)),
        size,
        heads,
        head_dim**-0.5 if scale is None else float(scale),
        int(window or 0),
        float(softcap or 0),
    )
    ends: Any = (alibi, sinks, stored.kind, key_scale, value_scale)
    options = (int(stream), max_seq_len, workspace, cores, max_query_len)
    _launch(arrays, lse, table, starts, rules, ends, arena.shape[0] if check else 0, options)


def _launch(
    arrays: Any, lse: Any, table: Any, starts: Any, rules: Any, ends: Any, frames: int, options: Any
) -> None:
    """Hand a call to the kernel of the arrays' device; `frames` > 0: check the tables first."""
    from cuda_kernels.attention.request import Request
    from cuda_kernels.attention.rows import Rows

    if isinstance(table, DeviceArray):
        from cuda_kernels.attention import cuda_call

        request = Request._make((*arrays, lse, Rows._make((table, *starts)), *rules, *ends))
        cuda_call.attend(request, cuda_call.DeviceOptions._make(options))
        return
    from cuda_kernels import simd

    if simd.JIT_DISABLED:
        from cuda_kernels.attention import plain as twin
    else:
        from cuda_kernels.attention import cpu as twin  # type: ignore[no-redef]

    rows = Rows(table, *(np.ascontiguousarray(array, np.int64) for array in starts))
    kinds = (rules[0], rules[0], ends[2], ends[2])
    bits = (a.view(STORAGE_BITS[kind]) for a, kind in zip(arrays, kinds, strict=True))
    request = Request._make((*bits, lse, rows, *rules, *ends))
    if frames:
        _check_tables(rows, request.block_size, request.window, frames)
    twin.attend(request)


def _check_arrays(
    out: Any,
    query: Any,
    arena: Any,
    values: Any,
    storages: tuple[StorageDtype, StorageDtype],
    key_offset: int,
    value_offset: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
) -> None:
    """Shapes, dtypes (of queries and results, of K and V) and planes."""
    size = checks.integer("block_size", block_size, 1, 2**20)
    heads = checks.integer("num_kv_heads", num_kv_heads, 1, 2**20)
    dims = checks.integer("head_dim", head_dim, 1, 2**16)
    value_dims = checks.integer("value_dim", value_dim, 1, 2**16)
    dtypes, stored = (storages[0].array_dtype,), (storages[1].array_dtype,)
    checks.array("query", query, dtypes, (None, None, dims))
    num_tokens, num_heads, _ = query.shape
    if num_heads == 0 or num_heads % heads:
        raise ValueError(
            f"query has {num_heads} heads, which is not a multiple of num_kv_heads {heads}"
        )
    checks.array("out", out, dtypes, (num_tokens, num_heads, value_dims))
    checks.writable("out", out)
    checks.array("arena", arena, stored, (None, None), contiguous=True)
    checks.plane("key_offset", key_offset, heads, size, dims, arena.shape[1])
    checks.array("value_arena", values, stored, (arena.shape[0], None), contiguous=True)
    checks.plane("value_offset", value_offset, heads, size, value_dims, values.shape[1])


def _check_rules(
    num_heads: int,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    alibi: Any,
    sinks: Any,
) -> None:
    """Everything that bends the scores."""
    if scale is not None:
        _check_number("scale", scale)
    if softcap is not None:
        _check_number("softcap", softcap, positive=True)
    if window is not None:
        checks.integer("window", window, 1)
    for name, values in (("alibi", alibi), ("sinks", sinks)):
        if values is None:
            continue
        checks.array(name, values, (_FLOAT32,), (num_heads,))
        if isinstance(values, DeviceArray):
            continue
        wrong = np.isnan(values) | (values == np.inf)
        if name == "alibi":
            wrong |= np.isinf(values)
        if wrong.any():
            raise ValueError(f"{name}[{int(np.argmax(wrong))}] is not a finite number")


def _check_number(name: str, value: Any, *, positive: bool = False) -> None:
    """A finite float other than 0, or greater than 0; as float32, since so it is used."""
    numbers = (int, float, np.integer, np.floating)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers):
        raise TypeError(f"{name} must be a number or None, got {type(value).__name__}")
    number = float(value)
    single = float(np.float32(number)) if abs(number) < 3e38 else math.inf
    if not math.isfinite(single) or single == 0 or (positive and single < 0):
        allowed = "greater than 0" if positive else "other than 0"
        raise ValueError(f"{name} must be a finite number {allowed}, got {value}; None: default")


def _check_rows(
    num_tokens: int,
    table: Any,
    table_start: Any,
    seq_lens: Any,
    query_start: Any,
) -> None:
    """Shapes of the row arrays and the ends of query_start."""
    checks.array("seq_lens", seq_lens, checks.INTEGER_DTYPES, (None,))
    num_rows = seq_lens.shape[0]
    checks.array("table", table, (np.dtype(np.int32),), (None,), contiguous=True)
    checks.array("table_start", table_start, checks.INTEGER_DTYPES, (num_rows,))
    checks.array("query_start", query_start, checks.INTEGER_DTYPES, (num_rows + 1,))
    if isinstance(query_start, DeviceArray):
        return
    if query_start[0] != 0 or query_start[-1] > num_tokens:
        raise ValueError(
            f"query_start must begin at 0 and end at most at num_tokens {num_tokens}; got "
            f"{int(query_start[0])} and {int(query_start[-1])}"
        )


def _check_options(max_seq_len: Any, max_query_len: Any, workspace: Any, cores: Any) -> None:
    """What only a device uses."""
    for name, length in (("max_seq_len", max_seq_len), ("max_query_len", max_query_len)):
        if length is not None:
            checks.integer(name, length, 0)
    if workspace is not None:
        checks.array("workspace", workspace, (_FLOAT32,), (None,), contiguous=True)
        checks.writable("workspace", workspace)
    if cores not in ("auto", "tensor", "ordinary"):
        raise ValueError(f"cores must be 'auto', 'tensor' or 'ordinary', got {cores!r}")


def _check_tables(rows: Rows, block_size: int, window: int, num_frames: int) -> None:
    """The part of the tables that will be read (case 69): no launch, no read, on a bad id."""
    from cuda_kernels.attention import tasks

    fault, row, a, b = tasks.find_fault(rows, block_size, window, num_frames)
    if fault == 1:
        raise ValueError(
            f"table is too short for row {row}: seq_lens[{row}] {int(rows.seq_lens[row])} needs "
            f"{a} columns of {block_size} from table_start[{row}] {b}, but the table ends at "
            f"{rows.table.shape[0]}"
        )
    if fault == 2:
        raise ValueError(
            f"table of row {row}, column {a}, names frame {b}; arena has frames 0 to "
            f"{num_frames - 1}"
        )
    if fault == 3:
        raise ValueError(
            f"row {row} has {a} query tokens, more than its seq_lens[{row}] {b}; seq_lens counts "
            f"the query tokens too"
        )
    if fault == 4:
        raise ValueError(f"seq_lens[{row}] is {a}; allowed: 0 or more")
    if fault == 5:
        raise ValueError(f"query_start falls from row {row} to {row + 1}; it must not decrease")
