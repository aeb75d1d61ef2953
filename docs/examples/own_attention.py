"""Attention of your own over kvmem's blocks: torch's SDPA, flex_attention, FlashInfer.

`step.group(layer)` tells where the tokens lie, `Manager.kv(layer)` shows the memory, as views
without a copy. Each function here computes what `step.attend(layer, query)` computes:

    sdpa            gathers each row's K and V, then scaled_dot_product_attention
    flex            the same by flex_attention, rows of all sequences in one call
    FlashInferDecode    FlashInfer's paged decode, which reads the blocks where they lie (GPU only)

    python docs/examples/own_attention.py [cpu|cuda]
"""

from __future__ import annotations

import importlib.util
import sys

import torch

import kvmem


def gathered(
    manager: kvmem.Manager, step: kvmem.Step, layer: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each row of a step, in the order of their positions: `[length, heads, dim]`."""
    key_cache, value_cache = manager.kv(layer)
    table = step.group(layer).block_table
    size = manager.config.block_size
    rows = []
    for row, length in enumerate(step.host.seq_lens.tolist()):
        frames = table[row, : -(-length // size)].long()
        rows.append(tuple(c[frames].flatten(0, 1)[:length] for c in (key_cache, value_cache)))
    return rows


def sdpa(manager: kvmem.Manager, step: kvmem.Step, layer: int, query: torch.Tensor) -> torch.Tensor:
    """`[num_tokens, num_heads, v_head_dim]` by scaled_dot_product_attention, a call for each row.

    The queries of a row are the last of its positions, so its mask is the lower right corner of a
    causal one.
    """
    starts = step.host.query_start.tolist()
    out = []
    for row, (key, value) in enumerate(gathered(manager, step, layer)):
        asked = query[starts[row] : starts[row + 1]]
        first = len(key) - len(asked)
        mask = torch.ones(len(asked), len(key), dtype=torch.bool, device=query.device)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            asked.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None],
            attn_mask=mask.tril(first), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out) if out else query.new_empty(query.shape)


def flex(manager: kvmem.Manager, step: kvmem.Step, layer: int, query: torch.Tensor) -> torch.Tensor:
    """The same by flex_attention: all rows in one call, each token sees its own sequence.

    Wrap flex_attention in torch.compile where speed counts; as it stands it computes every score.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = gathered(manager, step, layer)
    key, value = (torch.cat([row[i] for row in rows]) for i in range(2))
    lengths = step.seq_lens.long()
    number = torch.arange(len(rows), device=query.device)
    row_of_key = number.repeat_interleave(lengths)
    row_of_query = number.repeat_interleave(step.query_start.long().diff())
    key_start = lengths.cumsum(0) - lengths
    key_position = torch.arange(len(key), device=query.device) - key_start[row_of_key]

    def seen(batch: object, head: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        own = row_of_query[q] == row_of_key[k]
        return own & (key_position[k] <= step.positions[q])

    mask = create_block_mask(seen, None, None, len(query), len(key), device=query.device)
    mixed = flex_attention(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None],
        block_mask=mask, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(mixed, torch.Tensor)
    return mixed[0].transpose(0, 1)


def hnd_caches(manager: kvmem.Manager, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer as FlashInfer's layout "HND" wants them, `[frames, heads, block, dim]`.

    Views. Inside a frame the planes are packed; from frame to frame it is further, since a frame
    holds all layers. FlashInfer takes any strides that K and V share, so `head_dim` and
    `v_head_dim` have to be equal, and counts in 32 bits from frame to frame.
    """
    key, value = (cache.transpose(1, 2) for cache in manager.kv(layer))
    if key.stride() != value.stride():
        raise ValueError(f"K has strides {key.stride()}, V {value.stride()}: they must be equal")
    return key, value


def page_table(step: kvmem.Step, block_size: int) -> tuple[torch.Tensor, ...]:
    """The rows of a step as FlashInfer's int32 `(indptr, indices, last_page_len)`, on the device of
    the step's tensors."""
    lengths = torch.from_numpy(step.host.seq_lens).long()
    blocks = -(-lengths // block_size)
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = blocks.cumsum(0)
    last = (lengths - (blocks - 1) * block_size).int()
    table = step.block_table
    used = torch.arange(table.shape[1]) < blocks[:, None]
    rows, columns = (index.to(table.device) for index in used.nonzero(as_tuple=True))
    return indptr.to(table.device), table[rows, columns], last.to(table.device)


def why_no_flashinfer() -> str | None:
    """What FlashInfer's part of this file lacks here; None if nothing."""
    if not torch.cuda.is_available():
        return "no GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install flashinfer-python)"
    return None


class FlashInferDecode:
    """FlashInfer's paged decode on a Manager's arena. One query token a row.

    decode = FlashInferDecode(manager)
    with manager.step(seqs) as step:
        decode.plan(step, num_heads=32)         # once a step
        for layer in ...:
            step.write(layer, k, v)
            out = decode.run(layer, query)      # [num_seqs, num_heads, head_dim]
    """

    def __init__(self, manager: kvmem.Manager, workspace_bytes: int = 128 << 20) -> None:
        import flashinfer

        self.manager = manager
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=manager.kv(0)[0].device)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")

    def plan(self, step: kvmem.Step, num_heads: int) -> None:
        """Tell FlashInfer the rows of a step."""
        config = self.manager.config
        if step.max_query_len > 1:
            raise ValueError("decode takes one token a row; this step has more")
        self.wrapper.plan(
            *page_table(step, config.block_size),
            num_heads, config.num_kv_heads, config.head_dim, config.block_size,
            q_data_type=config.dtype, kv_data_type=config.kv_dtype,
        )  # fmt: skip

    def run(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of one layer."""
        out: torch.Tensor = self.wrapper.run(query, hnd_caches(self.manager, layer))
        return out


def compare(device: str = "cpu", seed: int = 0) -> dict[str, float]:
    """Prefill and decode of three sequences in which each way computes the same batches; returns
    the largest difference from `step.attend`, by name."""
    half = device.startswith("cuda")  # FlashInfer has no float32
    dtype = torch.bfloat16 if half else torch.float32
    config = kvmem.Config(
        num_layers=2, num_kv_heads=2, head_dim=64, dtype=dtype, block_size=16, device_blocks=24,
        device=device,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    worst: dict[str, float] = {}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(manager.kv(0)[0].device, dtype)

    with kvmem.Manager(config) as manager:
        ways = {"sdpa": sdpa, "flex": flex}
        decode = FlashInferDecode(manager) if why_no_flashinfer() is None and half else None
        seqs = [manager.create(list(range(n)), publish=False) for n in (21, 40, 3)]
        for _ in range(3):
            with manager.step(seqs, max_tokens=48) as step:
                if decode is not None and step.max_query_len == 1:
                    decode.plan(step, num_heads=8)
                for layer in range(config.num_layers):
                    step.write(layer, *(random(step.num_tokens, 2, 64) for _ in "kv"))
                    query = random(step.num_tokens, 8, 64)
                    expected = step.attend(layer, query)
                    assert isinstance(expected, torch.Tensor)
                    found = {name: way(manager, step, layer, query) for name, way in ways.items()}
                    if decode is not None and step.max_query_len == 1:
                        found["FlashInfer"] = decode.run(layer, query)
                    for name, mixed in found.items():
                        apart = (mixed - expected).abs().max().item()
                        worst[name] = max(worst.get(name, 0.0), apart)
            manager.append(step.ready, [1] * len(step.ready))
    return worst


if __name__ == "__main__":
    for name, apart in compare(*sys.argv[1:2]).items():
        print(f"{name}: at most {apart:.2g} from step.attend")
    if lacking := why_no_flashinfer():
        print(f"FlashInfer: skipped, {lacking}")
