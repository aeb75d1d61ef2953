"""Mistakes planted in the CUDA kernels' sources, one replaced line each, for the tests to find.

A kernel with a mistake is compiled and interpreted as the real one is, and the kernel's own test is
run on it: the interpreter or the comparison has to object.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from cuda_kernels.cuda.compile import Compiled
from cuda_kernels.cuda.kernel import KernelSource
from tests.ptx.device import InterpretedDevice
from tests.ptx.machine import Kernel

ROOT = Path(__file__).resolve().parents[2]
COPYING = "cuda_kernels.cuda.copying"
WRITE = "cuda_kernels.cache_write.cuda_write"
COPY = "cuda_kernels.block_copy.cuda_copy"
MOVE = "cuda_kernels.frames.cuda_move"
ATTENTION = "cuda_kernels.attention.cuda_decode"
PROMPTS = "cuda_kernels.attention.cuda_prefill"
TILES = "cuda_kernels.attention.cuda_shared_tiles"
PARTS = "cuda_kernels.attention.cuda_parts"
SPLITS = "cuda_kernels.attention.cuda_splits"


@dataclass(frozen=True)
class KernelFault:
    """In which module, what is replaced by what, and whose test is to notice."""

    module: str
    right: str  # found once in the module
    wrong: str
    victim: str  # the module of the kernel that is run


def _fault(module: str, right: str, wrong: str, victim: str = "") -> KernelFault:
    return KernelFault(module, right, wrong, victim or module)


FAULTS = {
    "write_slot_off_by_one": _fault(
        WRITE, "offset = slot - frame * block_size", "offset = slot - frame * block_size + 1"
    ),
    "write_skipped_slot_written": _fault(WRITE, "if slot < 0:", "if slot < -1:"),
    "write_strides_swapped": _fault(
        WRITE, "value + token * value_token, value_head", "value + token * value_head, value_token"
    ),
    "write_head_stride_of_the_other_plane": _fault(
        WRITE, "target_head = value_plane_head", "target_head = key_plane_head"
    ),
    "rows_one_piece_too_many": _fault(
        COPYING,
        "while i < count:\n            row = quotient(i, pieces)\n"
        "            at = (i - row * pieces) * LINE",
        "while i <= count:\n            row = quotient(i, pieces)\n"
        "            at = (i - row * pieces) * LINE",
        WRITE,
    ),
    "rows_width_not_of_whole_lines": _fault(
        COPYING, "odd = target | source | row_bytes", "odd = target | source", WRITE
    ),
    "rows_four_where_three_are_left": _fault(
        COPYING, "while i + 3 * threads < count", "while i + 2 * threads < count", COPY
    ),
    "copy_one_slot_too_many": _fault(COPY, "filled * slot_bytes", "(filled + 1) * slot_bytes"),
    "copy_stride_of_the_filled_slots": _fault(
        COPY, "stride = block_size * slot_bytes", "stride = filled * slot_bytes"
    ),
    "copy_onto_itself": _fault(COPY, "if origin == destination:", "if origin < 0:"),
    "copy_backwards": _fault(
        COPY,
        "base + destination * frame_bytes, stride, base + origin * frame_bytes, stride",
        "base + origin * frame_bytes, stride, base + destination * frame_bytes, stride",
    ),
    "move_last_chunk_not_cut": _fault(
        MOVE, "size = min(chunk_bytes, piece_bytes - start)", "size = chunk_bytes"
    ),
    "move_every_block_every_task": _fault(MOVE, "task += int64(cuda.gridDim.x)", "task += 1"),
    "attention_queries_before_the_barrier": _fault(
        ATTENTION,
        "i += WARPS * TILE\n        cuda.syncthreads()\n\n        scores",
        "i += WARPS * TILE\n\n        scores",
    ),
    "attention_joined_before_the_barrier": _fault(
        SPLITS,
        "    cuda.syncthreads()\n    if thread < count:\n        top, total = join_warps",
        "    if thread < count:\n        top, total = join_warps",
        ATTENTION,
    ),
    "attention_mask_off_by_one": _fault(
        ATTENTION, "here >= low and here <= high", "here >= low and here <= high + 1"
    ),
    "attention_own_position_masked": _fault(
        ATTENTION, "here >= low and here <= high", "here >= low and here < high"
    ),
    "attention_window_off_by_one": _fault(
        ATTENTION, "position - window + 1)", "position - window)"
    ),
    "attention_strides_swapped": _fault(
        ATTENTION,
        "its_frame * value_frame + its_offset * value_token",
        "its_frame * value_token + its_offset * value_frame",
    ),
    "attention_head_stride_of_the_other_plane": _fault(
        ATTENTION, "value + kv_head * value_head", "value + kv_head * key_head"
    ),
    "attention_old_sums_not_rescaled": _fault(
        ATTENTION, "sums[h * panels + p] *= factor", "sums[h * panels + p] *= float32(1)"
    ),
    "attention_a_warp_left_out": _fault(
        SPLITS,
        "for w in range(WARPS):\n        factor",
        "for w in range(WARPS - 1):\n        factor",
        ATTENTION,
    ),
    "attention_sink_left_out": _fault(
        SPLITS, "totals[h], sink, sinks != 0)", "totals[h], sink, False)", ATTENTION
    ),
    "attention_distance_the_wrong_way": _fault(
        PARTS, "score - slope * float32(distance)", "score + slope * float32(distance)", ATTENTION
    ),
    "attention_empty_row_divided": _fault(
        SPLITS, "if not empty:", "if not empty or count > 0:", ATTENTION
    ),
    "prompts_mask_off_by_one": _fault(PROMPTS, "here > owns[half]:", "here > owns[half] + 1:"),
    "prompts_own_position_masked": _fault(PROMPTS, "here > owns[half]:", "here >= owns[half]:"),
    "prompts_window_off_by_one": _fault(TILES, "own - window + 1)", "own - window)", PROMPTS),
    "prompts_mask_left_out_one_too_early": _fault(
        PROMPTS, "next_tile > position + 1", "next_tile > position + 2"
    ),
    "prompts_last_tile_left_out": _fault(PROMPTS, "while tile <= last:", "while tile < last:"),
    "prompts_sums_not_rescaled": _fault(
        PROMPTS, "factors[0] != float32(1) or factors[1]", "factors[1]"
    ),
    "prompts_weights_not_rescaled": _fault(
        PROMPTS, "multiply_add(total[half], factor, whole)", "total[half] + whole"
    ),
    "prompts_tile_used_before_the_barrier": _fault(
        PROMPTS,
        "            await_copies()\n            cuda.syncthreads()\n",
        "            await_copies()\n",
    ),
    "prompts_tile_overwritten_before_the_barrier": _fault(
        PROMPTS,
        "            cuda.syncthreads()\n            if next_tile <= last:",
        "            if next_tile <= last:",
    ),
    "prompts_copies_not_waited_for": _fault(
        PROMPTS,
        "            await_copies()\n            cuda.syncthreads()\n",
        "            cuda.syncthreads()\n",
    ),
    "prompts_odd_values_kept": _fault(
        TILES, "        if changed != uint32(0):", "        if changed == uint32(1):", PROMPTS
    ),
    "prompts_odd_values_for_all": _fault(
        TILES,
        "                if place >= first_of(owns[half], window) and place <= owns[half]:",
        "                if place >= first_of(owns[half], window):",
        PROMPTS,
    ),
    "prompts_read_past_the_row": _fault(
        TILES, "inside = max(low, min(position, high))", "inside = position", PROMPTS
    ),
    "prompts_slot_of_the_next_row": _fault(
        PROMPTS, "size), tokens) + middle <= slot", "size), tokens) + middle <= slot + 1"
    ),
}


def skip_unless_drawn(name: str) -> None:
    """Skip the test of two mistakes in three, other ones each run: each costs a compilation."""
    if (
        os.environ.get("KVMEM_FAULTS") != "all"
        and zlib.crc32(name.encode(), int(os.environ["KVMEM_SEED"])) % 3
    ):
        pytest.skip("not drawn in this run; KVMEM_FAULTS=all plants all of them")


def plant(fault: KernelFault, folder: Path) -> str:
    """Write the kernel's module with the mistake into a folder; its name there."""
    text = _text(fault.module)
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.right!r} is not once in {fault.module}")
    text = text.replace(fault.right, fault.wrong)
    digest = _digest(fault.victim, text)
    if fault.module == fault.victim:
        return _write(folder, fault.module, digest, text)
    changed = _write(folder, fault.module, digest, text)
    own = _text(fault.victim)
    package, _, name = fault.module.rpartition(".")
    whole = f"from {package} import {name}\n"
    if whole in own:
        return _write(
            folder, fault.victim, digest, own.replace(whole, f"import {changed} as {name}\n")
        )
    if own.count(fault.module) != 1:
        raise ValueError(f"{fault.victim} does not import {fault.module} once")
    return _write(folder, fault.victim, digest, own.replace(fault.module, changed))


