"""`kvmem.ops`: torch custom ops over raw tensors, checked by opcheck and against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cuda_kernels.attention.spec import SPEC
from kvmem import ops
from kvmem.errors import ShapeError

FRAMES, BLOCK, HEADS, DIM = 9, 8, 2, 16
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def caches_of(dtype: torch.dtype, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    arena = torch.randn(FRAMES, 2, HEADS, BLOCK, DIM, generator=generator).to(dtype)
    return arena[:, 0].transpose(1, 2), arena[:, 1].transpose(1, 2)


def attention_arguments(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    key_cache, value_cache = caches_of(dtype, generator)
    return {
        "query": torch.randn(7, 4, DIM, generator=generator).to(dtype),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": torch.tensor([[3, 1, 0], [7, 4, 8]], dtype=torch.int32),
        "seq_lens": torch.tensor([11, 24]),
        "query_start": torch.tensor([0, 1, 7]),
    }


def write_arguments(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    key_cache, value_cache = caches_of(dtype, generator)
    return {
        "key": torch.randn(3, HEADS, DIM, generator=generator).to(dtype),
        "value": torch.randn(3, HEADS, DIM, generator=generator).to(dtype),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor([17, -1, 71]),
    }


def copy_arguments(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "caches": [*caches_of(dtype, generator), *caches_of(dtype, generator)],
        "source": torch.tensor([1, 2, 4]),
        "target": torch.tensor([5, 6, 4]),
        "num_tokens": torch.tensor([8, 3, 1]),
    }


def in_fp8(arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same over caches of fp8_e4m3, with scales."""
    scales = 2 ** torch.rand(2, HEADS, generator=torch.Generator().manual_seed(seed))
    caches = {
        name: (arguments[name].float() / by[:, None]).to(torch.float8_e4m3fn)
        for name, by in zip(("key_cache", "value_cache"), scales, strict=True)
    }
    planes = {n: c.transpose(1, 2).contiguous().transpose(1, 2) for n, c in caches.items()}
    return arguments | planes | {"k_scale": scales[0], "v_scale": scales[1]}


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_caches_in_fp8(seed: int, dtype: torch.dtype) -> None:
    """Attention over what they hold, times the scales, and writes that round as torch does."""
    arguments = in_fp8(attention_arguments(seed, dtype), seed)
    out, lse = ops.paged_attention(**arguments)
    assert out.dtype == dtype
    widened = {
        name: arguments[name].float() * arguments[scale][:, None]
        for name, scale in (("key_cache", "k_scale"), ("value_cache", "v_scale"))
    }
    plain = {k: v for k, v in arguments.items() if k not in ("k_scale", "v_scale")}
    planes = {n: c.transpose(1, 2).contiguous().transpose(1, 2) for n, c in widened.items()}
    expected = ops.paged_attention(**(plain | planes | {"query": arguments["query"].float()}))
    assert (out.float() - expected[0]).abs().max() <= DTYPES[dtype] * 5
    assert torch.allclose(lse, expected[1], atol=1e-4)

    rows = in_fp8(write_arguments(seed, dtype), seed)
    ops.write_kv(**rows)
    for name, cache, scale in (
        ("key", "key_cache", "k_scale"),
        ("value", "value_cache", "v_scale"),
    ):
        wanted = (rows[name].float() / rows[scale][:, None]).to(torch.float8_e4m3fn)
        for row, slot in ((0, 17), (2, 71)):
            stored = rows[cache][slot // BLOCK, slot % BLOCK]
            assert torch.equal(stored.view(torch.uint8), wanted[row].view(torch.uint8))
    source = rows["key_cache"].clone()
    ops.copy_blocks(
        [rows["key_cache"]], torch.tensor([2]), torch.tensor([5]), torch.tensor([BLOCK])
    )
    copied = rows["key_cache"][5].view(torch.uint8)
    assert torch.equal(copied, source[2].view(torch.uint8))


def test_fp8_is_refused_where_it_cannot_be(seed: int) -> None:
    arguments = in_fp8(attention_arguments(seed), seed)
    for changes, message in (
        ({"query": arguments["query"].to(torch.float8_e4m3fn)}, "query has dtype .*float8_e4m3fn"),
        ({"k_scale": torch.ones(HEADS + 1)}, "k_scale has shape"),
        ({"v_scale": torch.ones(HEADS).double()}, "v_scale has dtype torch.float64"),
        ({"value_cache": arguments["value_cache"].float()}, "must agree in dtype"),
        ({"key_cache": arguments["key_cache"].to(torch.float8_e5m2)}, "key_cache has dtype"),
    ):
        with pytest.raises(ShapeError, match=message):
            ops.paged_attention(**(arguments | changes))
    with pytest.raises(ValueError, match=r"key_scale\[1\] is not a number from"):
        ops.paged_attention(**(arguments | {"k_scale": torch.tensor([1.0, 0.0])}))
    with pytest.raises(ShapeError, match="v_scale needs caches of torch.float8_e4m3fn"):
        ops.write_kv(**write_arguments(seed), v_scale=torch.ones(HEADS))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_paged_attention(seed: int, dtype: torch.dtype) -> None:
    arguments = attention_arguments(seed, dtype)
    slopes = torch.linspace(0.1, 0.4, 4)
    out, lse = ops.paged_attention(**arguments, window=9, softcap=5.0, alibi=slopes, sinks=slopes)
    dense = {
        name: arguments[name].float().numpy() for name in ("query", "key_cache", "value_cache")
    }
    planes = [
        dense[name].transpose(0, 2, 1, 3).reshape(FRAMES, -1)
        for name in ("key_cache", "value_cache")
    ]
    table = arguments["block_table"].numpy()
    expected, expected_lse = SPEC.reference(
        {
            "dtype": "float32",
            "query": dense["query"],
            "arena": np.hstack(planes),
            "key_offset": 0,
            "value_offset": HEADS * BLOCK * DIM,
            "block_size": BLOCK,
            "num_kv_heads": HEADS,
            "value_dim": DIM,
            "table": table.reshape(-1),
            "table_start": np.array([0, 3]),
            "seq_lens": arguments["seq_lens"].numpy(),
            "query_start": arguments["query_start"].numpy(),
            "window": 9,
            "softcap": 5.0,
            "alibi": slopes.numpy(),
            "sinks": slopes.numpy(),
        }
    )
    largest = np.abs(dense["value_cache"]).max()
    assert out.dtype == dtype
    assert np.abs(out.float().numpy() - expected).max() <= DTYPES[dtype] * largest
    assert np.abs(lse.numpy() - expected_lse).max() <= 1e-5


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_write_then_read(seed: int, dtype: torch.dtype) -> None:
    arguments = write_arguments(seed, dtype)
    before = arguments["key_cache"].clone(), arguments["value_cache"].clone()
    ops.write_kv(**arguments)
    for cache, rows, old in zip(
        (arguments["key_cache"], arguments["value_cache"]),
        (arguments["key"], arguments["value"]),
        before,
        strict=True,
    ):
        expected = old.clone()
        expected[2, 1] = rows[0]
        expected[8, 7] = rows[2]
        assert torch.equal(cache, expected)


def test_copy_blocks(seed: int) -> None:
    arguments = copy_arguments(seed)
    before = [cache.clone() for cache in arguments["caches"]]
    ops.copy_blocks(**arguments)
    for cache, expected in zip(arguments["caches"], before, strict=True):
        expected[5] = expected[1]
        expected[6, :3] = expected[2, :3]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("op", "make"),
    [
        (ops.paged_attention, attention_arguments),
        (ops.write_kv, write_arguments),
        (ops.copy_blocks, copy_arguments),
    ],
)
def test_opcheck(seed: int, op: Any, make: Callable[[int], dict[str, Any]]) -> None:
    torch.library.opcheck(op, (), make(seed))


