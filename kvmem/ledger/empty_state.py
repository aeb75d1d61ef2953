"""The ledger of a new Manager: nothing is used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .state import (
    BLOCK,
    COPIES,
    FRAME,
    LEDGER,
    LOOKAHEAD,
    MAX_ROUNDS,
    NAMESPACE,
    NODE,
    NUM_SPAN_CLASSES,
    NUM_TIERS,
    POOL,
    SEQUENCE,
    SPAN_CLASS,
    TABLE,
    TIER_POLICIES,
    State,
    records,
)


def make_hash_keys(seed: int, block_size: int) -> NDArray[np.int64]:
    """The random numbers that the trie hashes with, from a secret seed."""
    low, high = -(2**63), 2**63 - 1
    return np.random.default_rng(seed).integers(low, high, block_size + 2, np.int64, endpoint=True)


def make_pools(counts: tuple[int, int], *, quarantine: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """The pools of both tiers and their frames, all free. O(frames)."""
    pools = records(NUM_TIERS, POOL)
    frames = records(sum(count + 1 for count in counts), FRAME)
    first = 0
    for tier, count in enumerate(counts):
        pool = pools[tier : tier + 1]
        pool["first"] = first
        pool["num_frames"] = pool["num_free"] = count
        pool["free_head"], pool["free_tail"] = (1, count) if count else (0, 0)
        pool["quarantine"] = quarantine
        # ascending, so that blocks taken together lie together and their copies coalesce
        frames["next"][first + 1 : first + count] = np.arange(2, count + 1)
        frames["previous"][first + 2 : first + count + 1] = np.arange(1, count)
        first += count + 1
    return pools, frames


def make_state(
    *,
    device_blocks: int,
    host_blocks: int,
    block_size: int,
    tier_policy: str,
    watermarks: tuple[int, int],
    record_fills: bool,
    clears: bool,
    quarantine: bool,
    hash_seed: int,
) -> State:
    """Build the empty ledger: every frame, block id and node is free. `hash_seed` is a secret that
    nobody outside can guess: no crafted tokens collide then (trie.py). O(frames)."""
    counts = (device_blocks, host_blocks)
    num_blocks = 1 + sum(counts)
    ledger = records(1, LEDGER)
    ledger["num_groups"] = 1
    ledger["block_size"] = block_size
    ledger["id_bits"] = num_blocks.bit_length()
    ledger["tier_policy"] = TIER_POLICIES[tier_policy]
    ledger["clean_low"], ledger["clean_high"] = watermarks
    ledger["record_fills"] = record_fills
    ledger["clears"] = clears and not record_fills
    pools, frames = make_pools(counts, quarantine=quarantine)
    blocks = records(num_blocks, BLOCK)
    blocks["node"][1:-1] = np.arange(2, num_blocks)
    nodes = records(num_blocks, NODE)
    nodes["parent"][1:-1] = np.arange(2, num_blocks)
    ledger["block_free"] = ledger["node_free"] = 1 if num_blocks > 1 else 0
    spans = records(2 * NUM_SPAN_CLASSES, SPAN_CLASS)
    spans["free_head"] = -1
    sequences = records(65, SEQUENCE)
    sequences["next_free"][1:-1] = np.arange(2, 65)
    ledger["sequence_free"] = 1
    fills = 4 * device_blocks + 4 if record_fills or clears else 1
    return State(
        ledger=ledger,
        pools=pools,
        blocks=blocks,
        frames=frames,
        nodes=nodes,
        node_blocks=np.zeros((num_blocks, 1), np.int32),
        node_keys=np.zeros((num_blocks, block_size), np.int32),
        index=np.zeros(max(16, num_blocks * 3 // 2), np.uint32),
        hash_keys=make_hash_keys(hash_seed, block_size),
        lookahead=np.zeros(LOOKAHEAD, np.int64),
        namespaces=records(8, NAMESPACE),
        sequences=sequences,
        tables=records((65, 1), TABLE),
        spans=spans,
        tokens=np.zeros(1 << 12, np.int32),
        table=np.zeros(1 << 8, np.int32),
        frame_table=np.zeros(1 << 8, np.int32),
        out_list=np.zeros((64, 4), np.int32),
        in_list=np.zeros((64, 4), np.int32),
        copy_list=np.zeros((64, 3), np.int32),
        fill_list=np.zeros(fills, np.int32),
        to_clean=np.zeros(num_blocks, np.int32),
        rounds=np.zeros((MAX_ROUNDS, COPIES), np.int64),
    )
