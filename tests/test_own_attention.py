"""docs/examples/own_attention.py: other attention over the same blocks, on the CPU and a double."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kvmem
from tests.cuda_double.opening import install

FILE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "own_attention.py"
TOLERANCE = {"cpu": 1e-5, "cuda": 3e-2}  # float32 and bfloat16


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("own_attention", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_as_step_attend(
    example: Any, seed: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    if device == "cuda":
        install(monkeypatch, seed, "random")
        monkeypatch.setattr(example, "why_no_flashinfer", lambda: "a double has none")
    found = example.compare(device, seed)
    assert set(found) == {"sdpa", "flex"}
    assert 0 < max(found.values()) <= TOLERANCE[device]


class PagedDecode:
    """FlashInfer's wrapper as its documentation and sources describe it, by plain indexing."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
        assert bool((last_page_len >= 1).all()) and bool((last_page_len <= page_size).all())
        self.rows = [indices[a:b].long() for a, b in pairwise(indptr)]
        self.last, self.group = last_page_len.tolist(), num_heads // num_kv_heads
        self.shape = (num_kv_heads, page_size, head_dim)

    def run(self, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        key, value = caches
        assert key.stride() == value.stride(), "k/v strides must be identical"
        assert key.shape[1:] == self.shape
        assert key.stride(3) == 1 and key.stride(0) < 2**32
        out = []
        for asked, frames, last in zip(query, self.rows, self.last, strict=True):
            length = (len(frames) - 1) * key.shape[2] + last
            k, v = (
                c[frames].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(self.group, 0)
                for c in (key, value)
            )
            weights = (torch.einsum("hd,hkd->hk", asked, k) * asked.shape[-1] ** -0.5).softmax(-1)
            out.append(torch.einsum("hk,hkd->hd", weights, v))
        return torch.stack(out)


def test_flashinfer_reads_the_blocks_where_they_lie(
    example: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for the package: tables, layout and strides are what it asks for."""
    module: Any = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = PagedDecode
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    draw = torch.Generator().manual_seed(seed)
    config = kvmem.Config(
        num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, device_blocks=12
    )
    with kvmem.Manager(config) as manager:
        decode = example.FlashInferDecode(manager, 1024)
        seqs = [manager.create(list(range(n)), publish=False) for n in (16, 1, 33, 15)]
        for number in range(3):
            with manager.step(seqs) as step:
                if number == 0:
                    with pytest.raises(ValueError, match="one token a row"):
                        decode.plan(step, 4)
                else:
                    decode.plan(step, 4)
                for layer in range(3):
                    rows = [torch.randn(step.num_tokens, 2, 16, generator=draw) for _ in "kv"]
                    step.write(layer, *rows)
                    query = torch.randn(step.num_tokens, 4, 16, generator=draw)
                    expected = step.attend(layer, query)
                    if number:
                        assert (decode.run(layer, query) - expected).abs().max() <= 1e-5
            manager.append(seqs, [1] * 4)
        key, _ = example.hnd_caches(manager, 1)
        assert key.untyped_storage().data_ptr() == manager.kv(1)[0].untyped_storage().data_ptr()


def test_what_flashinfer_cannot_read(example: Any) -> None:
    config = kvmem.Config(
        num_layers=1, num_kv_heads=2, head_dim=16, v_head_dim=8, block_size=16, device_blocks=2
    )
    with kvmem.Manager(config) as manager, pytest.raises(ValueError, match="must be equal"):
        example.hnd_caches(manager, 0)


def test_why_flashinfer_is_skipped(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(example, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in example.why_no_flashinfer()
    cuda.is_available = lambda: False
    assert example.why_no_flashinfer() == "no GPU"
