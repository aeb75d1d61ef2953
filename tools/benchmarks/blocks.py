"""The life of blocks in bulk, and how long a large Manager takes to make; alone:

PYTHONPATH=.:tools python -m benchmarks.blocks
"""

from __future__ import annotations

import time

import numpy as np

import kvmem
from benchmarks.figure import Figure, figure

BLOCKS, SIZE = 8192, 16
MANY = 1_000_000


class PlainPool:
    """The same life in plain Python: a free list, a dict from hash to block."""

    def __init__(self) -> None:
        self.free = list(range(BLOCKS))
        self.cached: dict[int, int] = {}

    def run(self, rows: np.ndarray) -> None:
        blocks, parent = [], 0
        for row in rows:
            if not self.free:
                self.free.append(self.cached.pop(next(iter(self.cached))))
            block = self.free.pop()
            parent = hash((parent, *row.tolist()))
            self.cached[parent] = block
            blocks.append(block)


def bench_blocks(repeats: int) -> list[Figure]:
    """Allocate, publish, evict and free 8,192 blocks, a block each; a Manager of 1 M blocks."""
    config = kvmem.Config(
        num_layers=1, num_kv_heads=1, head_dim=1, block_size=SIZE, device_blocks=BLOCKS
    )
    rng = np.random.default_rng(0)
    ours: list[float] = []
    plain: list[float] = []
    pool = PlainPool()
    with kvmem.Manager(config) as manager:
        for _ in range(max(5, repeats // 10)):
            tokens = rng.integers(0, 50_000, BLOCKS * SIZE, np.int32)
            begin = time.perf_counter()
            seq = manager.create(tokens)  # evicts what the turn before left cached
            with manager.step([seq]):
                pass
            manager.free([seq])
            ours.append((time.perf_counter() - begin) / BLOCKS)
            begin = time.perf_counter()
            pool.run(tokens.reshape(BLOCKS, SIZE))
            plain.append((time.perf_counter() - begin) / BLOCKS)
    name = f"allocate, publish, evict, free: {BLOCKS} blocks of {SIZE}, a block"
    figures = [figure("blocks", name, "us", 1e6, ours[1:], "plain Python pool", plain[1:])]
    built: list[float] = []
    lists: list[float] = []
    for _ in range(3):
        begin = time.perf_counter()
        many = kvmem.Manager(
            kvmem.Config(
                num_layers=1, num_kv_heads=1, head_dim=1, block_size=SIZE, device_blocks=MANY
            )
        )
        built.append(time.perf_counter() - begin)
        many.close()
        begin = time.perf_counter()
        _ = list(range(MANY)), [0] * MANY
        lists.append(time.perf_counter() - begin)
    name = f"Manager of {MANY} blocks"
    return [*figures, figure("blocks", name, "s", 1, built, "two lists of as many ints", lists)]


if __name__ == "__main__":
    print(*bench_blocks(200), sep="\n")
