"""`Stats`: what `Manager.stats()` answers, as plain numbers (R10)."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in blocks; `free + held == total` and `evictable` is part of `held`."""

    total: int
    free: int
    held: int  # frames that hold a block
    used: int  # held by blocks that a table names
    pinned: int  # held by blocks that a live Pin names
    evictable: int  # held, but may be taken for others
    peak: int  # most frames held at once
    arena_bytes: int  # memory of the tier, reserved frames included


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the Manager was made, and the state now. Blocks are whole frames in bytes."""

    device: TierStats
    host: TierStats
    sequences_waiting: int
    sequences_resident: int
    sequences_swapped: int
    steps: int  # steps planned, aborted ones included
    prefix_query_tokens: int  # known tokens of sequences when first stepped
    prefix_hit_tokens: int  # tokens served by the trie instead of computed
    blocks_published: int
    blocks_merged: int  # replaced by an equal published block
    blocks_copied_on_write: int
    swap_outs: int  # sequences
    swap_ins: int
    recomputes: int
    blocks_out: int  # blocks copied device to host (planned; `*_bytes` likewise)
    blocks_in: int
    blocks_cleaned: int  # of blocks_out: copied ahead of their eviction
    bytes_out: int
    bytes_in: int
    clean_swap_outs: int  # blocks that swap_out found clean: nothing copied
    evicted_device: int  # blocks that lost their device frame
    evicted_clean: int  # of these, without a copy
    evicted_host: int
    blocks_dropped: int  # cached blocks that left their last tier
    cached_nodes: int  # blocks the trie can serve, in either tier
    blocks_out_failed: int  # of blocks_out: in transfers whose copy failed, moved or not
    blocks_in_failed: int
    bytes_out_done: int  # counted at the device interface when a copy has ended
    bytes_in_done: int
    runs_out_done: int  # contiguous in both arenas: the copies that these bytes take a device
    runs_in_done: int
    host_locked_bytes: int  # of the host tier: page-locked for a GPU, 0 on other devices
    transfers_copied: int  # on a GPU: one copy a run; which way is fastest is measured there
    transfers_batched: int  # one call for all runs
    transfers_staged: int  # gathered or scattered by a kernel

    def to_dict(self) -> dict[str, object]:
        """Nested dicts of numbers, for JSON."""
        return asdict(self)
