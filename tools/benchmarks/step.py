"""Bookkeeping of one decode step through `append` and `step`; alone:

PYTHONPATH=.:tools python -m benchmarks.step
"""

from __future__ import annotations

import numpy as np

import kvmem
from benchmarks.figure import Figure, figure, timed
from benchmarks.plain import PlainBlocks

BLOCK = 16
ROWS = 256
PLAIN = "plain Python manager"


class Decoding:
    """256 resident sequences, their blocks filling at different steps unless `together`."""

    def __init__(self, context: int, steps: int, *, together: bool = False) -> None:
        steps += 2 * BLOCK
        blocks = (ROWS + 1) * (context // BLOCK + steps // BLOCK + 2)
        config = kvmem.Config(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK, device_blocks=blocks
        )
        self.manager = kvmem.Manager(config)
        rng = np.random.default_rng(0)
        lengths = [context - BLOCK + (0 if together else i % BLOCK) for i in range(ROWS)]
        prompts = [rng.integers(0, 50_000, length, np.int32) for length in lengths]
        self.seqs = [self.manager.create(prompt) for prompt in prompts]
        with self.manager.step(self.seqs):
            pass
        self.plain = PlainBlocks(self.manager.config.device_blocks, BLOCK)
        for prompt in prompts:
            self.plain.add(prompt.tolist())
        self.sampled = np.zeros(ROWS, np.int32)

    def run(self) -> None:
        """One step: everything an engine reads of it, nothing computed."""
        manager, seqs = self.manager, self.seqs
        manager.append(seqs, self.sampled)
        with manager.step(seqs) as step:
            _ = (step.tokens, step.positions, step.slot_mapping, step.seq_lens,
                 step.query_start, step.last, step.block_table)  # fmt: skip

    def run_plain(self) -> None:
        self.plain.step([0] * ROWS)

    def close(self) -> None:
        self.manager.free(self.seqs)
        self.manager.close()


def bench_step(repeats: int) -> list[Figure]:
    """A step with the same list; then a list that changes, and all rows filling a block at once."""
    figures = []
    for context in (1024, 4096, 16384, 65536):
        work = Decoding(context, 2 * repeats)
        for _ in range(BLOCK):
            work.run()
        # One step of the peer reads megabytes, so it runs apart: in turns, its cache misses would
        # be counted to us.
        ours = timed(work.run, repeats)
        other = timed(work.run_plain, max(5, repeats // 20))
        name = f"{ROWS} sequences of {context} tokens, the same list"
        figures.append(figure("step", name, "us", 1e6, ours, PLAIN, other))
        if context == 4096:
            figures[-1].at_most(30).at_least(10)
            figures.append(_changing(work, repeats, other))
        work.close()
    return [*figures, _filling(repeats)]


def _changing(work: Decoding, repeats: int, other: list[float]) -> Figure:
    """Each step one sequence leaves the list and another comes back."""
    everyone = work.seqs
    turns = iter(range(1 << 30))

    def run() -> None:
        i = next(turns) % ROWS
        work.seqs = everyone[:i] + everyone[i + 1 :]
        work.sampled = np.zeros(len(work.seqs), np.int32)
        work.run()

    ours = timed(run, repeats)
    work.seqs, work.sampled = everyone, np.zeros(ROWS, np.int32)
    name = f"{ROWS - 1} of {ROWS} sequences of 4096, another list each step"
    return figure("step", name, "us", 1e6, ours, PLAIN, other).at_most(100)


def _filling(repeats: int) -> Figure:
    """Only the steps in which every row fills a block, so publishes it."""
    turns = max(5, repeats // BLOCK)
    work = Decoding(4096, turns * BLOCK, together=True)
    ours: list[float] = []
    other: list[float] = []
    for _ in range(turns):
        for _ in range(BLOCK - 1):
            work.run()
            work.run_plain()
        for run, times in ((work.run, ours), (work.run_plain, other)):
            times += timed(run, 1)
    work.close()
    name = f"{ROWS} sequences of 4096, all fill a block"
    return figure("step", name, "us", 1e6, ours, PLAIN, other).at_most(150)


if __name__ == "__main__":
    print(*bench_step(200), sep="\n")
