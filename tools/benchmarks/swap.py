"""Swap out and in through the Manager, beside memcpy and torch's copy of as many bytes; alone:

PYTHONPATH=.:tools python -m benchmarks.swap
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

import kvmem
from benchmarks.figure import Figure, alternate, figure
from benchmarks.transfers import bench_transfers
from kvmem.budget import free_host_bytes

BLOCK_KIB = (16, 64, 128, 512, 2048, 8192)
GATED_KIB = 128  # from here on 0.85 of memcpy is asked
MOST_BYTES = 1 << 30
# A layer of this makes blocks of 8 KiB a head: float32, heads of 64, 16 tokens.
MODEL = {"head_dim": 64, "block_size": 16, "dtype": "float32"}
HEAD_KIB, MOST_HEADS = 8, 8


@dataclass
class Times:
    """Seconds of everything that is done in turns, by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def warm(self, name: str) -> list[float]:
        """All but the first turn, which touches fresh pages."""
        return self.seconds[name][1:]


def total_bytes() -> int:
    """1 GiB, or what leaves half of the free memory alone: two tiers, two buffers of memcpy."""
    total = MOST_BYTES
    while 4 * total > free_host_bytes() // 2:
        total //= 2
    return max(total, BLOCK_KIB[-1] << 13)


def measure(block_kib: int, total: int, repeats: int) -> Times:
    """One block size: swap out, swap in, memcpy and torch's copies, in turns."""
    blocks = total // (block_kib << 10)
    heads = min(MOST_HEADS, block_kib // HEAD_KIB)
    config = kvmem.Config(
        num_layers=block_kib // (HEAD_KIB * heads), num_kv_heads=heads,
        device_blocks=blocks, host_blocks=blocks, **MODEL,
    )  # fmt: skip
    times, threads = Times(), torch.get_num_threads()
    source, target = torch.ones(2, total, dtype=torch.uint8)
    with kvmem.Manager(config) as manager:
        for layer in range(config.num_layers):
            for cache in manager.kv(layer):
                cache[1:] = 1.0  # pages that were never written would be read from the cache
        seq = manager.create(np.arange(blocks * config.block_size, dtype=np.int32), publish=False)
        for _ in range(repeats + 1):
            with manager.step([seq]):
                pass  # dirty again
            transfers = []
            for way, act in (("out", manager.swap_out), ("in", manager.swap_in)):
                with times.take(way):
                    transfers.append(act([seq]))
                    transfers[-1].wait()
                manager.evict(blocks)
            assert [transfer.num_blocks for transfer in transfers] == [blocks, blocks]
            manager.swap_out([seq], how="recompute")
            with times.take("memcpy"):
                np.copyto(target.numpy(), source.numpy())
            for count in {1, threads}:
                torch.set_num_threads(count)
                with times.take(f"torch copy_, {count} threads"):
                    target.copy_(source)
        manager.free([seq])
    return times


def copy_on_write(repeats: int) -> list[Figure]:
    """`copy_blocks` of half filled blocks, beside memcpy of as many contiguous bytes."""
    from cuda_kernels import copy_blocks

    layers, heads, dim, block, tokens = 16, 8, 64, 16, 8
    plane, figures = heads * block * dim, []
    rng = np.random.default_rng(0)
    for pairs in (1, 16):
        arena = np.ones((4 * pairs, 2 * layers * plane), np.float32)
        frames = rng.permutation(4 * pairs).astype(np.int32).reshape(2, 2, pairs)
        size = 2 * layers * heads * tokens * dim * pairs
        flat = np.ones((2, size), np.float32)

        arguments = {
            "block_size": block,
            "num_tokens": np.full(pairs, tokens, np.int32),
            "plane_offset": np.arange(2 * layers) * plane,
            "plane_rows": np.full(2 * layers, heads),
            "plane_width": np.full(2 * layers, dim),
        }
        ours = partial(copy_blocks, arena, *frames[0], check=False, **arguments)
        ours()
        times = alternate((ours, partial(np.copyto, *flat)), max(20, repeats))
        name = f"copy on write, {pairs} half filled blocks, {size * 4 >> 10} KiB"
        figures.append(figure("swap", name, "us", 1e6, times[0], "memcpy", times[1]))
    return figures


def bench_swap(repeats: int) -> list[Figure]:
    """Swap out and in of 1 GiB, in blocks of 16 KiB to 8 MiB; what it keeps the caller for; copy on
    write."""
    figures, total = [], total_bytes()
    for block_kib in BLOCK_KIB:
        times = measure(block_kib, total, max(5, repeats // 20))
        peers = [name for name in times.seconds if name not in ("out", "in")]
        for way in ("out", "in"):
            name = f"{way}, {total >> 20} MiB, blocks of {block_kib} KiB"
            for peer in peers:
                made = figure("swap", name, "ms", 1e3, times.warm(way), peer, times.warm(peer))
                asked = peer == "memcpy" and block_kib >= GATED_KIB
                figures.append(made.at_least(0.85) if asked else made)
    return [*figures, *bench_transfers(repeats), *copy_on_write(repeats)]


if __name__ == "__main__":
    print(*bench_swap(200), sep="\n")
