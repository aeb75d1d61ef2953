"""A Manager on the GPU beside one on the CPU: the same requests, forks and swaps, near results.

It needs what kvmem itself does (numba of the pinned minor, psutil, nvidia-ml-py, proclimits) and is
skipped with a reason where one is missing: the kernels can be measured without.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import pytest
import torch

from tools.gpu.machine import PACKAGES, outside

pytestmark = pytest.mark.gpu

LAYERS, HEADS, KV_HEADS, DIMS = 2, 4, 2, 64
NEEDED = {"numba": PACKAGES["numba"][:2], "psutil": ("6", ""), "nvidia-ml-py": ("12.560", ""),
          "proclimits": ("0.2", "0.3")}  # fmt: skip


@pytest.fixture
def place(device: Any, seed: int) -> Any:
    """Where tensors of device="cuda" lie: on the GPU, or for the rehearsal on a double of one."""
    for name, allowed in NEEDED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed, which a Manager needs: pip install kvmem")
        wanted = outside(version, *allowed)
        if wanted:
            pytest.skip(f"{name} {version} is not {wanted}, which a Manager needs")
    if device.is_real:
        yield "cuda"
        return
    from tests.cuda_double.opening import install

    with pytest.MonkeyPatch.context() as patch:
        install(patch, seed, "random")
        yield "cpu"


class Engine:
    """K, V and q of a token hang on the token and its position alone."""

    def __init__(self, seed: int, device: str, place: str, dtype: str) -> None:
        import kvmem

        self.place, self.found = place, list[torch.Tensor]()
        self.dtype = getattr(torch, dtype)
        draw = torch.Generator().manual_seed(seed)
        self.tables = torch.randn(LAYERS, 97, (HEADS + 2 * KV_HEADS) * DIMS, generator=draw)
        self.m = kvmem.Manager(
            kvmem.Config(
                num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIMS, dtype=dtype,
                block_size=16, device_blocks=24, host_blocks=64, device=device, debug=True,
            )
        )  # fmt: skip

    def step(self, seqs: list[Any]) -> None:
        """Write and attend all layers; results of all rows are kept, on the host."""
        with self.m.step(seqs) as step:
            tokens, positions = step.tokens.cpu().long(), step.positions.cpu()
            for layer in range(LAYERS):
                rows = self.tables[layer][tokens] * (1 + positions[:, None] % 7 / 8)
                rows = rows.view(len(tokens), -1, DIMS).to(self.dtype).to(self.place)
                query, key, value = rows.split([HEADS, KV_HEADS, KV_HEADS], 1)
                step.write(layer, key.contiguous(), value.contiguous())
                self.found.append(step.attend(layer, query.contiguous()).float().cpu())

    def run(self, rng: np.random.Generator) -> list[torch.Tensor]:
        """Requests with a common beginning, forks that part, swaps that force frames to move."""
        m, common = self.m, rng.integers(0, 97, 40).tolist()
        seqs = [m.create([*common, *rng.integers(0, 97, 5 + 9 * i).tolist()]) for i in range(3)]
        self.step(seqs)
        (child,) = m.fork(seqs[0])  # its last block is shared: the next write copies it
        seqs.append(child)
        for turn in range(6):
            m.append(seqs, rng.integers(0, 97, len(seqs)).astype(np.int32))
            self.step(seqs)
            out = [seqs[turn % 4], seqs[(turn + 1) % 4]]
            m.swap_out(out).wait()
            m.evict(24)  # nothing stays, so that coming back copies
            m.swap_in(out).wait()
            m.verify()
        assert m.stats().swap_outs > 0
        m.free(seqs)
        m.close()
        return self.found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_as_on_the_cpu(seed: int, place: str, dtype: str) -> None:
    ours = Engine(seed, "cuda", place, dtype).run(np.random.default_rng(seed))
    theirs = Engine(seed, "cpu", "cpu", dtype).run(np.random.default_rng(seed))
    allowed = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    assert len(ours) == len(theirs) == 7 * LAYERS
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        assert (mine - other).abs().max() <= 2 * allowed * other.abs().max()


def test_a_swap_brings_back_every_byte(seed: int, place: str) -> None:
    """Read through `kv`, before and after blocks went to the host and came back elsewhere."""
    engine = Engine(seed, "cuda", place, "bfloat16")
    m, rng = engine.m, np.random.default_rng(seed)
    seq = m.create(rng.integers(0, 97, 16 * 9).tolist())
    other = m.create(rng.integers(0, 97, 16 * 12).tolist())
    engine.step([seq])

    def content() -> list[torch.Tensor]:
        blocks = [m.block(block_id) for block_id in seq.block_ids]
        parts = [f(layer) for b in blocks for layer in range(LAYERS) for f in (b.k_data, b.v_data)]
        return [part.cpu().clone() for part in parts]

    before = content()
    m.swap_out([seq]).wait()
    m.evict(24)
    engine.step([other])  # others take the frames
    m.swap_out([other]).wait()
    m.evict(24)
    m.swap_in([seq]).wait()
    after = content()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert before[0].float().abs().max() > 0
    m.free([seq, other])
    m.close()
