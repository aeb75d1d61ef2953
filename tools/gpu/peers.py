"""Other implementations of attention on the K and V of a `PagedBatch`.

SDPA reads K and V contiguously, which no paged cache has. FlashInfer and vLLM read pages; theirs
lie in order. A peer that isn't installed is "absent"; one that can't do a case says why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tools.gpu.clock import Run
from tools.gpu.kv import PagedBatch

_WORKSPACE_BYTES = 256 << 20


def sdpa(batch: PagedBatch) -> dict[str, Run]:
    """torch's attention, in the forms that apply to a case."""
    torch, case = batch.bench.torch, batch.case
    attention = torch.nn.functional.scaled_dot_product_attention
    query = batch.query.view(case.batch, case.new, case.heads, case.dims).transpose(1, 2)
    dense = [
        (key.transpose(1, 2), value.transpose(1, 2))
        for key, value in zip(batch.keys, batch.values, strict=True)
    ]
    if case.new > 1:
        return {"SDPA": _prompt(batch, attention, query, dense)}
    grouped = batch.query.view(case.batch, case.kv_heads, case.heads // case.kv_heads, case.dims)

    def as_length(turn: int) -> Any:
        return attention(grouped, *dense[turn % len(dense)])

    def as_gqa(turn: int) -> Any:
        return attention(query, *dense[turn % len(dense)], enable_gqa=True)

    return {"SDPA, group as length": as_length, "SDPA, enable_gqa": as_gqa}


def _prompt(batch: PagedBatch, attention: Any, query: Any, dense: Any) -> Run:
    """Causal, the last tokens against all. Results as [tokens, heads, dims]."""
    from torch.nn.attention.bias import causal_lower_right

    case = batch.case
    rule: dict[str, Any] = {"is_causal": True}
    if case.new < case.context:
        rule = {"attn_mask": causal_lower_right(case.new, case.context)}
    group = case.heads // case.kv_heads

    def native(turn: int) -> Any:
        key, value = dense[turn % len(dense)]
        return attention(query, key, value, enable_gqa=True, **rule).transpose(1, 2)

    try:
        native(0)
    except Exception:  # some versions can't do both; repeating the heads costs memory only
        repeated = [tuple(part.repeat_interleave(group, 1) for part in pair) for pair in dense[:2]]

        def expanded(turn: int) -> Any:
            key, value = repeated[turn % len(repeated)]
            return attention(query, key, value, **rule).transpose(1, 2)

        return expanded
    return native


def flashinfer(batch: PagedBatch) -> Run:
    """FlashInfer's wrappers, planned once; raises ImportError where it isn't installed."""
    import flashinfer as peer

    torch, case = batch.bench.torch, batch.case
    place = {"device": batch.bench.place, "dtype": torch.int32}
    per_row = case.context // case.block
    room = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=batch.bench.place)
    pages = torch.arange(batch.frames, **place)
    starts = torch.arange(case.batch + 1, **place) * per_row
    last = torch.full((case.batch,), case.block, **place)
    sizes = (case.heads, case.kv_heads, case.dims, case.block)
    if case.new > 1:
        wrapper = peer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        news = torch.arange(case.batch + 1, **place) * case.new
        wrapper.plan(news, starts, pages, last, *sizes, causal=True, q_data_type=torch.bfloat16)
    else:
        wrapper = peer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
        wrapper.plan(starts, pages, last, *sizes, q_data_type=torch.bfloat16)
    caches = [_pages(batch, layer) for layer in range(batch.layers)]
    return lambda turn: wrapper.run(batch.query, caches[turn % len(caches)])


def vllm(batch: PagedBatch) -> Run:
    """vLLM's FlashAttention over a block table; raises ImportError where it isn't installed."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    torch, case = batch.bench.torch, batch.case
    place = {"device": batch.bench.place, "dtype": torch.int32}
    table = torch.arange(batch.frames, **place).view(case.batch, -1)
    lens, starts = batch.seq_lens.to(torch.int32), batch.query_start.to(torch.int32)
    caches = [_pages(batch, layer) for layer in range(batch.layers)]

    def run(turn: int) -> Any:
        key, value = caches[turn % len(caches)]
        return flash_attn_varlen_func(
            q=batch.query, k=key, v=value, max_seqlen_q=case.new, cu_seqlens_q=starts,
            max_seqlen_k=case.context, seqused_k=lens, block_table=table, causal=True,
        )  # fmt: skip

    return run


def _pages(batch: PagedBatch, layer: int) -> tuple[Any, Any]:
    """K and V as [pages, page_size, kv_heads, dims]."""
    case = batch.case
    shape = (batch.frames, case.block, case.kv_heads, case.dims)
    return batch.keys[layer].view(shape), batch.values[layer].view(shape)


#: Paged peers by the name of the package.
PAGED: dict[str, Callable[[PagedBatch], Run]] = {"flashinfer": flashinfer, "vllm": vllm}


def paged(batch: PagedBatch) -> tuple[dict[str, Run], dict[str, str]]:
    """The paged peers that can run a case, and of the others why not."""
    runs: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    for name, make in PAGED.items():
        if importlib.util.find_spec(name) is None:
            reasons[name] = "absent"
            continue
        try:
            runs[name] = make(batch)
        except Exception as error:  # compiles at run time, wants other versions: anything
            reasons[name] = f"failed: {type(error).__name__}: {str(error)[:200]}"
    return runs, reasons
