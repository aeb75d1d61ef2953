"""Sections of limits: how fast the device copies and reads, what a launch costs the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cuda_kernels
from cuda_kernels.cuda.kernel import Launch
from tools.gpu.clock import Budget, Run, Spread, Timing, measure
from tools.gpu.kv import Case, PagedBatch
from tools.gpu.record import Bench, Row

#: Calls in one timing on the host: fewer than a stream's queue takes before it makes callers wait.
CALLS = 200


def bandwidth(bench: Bench, budget: Budget) -> str:
    """Copy on the device (bytes read and written), and reading by reductions; sets the rates.

    The rate of reading is the best of the reductions and of the copy, for what can copy can read.
    """
    torch = bench.torch
    size = max(1 << 16, min(4 << 30, bench.free_bytes() // 8)) // 4096 * 4096
    source = torch.zeros(size // 4, dtype=torch.float32, device=bench.place)
    target = torch.empty_like(source)
    sides: dict[str, tuple[int, Run]] = {
        "copy": (2 * size, lambda turn: target.copy_(source)),
        "sum": (size, lambda turn: source.sum()),
        "largest": (size, lambda turn: source.amax()),
        "sum of 64 columns": (size, lambda turn: source.view(-1, 64).sum(0)),
    }
    found = measure(
        bench.clock, {name: run for name, (_, run) in sides.items()},
        seconds=min(4 * bench.case_seconds, budget.seconds / 2),
    )  # fmt: skip
    rates = {}
    for name, (moved, _) in sides.items():
        spread = found[name]
        if isinstance(spread, Spread):
            rates[name] = moved / spread.median
        bench.keep(Row(f"{name} of {size / 2**20:,.0f} MiB", {"bytes": size}, moved, spread))
    bench.copy_rate = rates.get("copy", 0.0)
    bench.read_rate = max(rates.values(), default=0.0)
    return f"copying {bench.copy_rate / 1e9:,.0f} GB/s, reading {bench.read_rate / 1e9:,.0f} GB/s"


class Captured:
    """A device that keeps what it is asked to launch."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []

    def launch(self, launch: Launch, stream: int) -> None:
        """Note it."""
        self.launched.append(launch)


def launch(bench: Bench, budget: Budget) -> str:
    """What a call costs the host, while the device keeps up."""
    torch = bench.torch
    batch = PagedBatch(bench, Case(8, 64, 16, 32))
    small = torch.zeros(1, device=bench.place)
    arena, rows, slots = _rows(bench)
    options: dict[str, Any] = {
        "dtype": "bfloat16", "key_offset": 0, "value_offset": 16 * 1024, "block_size": 16,
        "num_kv_heads": 8, "head_dim": 128, "value_dim": 128, "stream": bench.stream,
    }  # fmt: skip
    given = [bench.array(tensor) for tensor in (arena, *rows)]
    where = bench.array(slots)

    def write(*, check: bool) -> None:
        cuda_kernels.write_kv(*given, slot_mapping=where, check=check, **options)

    sides: dict[str, Callable[[], object]] = {
        "write_kv(check=False)": lambda: write(check=False),
        "write_kv": lambda: write(check=True),
        "paged_attention(check=False), 8 rows": lambda: batch.attend(0),
        "paged_attention, 8 rows": lambda: batch.attend(0, check=True),
        "torch add_": lambda: small.add_(1),
    }
    seen = Captured()
    none = torch.full_like(slots, -1)  # each row is skipped: the kernel returns at once
    noted = [replace(bench.array(tensor), device=seen) for tensor in (arena, *rows, none)]
    cuda_kernels.write_kv(*noted[:3], slot_mapping=noted[3], check=False, **options)
    (empty,) = seen.launched
    name = f"one launch, {len(empty.arguments)} arguments"
    sides = {name: lambda: bench.device.launch(empty, bench.stream), **sides}
    for name, run in sides.items():
        if budget.allows(name):
            bench.keep(Row(name, {"calls": CALLS}, 0, on_host(bench, run)))
    return "seconds of the host a call, not of the device"


def on_host(bench: Bench, run: Callable[[], object], turns: int = 15) -> Spread:
    """Seconds of the host a call, some calls in a row into an empty queue."""
    calls = CALLS if bench.place != "cpu" else 2
    for _ in range(3):
        run()
    taken = []
    for _ in range(turns if bench.place != "cpu" else 1):
        bench.clock.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        taken.append(Timing((time.perf_counter() - begin) / calls, True))
    bench.clock.wait()
    return Spread.of(taken)


def _rows(bench: Bench) -> tuple[Any, tuple[Any, Any], Any]:
    """An arena, new rows and their slots, of one layer with 8 heads of 128."""
    torch, place = bench.torch, {"device": bench.place}
    arena = torch.zeros((16, 2 * 16 * 1024), dtype=torch.bfloat16, **place)
    rows = torch.zeros((2, 16, 8, 128), dtype=torch.bfloat16, **place)
    return arena, (rows[0], rows[1]), torch.arange(16, **place)
