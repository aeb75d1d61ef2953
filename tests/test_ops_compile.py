"""`kvmem.ops` under torch's own machinery: opcheck, FakeTensors, torch.compile, growing lengths."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from kvmem import ops

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def caches(
    dtype: torch.dtype, frames: int, block: int, heads: int, dim: int, value_dim: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value cache as `Manager.kv` returns them: planes of one frame, side by side."""
    draw = torch.Generator().manual_seed(seed)
    split = heads * block * dim
    arena = torch.randn(frames, split + heads * block * value_dim, generator=draw).to(dtype)
    key = arena[:, :split].view(frames, heads, block, dim).transpose(1, 2)
    value = arena[:, split:].view(frames, heads, block, value_dim).transpose(1, 2)
    return key, value


def attention(
    dtype: torch.dtype,
    seed: int,
    *,
    heads: int = 2,
    group: int = 2,
    dim: int = 16,
    value_dim: int = 16,
    block: int = 8,
    lengths: tuple[int, ...] = (11, 24),
    queries: tuple[int, ...] = (1, 6),
) -> dict[str, Any]:
    columns = -(-max(lengths) // block)
    key, value = caches(dtype, columns * len(lengths) + 1, block, heads, dim, value_dim, seed)
    draw = torch.Generator().manual_seed(seed)
    table = torch.randperm(columns * len(lengths), generator=draw).view(len(lengths), -1) + 1
    starts = torch.tensor([0, *queries]).cumsum(0)
    return {
        "query": torch.randn(int(starts[-1]), heads * group, dim, generator=draw).to(dtype),
        "key_cache": key,
        "value_cache": value,
        "block_table": table.int(),
        "seq_lens": torch.tensor(lengths),
        "query_start": starts,
    }


SHAPES: list[dict[str, Any]] = [
    {},
    {"heads": 1, "group": 1, "dim": 5, "value_dim": 3, "block": 1, "lengths": (3,),
     "queries": (3,)},
    {"heads": 3, "group": 4, "dim": 64, "value_dim": 32, "block": 16, "lengths": (0, 17, 40),
     "queries": (0, 1, 5)},
]  # fmt: skip
#: opcheck takes about half a second a call: each shape, dtype and option once, not all of them
#: with each other. The kernels' own tests have the combinations.
CASES = list(zip(DTYPES, SHAPES, strict=True))


def options(heads: int) -> list[dict[str, Any]]:
    slopes = torch.linspace(0.1, 0.4, heads)
    return [
        {},
        {"scale": 0.3, "window": 5},
        {"softcap": 4.0, "alibi": slopes, "sinks": slopes - 0.2, "window": 9},
    ]


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_opcheck_of_attention(seed: int, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    arguments = attention(dtype, seed, **shape)
    arguments["query_start"] = arguments["query_start"].int()
    for extra in options(arguments["query"].shape[1]):
        torch.library.opcheck(ops.paged_attention, (), arguments | extra)


@pytest.mark.parametrize(
    ("dtype", "integer", "tokens", "heads", "block", "dim", "value_dim"),
    [
        (torch.float32, torch.int64, 4, 2, 8, 16, 16),
        (torch.bfloat16, torch.int32, 0, 2, 8, 16, 16),
        (torch.float16, torch.int32, 1, 1, 1, 7, 3),
    ],
)
def test_opcheck_of_the_moves(
    seed: int,
    dtype: torch.dtype,
    integer: torch.dtype,
    tokens: int,
    heads: int,
    block: int,
    dim: int,
    value_dim: int,
) -> None:
    key, value = caches(dtype, 9, block, heads, dim, value_dim, seed)
    draw = torch.Generator().manual_seed(seed)
    arguments = {
        "key": torch.randn(tokens, heads, dim, generator=draw).to(dtype),
        "value": torch.randn(heads, tokens, value_dim, generator=draw).to(dtype).transpose(0, 1),
        "key_cache": key,
        "value_cache": value,
        "slot_mapping": torch.randperm(9 * block, generator=draw)[:tokens].to(integer),
    }
    torch.library.opcheck(ops.write_kv, (), arguments)
    frames = {"source": [1, 2, 5], "target": [3, 4, 5], "num_tokens": [block, 0, 1]}
    moves = {name: torch.tensor(ids, dtype=integer) for name, ids in frames.items()}
    torch.library.opcheck(ops.copy_blocks, (), {"caches": [key, value], **moves})


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", SHAPES)
def test_fake_tensors_tell_what_comes(seed: int, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    """Shapes, dtypes and strides of the fakes are those of the real results."""
    arguments = attention(dtype, seed, **shape)
    real = ops.paged_attention(**arguments)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in arguments.items()}
        fake = ops.paged_attention(**fakes)
        key, slots = fakes["key_cache"], fakes["seq_lens"]
        rows = fakes["query"].new_empty(slots.shape[0], key.shape[2], key.shape[3])
        values = rows.new_empty(*rows.shape[:2], fakes["value_cache"].shape[3])
        assert ops.write_kv(rows, values, key, fakes["value_cache"], slots) is None
        assert ops.copy_blocks([key], slots, slots, slots) is None
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


class Layer(torch.nn.Module):
    """Projections, a write into the cache, attention over it: what an engine compiles."""

    heads, group, dim = 2, 2, 16

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        width = self.heads * self.group * self.dim
        self.query = torch.nn.Linear(width, width, bias=False, dtype=dtype)
        self.key_value = torch.nn.Linear(width, 2 * self.heads * self.dim, bias=False, dtype=dtype)
        self.out = torch.nn.Linear(width, width, bias=False, dtype=dtype)

    def forward(
        self,
        hidden: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
    ) -> torch.Tensor:
        key, value = self.key_value(hidden).chunk(2, -1)
        rows = (hidden.shape[0], self.heads, self.dim)
        ops.write_kv(key.reshape(rows), value.reshape(rows), key_cache, value_cache, slots)
        query = self.query(hidden).view(hidden.shape[0], -1, self.dim)
        mixed, _ = ops.paged_attention(query, key_cache, value_cache, table, seq_lens, query_start)
        return hidden + self.out(mixed.flatten(1))


def steps(dtype: torch.dtype, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Batches of an engine: prefill of some lengths, decode of some rows; one cache for all."""
    key, value = caches(dtype, 40, 8, Layer.heads, Layer.dim, Layer.dim, seed)
    draw = torch.Generator().manual_seed(seed)
    made = []
    for lengths, queries in (
        ((20, 9), (20, 9)),
        ((33, 12, 7), (13, 3, 7)),
        ((34, 13, 8), (1, 1, 1)),
        ((35, 14, 9, 2), (1, 1, 1, 2)),
        ((60, 15), (25, 1)),
    ):
        columns = -(-max(lengths) // 8)
        table = torch.zeros(len(lengths), columns, dtype=torch.int32)
        slots = []
        for row, (length, new) in enumerate(zip(lengths, queries, strict=True)):
            table[row] = torch.arange(columns) + 1 + row * 9
            at = torch.arange(length - new, length)
            slots.append(table[row, at // 8].long() * 8 + at % 8)
        starts = torch.tensor([0, *queries]).cumsum(0)
        hidden = torch.randn(int(starts[-1]), 64, generator=draw).to(dtype)
        made.append((hidden, key, value, torch.cat(slots), table, torch.tensor(lengths), starts))
    return made


def compiled_like_eager(dtype: torch.dtype, seed: int, backend: str) -> int:
    """Run all steps both ways, compare outputs and caches; how often it compiled."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    counter = CompileCounterWithBackend(backend)
    with torch.no_grad():
        layer = Layer(dtype)
        program = torch.compile(layer, fullgraph=True, backend=counter)
        for ours, theirs in zip(steps(dtype, seed), steps(dtype, seed), strict=True):
            got, expected = program(*ours), layer(*theirs)
            assert (got - expected).abs().max() <= 4 * DTYPES[dtype] * expected.abs().max()
            for cache, other in zip(ours[1:3], theirs[1:3], strict=True):
                assert (cache - other).abs().max() <= 4 * DTYPES[dtype] * other.abs().max()
    return int(counter.frame_count)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_compiled_layer(seed: int, dtype: torch.dtype) -> None:
    """Once for the first shapes and once with lengths left open; then every batch fits."""
    assert compiled_like_eager(dtype, seed, "aot_eager") <= 2


def test_compiled_by_inductor(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # its own cache does not see a change of an operator's signature, and all checkouts share it
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler: none of g++ and clang++ is here")
    assert compiled_like_eager(torch.float32, seed, "inductor") <= 2
