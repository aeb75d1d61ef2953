"""Sections of moves: K/V rows, blocks, frames; beside torch and the measured rate of copying."""

from __future__ import annotations

from typing import Any

import cuda_kernels
from cuda_kernels.frames import MAX_BLOCKS
from tools.gpu.clock import Budget, Run, Spread, measure
from tools.gpu.record import Bench, Row

HEADS, DIMS, BLOCK = 8, 128, 16
_PLANE = HEADS * BLOCK * DIMS  # elements


def moves(bench: Bench, budget: Budget) -> str:
    """Every move within the device, then swaps with pinned host memory."""
    cases = [(f"write_kv, {tokens:,} tokens", write_kv, tokens) for tokens in (256, 8192)]
    cases += [(f"copy_blocks, 64 pairs, {n} of 16 slots", copy_blocks, n) for n in (16, 8)]
    cases += [
        (f"{name}, 256 frames of 2 MiB, at most {blocks} blocks", pieces, (name, blocks))
        for name in ("gather_frames", "scatter_frames", "move_frames")
        for blocks in (MAX_BLOCKS, 8 * MAX_BLOCKS)
    ]  # fmt: skip
    if bench.place != "cpu":
        cases += [
            (f"move_frames, 64 frames of 2 MiB {way} pinned host memory", swap, way)
            for way in ("to", "from")
        ]
    for name, make, what in cases:
        if budget.allows(name):
            bench.keep(_row(bench, name, *make(bench, what)))
    return ""


def _row(bench: Bench, name: str, moved: int, ours: Run, others: dict[str, Run], keeps: Any) -> Row:
    """Measure; the share is of the rate at which the device copies, reads and writes counted.

    ``keeps`` are the tensors whose memory ours works on.
    """
    found = measure(bench.clock, {"ours": ours, **others}, seconds=bench.case_seconds)
    del keeps
    row = Row(name, {}, moved, found.pop("ours", "no figure"), found)
    if bench.copy_rate and isinstance(row.ours, Spread) and "host" not in name:
        row.limit, row.share = "copying", moved / row.ours.median / bench.copy_rate
    return row


#: Bytes read and written, ours, others, the tensors behind ours.
Made = tuple[int, Run, dict[str, Run], tuple[Any, ...]]


