"""Attention on a GPU: decode by both kernels, parts and their merge, prompts, equal bits, poison.

Inputs are those of the specs and of the tests by interpreter: NaN stands wherever a token may not
read, frames are permuted, lengths lie around the edges of blocks, tiles and splits.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.attention.cuda_call import KERNELS, MERGE_KERNELS, TENSOR_KERNELS
from cuda_kernels.attention.spec import SPEC
from cuda_kernels.dtypes import bits_to_float
from tests.ptx.test_attention import check, draw, label, largest, mapped, split_by, workspace
from tests.ptx.test_attention_mma import draw as draw_tensor

pytestmark = pytest.mark.gpu

MORE = int(os.environ.get("KVMEM_GPU_SHAPES", "1"))
SHAPES = max(1, 12 * MORE)
DTYPES = ("float32", "float16", "bfloat16")


def attend(device: Any, a: dict[str, Any], *, cut: bool = False, **options: Any) -> None:
    """One call; with ``cut``, rows may be dealt to several blocks of threads."""
    device.clear()
    given = mapped(device, a)
    if cut:
        options |= workspace(device, a)
    cuda_kernels.paged_attention(**given, **options)


@pytest.mark.parametrize("key", list(KERNELS), ids=label)
def test_decode_on_ordinary_cores(seed: int, device: Any, key: Any) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(SHAPES):
        a = draw(rng, key)
        attend(device, a, cores="ordinary", cut=rng.random() < 0.5)
        check(a)


@pytest.mark.parametrize("key", list(TENSOR_KERNELS), ids=label)
def test_decode_on_tensor_cores(
    seed: int, device: Any, key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits shorter than those that ship, too, so that small shapes have many."""
    rng = np.random.default_rng(seed)
    for _ in range(SHAPES):
        split = int(rng.choice([64, 128, 512]))
        split_by(monkeypatch, split, int(rng.choice([16, 528])))
        a = draw_tensor(rng, key, split)
        attend(device, a, cores="tensor", cut=rng.random() < 0.6)
        check(a)


