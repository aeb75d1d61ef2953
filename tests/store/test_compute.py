"""From torch tensors to the kernels: values against dense references, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvmem.errors import NotResident, ShapeError
from kvmem.store import DEVICE, HOST, Store
from tests.store.fakes import arena_bytes, ids

MakeStore = Callable[..., Store]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any) -> Any:
    """Causal attention of the last rows in float64: (out, log-sum-exp)."""
    q, k, v = (x.double().numpy() for x in (query, key, value))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[2])
    rows, length = q.shape[0], k.shape[0]
    future = np.arange(length)[None] > np.arange(length - rows, length)[:, None]
    scores[:, future] = -np.inf
    weight = np.exp(scores)
    total = weight.sum(2)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64))[:, None]
    return np.einsum("hts,shd->thd", weight / total[..., None], v), np.log(total).T


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_write_then_attend_equals_the_dense_reference(
    make_store: MakeStore, dtype: torch.dtype, seed: int
) -> None:
    """Two rows of 9 and 6 tokens in scattered frames; the first has 4 new tokens, the other 1."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    store = make_store(dtype=dtype, head_dim=64, v_head_dim=80)
    layer, tables, lengths, new = 1, (ids(5, 2, 4), ids(1, 6)), (9, 6), (4, 1)
    keys, values = zip(*((random(n, 2, 64), random(n, 2, 80)) for n in lengths), strict=True)
    for table, key, value in zip(tables, keys, values, strict=True):
        position = np.arange(len(key))
        slots = table[position // 4].astype(np.int64) * 4 + position % 4
        store.write(layer, key, value, slots)
    query = random(5, 6, 64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 0.1, 3.0])
    out = torch.empty(5, 6, 80, dtype=dtype)
    for given in (None, sinks):
        got, lse = store.attend(
            layer,
            query,
            table=np.concatenate(tables),
            table_start=np.array([0, 3]),
            seq_lens=ids(*lengths),
            query_start=ids(0, 4, 5),
            sinks=given,
            return_lse=True,
            out=out,
        )
        assert got is out
        assert lse.dtype == torch.float32
        for row, (first, last) in enumerate(((0, 4), (4, 5))):
            assert last - first == new[row]
            want, want_lse = dense(query[first:last], keys[row], values[row], given)
            error = np.abs(out[first:last].double().numpy() - want).max()
            assert error <= TOLERANCE[dtype] * values[row].abs().max()
            assert np.abs(lse[first:last].numpy() - want_lse).max() < 1e-4


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_views_show_what_was_written(make_store: MakeStore, dtype: torch.dtype) -> None:
    store = make_store(dtype=dtype, v_head_dim=6)
    key = torch.arange(2 * 2 * 8).view(2, 2, 8).to(dtype)
    value = -torch.arange(2 * 2 * 6).view(2, 2, 6).to(dtype)
    fused = torch.stack([key, key]).transpose(1, 2)[1].transpose(0, 1)  # strides of a projection
    assert torch.equal(fused, key)
    store.write(0, fused, value, np.array([4 * 3 + 1, 4 * 2], np.int64))
    k, v = store.kv(0)
    assert k.shape == (7, 4, 2, 8)
    assert v.shape == (7, 4, 2, 6)
    assert torch.equal(k[3, 1], key[0])
    assert torch.equal(v[2, 0], value[1])
    bk, bv = store.block_view(DEVICE, 2, 0)
    assert torch.equal(bk[0], key[1])
    assert torch.equal(bv[0], value[1])
    assert bk.data_ptr() == k[2].data_ptr()
    assert not k[0].any()
    assert not v[0].any()
    assert store.kv(1)[0][1:].isnan().all()


def test_a_skipped_row_writes_nothing_and_may_hold_nan(make_store: MakeStore) -> None:
    store = make_store()
    before = arena_bytes(store, DEVICE).copy()
    nothing = torch.full((2, 2, 8), math.nan)
    store.write(0, nothing, nothing, np.array([-1, -1], np.int64))
    assert np.array_equal(before, arena_bytes(store, DEVICE))


def good() -> dict[str, Any]:
    return {
        "key": torch.zeros(2, 2, 8),
        "value": torch.zeros(2, 2, 8),
        "layer": 0,
        "slots": np.array([5, 6], np.int64),
    }


