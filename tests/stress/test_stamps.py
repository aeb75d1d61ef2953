"""Stamps: a function of all tokens up to one, exact in each dtype; and the reference attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmem.stress.body import Batch, Tracked
from kvmem.stress.stamps import KEY, NUM_GROUPED, QUERY, VALUE, Stamps, attended

EMPTY = np.zeros(0, np.uint64)


def made(longest: int = 64) -> Stamps:
    return Stamps(num_layers=3, num_kv_heads=2, head_dim=8, longest=longest)


def tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 2**31 - 1, count, dtype=np.int32)


def test_a_chain_grows_in_any_pieces(seed: int) -> None:
    rng, stamps = np.random.default_rng(seed), made()
    row = tokens(rng, 64)
    whole = stamps.extended(EMPTY, row, None)
    chain = EMPTY
    for piece in np.split(row, np.sort(rng.integers(0, 65, 9))):
        chain = stamps.extended(chain, piece, None)
    assert (chain == whole).all()
    assert len(np.unique(whole)) == 64


def test_equal_prefixes_have_equal_stamps_and_no_others(seed: int) -> None:
    rng, stamps = np.random.default_rng(seed), made()
    row = tokens(rng, 64)
    chain = stamps.extended(EMPTY, row, None)
    for at in (0, 1, 31, 63):
        other = row.copy()
        other[at] ^= 1
        changed = stamps.extended(EMPTY, other, None)
        assert (changed[:at] == chain[:at]).all()
        assert (changed[at:] != chain[at:]).all()
    assert (stamps.extended(EMPTY, row, "tenant") != chain).all()
    swapped = row.copy()
    swapped[:2] = row[1::-1]
    assert (stamps.extended(EMPTY, swapped, None)[1:] != chain[1:]).all()


def test_rows_differ_by_token_layer_and_kind_and_are_exact(seed: int) -> None:
    rng, stamps = np.random.default_rng(seed), made()
    chain = stamps.extended(EMPTY, tokens(rng, 64), None)
    seen = set()
    for layer in range(3):
        for kind, heads in ((KEY, 2), (VALUE, 2), (QUERY, 2 * NUM_GROUPED)):
            rows = stamps.rows(kind, layer, chain)
            assert rows.shape == (64, heads, 8)
            assert rows.dtype == np.float32
            assert np.abs(rows).max() <= 2
            assert abs(rows.mean()) < 0.2
            assert 1 < rows.std() < 1.3
            for dtype in (torch.float16, torch.bfloat16):
                kept = torch.from_numpy(rows).to(dtype).float().numpy()
                assert (kept == rows).all()
            seen |= {row.tobytes() for head in range(heads) for row in rows[:, head]}
    assert len(seen) == 3 * 64 * (4 + 2 * NUM_GROUPED)


@pytest.mark.parametrize("asked", [0, 1, 5, 12])
def test_attention_against_loops(asked: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    key, value = rng.normal(size=(2, 12, 2, 8)).astype(np.float32)
    query = rng.normal(size=(asked, 4, 8)).astype(np.float32)
    found = attended(query, key, value)
    assert found.shape == (asked, 4, 8)
    for i in range(asked):
        for head in range(4):
            seen = slice(0, 12 - asked + i + 1)
            scores = key[seen, head // 2] @ query[i, head].astype(np.float64) / np.sqrt(8)
            weights = np.exp(scores) / np.exp(scores).sum()
            assert np.allclose(found[i, head], weights @ value[seen, head // 2], atol=1e-12)


def test_the_rows_of_a_batch(seed: int) -> None:
    rng, stamps = np.random.default_rng(seed), made()
    tracked = []
    for length in (5, 1, 9):
        row = tokens(rng, length)
        chain = stamps.extended(EMPTY, row, None)
        tracked.append(Tracked(None, None, row, chain, 9))  # type: ignore[arg-type]
    batch = Batch(tracked, np.array([4, 1, 9]), np.array([0, 2, 3, 6]))
    assert batch.row_of.tolist() == [0] * 4 + [1] + [2] * 9
    assert batch.position.tolist() == [0, 1, 2, 3, 0, *range(9)]
    assert batch.chain[4] == tracked[1].chain[0]
    assert batch.asking.tolist() == [2, 3, 4, 11, 12, 13]
    nothing = Batch([], np.zeros(0, np.int64), np.zeros(1, np.int64))
    assert len(nothing.chain) == len(nothing.asking) == 0
