"""A Manager's arenas: what was asked for, what is really held, and who uses it.

An arena is address space first; a page of it costs memory when it is first written. So "requested"
is what the Config asks for, "held" what the kernel has given: pages present in
``/proc/self/pagemap``. Only the process that made a Manager can tell.
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

PAGEMAP = Path("/proc/self/pagemap")
_ENTRY_BYTES = 8
_CHUNK_PAGES = 1 << 20
_PRESENT = np.uint64(1 << 63)


@dataclass(slots=True, kw_only=True)
class ArenaMemory:
    """One tier. Bytes; blocks as in ``Manager.stats()``: ``used`` are named by a table, ``pinned``
    by a live Pin, ``evictable`` are cached and may go, ``held = total - free``."""

    tier: str
    memory: str  # "pageable host memory": what kind of memory it is
    requested_bytes: int | None = None
    held_bytes: int | None = None
    pinned_bytes: int | None = None  # locked for a device's copies; 0 on the CPU device
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
    tiers = []
    for name, arena in arenas.items():
        tier: TierStats = getattr(stats, name)
        blocks = asdict(tier)
        found = ArenaMemory(
            tier=name,
            memory="pageable host memory",
            requested_bytes=arena.num_bytes,
            pinned_bytes=0,
            block_bytes=block_bytes,
        )
        blocks.pop("arena_bytes")
        found.blocks = blocks
        found.held_bytes = found.reasons.get_or_say(
            "held_bytes", partial(present_bytes, arena.bytes.ctypes.data, arena.num_bytes)
        )
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
