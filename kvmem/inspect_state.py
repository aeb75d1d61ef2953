"""Read-only views of the whole Manager: `stats()` and `snapshot()`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmem.geometry import RESERVED_FRAMES
from kvmem.ledger.state import DEVICE, GROUP, HOST, RESIDENT, SWAPPED, WAITING, State
from kvmem.runtime import TIERS
from kvmem.stats import Stats, TierStats

if TYPE_CHECKING:
    from kvmem.runtime import Runtime

FIELDS = {DEVICE: "device_frame", HOST: "host_frame"}
# Owner codes of a snapshot beside sequence ids (> 0).
FREE, CACHED, SHARED, PINNED, MOVING = 0, -1, -2, -3, -4


def stats(runtime: Runtime) -> Stats:
    """See Manager.stats. O(blocks)."""
    state = runtime.ledger.state
    led = {name: int(state.ledger[name][0]) for name in state.ledger.dtype.names or ()}
    counted = runtime.store.counters()
    states = state.sequences["state"]
    frame_bytes = runtime.store.layout.frame_bytes
    return Stats(
        device=_tier(state, DEVICE, counted["device_arena_bytes"]),
        host=_tier(state, HOST, counted["host_arena_bytes"]),
        sequences_waiting=int(np.count_nonzero(states == WAITING)),
        sequences_resident=int(np.count_nonzero(states == RESIDENT)),
        sequences_swapped=int(np.count_nonzero(states == SWAPPED)),
        steps=led["epoch"],
        prefix_query_tokens=led["query_tokens"],
        prefix_hit_tokens=led["hit_tokens"],
        blocks_published=led["published"],
        blocks_merged=led["merged"],
        blocks_copied_on_write=led["copied_on_write"],
        swap_outs=led["swap_outs"],
        swap_ins=led["swap_ins"],
        recomputes=led["recomputes"],
        blocks_out=led["blocks_out"],
        blocks_cleaned=led["blocks_cleaned"],
        blocks_in=led["blocks_in"],
        bytes_out=led["blocks_out"] * frame_bytes,
        bytes_in=led["blocks_in"] * frame_bytes,
        clean_swap_outs=led["clean_swap_outs"],
        evicted_device=led["evicted_device"],
        evicted_clean=led["evicted_clean"],
        evicted_host=led["evicted_host"],
        blocks_dropped=led["dropped"],
        cached_nodes=led["num_nodes"],
        bytes_out_done=counted["out_bytes"],
        blocks_out_failed=runtime.ledger.failed_blocks[HOST],
        blocks_in_failed=runtime.ledger.failed_blocks[DEVICE],
        bytes_in_done=counted["in_bytes"],
        runs_out_done=counted["out_runs"],
        runs_in_done=counted["in_runs"],
        host_locked_bytes=counted["host_locked_bytes"],
        transfers_copied=counted["transfers_copied"],
        transfers_batched=counted["transfers_batched"],
        transfers_staged=counted["transfers_staged"],
    )


def filled_frames(runtime: Runtime) -> NDArray[np.int32]:
    """The free device frames whose fill with poison is known to be done; none without `debug`."""
    if not runtime.store.debug:
        return np.zeros(0, np.int32)
    state = runtime.ledger.state
    frames = state.frames[: int(state.pools["num_frames"][DEVICE]) + 1]
    done = frames["fence_out"] <= runtime.store.retired()[0]
    return np.flatnonzero((frames["block"] == 0) & done)[RESERVED_FRAMES:].astype(np.int32)


def _tier(state: State, tier: int, arena_bytes: int) -> TierStats:
    pool, blocks = state.pools[tier], state.blocks
    held = blocks[FIELDS[tier]] > 0
    total, free = int(pool["num_frames"]), int(pool["num_free"])
    return TierStats(
        total=total,
        free=free,
        held=total - free,
        used=int(np.count_nonzero(held & (blocks["ref_count"] > 0))),
        pinned=int(np.count_nonzero(held & (blocks["num_pins"] > 0))),
        evictable=int(pool["num_evictable"]),
        peak=int(pool["peak"]),
        arena_bytes=arena_bytes,
    )


def snapshot(runtime: Runtime) -> dict[str, Any]:
    """See Manager.snapshot. O(frames + table entries)."""
    state = runtime.ledger.state
    retired = runtime.store.retired()
    owner = _block_owners(state)
    tiers = {}
    for tier, name in enumerate(TIERS):
        pool = state.pools[tier]
        first, count = int(pool["first"]), int(pool["num_frames"])
        frames = state.frames[first : first + count + 1]
        codes = np.where(frames["block"] > 0, owner[frames["block"]], FREE)
        moving = (frames["fence_out"] > retired[0]) | (frames["fence_in"] > retired[1])
        codes[moving & (codes != FREE)] = MOVING
        tiers[name] = {"owner": codes[1:].astype(np.int32)}
    return {
        "time": time.monotonic(),
        "step": int(state.ledger["epoch"][0]),
        "tiers": tiers,
        "block_size": runtime.config.block_size,
        "stats": stats(runtime).to_dict(),
    }


class BlockSample(NamedTuple):
    """Some blocks at one moment; one entry a block."""

    live: NDArray[np.bool_]  # it holds content, in any tier
    used: NDArray[np.bool_]  # a table names it
    content: NDArray[np.int64]  # differs when the block was given to other content; 0: unpublished


def sample_blocks(runtime: Runtime, ids: NDArray[np.int64]) -> BlockSample:
    """The blocks ``ids`` now, for metrics. O(len(ids))."""
    state = runtime.ledger.state
    blocks = state.blocks
    # Field by field: taking whole records costs a hundred times as much.
    used = blocks["ref_count"][ids] > 0
    live = used | ((blocks["device_frame"][ids] | blocks["host_frame"][ids]) != 0)
    # Of a free id the field is a link. A node may be reused as well, its hash then differs.
    node = blocks["node"][ids] * live
    content = (node.astype(np.int64) << 32) | state.nodes["hash"][node]
    return BlockSample(live, used, content * (node > 0))


def _block_owners(state: State) -> NDArray[np.int64]:
    """For each block the id of its only sequence, or a code."""
    blocks = state.blocks
    owner = np.where(blocks["ref_count"] > 0, SHARED, CACHED).astype(np.int64)
    single = blocks["ref_count"] == 1
    for record in np.flatnonzero(state.sequences["state"]):
        table = state.tables[record, GROUP]
        start, count = int(table["start"]), int(table["num_blocks"])
        ids = state.table[start : start + count]
        owner[ids[single[ids]]] = int(state.sequences["arrival"][record])
    owner[blocks["num_pins"] > 0] = PINNED
    return owner
