"""A captured graph on the GPU: its replays, over batches that change, have the bits of plain steps.

In the rehearsal there is nothing to capture, and the same steps run eagerly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu import test_manager
from tests.gpu.test_manager import DIMS, HEADS, KV_HEADS, LAYERS, Engine

pytestmark = pytest.mark.gpu

place = test_manager.place
TOKENS = 256


class PlainEngine(Engine):
    """`Engine` with tensors for up to `TOKENS` tokens, of which a step takes its own."""

    def __init__(self, seed: int, place: str, dtype: str) -> None:
        super().__init__(seed, "cuda", place, dtype)
        self.inputs = [
            [torch.zeros(TOKENS, heads, DIMS, dtype=self.dtype, device=place) for heads in counts]
            for counts in [(HEADS, KV_HEADS, KV_HEADS)] * LAYERS
        ]

    def step(self, seqs: list[Any]) -> None:
        with self.m.step(seqs, max_tokens=TOKENS) as step:
            self.fill(step)
            results = self.compute(step, step.num_tokens)
            self.found += [out.float().cpu() for out in results]

    def fill(self, step: Any) -> None:
        """Inputs of a step's tokens, NaN behind them."""
        count = step.num_tokens
        tokens, positions = step.tokens[:count].cpu().long(), step.positions[:count].cpu()
        for layer in range(LAYERS):
            rows = self.tables[layer][tokens] * (1 + positions[:, None] % 7 / 8)
            rows = rows.view(count, -1, DIMS).to(self.dtype).to(self.place)
            parts = rows.split([HEADS, KV_HEADS, KV_HEADS], 1)
            for tensor, part in zip(self.inputs[layer], parts, strict=True):
                tensor[:count] = part
                tensor[count:] = torch.nan

    def compute(self, step: Any, count: int) -> list[torch.Tensor]:
        """Write and attend all layers with so many tokens."""
        found = []
        for layer in range(LAYERS):
            query, key, value = (tensor[:count] for tensor in self.inputs[layer])
            step.write(layer, key, value)
            found.append(step.attend(layer, query))
        return found


class GraphEngine(PlainEngine):
    """The same, all of whose steps go through one graph."""

    def __init__(self, seed: int, place: str, dtype: str, *, captures: bool) -> None:
        super().__init__(seed, place, dtype)
        self.buffers = self.m.graph_buffers(max_seqs=4, max_tokens=TOKENS, max_context=128)
        self.captures = captures
        self.graph: Any = None
        self.results: list[torch.Tensor] = []

    def step(self, seqs: list[Any]) -> None:
        with self.m.step(seqs, into=self.buffers) as step:
            self.fill(step)
            if not self.captures:
                self.results = self.compute(step, TOKENS)
            else:
                if self.graph is None:
                    self.compute(step, TOKENS)
                    self.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph):
                        self.results = self.compute(step, TOKENS)
                self.graph.replay()
            for out in self.results:
                assert not out[step.num_tokens :].any()
                self.found.append(out[: step.num_tokens].float().cpu())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_replays_are_plain_steps(device: Any, place: str, seed: int, dtype: str) -> None:
    plain = PlainEngine(seed, place, dtype)
    graphed = GraphEngine(seed, place, dtype, captures=device.is_real)
    wanted, found = (e.run(np.random.default_rng(seed)) for e in (plain, graphed))
    assert len(wanted) == len(found) == 7 * LAYERS
    for a, b in zip(wanted, found, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
