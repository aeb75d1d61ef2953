"""What swapping costs the engine's own thread: submits, clean swap-outs, steps beside it; alone:

PYTHONPATH=.:tools python -m benchmarks.transfers
"""

from __future__ import annotations

import time

import numpy as np
import torch

import kvmem
from benchmarks.figure import Figure, figure

# A layer of this makes blocks of 128 KiB: float32, 8 heads x 64, 16 tokens, two layers.
MODEL = {"num_layers": 2, "num_kv_heads": 8, "head_dim": 64, "block_size": 16, "dtype": "float32"}


def sequence(manager: kvmem.Manager, blocks: int) -> kvmem.Sequence:
    """A computed sequence of so many full blocks, outside the prefix cache."""
    tokens = np.arange(blocks * manager.config.block_size, dtype=np.int32)
    seq = manager.create(tokens, publish=False)
    with manager.step([seq]):
        pass
    return seq


def submit_cost(repeats: int, blocks: int, limit: float | None) -> Figure:
    """What swap_out and swap_in keep the caller for, a block, beside the copies themselves."""
    submits, whole = [], []
    config = kvmem.Config(device_blocks=blocks, host_blocks=blocks, **MODEL)
    with kvmem.Manager(config) as manager:
        seq = sequence(manager, blocks)
        for _ in range(repeats + 5):
            for act in (manager.swap_out, manager.swap_in):
                begin = time.perf_counter()
                transfer = act([seq])
                submits.append((time.perf_counter() - begin) / blocks)
                transfer.wait()
                whole.append((time.perf_counter() - begin) / blocks)
                manager.evict(blocks)
            manager.swap_out([seq], how="recompute")
            with manager.step([seq]):
                pass  # dirty again
        manager.free([seq])
    name = f"submit of {blocks} blocks of 128 KiB, a block, one way"
    made = figure("swap", name, "us", 1e6, submits[10:], "until it is copied", whole[10:])
    return made if limit is None else made.at_most(limit)


def clean_swap_out(repeats: int, tokens: int = 4096) -> Figure:
    """Swap out of a sequence whose host copies are complete, and back, beside the first time."""
    blocks = tokens // int(MODEL["block_size"])
    config = kvmem.Config(device_blocks=blocks, host_blocks=blocks, **MODEL)
    clean, first = [], []
    with kvmem.Manager(config) as manager:
        seq = sequence(manager, blocks)
        for _ in range(repeats):
            begin = time.perf_counter()
            manager.swap_out([seq]).wait()
            first.append(time.perf_counter() - begin)
            for _ in range(5):
                manager.swap_in([seq])
                begin = time.perf_counter()
                transfer = manager.swap_out([seq])
                clean.append(time.perf_counter() - begin)
                assert transfer.num_blocks == 0
            manager.swap_out([seq], how="recompute")
            with manager.step([seq]):
                pass
        manager.free([seq])
    name = f"clean swap-out of {tokens} tokens, {blocks} blocks"
    return figure("swap", name, "us", 1e6, clean[5:], "dirty, until copied", first[1:]).at_most(100)


def steps_beside_copies(repeats: int) -> Figure:
    """Steady decode steps with attention while another sequence goes out and in all the time."""
    rows, tokens, moved = 8, 1024, 512
    size = int(MODEL["block_size"])
    blocks = rows * (tokens // size + 2 + repeats // size) + moved
    config = kvmem.Config(device_blocks=blocks, host_blocks=moved, **MODEL)
    query = torch.randn(rows, 8, 64)
    alone: list[float] = []
    beside: list[float] = []
    with kvmem.Manager(config) as manager:
        seqs = [sequence(manager, tokens // size) for _ in range(rows)]
        other = sequence(manager, moved)
        for turn in range(repeats + 3):
            for times, busy in ((alone, False), (beside, True)):
                transfer = manager.swap_out([other]) if busy else None
                manager.append(seqs, [turn] * rows)
                begin = time.perf_counter()
                with manager.step(seqs) as step:
                    for layer in range(config.num_layers):
                        step.write(layer, query, query)
                        step.attend(layer, query)
                times.append(time.perf_counter() - begin)
                if transfer is not None:
                    transfer.wait()
                    manager.swap_out([other], how="recompute")
                    with manager.step([other]):
                        pass
        manager.free([*seqs, other])
    name = f"decode step, {rows} x {tokens}, while {moved} blocks of 128 KiB go out"
    return figure("swap", name, "us", 1e6, beside[3:], "the same step alone", alone[3:])


def bench_transfers(repeats: int) -> list[Figure]:
    """All of the above."""
    few = max(10, repeats // 10)
    return [
        submit_cost(few, 200, None),
        submit_cost(few, 1000, 1.0),
        clean_swap_out(few),
        steps_beside_copies(few),
    ]


if __name__ == "__main__":
    print(*bench_transfers(200), sep="\n")
