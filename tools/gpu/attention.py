"""Sections of attention: decode, decode with K and V in fp8, prompts."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from tools.gpu.clock import Budget, Spread, measure
from tools.gpu.kv import Case, PagedBatch, room_for
from tools.gpu.peers import paged, sdpa
from tools.gpu.record import Bench, Row

CONTEXTS, BATCHES, BLOCKS, HEADS = (1024, 8192, 32768, 131072), (1, 8, 64, 256), (16, 64), (32, 64)
STORED = "fp8_e4m3"


def decode_cases(quick: bool, kv_dtype: str | None = None) -> list[Case]:
    """One new token a row. What says most comes first, for the time may run out."""
    if quick:
        shapes = [(64, 8192, 16, 32), (1, 32768, 16, 32), (8, 8192, 64, 64), (256, 1024, 16, 32)]
        shapes += [(1, 8192, 16, 64), (64, 8192, 64, 32), (8, 32768, 16, 32), (1, 1024, 16, 32)]
    else:
        shapes = [
            (batch, context, block, heads)
            for block in BLOCKS
            for heads in HEADS
            for context in CONTEXTS
            for batch in BATCHES
        ]
    if kv_dtype:
        shapes = [shape for shape in shapes if shape[0] in (1, 64) and shape[1] >= 8192]
    return [Case(*shape, kv_dtype=kv_dtype) for shape in shapes]


def prompt_cases(quick: bool) -> list[Case]:
    """A chunk of 2,048 tokens after cached ones."""
    new = 2048
    blocks = (16,) if quick else (16, 64)
    heads = (32,) if quick else (32, 64)
    return [
        Case(1, new + cached, block, count, new=new)
        for block in blocks
        for count in heads
        for cached in (0, 8192, 32768)
    ]


def decode(bench: Bench, budget: Budget) -> str:
    """Decode in bfloat16, as a share of the rate at which the device reads."""
    return run_cases(bench, budget, decode_cases(bench.quick))


def fp8(bench: Bench, budget: Budget) -> str:
    """The same with K and V in fp8_e4m3, where this version's kernels take it."""
    reason = probe_fp8(bench)
    if reason:
        return f"not in this version: {reason}"
    return run_cases(bench, budget, decode_cases(bench.quick, STORED))


def prompt(bench: Bench, budget: Budget) -> str:
    """A chunk of a prompt over what is cached, beside SDPA."""
    return run_cases(bench, budget, prompt_cases(bench.quick))


def probe_fp8(bench: Bench) -> str:
    """Why the kernels don't take K and V in fp8 on a device; empty if they do."""
    try:
        PagedBatch(bench, Case(1, 16, 16, 8, kv_dtype=STORED)).attend(0, check=True)
        bench.clock.wait()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)[:200]
    return ""


def run_cases(bench: Bench, budget: Budget, cases: Iterable[Case]) -> str:
    """Measure case by case while time and memory allow."""
    for case in cases:
        if not budget.allows(case.name):
            continue
        reason = room_for(bench, case)
        if reason:
            budget.left_out.append(reason)
            continue
        try:
            bench.keep(run_case(bench, case))
        except bench.torch.OutOfMemoryError:
            budget.left_out.append(f"{case.name}: memory ran out")
        gc.collect()  # closures over tensors
        if bench.place != "cpu":
            bench.torch.cuda.empty_cache()
    return ""


def run_case(bench: Bench, case: Case) -> Row:
    """Ours beside each peer, the results compared with SDPA's first."""
    batch = PagedBatch(bench, case)
    error, allowed = None, None
    dense = sdpa(batch)
    for run in dense.values():
        try:
            error, allowed = batch.difference(run)
        except Exception:  # ours, or a form that this torch can't do: `measure` keeps the reason
            continue
        break
    runs, reasons = paged(batch)
    found = measure(
        bench.clock, {"ours": batch.attend, **dense, **runs}, seconds=bench.case_seconds
    )
    row = Row(
        case.name, case.facts() | {"layers": batch.layers}, case.moved_bytes,
        found.pop("ours", "no figure"), {**found, **reasons}, error=error, allowed_error=allowed,
        operations=case.operations if case.new > 1 else 0,
    )  # fmt: skip
    if case.new == 1 and bench.read_rate and isinstance(row.ours, Spread):
        row.limit = "reading"
        row.share = case.moved_bytes / row.ours.median / bench.read_rate
    return row
