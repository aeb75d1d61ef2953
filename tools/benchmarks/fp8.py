"""Decode attention over K and V stored as fp8_e4m3, beside the same stored as bfloat16.

PYTHONPATH=.:tools python -m benchmarks.fp8 --threads 1 2 --blocks 64 16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.attend import Batch, Methods, Shape, figures_of, set_threads, show, take_turns
from benchmarks.figure import Figure
from benchmarks.read_limit import read_all

USUAL = tuple(Shape(8, 4096, block, "bfloat16", 2) for block in (64, 16))


def bench_fp8(repeats: int, shapes: Sequence[Shape] = USUAL) -> list[Figure]:
    """Decode over K/V in fp8_e4m3 beside the same in the queries' dtype; layer for layer, so half
    the bytes."""
    figures = []
    for shape in shapes:
        set_threads(shape.threads)
        batches = {"ours": Batch(replace(shape, kv_dtype="fp8_e4m3"), most_layers=8)}
        batches[shape.dtype] = Batch(shape, most_layers=8)
        used = min(len(batch.layers) for batch in batches.values())
        for batch in batches.values():
            batch.layers = batch.layers[:used]
        flat = batches["ours"].arena.reshape(-1)[: used * batches["ours"].shape.layer_bytes]
        flat = flat[: flat.size // 32768 * 32768].view(np.float32)
        methods: Methods = {name: batch.attend for name, batch in batches.items()}
        methods["reading contiguously"] = lambda flat=flat, n=shape.threads: read_all(flat, n)
        name = batches["ours"].shape.name("decode")
        figures += figures_of("fp8", name, take_turns(methods, min(repeats, 20)))
        show(figures[-2:], used * batches["ours"].shape.layer_bytes)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--blocks", type=int, nargs="*", default=[64, 16])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    shapes = [
        Shape(given.rows, given.context, block, dtype, threads)
        for block in given.blocks
        for dtype in given.dtypes
        for threads in given.threads
    ]
    bench_fp8(given.repeats, shapes)


if __name__ == "__main__":
    main()