@pytest.mark.parametrize("cores", ["tensor", "ordinary"])
def test_few_rows_in_many_parts(seed: int, device: Any, cores: str) -> None:
    """Splits dealt to several blocks, then joined by the other kernel."""
    a = SPEC.make_inputs(
        np.random.default_rng(seed), dtype="bfloat16", seq_lens=[1100, 513, 1],
        query_lens=[1, 2, 1], num_heads=4, num_kv_heads=1, head_dim=64, value_dim=64,
        block_size=16, alignment=8,
    )  # fmt: skip
    attend(device, a, cores=cores, cut=True)
    assert device.launched[0][0].grid[2] > 1
    assert device.launched[1][0].source in MERGE_KERNELS.values()
    check(a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompt(seed: int, device: Any, dtype: str) -> None:
    """Chunks of prompts beside rows that decode; causal within the chunk."""
    rng = np.random.default_rng(seed)
    long = device.is_real
    for _ in range(max(1, 4 * MORE)):
        news = [
            int(rng.integers(2, 300 if long else 20)),
            1,
            int(rng.integers(1, 70 if long else 9)),
        ]
        cached = [int(rng.choice([0, 5, 700 if long else 40])) for _ in news]
        rules = {"window": int(rng.integers(1, 200))} if rng.random() < 0.3 else {}
        kv_heads, dims = int(rng.integers(1, 3)), int(rng.choice([64, 96, 128]))
        a = SPEC.make_inputs(
            rng, dtype=dtype, seq_lens=[n + c for n, c in zip(news, cached, strict=True)],
            query_lens=news, num_heads=kv_heads * int(rng.choice([1, 4, 7])),
            num_kv_heads=kv_heads, head_dim=dims, value_dim=dims,
            block_size=int(rng.choice([16, 64])), alignment=8, **rules,
        )  # fmt: skip
        attend(device, a)
        check(a)


@pytest.mark.parametrize("cores", ["tensor", "ordinary"])
@pytest.mark.parametrize("new", [1, 3], ids=["decode", "several"])
def test_a_row_alone_and_in_a_batch(seed: int, device: Any, cores: str, new: int) -> None:
    """The same bits: among other rows, alone, in one part and in several."""
    rng = np.random.default_rng(seed)
    lens = [70, 600, 5, 520]
    batch = SPEC.make_inputs(
        rng, dtype="bfloat16", seq_lens=lens, query_lens=[new] * 4, num_heads=4, num_kv_heads=1,
        head_dim=64, value_dim=64, block_size=16, alignment=8,
    )  # fmt: skip
    attend(device, batch, cores=cores)
    check(batch)
    for row, length in enumerate(lens):
        tokens = slice(new * row, new * row + new)
        alone = batch | {
            "query": batch["query"][tokens].copy(),
            "out": np.full_like(batch["out"][tokens], 0x7FC0),
            "lse": np.full_like(batch["lse"][tokens], np.nan),
            "table_start": batch["table_start"][row : row + 1].copy(),
            "seq_lens": np.array([length]),
            "query_start": np.array([0, new]),
        }
        attend(device, alone, cores=cores, cut=True)
        assert (device.launched[0][0].grid[2] > 1) == (length > 512)
        assert np.array_equal(alone["out"], batch["out"][tokens])
        assert np.array_equal(alone["lse"], batch["lse"][tokens])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_few_rows_by_two_kernels(seed: int, device: Any, dtype: str) -> None:
    """Each is the other's second opinion; they round differently."""
    a = SPEC.make_inputs(
        np.random.default_rng(seed), dtype=dtype, seq_lens=[130, 1, 77], query_lens=[1, 1, 2],
        num_heads=8, num_kv_heads=2, head_dim=64, value_dim=64, block_size=16, alignment=8,
        softcap=20.0,
    )  # fmt: skip
    found = []
    for cores in ("tensor", "ordinary"):
        attend(device, a, cores=cores)
        found.append(bits_to_float(a["out"], dtype))
    assert np.abs(found[0] - found[1]).max() <= SPEC.tolerance[dtype] * largest(a)
    assert not np.array_equal(*found)


def test_poison_changes_no_bit(seed: int, device: Any) -> None:
    """Whatever lies where no token may read: NaN, infinity, zero."""
    a = SPEC.make_inputs(
        np.random.default_rng(seed), dtype="bfloat16", seq_lens=[33, 0, 100],
        query_lens=[1, 1, 2], num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64,
        block_size=32, alignment=8,
    )  # fmt: skip
    unread = a["arena"] == 0x7FC0
    assert unread.any()
    results = set()
    for poison in (0x7FC0, 0x7F80, 0xFF80, 0x0000, 0xFFFF):
        a["arena"][unread] = poison
        attend(device, a, cut=True)
        results.add(a["out"].tobytes() + a["lse"].tobytes())
    assert len(results) == 1
    check(a)


@pytest.mark.parametrize("cores", ["tensor", "ordinary"])
@pytest.mark.parametrize("block", [16, 64])
def test_long_rows(seed: int, real_device: Any, cores: str, block: int) -> None:
    """Contexts as they are served, 32/8 heads of 128; errors beside the size of the results."""
    a = SPEC.make_inputs(
        np.random.default_rng(seed), dtype="bfloat16", seq_lens=[9000, 1, 4097, 2048],
        query_lens=[1, 1, 1, 1], num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128,
        block_size=block, alignment=8,
    )  # fmt: skip
    attend(real_device, a, cores=cores, cut=True)
    check(a)
    expected, _ = SPEC.reference(a)
    found = bits_to_float(a["out"], "bfloat16")
    for row in range(4):  # long rows have small results: the spec's tolerance would hide much
        error = np.abs(found[row] - expected[row]).max()
        assert error <= 0.03 * np.abs(expected[row]).max(), (row, error)
