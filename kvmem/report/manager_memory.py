"""A Manager's arenas: what was asked for, what is really held, and who uses it.

An arena of the host is address space first; a page of it costs memory when it is first written. So
"requested" is what the Config asks for, "held" what the kernel has given: pages present in
``/proc/self/pagemap``. Page-locking writes to all of them, and memory of a GPU is held from the
start. Only the process that made a Manager can tell.
"""

from __future__ import annotations

import mmap
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvmem.report.reasons import Reasons

if TYPE_CHECKING:
    from kvmem.manager import Manager
    from kvmem.stats import TierStats
    from kvmem.store.arena import ArenaBase
    from kvmem.store.cuda.pinning import Pinned

PAGEMAP = Path("/proc/self/pagemap")
_ENTRY_BYTES = 8
_CHUNK_PAGES = 1 << 20
_PRESENT = np.uint64(1 << 63)


@dataclass(slots=True, kw_only=True)
class ArenaMemory:
    """One tier. Bytes; blocks as in ``Manager.stats()``: ``used`` are named by a table, ``pinned``
    by a live Pin, ``evictable`` are cached and may go, ``held = total - free``."""

    tier: str
    #: "pageable host memory", "page-locked host memory", "partly page-locked host memory" or "GPU
    #: memory (cuda:0)".
    memory: str
    requested_bytes: int | None = None
    held_bytes: int | None = None
    pinned_bytes: int | None = None  # page-locked for a GPU's copies; 0 on the CPU and of a GPU
    block_bytes: int | None = None
    blocks: dict[str, int] = field(default_factory=dict)
    reasons: Reasons = field(default_factory=Reasons)


@dataclass(slots=True, kw_only=True)
class ManagerMemory:
    """All that one Manager takes."""

    device: str
    tiers: list[ArenaMemory]
    requested_bytes: int
    held_bytes: int | None
    metadata_bytes: int  # records of the ledger, tables and tokens included
    reasons: Reasons = field(default_factory=Reasons)


def read_manager(manager: Manager) -> ManagerMemory:
    """The arenas of ``manager`` now. Raises ManagerClosed. Cost: O(blocks), and 8 bytes read for
    each page of 4 KiB."""
    stats = manager.stats()
    block_bytes = manager.config.geometry.frame_bytes
    arenas = manager._runtime.store.arenas()
    on_gpu = manager.config.on_gpu
    tiers = []
    for name, arena in arenas.items():
        tier: TierStats = getattr(stats, name)
        blocks = asdict(tier)
        found = _arena_memory(name, arena, on_gpu=on_gpu and name == "device")
        found.block_bytes = block_bytes
        blocks.pop("arena_bytes")
        found.blocks = blocks
        tiers.append(found)
    held = [tier.held_bytes for tier in tiers if tier.held_bytes is not None]
    whole = ManagerMemory(
        device=manager.config.device,
        tiers=tiers,
        requested_bytes=sum(arena.num_bytes for arena in arenas.values()),
        held_bytes=sum(held) if len(held) == len(tiers) else None,
        metadata_bytes=_metadata_bytes(manager),
    )
    if whole.held_bytes is None:
        whole.reasons["held_bytes"] = next(
            tier.reasons["held_bytes"] for tier in tiers if tier.held_bytes is None
        )
    return whole


def _arena_memory(tier: str, arena: ArenaBase, *, on_gpu: bool) -> ArenaMemory:
    """What kind of memory an arena is, how much of it is held and page-locked."""
    total = arena.num_bytes
    if on_gpu:
        where = f"GPU memory ({arena.tensor.device})"
        return ArenaMemory(
            tier=tier, memory=where, requested_bytes=total, held_bytes=total, pinned_bytes=0
        )
    found = ArenaMemory(
        tier=tier, memory="pageable host memory", requested_bytes=total, pinned_bytes=0
    )
    pinned: Pinned | None = getattr(arena, "pinned", None)  # host memory that a GPU copies from
    if pinned is not None:
        found.pinned_bytes = pinned.num_bytes
        if pinned.num_bytes:
            part = "" if pinned.num_bytes == total else "partly "
            found.memory = f"{part}page-locked host memory"
        if pinned.reason is not None:
            found.reasons["pinned_bytes"] = pinned.reason
        if pinned.numa_reason is not None:
            found.reasons["numa_node"] = pinned.numa_reason
    found.held_bytes = found.reasons.get_or_say(
        "held_bytes", partial(present_bytes, arena.bytes.ctypes.data, total)
    )
    return found


def present_bytes(address: int, num_bytes: int, pagemap: Path = PAGEMAP) -> int:
    """Bytes of a range of this process's memory that are in physical memory, in whole pages.

    Raises OSError where the kernel does not tell.
    """
    page = mmap.PAGESIZE
    first, last = address // page, -(-(address + num_bytes) // page)
    present = 0
    with pagemap.open("rb", buffering=0) as file:
        for start in range(first, last, _CHUNK_PAGES):
            count = min(_CHUNK_PAGES, last - start)
            file.seek(start * _ENTRY_BYTES)
            raw = file.read(count * _ENTRY_BYTES)
            if len(raw) != count * _ENTRY_BYTES:
                raise OSError("the kernel's page map is shorter than the memory")
            entries = np.frombuffer(raw, np.uint64)
            present += int(np.count_nonzero(entries & _PRESENT))
    return present * page


def _metadata_bytes(manager: Manager) -> int:
    """Bytes of all arrays of the ledger."""
    state = manager._runtime.ledger.state
    return sum(int(array.nbytes) for array in state if isinstance(array, np.ndarray))
