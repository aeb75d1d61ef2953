"""Attention and K/V writes beside torch and beside what the machine can read.

    PYTHONPATH=.:tools python -m benchmarks.attend                       the usual shapes
    PYTHONPATH=.:tools python -m benchmarks.attend decode --threads 1 2 --dtypes bfloat16 float16
    PYTHONPATH=.:tools python -m benchmarks.attend layouts --threads 1 --repeats 15

K/V lies in frames of many layers, scattered; several layers are attended in turn, so that nothing
comes from a cache. Methods run in turns in one process; medians with 10th and 90th percentile, and
the best, since other work on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numba
import numpy as np
import torch

import cuda_kernels
from benchmarks import vllm_cpu
from benchmarks.figure import Figure, figure
from benchmarks.read_limit import read_all, read_scattered
from cuda_kernels.dtypes import any_storage_dtype, float_to_bits

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADS, KV_HEADS, DIMS = 32, 8, 128
GROUP = HEADS // KV_HEADS
READ_BYTES = 1.07e9  # what each method reads in a pass, at least
ARENA_BYTES = 3.3e9

Methods = dict[str, Callable[[], Any]]


@dataclass
class Shape:
    """Rows of one length at decode, or one row of a prompt."""

    rows: int
    context: int
    block: int
    dtype: str
    threads: int
    layout: str = "HND"
    kv_dtype: str | None = None  # None: that of the queries

    @property
    def stored(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def layer_bytes(self) -> int:
        item = any_storage_dtype(self.stored).array_dtype.itemsize
        return 2 * self.rows * self.context * KV_HEADS * DIMS * item

    def name(self, what: str) -> str:
        return (
            f"{what}, {self.rows} x {self.context}, {HEADS}/{KV_HEADS} heads x {DIMS}, "
            f"{self.stored}, block {self.block} {self.layout}, {self.threads} threads"
        )


def tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """An array of a storage dtype as a tensor on the same memory."""
    if dtype == "float32":
        return torch.from_numpy(bits)
    return torch.from_numpy(bits.view(np.int16)).view(TORCH[dtype])


class Batch:
    """K/V of some layers in scattered frames, the same contiguous, and the calls on them."""

    def __init__(self, shape: Shape, query_tokens: int = 1, most_layers: int = 24) -> None:
        self.shape = shape
        rng = np.random.default_rng(0)
        per_row = -(-shape.context // shape.block)
        frames = shape.rows * per_row
        layers = int(max(1, min(most_layers, ARENA_BYTES // shape.layer_bytes)))
        used = int(min(layers, math.ceil(READ_BYTES / shape.layer_bytes)))
        self.layers = [k * layers // used for k in range(used)]
        self.plane = KV_HEADS * shape.block * DIMS
        dtype = any_storage_dtype(shape.stored).array_dtype
        self.arena = np.empty((frames, 2 * layers * self.plane), dtype)
        numbers = float_to_bits(rng.standard_normal(2**20 + 7), shape.stored)
        flat = self.arena.reshape(-1)
        for start in range(0, flat.size, numbers.size):
            flat[start : start + numbers.size] = numbers[: flat.size - start]
        self.table = rng.permutation(frames).astype(np.int32)
        tokens = shape.rows * query_tokens
        self.query = float_to_bits(rng.standard_normal((tokens, HEADS, DIMS)), shape.dtype)
        self.out = np.zeros_like(self.query)
        self.row_arguments = {
            "dtype": shape.dtype,
            "kv_dtype": shape.kv_dtype,
            "block_size": shape.block,
            "num_kv_heads": KV_HEADS,
            "head_dim": DIMS,
            "value_dim": DIMS,
            "layout": shape.layout,
            "table": self.table,
            "table_start": np.arange(shape.rows, dtype=np.int64) * per_row,
            "seq_lens": np.full(shape.rows, shape.context, np.int64),
            "query_start": np.arange(shape.rows + 1, dtype=np.int64) * query_tokens,
        }

    def attend(self) -> np.ndarray:
        """Ours, over all layers."""
        for layer in self.layers:
            key = 2 * layer * self.plane
            cuda_kernels.paged_attention(
                self.out,
                self.query,
                self.arena,
                key_offset=key,
                value_offset=key + self.plane,
                **self.row_arguments,
            )
        return self.out

    def gather(self, offset: int) -> torch.Tensor:
        """A plane of all rows, gathered into [rows, heads, context, dims], as torch would."""
        shape = self.shape
        frames = torch.from_numpy(self.table.astype(np.int64)).view(shape.rows, -1)
        plane = tensor(self.arena, shape.dtype)[:, offset : offset + self.plane]
        if shape.layout == "HND":
            plane = plane.view(-1, KV_HEADS, shape.block, DIMS)[frames].permute(0, 2, 1, 3, 4)
        else:
            plane = plane.view(-1, shape.block, KV_HEADS, DIMS)[frames].permute(0, 3, 1, 2, 4)
        return plane.reshape(shape.rows, KV_HEADS, -1, DIMS)[:, :, : shape.context]

    def planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = 2 * layer * self.plane
        return self.gather(key), self.gather(key + self.plane)


def decode_methods(batch: Batch) -> Methods:
    """Ours, torch on contiguous K/V in two forms, gather then torch, and three read limits."""
    shape = batch.shape
    dense = [tuple(plane.contiguous() for plane in batch.planes(k)) for k in batch.layers]
    query = tensor(batch.query, shape.dtype)
    grouped = query.view(shape.rows, KV_HEADS, GROUP, DIMS)
    attention = torch.nn.functional.scaled_dot_product_attention

    def as_length() -> torch.Tensor:
        for key, value in dense:
            result = attention(grouped, key, value)
        return result

    def as_gqa() -> torch.Tensor:
        for key, value in dense:
            result = attention(query[:, :, None], key, value, enable_gqa=True)
        return result

    def gathered() -> torch.Tensor:
        for layer in batch.layers:
            result = attention(grouped, *batch.planes(layer))
        return result

    flat = batch.arena.reshape(-1).view(np.float32)
    flat = flat[: int(shape.layer_bytes * len(batch.layers)) // 4 // 8192 * 8192]
    rng = np.random.default_rng(1)
    methods: Methods = {
        "ours": batch.attend,
        "SDPA, contiguous, group as length": as_length,
        "SDPA, contiguous, enable_gqa": as_gqa,
        "gather + SDPA": gathered,
        "reading contiguously": lambda: read_all(flat, shape.threads),
    }
    for kib in (4, 16):
        order = rng.permutation(flat.size // (kib * 256))
        methods[f"reading {kib} KiB granules"] = lambda order=order, kib=kib: read_scattered(
            flat, order, kib * 256, shape.threads
        )
    methods |= vllm_cpu.methods(batch, dense, query)
    expected = tensor(np.array(batch.attend()), shape.dtype).float().view(grouped.shape)
    error = float((expected - as_length().float()).abs().max())
    assert error < 0.02, f"ours and torch differ by {error}"
    return methods


def take_turns(methods: Methods, repeats: int) -> dict[str, list[float]]:
    """Seconds of each method, in turns, after one round that isn't counted."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(repeats + 1):
        for name, run in methods.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def figures_of(section: str, name: str, seconds: dict[str, list[float]]) -> list[Figure]:
    """ "ours" beside each other method."""
    ours = seconds["ours"]
    return [
        figure(section, name, "ms", 1e3, ours, peer, other)
        for peer, other in seconds.items()
        if peer != "ours"
    ]


