"""Decoding under a CUDA graph: captured in the first step, replayed in every later one.

    python docs/examples/cuda_graph.py

Prompts run as plain steps, for their shapes change; decoding runs `into` buffers of fixed shapes.
On a GPU the whole model is captured with them; without one the same steps run eagerly. Both ways
answer the same tokens as plain steps, which the program checks. (Attention has the same bits; a
model's own products may round otherwise in another shape, which this one's margins outweigh.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import kvmem

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 128, 2, 2


class ToyModel:
    """A small attention model with fixed random weights; greedy."""

    def __init__(self, device: str) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.embed = torch.randn(VOCABULARY, WIDTH, generator=numbers).to(device)
        mix = torch.randn(LAYERS, 3, WIDTH, WIDTH, generator=numbers) / WIDTH**0.5
        self.mix = mix.to(device)
        self.out = torch.randn(WIDTH, VOCABULARY, generator=numbers).to(device)

    def __call__(self, step: kvmem.Step) -> torch.Tensor:
        """The next token of each sequence in `step.ready`; behind them, of nobody."""
        hidden = self.embed[step.tokens] + torch.sin(step.positions[:, None] * 0.1)
        for layer in range(LAYERS):
            query, key, value = (
                (hidden @ weights).reshape(-1, HEADS, WIDTH // HEADS) for weights in self.mix[layer]
            )
            step.write(layer, key, value)
            mixed = step.attend(layer, query)
            assert isinstance(mixed, torch.Tensor)
            hidden = torch.nn.functional.normalize(hidden + mixed.reshape(-1, WIDTH)) * 4
        return (hidden[step.last] @ self.out).argmax(dim=-1)


class GraphDecoder:
    """One token for each of up to `max_seqs` sequences of up to `max_context` tokens a call.

    A row has one pending token, so the buffers have as many tokens as rows. All tensors that the
    captured model reads are the step's, which lie in the buffers, or its own weights.
    """

    def __init__(
        self,
        manager: kvmem.Manager,
        model: Callable[[kvmem.Step], torch.Tensor],
        *,
        max_seqs: int,
        max_context: int,
    ) -> None:
        self.manager, self.model = manager, model
        self.buffers = manager.graph_buffers(max_seqs, max_seqs, max_context)
        self.on_gpu = manager.config.device.startswith("cuda")
        self.graph: torch.cuda.CUDAGraph | None = None
        self.sampled = torch.zeros(0, dtype=torch.int64)  # of the graph, once captured

    def decode(self, sequences: list[kvmem.Sequence]) -> list[int]:
        """The next token of each sequence, all of which have one token pending."""
        with self.manager.step(sequences, into=self.buffers) as step:  # the arrays are there now
            if not self.on_gpu:
                self.sampled = self.model(step)
            else:
                if self.graph is None:
                    self.graph = self._captured(step)
                self.graph.replay()
            tokens: list[int] = self.sampled[: len(sequences)].tolist()
        return tokens

    def _captured(self, step: kvmem.Step) -> torch.cuda.CUDAGraph:
        """The model as a graph, after a run that loads kernels and takes what is allocated once.
        The run writes what the replay will write again."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.model(step)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.sampled = self.model(step)
        return graph


def answers(
    manager: kvmem.Manager, model: ToyModel, prompts: list[list[int]], *, graphed: bool
) -> list[list[int]]:
    """What the model answers: first tokens by a plain step, the others in either way. Prompts have
    answers of different lengths, so the batch shrinks."""
    decoder = GraphDecoder(manager, model, max_seqs=len(prompts), max_context=128)
    sequences = [manager.create(prompt) for prompt in prompts]
    left = {id(seq): 4 + 3 * row for row, seq in enumerate(sequences)}
    running = list(sequences)
    with manager.step(running) as step:
        sampled = model(step).tolist()
    while True:
        manager.append(running, sampled)
        for seq in running:
            left[id(seq)] -= 1
        running = [seq for seq in running if left[id(seq)]]
        if not running:
            break
        if graphed:
            sampled = decoder.decode(running)
        else:
            with manager.step(running) as step:
                sampled = model(step).tolist()
    found = [seq.tokens[len(p) :].tolist() for seq, p in zip(sequences, prompts, strict=True)]
    manager.free(sequences)
    manager.reset()  # else the second run would find the first one's K/V
    decoder.buffers.release()
    return found


def main(device: str | None = None) -> list[list[int]]:
    """Both ways on a device, the GPU where there is one; the answers, which are the same."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = kvmem.Config(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=WIDTH // HEADS,
        block_size=16,
        device=device,
        device_blocks=64,
    )
    draw = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(VOCABULARY, (5 + 9 * row,), generator=draw).tolist() for row in range(6)
    ]
    with kvmem.Manager(config) as manager:
        model = ToyModel(device)
        plain = answers(manager, model, prompts, graphed=False)
        graphed = answers(manager, model, prompts, graphed=True)
    if plain != graphed:
        raise SystemExit(f"other tokens with fixed buffers: {graphed} instead of {plain}")
    return graphed


if __name__ == "__main__":
    for answer in main():
        print(*answer)
