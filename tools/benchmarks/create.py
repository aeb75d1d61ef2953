"""`create` and first plan of a long cached prompt; alone:

PYTHONPATH=.:tools python -m benchmarks.create
"""

from __future__ import annotations

import hashlib
import time

import numpy as np

import kvmem
from benchmarks.figure import Figure, figure

LENGTH = 131_072


def shuffle_frames(manager: kvmem.Manager, block_size: int) -> None:
    """Hand out half of the blocks and take them back in random order."""
    rng = np.random.default_rng(1)
    count = manager.config.device_blocks // 2
    ones = np.ones(block_size, np.int32)
    seqs = [manager.create(ones, publish=False, max_cached=0) for _ in range(count)]
    with manager.step(seqs):
        pass
    manager.free([seqs[i] for i in rng.permutation(count)])


def chain(tokens: np.ndarray, block_size: int) -> bytes:
    """What engines with cryptographic block hashes compute for the same prompt."""
    digest = b""
    for row in tokens.reshape(-1, block_size):
        digest = hashlib.blake2b(row.tobytes() + digest, digest_size=32).digest()
    return digest


def bench_create(repeats: int) -> list[Figure]:
    """A prompt of 131,072 tokens, all cached, over shuffled frames; as int32 array and as list."""
    figures = []
    tokens = np.random.default_rng(0).integers(0, 50_000, LENGTH, np.int32)
    for block_size in (16, 64):
        config = kvmem.Config(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size,
            device_blocks=8 * LENGTH // block_size,
        )  # fmt: skip
        with kvmem.Manager(config) as manager:
            shuffle_frames(manager, block_size)
            first = manager.create(tokens)
            with manager.step([first]):
                pass
            manager.free([first])
            times: dict[str, list[float]] = {"array": [], "list": [], "chain": []}
            forms = {"array": tokens, "list": tokens.tolist()}
            for _ in range(max(10, repeats // 8)):
                for form, given in forms.items():
                    begin = time.perf_counter()
                    seq = manager.create(given)
                    step = manager.step([seq])
                    times[form].append(time.perf_counter() - begin)
                    step.cancel()
                    manager.free([seq])
                begin = time.perf_counter()
                chain(tokens, block_size)
                times["chain"].append(time.perf_counter() - begin)
        for form in forms:
            name = f"131,072 cached tokens as {form}, block {block_size}"
            made = figure("create", name, "ms", 1e3, times[form], "BLAKE2b chain", times["chain"])
            figures.append(made.at_most(1) if form == "array" else made)
    return figures


if __name__ == "__main__":
    print(*bench_create(200), sep="\n")
