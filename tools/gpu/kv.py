"""K and V of some layers in scattered frames, the same contiguous, and the calls on them."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any

import cuda_kernels
from cuda_kernels.attention.cuda_call import workspace_elements
from tools.gpu.record import Bench

#: Largest difference from SDPA allowed, as a share of its largest value: both round to bfloat16.
ALLOWED_ERROR = 0.05
_ROOM = 1 << 30  # left alone


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one length with as many new tokens each; lengths are multiples of the block."""

    batch: int
    context: int
    block: int
    heads: int
    kv_heads: int = 8
    dims: int = 128
    new: int = 1
    kv_dtype: str | None = None  # None: bfloat16, as the queries

    @property
    def layer_bytes(self) -> int:
        """K and V of a layer, all rows."""
        item = 1 if self.kv_dtype else 2
        return 2 * self.batch * self.context * self.kv_heads * self.dims * item

    @property
    def moved_bytes(self) -> int:
        """K and V once, queries and results once."""
        return self.layer_bytes + 2 * 2 * self.batch * self.new * self.heads * self.dims

    @property
    def operations(self) -> int:
        """Two products, a multiplication and an addition each, of what the mask leaves."""
        pairs = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.batch * self.heads * self.dims * pairs

    @property
    def name(self) -> str:
        """As progress lines and reports say it."""
        rows = f"{self.batch} x {self.context:,}"
        if self.new > 1:
            rows = f"{self.new:,} after {self.context - self.new:,}"
        kind = self.kv_dtype or "bf16"
        return f"{rows}, {self.heads}/{self.kv_heads} x {self.dims} {kind}, block {self.block}"

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def room_for(bench: Bench, case: Case) -> str:
    """Why a case can't be held in memory; empty if it can."""
    layers = bench.layers_for(case.layer_bytes)
    dense = case.layer_bytes * (2 if case.kv_dtype else 1)
    workspace = 4 * workspace_elements(
        case.batch * case.new if case.new == 1 else 0, case.heads, case.dims, case.context
    )
    needed = layers * (case.layer_bytes + dense) + 2 * dense + workspace
    free = bench.free_bytes() - _ROOM
    if needed <= free:
        return ""
    return f"{case.name}: it needs {needed / 2**30:.0f} GiB, {max(free, 0) / 2**30:.0f} are free"


class PagedBatch:
    """``keys`` and ``values`` are ``[rows, context, kv_heads, dims]``, one of each a layer.

    The arena holds the same in frames of all layers, in random order: what is next to each other in
    a row lies far apart.
    """

    def __init__(self, bench: Bench, case: Case) -> None:
        torch = bench.torch
        self.bench, self.case = bench, case
        self.layers = bench.layers_for(case.layer_bytes)
        per_row = case.context // case.block
        self.frames = case.batch * per_row
        self.plane = case.kv_heads * case.block * case.dims
        place = {"device": bench.place}
        torch.manual_seed(0)
        shape = (case.batch, case.context, case.kv_heads, case.dims)
        self.keys, self.values = [], []
        stored = torch.float8_e4m3fn if case.kv_dtype else torch.bfloat16
        bits = torch.uint8 if case.kv_dtype else torch.bfloat16
        self.table = torch.randperm(self.frames, **place).to(torch.int32)
        order = self.table.long()
        self.arena = torch.empty((self.frames, self.layers * 2 * self.plane), dtype=bits, **place)
        planes = self.arena.view(self.frames, self.layers, 2, *self._plane_shape())
        for layer in range(self.layers):
            for side, kept in enumerate((self.keys, self.values)):
                dense = torch.randn(shape, dtype=torch.bfloat16, **place).to(stored)
                blocks = dense.view(bits).view(
                    self.frames, case.block, case.kv_heads, case.dims
                ).transpose(1, 2)  # fmt: skip
                planes[:, layer, side].index_copy_(0, order, blocks.contiguous())
                kept.append(dense.to(torch.bfloat16))
        tokens = case.batch * case.new
        self.query = torch.randn(
            (tokens, case.heads, case.dims), dtype=torch.bfloat16, **place
        )  # fmt: skip
        self.out = torch.zeros_like(self.query)
        self.table_start = torch.arange(case.batch, **place) * per_row
        self.seq_lens = torch.full((case.batch,), case.context, **place)
        self.query_start = torch.arange(case.batch + 1, **place) * case.new
        self._arguments = self._make_arguments()

    def _plane_shape(self) -> tuple[int, int, int]:
        return self.case.kv_heads, self.case.block, self.case.dims

    def _make_arguments(self) -> dict[str, Any]:
        bench, case = self.bench, self.case
        arrays = {
            name: bench.array(getattr(self, name))
            for name in ("out", "query", "arena", "table", "table_start", "seq_lens", "query_start")
        }
        made = arrays | {
            "dtype": "bfloat16", "block_size": case.block, "num_kv_heads": case.kv_heads,
            "head_dim": case.dims, "value_dim": case.dims, "max_seq_len": case.context,
            "stream": bench.stream,
        }  # fmt: skip
        if case.kv_dtype:
            made["kv_dtype"] = case.kv_dtype
        if "max_query_len" in inspect.signature(cuda_kernels.paged_attention).parameters:
            made["max_query_len"] = case.new  # engines know it; it may spare a launch
        if case.new == 1:
            count = workspace_elements(case.batch, case.heads, case.dims, case.context)
            self.workspace = bench.torch.empty(
                count, dtype=bench.torch.float32, device=bench.place
            )  # fmt: skip
            made["workspace"] = bench.array(self.workspace)
        return made

    def attend(self, turn: int, *, check: bool = False) -> Any:
        """Ours, on the layer that is next; returns the tensor of results."""
        key = turn % self.layers * 2 * self.plane
        cuda_kernels.paged_attention(
            **self._arguments, key_offset=key, value_offset=key + self.plane, check=check
        )
        return self.out

    def difference(self, other: Any) -> tuple[float, float]:
        """Largest difference of our result for layer 0 from another, and what is allowed."""
        ours = self.attend(0).float().clone()
        self.bench.clock.wait()
        theirs = other(0).reshape(ours.shape).float()
        if not bool(ours.isfinite().all()):
            return float("inf"), ALLOWED_ERROR * float(theirs.abs().max())
        return float((ours - theirs).abs().max()), ALLOWED_ERROR * float(theirs.abs().max())