def ask(figures: Sequence[Figure], block: int) -> None:
    """What is asked of decode in bfloat16. The limit is that of reading pieces as large as a
    block's head, in random order: contiguous reading is printed beside, and is no paged kernel's
    to reach."""
    kib, share = (16, 0.8) if block == 64 else (4, 0.65)
    read = f"reading {kib} KiB granules"
    gates = {
        read: share, "SDPA, contiguous, group as length": 1.5, "gather + SDPA": 8,
        "vllm-cpu amx": 1.0,
    }  # fmt: skip
    for f in figures:
        if f.compared_with in gates:
            f.at_least(gates[f.compared_with])


def set_threads(count: int) -> None:
    numba.set_num_threads(count)
    torch.set_num_threads(count)


def bench_decode(repeats: int, shapes: Sequence[Shape]) -> list[Figure]:
    """One token of each row against its context."""
    figures = []
    for shape in shapes:
        set_threads(shape.threads)
        batch = Batch(shape)
        seconds = take_turns(decode_methods(batch), repeats)
        made = figures_of("attend", shape.name("decode"), seconds)
        if shape.dtype == "bfloat16" and shape.layout == "HND":
            ask(made, shape.block)
        show(made, shape.layer_bytes * len(batch.layers))
        figures += made
    return figures


def bench_prefill(repeats: int, shapes: Sequence[Shape], chunk: int = 2048) -> list[Figure]:
    """The last `chunk` tokens of each row against all its context."""
    figures = []
    for shape in shapes:
        set_threads(shape.threads)
        batch = Batch(shape, chunk, most_layers=2)
        batch.layers = [0]
        key, value = (plane.contiguous() for plane in batch.planes(0))
        query = tensor(batch.query, shape.dtype).view(shape.rows, chunk, HEADS, DIMS)
        query = query.transpose(1, 2).contiguous()
        mask = None
        if shape.context > chunk:
            mask = torch.ones(chunk, shape.context, dtype=torch.bool)
            mask = mask.tril(shape.context - chunk)

        def peer(query=query, key=key, value=value, mask=mask) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )

        seconds = take_turns({"ours": batch.attend, "SDPA, contiguous": peer}, repeats)
        figures += figures_of("attend", shape.name(f"prefill of {chunk}"), seconds)
        show(figures[-1:], None)
    return figures