def test_fake_tensors(seed: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = attention_arguments(seed, torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in arguments.items()}
        out, lse = ops.paged_attention(**fake)
    assert (out.shape, out.dtype) == ((7, 4, DIM), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((7, 4), torch.float32)


def test_tokens_past_the_rows_give_zeros(seed: int) -> None:
    arguments = attention_arguments(seed)
    arguments["query_start"] = torch.tensor([0, 1, 5])
    out, lse = ops.paged_attention(**arguments)
    assert not out[5:].any()
    assert torch.isneginf(lse[5:]).all()


Change = Callable[[dict[str, Any]], dict[str, Any]]


def put(name: str, index: Any, value: Any) -> Change:
    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        tensor = arguments[name].clone()
        tensor[index] = value
        return {name: tensor}

    return change


def via(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda arguments: {name: function(arguments[name])}


def to(**values: Any) -> Change:
    return lambda _: values


ATTENTION = [
    (put("block_table", (0, 1), -1), ValueError, "row 0, column 1, names frame -1"),
    (put("block_table", (1, 2), FRAMES), ValueError, "row 1, column 2, names frame 9.* 0 to 8"),
    (put("seq_lens", 1, 25), ValueError, "3 columns, but row 1 needs 4 for .* 25 in blocks of 8"),
    (put("seq_lens", 1, 3), ValueError, "row 1 has 6 query tokens"),
    (put("query_start", 2, 8), ValueError, "query_start"),
    (via("block_table", lambda t: t.short()), TypeError, "block_table has dtype torch.int16"),
    (via("block_table", lambda t: t.float()), TypeError, "block_table has dtype torch.float32"),
    (via("block_table", lambda t: t[0]), ShapeError, r"block_table has shape \[3\]; expected 2"),
    (via("seq_lens", lambda t: t[:1]), ShapeError, "seq_lens must have 2"),
    (via("seq_lens", lambda t: t.double()), TypeError, "seq_lens has dtype"),
    (via("query", lambda t: t[:, :3]), ValueError, "3 heads, .* multiple of num_kv_heads 2"),
    (via("query", lambda t: t[:, :, :8]), ShapeError, r"query has shape .*; expected \[any, any"),
    (via("query", lambda t: t.half()), ShapeError, "query has dtype torch.float16; expected"),
    (via("key_cache", lambda t: t.contiguous()), ShapeError, "key_cache .* strides"),
    (via("value_cache", lambda t: t[1:]), ShapeError, "must agree in dtype, frames"),
    (via("value_cache", lambda t: t.half()), ShapeError, "must agree in dtype"),
    (via("value_cache", lambda t: t.double()), ShapeError, "value_cache has dtype torch.float64"),
    (to(window=0), ValueError, "window must be"),
    (to(softcap=-1.0), ValueError, "softcap must be"),
    (to(scale=0.0), ValueError, "scale must be"),
    (to(alibi=torch.ones(3)), ShapeError, r"alibi has shape \[3\]; expected \[4\]"),
    (to(sinks=torch.full((4,), torch.nan)), ValueError, r"sinks\[0\]"),
]
WRITE = [
    (put("slot_mapping", 0, 72), ValueError, r"slot_mapping\[0\] is 72; .* 0 to 71"),
    (put("slot_mapping", 2, -2), ValueError, r"slot_mapping\[2\] is -2"),
    (via("slot_mapping", lambda t: t[:2]), ShapeError, r"key has shape .*; expected \[2, 2, 16\]"),
    (via("slot_mapping", lambda t: t.float()), TypeError, "slot_mapping has dtype"),
    (via("value", lambda t: t[:, :1]), ShapeError, "value has shape"),
    (via("key", lambda t: t.bfloat16()), ShapeError, "key has dtype torch.bfloat16"),
]
COPY = [
    (put("target", 1, 5), ValueError, "target names frame 5 more than once"),
    (put("source", 1, 5), ValueError, "frame 5 is a source and a target"),
    (put("target", 0, FRAMES), ValueError, r"target\[0\] is frame 9"),
    (put("num_tokens", 0, 9), ValueError, r"num_tokens\[0\] is 9; allowed: 0 to 8"),
    (via("source", lambda t: t[:2]), ValueError, "target must have shape"),
    (lambda a: {"caches": [a["caches"][0].contiguous()]}, ShapeError, r"caches\[0\] of shape"),
]


@pytest.mark.parametrize(
    ("op", "make", "change", "error", "words"),
    [(ops.paged_attention, attention_arguments, *row) for row in ATTENTION]
    + [(ops.write_kv, write_arguments, *row) for row in WRITE]
    + [(ops.copy_blocks, copy_arguments, *row) for row in COPY],
)
def test_bad_argument(
    seed: int, op: Any, make: Any, change: Change, error: type[Exception], words: str
) -> None:
    arguments = make(seed)
    changed = arguments | change(arguments)
    tensors = [t for v in changed.values() for t in (v if isinstance(v, list) else [v])]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cpu"]
    before = [t.clone() for t in tensors]
    with pytest.raises(error, match=words) as caught:
        op(**changed)
    assert len(str(caught.value)) <= 300
    assert all(torch.equal(t, b) or t.isnan().any() for t, b in zip(tensors, before, strict=True))
    op(**arguments)