def _digest(victim: str, text: str) -> str:
    """Hangs on the mistake and on all that the kernel takes from its folder."""
    folder = (ROOT / victim.replace(".", "/")).parent
    beside = b"".join(path.read_bytes() for path in sorted(folder.glob("cuda_*.py")))
    return hashlib.sha256(text.encode() + beside).hexdigest()[:8]


def _text(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text()


def _write(folder: Path, module: str, digest: str, text: str) -> str:
    """Its name tells what it is made of, so a kernel kept from an earlier run is the same one."""
    name = f"planted_{module.rsplit('.', 1)[1]}_{digest}"
    (folder / f"{name}.py").write_text(text)
    return name


class FaultyDevice(InterpretedDevice):
    """Compiles one module's kernels from the one with the mistake."""

    together = ()
    victim: ClassVar[str] = ""
    planted: ClassVar[str] = ""

    def compiled(self, source: KernelSource) -> tuple[Compiled, Kernel]:
        if source not in self.kernels and source.module == self.victim:
            self.kernels[source] = super().compiled(replace(source, module=self.planted))
        return super().compiled(source)


@contextlib.contextmanager
def faulty(fault: KernelFault, folder: Path) -> Iterator[type[FaultyDevice]]:
    """A class of devices with the mistake, while inside."""
    name = plant(fault, folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield type("Faulty", (FaultyDevice,), {"victim": fault.victim, "planted": name})
    finally:
        sys.path.remove(str(folder))