def bench_write(repeats: int, tokens: Sequence[int] = (32, 2048)) -> list[Figure]:
    """K/V of one layer into scattered slots, beside torch's index_put on as many rows."""
    figures = []
    set_threads(1)
    for block in (16, 64):
        for count in tokens:
            rng = np.random.default_rng(0)
            frames = 4096 // block + 1
            plane = KV_HEADS * block * DIMS
            arena = np.zeros((frames, 2 * 24 * plane), np.uint16)
            key = float_to_bits(rng.standard_normal((count, KV_HEADS, DIMS)), "bfloat16")
            slots = rng.permutation(frames * block)[:count].astype(np.int64)
            rows = torch.from_numpy(key.view(np.int16))
            pool = torch.zeros(2, frames * block, KV_HEADS, DIMS, dtype=torch.int16)
            index = torch.from_numpy(slots)

            def ours(arena=arena, key=key, slots=slots, block=block, plane=plane) -> None:
                cuda_kernels.write_kv(
                    arena, key, key, dtype="bfloat16", key_offset=0, value_offset=plane,
                    block_size=block, num_kv_heads=KV_HEADS, head_dim=DIMS, value_dim=DIMS,
                    slot_mapping=slots,
                )  # fmt: skip

            def peer(pool=pool, rows=rows, index=index) -> None:
                pool[0][index] = rows
                pool[1][index] = rows

            seconds = take_turns({"ours": ours, "torch index_put": peer}, max(50, repeats))
            name = f"write_kv, {count} tokens, {KV_HEADS} heads x {DIMS}, bfloat16, block {block}"
            figures += figures_of("write", name, seconds)
            show(figures[-1:], None)
    return figures


def bench_layouts(repeats: int, threads: int = 1) -> list[Figure]:
    """Head-major beside token-major planes, blocks of 64 beside 16: decode and prefill."""
    figures = []
    set_threads(threads)
    for what, rows, context, tokens in (("decode", 8, 4096, 1), ("prefill of 512", 1, 2048, 512)):
        methods: Methods = {}
        for block in (64, 16):
            for layout in ("HND", "NHD"):
                shape = Shape(rows, context, block, "bfloat16", threads, layout)
                name = "ours" if not methods else f"block {block} {layout}"
                methods[name] = Batch(shape, tokens, most_layers=8 if tokens == 1 else 1).attend
        shape = Shape(rows, context, 64, "bfloat16", threads)
        figures += figures_of("layout", shape.name(what), take_turns(methods, repeats))
        show(figures[-3:], None)
    return figures


def show(figures: Sequence[Figure], read_bytes: int | None) -> None:
    """Print figures as they come; with GB/s where bytes are given."""
    first = figures[0]
    line = f"{first.name}: median {first.median:.3f} ms ({first.p10:.3f}-{first.p90:.3f})"
    line += f", best {first.best:.3f}"
    if read_bytes:
        line += f"; {read_bytes / first.median / 1e6:.1f} GB/s, {read_bytes / first.best / 1e6:.1f}"
    print(f"{line}; load {first.load}", file=sys.stderr, flush=True)
    for f in figures:
        rate = f"; {read_bytes / f.compared_median / 1e6:.1f} GB/s" if read_bytes else ""
        print(
            f"    {f.ratio:7.2f}x (best {f.compared_best / f.best:.2f}x) {f.compared_with} "
            f"{f.compared_median:.3f} ms{rate}",
            file=sys.stderr,
            flush=True,
        )


def bench_attend(repeats: int) -> list[Figure]:
    """The shapes that the documents quote."""
    sizes = ((8, 4096), (32, 4096), (1, 32768))
    shapes = [
        Shape(*size, block, "bfloat16", threads)
        for size in sizes
        for block in (64, 16)
        for threads in (1, 2)
    ]
    shapes += [Shape(8, 4096, 64, dtype, 2) for dtype in ("float16", "float32")]
    figures = bench_decode(max(5, repeats // 20), shapes)
    figures += bench_prefill(max(3, repeats // 40), [Shape(1, 2048, 64, "float32", 2)])
    return figures + bench_write(repeats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["decode", "prefill", "write"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--blocks", type=int, nargs="*", default=[64, 16])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--layouts", nargs="*", default=["HND"])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    given = parser.parse_args()
    shapes = [
        Shape(given.rows, given.context, block, dtype, threads, layout)
        for block in given.blocks
        for layout in given.layouts
        for dtype in given.dtypes
        for threads in given.threads
    ]
    figures: list[Figure] = []
    if "decode" in given.what:
        figures += bench_decode(given.repeats, shapes)
    if "prefill" in given.what:
        figures += bench_prefill(given.repeats, shapes)
    if "layouts" in given.what:
        figures += bench_layouts(given.repeats, given.threads[0])
    if "write" in given.what:
        figures += bench_write(given.repeats)
    if given.json:
        print(json.dumps([asdict(f) for f in figures]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