def write_kv(bench: Bench, tokens: int) -> Made:
    """New rows of one layer into scattered slots; torch writes to planes without pages."""
    torch, place = bench.torch, {"device": bench.place}
    layers = bench.layers_for(2 * 2 * tokens * HEADS * DIMS, most=64)
    frames = 2 * -(-tokens // BLOCK)
    arena = torch.zeros((frames, layers * 2 * _PLANE), dtype=torch.bfloat16, **place)
    flat = torch.zeros((layers, 2, frames * BLOCK, HEADS, DIMS), dtype=torch.bfloat16, **place)
    rows = torch.randn((layers, 2, tokens, HEADS, DIMS), dtype=torch.bfloat16, **place)
    slots = torch.randperm(frames * BLOCK, **place)[:tokens].contiguous()
    target, where = bench.array(arena), bench.array(slots)
    given = [[bench.array(rows[layer, side]) for side in range(2)] for layer in range(layers)]

    def ours(turn: int) -> None:
        layer = turn % layers
        key = 2 * layer * _PLANE
        cuda_kernels.write_kv(
            target, *given[layer], dtype="bfloat16", key_offset=key, value_offset=key + _PLANE,
            block_size=BLOCK, num_kv_heads=HEADS, head_dim=DIMS, value_dim=DIMS,
            slot_mapping=where, check=False, stream=bench.stream,
        )  # fmt: skip

    def index_copy(turn: int) -> None:
        layer = turn % layers
        for side in range(2):
            flat[layer, side].index_copy_(0, slots, rows[layer, side])

    return (
        2 * rows[0].nbytes,
        ours,
        {"torch index_copy_ twice, no pages": index_copy},
        (arena, rows),
    )


def copy_blocks(bench: Bench, filled: int, layers: int = 32, pairs: int = 64) -> Made:
    """Copy-on-write of blocks of all layers; torch copies whole frames."""
    torch, place = bench.torch, {"device": bench.place}
    sets = 4
    planes = torch.arange(2 * layers, **place)
    arena = torch.zeros((2 * pairs * sets, 2 * layers * _PLANE), dtype=torch.bfloat16, **place)
    order = torch.randperm(2 * pairs * sets, **place).view(sets, 2, pairs).to(torch.int32)
    counts = torch.full((pairs,), filled, dtype=torch.int32, **place)
    sizes = [planes * _PLANE, torch.full_like(planes, HEADS), torch.full_like(planes, DIMS)]
    names = ("plane_offset", "plane_rows", "plane_width")
    given = {name: bench.array(size) for name, size in zip(names, sizes, strict=True)}
    target, count = bench.array(arena), bench.array(counts)
    ids = [[bench.array(part) for part in pair] for pair in order]

    def ours(turn: int) -> None:
        cuda_kernels.copy_blocks(
            target, *ids[turn % sets], count, block_size=BLOCK, check=False,
            stream=bench.stream, **given,
        )  # fmt: skip

    def index_copy(turn: int) -> None:
        source, other = order[turn % sets]
        arena.index_copy_(0, other.long(), arena.index_select(0, source))

    moved = 2 * pairs * arena[0].nbytes * filled // BLOCK
    return (
        moved,
        ours,
        {"torch index_select, index_copy_ of whole frames": index_copy},
        (arena, order, counts, sizes),
    )


def pieces(bench: Bench, what: tuple[str, int], count: int = 256, size: int = 2 << 20) -> Made:
    """Whole frames to or from staging, or another arena, by so many blocks of threads."""
    name, blocks = what
    torch, place = bench.torch, {"device": bench.place, "dtype": bench.torch.uint8}
    frames = 2 * count
    arena = torch.zeros((frames, size), **place)
    staging = torch.zeros((count, size), **place)
    ids = torch.randperm(frames, device=bench.place)[:count].to(torch.int32)
    rows = torch.arange(count, device=bench.place, dtype=torch.int32)
    near, far, chosen, straight = map(bench.array, (staging, arena, ids, rows))
    options: dict[str, Any] = {"check": False, "max_blocks": blocks, "stream": bench.stream}

    def ours(turn: int) -> None:
        if name == "gather_frames":
            cuda_kernels.gather_frames(near, far, chosen, **options)
        elif name == "scatter_frames":
            cuda_kernels.scatter_frames(far, chosen, near, **options)
        else:
            cuda_kernels.move_frames(near, straight, far, chosen, **options)

    def select(turn: int) -> None:
        torch.index_select(arena, 0, ids, out=staging)

    def index_copy(turn: int) -> None:
        arena.index_copy_(0, ids.long(), staging)

    peer: dict[str, Run] = {"torch index_select": select}
    if name == "scatter_frames":
        peer = {"torch index_copy_": index_copy}
    return 2 * staging.nbytes, ours, peer, (arena, staging, ids, rows)


def swap(bench: Bench, way: str) -> Made:
    """Frames between the device and pinned host memory; torch copies as many bytes in one piece."""
    torch = bench.torch
    count, size = 64, 2 << 20
    kind = {"dtype": bench.torch.uint8}
    device = torch.zeros((2 * count, size), device=bench.place, **kind)
    host = torch.zeros((2 * count, size), pin_memory=True, **kind)
    ids = torch.randperm(2 * count, device=bench.place)[:count].to(torch.int32)
    ends = {"to": (host, device), "from": (device, host)}[way]
    target, origin = map(bench.array, ends)
    chosen = bench.array(ids)

    def ours(turn: int) -> None:
        cuda_kernels.move_frames(target, chosen, origin, chosen, check=False, stream=bench.stream)

    def straight(turn: int) -> None:
        ends[0][:count].copy_(ends[1][:count], non_blocking=True)

    return count * size, ours, {"torch copy_, one piece": straight}, (device, host, ids)
