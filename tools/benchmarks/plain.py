"""The peer of the step benchmark: what a small engine writes by hand, in plain Python."""

from __future__ import annotations

import torch


class PlainBlocks:
    """Lists of block ids and a free list, no prefix cache, no checks: as the known small engines
    prepare a decode batch, with one list built a row."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free, self.block_size = list(range(num_blocks)), block_size
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self.tokens: list[list[int]] = []

    def add(self, tokens: list[int]) -> None:
        count = -(-len(tokens) // self.block_size)
        self.tables.append([self.free.pop() for _ in range(count)])
        self.lengths.append(len(tokens))
        self.tokens.append(tokens)

    def step(self, sampled: list[int]) -> list[torch.Tensor]:
        """Append a token to each and build the tensors of the batch."""
        slots, positions, lengths = [], [], []
        for i, table in enumerate(self.tables):
            position = self.lengths[i]
            self.tokens[i].append(sampled[i])
            if position % self.block_size == 0:
                table.append(self.free.pop())
            slots.append(table[-1] * self.block_size + position % self.block_size)
            positions.append(position)
            lengths.append(position + 1)
            self.lengths[i] = position + 1
        longest = max(map(len, self.tables))
        rows = [table + [0] * (longest - len(table)) for table in self.tables]
        return [
            torch.tensor(sampled),
            torch.tensor(positions),
            torch.tensor(slots),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(rows, dtype=torch.int32),
        ]
