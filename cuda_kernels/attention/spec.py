"""The spec of `paged_attention`: axes, tolerance, float64 reference, input maker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.dtypes import (
    any_storage_dtype,
    bits_to_float,
    float_to_bits,
    nan_pattern,
    storage_dtype,
)
from cuda_kernels.spec import Spec

Float64 = NDArray[np.float64]


def gather_row(
    arena: Float64,
    frames: NDArray[np.int32],
    length: int,
    offset: int,
    heads: int,
    size: int,
    dims: int,
    layout: str,
) -> Float64:
    """The first ``length`` positions of a row's plane, contiguous: ``[heads, length, dims]``."""
    planes = arena[frames, offset : offset + heads * size * dims]
    if layout == "HND":
        planes = planes.reshape(frames.shape[0], heads, size, dims).transpose(1, 0, 2, 3)
    else:
        planes = planes.reshape(frames.shape[0], size, heads, dims).transpose(2, 0, 1, 3)
    return planes.reshape(heads, -1, dims)[:, :length]


def reference(arguments: dict[str, Any]) -> tuple[Float64, Float64]:
    """Dense float64 attention of each row; returns out and log-sum-exp."""
    a = arguments
    query = bits_to_float(a["query"], a["dtype"]).astype(np.float64)
    num_tokens, num_heads, head_dim = query.shape
    heads, size, value_dim = a["num_kv_heads"], a["block_size"], a["value_dim"]
    out = np.zeros((num_tokens, num_heads, value_dim))
    lse = np.full((num_tokens, num_heads), -np.inf)
    scale = head_dim**-0.5 if a.get("scale") is None else a["scale"]
    sinks = a.get("sinks")
    for row, length in enumerate(a["seq_lens"]):
        tokens = slice(a["query_start"][row], a["query_start"][row + 1])
        count = tokens.stop - tokens.start
        if length == 0 or count == 0:
            continue
        start = a["table_start"][row]
        frames = a["table"][start : start + -(-length // size)]
        used = bits_to_float(a["arena"][frames], stored_as(a)).astype(np.float64)
        local = np.arange(frames.shape[0])
        layout = a.get("layout", "HND")
        key = gather_row(used, local, length, a["key_offset"], heads, size, head_dim, layout)
        value = gather_row(used, local, length, a["value_offset"], heads, size, value_dim, layout)
        key, value = key * scale_of(a, "key_scale"), value * scale_of(a, "value_scale")
        positions = np.arange(length - count, length)[:, None]
        for head in range(num_heads):
            kv_head = head // (num_heads // heads)
            scores = query[tokens, head] @ key[kv_head].T * scale
            bend_and_mask(scores, positions, head, a)
            logits = scores if sinks is None else np.c_[scores, np.full(count, sinks[head])]
            peak = logits.max(axis=1, keepdims=True)
            total = np.exp(logits - peak).sum(axis=1, keepdims=True)
            out[tokens, head] = np.exp(scores - peak) / total @ value[kv_head]
            lse[tokens, head] = (peak + np.log(total))[:, 0]
    return out, lse


def stored_as(a: dict[str, Any]) -> str:
    """The name of what K and V are stored as."""
    return str(a.get("kv_dtype") or a["dtype"])


def scale_of(a: dict[str, Any], name: str) -> Float64:
    """What stored K or V is multiplied by: ``[num_kv_heads, 1, 1]``."""
    scale = a.get(name)
    ones = np.ones(a["num_kv_heads"])
    return (ones if scale is None else scale.astype(np.float64))[:, None, None]


def bend_and_mask(scores: Float64, positions: NDArray[Any], head: int, a: dict[str, Any]) -> None:
    """Softcap, then ALiBi, then the mask, in place."""
    if a.get("softcap") is not None:
        scores[:] = a["softcap"] * np.tanh(scores / a["softcap"])
    keys = np.arange(scores.shape[1])[None]
    if a.get("alibi") is not None:
        scores -= float(a["alibi"][head]) * (positions - keys)
    masked = keys > positions
    if a.get("window") is not None:
        masked |= keys <= positions - a["window"]
    scores[masked] = -np.inf


def make_inputs(
    rng: np.random.Generator,
    *,
    dtype: str,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    free_frames: int = 3,
    layout: str = "HND",
    alignment: int = 1,
    kv_dtype: str | None = None,
    **rules: Any,
) -> dict[str, Any]:
    """Draw arguments of `paged_attention`: scattered frames, NaN wherever no row may read.

    The planes lie in shuffled order with gaps, as those of one layer of many do; they and frames
    begin at multiples of ``alignment`` elements if their sizes are. With "fp8_e4m3" scales are
    drawn, too: some so small that a few numbers saturate, some so large that many are subnormal.
    """
    counts = [-(-length // block_size) for length in seq_lens]
    num_frames = sum(counts) + free_frames
    key_size = num_kv_heads * block_size * head_dim
    value_size = num_kv_heads * block_size * value_dim
    gap = int(rng.integers(0, 17)) * alignment
    offsets = (gap, 2 * gap + key_size) if rng.random() < 0.5 else (gap + value_size, gap)
    frame_elements = 3 * gap + key_size + value_size
    stored = kv_dtype or dtype
    array_dtype = any_storage_dtype(stored).array_dtype
    poison = nan_pattern(stored).view(array_dtype)
    scales: dict[str, Any] = {}
    if stored != dtype:
        drawn = 2.0 ** rng.uniform(-7, 3, (2, num_kv_heads))
        scales = dict(zip(("key_scale", "value_scale"), drawn.astype(np.float32), strict=True))
    arena = np.full((num_frames, frame_elements), poison, array_dtype)
    table = rng.permutation(num_frames)[: sum(counts)].astype(np.int32)
    table_start = np.cumsum([0, *counts])[:-1]
    for row, length in enumerate(seq_lens):
        frames = table[table_start[row] : table_start[row] + counts[row]]
        planes_of = zip(offsets, (head_dim, value_dim), ("key_scale", "value_scale"), strict=True)
        for offset, dims, name in planes_of:
            rows = rng.standard_normal((num_kv_heads, counts[row] * block_size, dims))
            rows /= scales[name][:, None, None] if scales else 1
            bits = float_to_bits(rows, stored)
            bits[:, length:] = poison
            planes = bits.reshape(num_kv_heads, counts[row], block_size, dims)
            width = num_kv_heads * block_size * dims
            order = (1, 0, 2, 3) if layout == "HND" else (1, 2, 0, 3)
            plane = planes.transpose(order).reshape(counts[row], width)
            arena[frames, offset : offset + width] = plane
    query_start = np.cumsum([0, *query_lens])
    out_dtype = storage_dtype(dtype).array_dtype
    query = float_to_bits(rng.standard_normal((query_start[-1], num_heads, head_dim)), dtype)
    return {
        "out": np.full(
            (query_start[-1], num_heads, value_dim), nan_pattern(dtype).view(out_dtype), out_dtype
        ),
        "query": query,
        "arena": arena,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        **scales,
        "key_offset": offsets[0],
        "value_offset": offsets[1],
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "layout": layout,
        "table": table,
        "table_start": table_start,
        "seq_lens": np.asarray(seq_lens, np.int64),
        "query_start": query_start,
        "lse": np.full((query_start[-1], num_heads), np.nan, np.float32),
        **rules,
    }


SPEC = Spec(
    name="paged_attention",
    axes={
        "num_tokens": "query tokens of all rows",
        "num_heads": "query heads, a multiple of num_kv_heads",
        "num_kv_heads": "heads of K and V",
        "head_dim": "width of q and k, any",
        "value_dim": "width of v and out, any",
        "block_size": "slots of a frame, any",
    },
    tensors={
        "query": "[num_tokens, num_heads, head_dim], storage dtype",
        "out": "[num_tokens, num_heads, value_dim], storage dtype",
        "arena": "[frames, frame_elements], storage dtype, or uint8 with kv_dtype fp8_e4m3",
        "key_scale": "[num_kv_heads], float32, with fp8_e4m3 only; value_scale likewise",
        "table": "[blocks of all rows], int32",
        "table_start": "[rows], int32 or int64",
        "seq_lens": "[rows], int32 or int64",
        "query_start": "[rows + 1], int32 or int64",
        "lse": "[num_tokens, num_heads], float32",
    },
    tolerance={"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2},
    relative_to="max |V|",
    reference=reference,
    make_inputs=make_inputs,
)
