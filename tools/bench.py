"""Measures kvmem against a peer or a limit in the same run; prints a table or JSON.

    make bench                              all sections
    make bench ARGS="step swap --json"      some, as JSON (schema kvmem.bench/1)

Figures are medians with the 10th and 90th percentile. Both sides of a ratio are measured in turns,
so that a busy machine slows both; `load` is the machine's load average before the section.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

import kvmem

SCHEMA = "kvmem.bench/1"


@dataclass
class Figure:
    """One measured figure beside what it is compared with, in the same unit."""

    section: str
    name: str
    unit: str
    median: float
    p10: float
    p90: float
    compared_with: str
    compared_median: float
    ratio: float  # times faster than (or share of) what it is compared with
    load: float


def alternate(
    sides: tuple[Callable[[], object], Callable[[], object]], repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds of each side, run in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, run in enumerate(sides):
            begin = time.perf_counter()
            run()
            seconds[side].append(time.perf_counter() - begin)
    return seconds


def figure(
    section: str, name: str, unit: str, per: float, ours: list[float], peer: str, other: list[float]
) -> Figure:
    """Times to a figure in `unit` = seconds * per; ratio > 1: kvmem is faster."""
    low, median, high = (float(np.percentile(ours, q)) * per for q in (10, 50, 90))
    compared = float(np.median(other)) * per
    ratio = round(compared / median, 3)
    digits = [round(value, 3) for value in (median, low, high)]
    load = round(os.getloadavg()[0], 2)
    return Figure(section, name, unit, *digits, peer, round(compared, 3), ratio, load)


class PlainBlocks:
    """What a small engine writes by hand: lists and a free list, no cache, no checks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free, self.block_size = list(range(num_blocks)), block_size
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []

    def add(self, num_tokens: int) -> None:
        count = -(-num_tokens // self.block_size)
        self.tables.append([self.free.pop() for _ in range(count)])
        self.lengths.append(num_tokens)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        slots = []
        for i, table in enumerate(self.tables):
            position = self.lengths[i]
            if position % self.block_size == 0:
                table.append(self.free.pop())
            slots.append(table[-1] * self.block_size + position % self.block_size)
            self.lengths[i] = position + 1
        longest = max(map(len, self.tables))
        rows = [table + [0] * (longest - len(table)) for table in self.tables]
        return torch.tensor(rows, dtype=torch.int32), torch.tensor(slots)


def bench_step(repeats: int) -> list[Figure]:
    """Bookkeeping of one decode step: append and step of 256 resident sequences."""
    figures = []
    for context in (1024, 4096):
        config = kvmem.Config(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=16,
            device_blocks=256 * (context // 16 + repeats // 16 + 4),
        )  # fmt: skip
        with kvmem.Manager(config) as manager:
            prompts = np.random.default_rng(0).integers(0, 50_000, (256, context), np.int32)
            seqs = [manager.create(prompt) for prompt in prompts]
            with manager.step(seqs):
                pass
            plain = PlainBlocks(config.device_blocks, 16)
            for _ in seqs:
                plain.add(context)
            sampled = np.zeros(256, np.int32)

            def ours(
                manager: kvmem.Manager = manager,
                seqs: list[kvmem.Sequence] = seqs,
                sampled: np.ndarray = sampled,
            ) -> None:
                manager.append(seqs, sampled)
                with manager.step(seqs) as step:
                    _ = step.tokens, step.slot_mapping

            times = alternate((ours, plain.step), repeats)
            name = f"256 sequences of {context} tokens"
            figures.append(
                figure("step", name, "us", 1e6, times[0], "plain Python manager", times[1])
            )
            manager.free(seqs)
    return figures


def bench_create(repeats: int) -> list[Figure]:
    """`create` and first plan of a fully cached prompt of 131,072 tokens, against hashing it."""
    import hashlib

    figures = []
    for block_size in (16, 64):
        length = 131_072
        config = kvmem.Config(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size,
            device_blocks=length // block_size + 8,
        )  # fmt: skip
        tokens = np.random.default_rng(0).integers(0, 50_000, length, np.int32)

        def chain(tokens: np.ndarray = tokens, block_size: int = block_size) -> None:
            digest = b""
            rows = tokens.reshape(-1, block_size)
            for row in rows:
                digest = hashlib.blake2b(row.tobytes() + digest, digest_size=32).digest()

        with kvmem.Manager(config) as manager:
            first = manager.create(tokens)
            with manager.step([first]):
                pass
            manager.free([first])

            def ours(manager: kvmem.Manager = manager, tokens: np.ndarray = tokens) -> None:
                seq = manager.create(tokens)
                manager.step([seq]).cancel()
                manager.free([seq])

            times = alternate((ours, chain), max(10, repeats // 8))
            name = f"131,072 cached tokens, block {block_size}"
            figures.append(figure("create", name, "ms", 1e3, times[0], "BLAKE2b chain", times[1]))
    return figures


def bench_swap(repeats: int) -> list[Figure]:
    """Swap out and in of 256 MiB through the Manager, against memcpy of the same bytes."""
    blocks = 256
    config = kvmem.Config(
        num_layers=16, num_kv_heads=8, head_dim=64, block_size=16,
        device_blocks=blocks, host_blocks=blocks, dtype="float32",
    )  # fmt: skip
    figures = []
    with kvmem.Manager(config) as manager:
        total = config.plan().block_bytes * blocks
        seq = manager.create(np.arange(blocks * 16, dtype=np.int32), publish=False)
        with manager.step([seq]):
            pass
        source, target = np.ones(total, np.uint8), np.ones(total, np.uint8)
        seconds: dict[str, list[float]] = {"out": [], "in": [], "memcpy": []}
        for _ in range(max(5, repeats // 20)):
            begin = time.perf_counter()
            manager.swap_out([seq]).wait()
            seconds["out"].append(time.perf_counter() - begin)
            manager.evict(blocks)
            begin = time.perf_counter()
            manager.swap_in([seq]).wait()
            seconds["in"].append(time.perf_counter() - begin)
            manager.swap_out([seq], how="recompute")
            with manager.step([seq]):
                pass  # dirty again
            begin = time.perf_counter()
            np.copyto(target, source)
            seconds["memcpy"].append(time.perf_counter() - begin)
        for way in ("out", "in"):
            name = f"swap {way} of {total >> 20} MiB, {total // blocks >> 10} KiB blocks"
            figures.append(
                figure("swap", name, "ms", 1e3, seconds[way], "memcpy", seconds["memcpy"])
            )
        manager.free([seq])
    return figures


def bench_attend(repeats: int) -> list[Figure]:
    """Decode attention of 8 rows at 2,048 tokens, 8/2 heads x 64, against contiguous SDPA."""
    context, rows = 2048, 8
    figures = []
    for dtype in (torch.float32, torch.bfloat16):
        config = kvmem.Config(
            num_layers=1, num_kv_heads=2, head_dim=64, block_size=64, dtype=dtype,
            device_blocks=rows * (context // 64 + 1),
        )  # fmt: skip
        with kvmem.Manager(config) as manager:
            prompts = np.random.default_rng(0).integers(0, 50_000, (rows, context), np.int32)
            seqs = [manager.create(prompt) for prompt in prompts]
            with manager.step(seqs) as step:
                key = torch.randn(step.num_tokens, 2, 64, dtype=dtype)
                step.write(0, key, key)
            manager.append(seqs, np.zeros(rows, np.int32))
            query = torch.randn(rows, 8, 64, dtype=dtype)
            dense = key.view(rows, context, 2, 64).transpose(1, 2).contiguous()
            dense = dense.repeat_interleave(4, dim=1)
            scaled = torch.nn.functional.scaled_dot_product_attention
            with manager.step(seqs) as step:
                step.write(0, key[:rows], key[:rows])
                times = alternate(
                    (
                        lambda step=step, query=query: step.attend(0, query),
                        lambda query=query, dense=dense, scaled=scaled: scaled(
                            query[:, :, None], dense, dense
                        ),
                    ),
                    max(20, repeats // 4),
                )
            name = f"decode, 8 rows x {context}, 8/2 heads x 64, {str(dtype)[6:]}"
            figures.append(
                figure("attend", name, "ms", 1e3, times[0], "SDPA, contiguous K/V", times[1])
            )
            manager.free(seqs)
    return figures


def bench_import(repeats: int) -> list[Figure]:
    """`import kvmem` in a fresh process, against `import torch` alone."""

    def run(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    times = alternate((run("import kvmem; kvmem.Config"), run("import torch")), 5)
    return [figure("import", "import kvmem; kvmem.Config", "s", 1, times[0], "torch", times[1])]


SECTIONS = {
    "step": bench_step,
    "create": bench_create,
    "swap": bench_swap,
    "attend": bench_attend,
    "import": bench_import,
}


def commit() -> str:
    """The commit of the checkout, "unknown" outside one."""
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of: {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; allowed: {', '.join(SECTIONS)}")
    figures: list[Figure] = []
    for name in arguments.sections or SECTIONS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures += SECTIONS[name](arguments.repeats)
    if arguments.json:
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "gpu": None}
        head = {"schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "commit": commit()}
        print(json.dumps({**head, "machine": machine, "figures": [asdict(f) for f in figures]}))
        return 0
    for f in figures:
        print(
            f"{f.section:7} {f.name:46} {f.median:9.3f} {f.unit} ({f.p10:.3f}-{f.p90:.3f})  "
            f"{f.ratio:6.2f}x {f.compared_with} ({f.compared_median:.3f}), load {f.load}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