BAD_WRITES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tokens": ({"key": torch.zeros(3, 2, 8)}, ShapeError, r"key has shape \(3, 2, 8\); expected"),
    "heads": ({"value": torch.zeros(2, 3, 8)}, ShapeError, r"value .* expected \(2, 2, 8\)"),
    "dim": ({"key": torch.zeros(2, 2, 9)}, ShapeError, "key has shape"),
    "flat": ({"key": torch.zeros(2, 16)}, ShapeError, "key has shape"),
    "dtype": ({"key": torch.zeros(2, 2, 8).half()}, ShapeError, "float16; expected torch.float32"),
    "device": ({"key": torch.zeros(2, 2, 8, device="meta")}, ShapeError, "device meta; .* cpu"),
    "grad": ({"value": torch.zeros(2, 2, 8, requires_grad=True)}, ShapeError, "requires grad"),
    "array": ({"key": np.zeros((2, 2, 8), np.float32)}, TypeError, "key must be a torch.Tensor"),
    "none": ({"value": None}, TypeError, "value must be a torch.Tensor, got NoneType"),
    "nan": ({"key": torch.full((2, 2, 8), math.nan)}, ShapeError, "key holds NaN in row 0 of 2"),
    "layer": ({"layer": 2}, ShapeError, "layer 2 does not exist; .* 0 to 1"),
    "negative layer": ({"layer": -1}, ShapeError, "layer -1 does not exist"),
    "layer type": ({"layer": 1.0}, TypeError, "layer must be an int, got float"),
    "layer bool": ({"layer": True}, TypeError, "layer must be an int, got bool"),
    "slot": ({"slots": np.array([5, 999], np.int64)}, ValueError, r"slot_mapping\[1\] is 999"),
}


@pytest.mark.parametrize("name", BAD_WRITES)
def test_a_bad_write_changes_nothing(make_store: MakeStore, name: str) -> None:
    change, error, message = BAD_WRITES[name]
    store = make_store()
    before = arena_bytes(store, DEVICE).copy()
    given = good() | change
    with pytest.raises(error, match=message) as caught:
        store.write(given["layer"], given["key"], given["value"], given["slots"])
    assert len(str(caught.value)) <= 300
    assert np.array_equal(before, arena_bytes(store, DEVICE))
    fine = good()
    store.write(fine["layer"], fine["key"], fine["value"], fine["slots"])


BAD_ATTENDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "heads": ({"query": torch.zeros(2, 3, 8)}, ShapeError, "3 heads, .* multiple of the 2"),
    "no heads": ({"query": torch.zeros(2, 0, 8)}, ShapeError, "0 heads"),
    "dim": ({"query": torch.zeros(2, 4, 7)}, ShapeError, r"expected \(2, 4, 8\)"),
    "rank": ({"query": torch.zeros(2, 32)}, ShapeError, r"expected \[num_tokens, num_heads, 8\]"),
    "tokens": ({"query": torch.zeros(3, 4, 8)}, ShapeError, r"expected \(2, 4, 8\)"),
    "dtype": ({"query": torch.zeros(2, 4, 8).bfloat16()}, ShapeError, "dtype torch.bfloat16"),
    "type": ({"query": [[1.0]]}, TypeError, "query must be a torch.Tensor, got list"),
    "out": ({"out": torch.zeros(2, 4, 9)}, ShapeError, "out has shape"),
    "layer": ({"layer": 7}, ShapeError, "layer 7"),
    "alibi": ({"alibi": [0.5]}, ValueError, r"alibi has shape \(1,\); expected \(4,\)"),
    "sinks": ({"sinks": torch.zeros(2, 4)}, ValueError, "sinks has shape"),
    "scale": ({"scale": math.nan}, ValueError, "scale"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap"),
    "window": ({"window": 0}, ValueError, "window"),
    "frame": ({"table": ids(1, 99)}, ValueError, "table of row 0, column 1, names frame 99"),
    "columns": ({"seq_lens": ids(9)}, ValueError, "table is too short for row 0"),
}


@pytest.mark.parametrize("name", BAD_ATTENDS)
def test_a_bad_attend_is_refused(make_store: MakeStore, name: str) -> None:
    change, error, message = BAD_ATTENDS[name]
    store = make_store()
    given: dict[str, Any] = {
        "layer": 0,
        "query": torch.zeros(2, 4, 8),
        "table": ids(1, 2),
        "table_start": np.array([0]),
        "seq_lens": ids(6),
        "query_start": ids(0, 2),
    } | change
    with pytest.raises(error, match=message) as caught:
        store.attend(given.pop("layer"), given.pop("query"), **given)
    assert len(str(caught.value)) <= 300


def test_frames_and_tiers_out_of_range(make_store: MakeStore) -> None:
    store = make_store(host_blocks=0)
    for frame in (0, -1, 7):
        with pytest.raises(ValueError, match=f"frame {frame} is out of range"):
            store.block_view(DEVICE, frame, 0)
    with pytest.raises(NotResident, match="host tier is off; set host_blocks"):
        store.block_view(HOST, 1, 0)
    with pytest.raises(ValueError, match="tier 2 is unknown"):
        store.block_view(2, 1, 0)
    with pytest.raises(ValueError, match="layer 5"):
        store.kv(5)
    assert store.counters()["host_arena_bytes"] == 0


def test_a_row_of_no_tokens_is_fine(make_store: MakeStore) -> None:
    store = make_store()
    out = store.attend(
        0,
        torch.zeros(0, 4, 8),
        table=ids(),
        table_start=np.array([0]),
        seq_lens=ids(0),
        query_start=ids(0, 0),
    )
    assert isinstance(out, torch.Tensor)
    assert out.shape == (0, 4, 8)
