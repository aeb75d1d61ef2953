"""`verify()`: rules R1-R5 checked from the records alone, in plain Python and NumPy.

Written without any function of the compiled ledger, so that a mistake there is not repeated here.
Raises `LedgerCorrupt` naming the first breach. O(frames + blocks + table entries + nodes).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .state import (
    BUSY,
    DEVICE,
    EXCLUSIVE,
    GROUP,
    HOST,
    IN_DEVICE_LRU,
    IN_HOST_LRU,
    MARKED,
    NUM_TIERS,
    QUEUED,
    RESIDENT,
    SWAPPED,
    SWEPT,
    UNSAVED,
    WAITING,
    State,
)

FRAME_FIELD = {DEVICE: "device_frame", HOST: "host_frame"}
TIER_NAME = {DEVICE: "device", HOST: "host"}


class LedgerCorrupt(AssertionError):
    """A rule of the design does not hold: a mistake of kvmem's own, never of the caller."""


def require(condition: bool, rule: str, detail: str) -> None:
    """Raise unless the rule holds."""
    if not condition:
        raise LedgerCorrupt(f"{rule}: {detail}")


def walk(links: NDArray[np.int32], head: int, limit: int, rule: str, name: str) -> list[int]:
    """The ids of a linked list; a loop or a repeated id is a breach."""
    ids: list[int] = []
    while head:
        ids.append(head)
        require(len(ids) <= limit, rule, f"{name} loops or is longer than {limit}")
        head = int(links[head])
    require(len(set(ids)) == len(ids), rule, f"{name} holds an id twice")
    return ids


def verify(state: State, copy_sources: list[int]) -> None:
    """Check the whole ledger. `copy_sources` are the blocks held by copies on write of open
    steps, once each."""
    tables = live_tables(state)
    check_tables(state, tables)
    check_counts(state, tables, copy_sources)
    for tier in range(NUM_TIERS):
        check_pool(state, tier)
    check_blocks(state)
    check_cleaning(state)
    check_trie(state)
    check_sequences(state, tables)
    check_spans(state)


def live_tables(state: State) -> dict[int, list[int]]:
    """Sequence record -> its block ids."""
    result = {}
    for s in np.flatnonzero(state.sequences["state"]):
        table = state.tables[s, GROUP]
        start, count = int(table["start"]), int(table["num_blocks"])
        result[int(s)] = [int(b) for b in state.table[start : start + count]]
    return result


def check_tables(state: State, tables: dict[int, list[int]]) -> None:
    """Each entry names a live block; a RESIDENT table's frame row is that of its blocks (R2)."""
    for s, table in tables.items():
        require(0 not in table, "R2", f"sequence {s} has an empty table entry")
        require(len(set(table)) == len(table), "R2", f"sequence {s} names a block twice")
        record = state.tables[s, GROUP]
        require(len(table) <= record["capacity"], "R2", f"table of {s} overflows its span")
        if state.sequences["state"][s] == RESIDENT:
            start = int(record["start"])
            frames = state.frame_table[start : start + len(table)]
            expected = state.blocks["device_frame"][table]
            require(bool((expected > 0).all()), "R1", f"a block of RESIDENT {s} has no frame")
            require(
                np.array_equal(frames, expected), "R2", f"the frame table of {s} is out of date"
            )


def check_counts(state: State, tables: dict[int, list[int]], copy_sources: list[int]) -> None:
    """ref_count and num_resident equal the number of entries naming the block (R2)."""
    refs: Counter[int] = Counter(copy_sources)
    residents: Counter[int] = Counter(copy_sources)
    for s, table in tables.items():
        refs.update(table)
        if state.sequences["state"][s] == RESIDENT:
            residents.update(table)
    for name, counts in (("ref_count", refs), ("num_resident", residents)):
        actual = state.blocks[name]
        expected = np.zeros(len(actual), np.int64)
        for b, count in counts.items():
            expected[b] = count
        wrong = np.flatnonzero(actual != expected)
        if len(wrong):
            b = int(wrong[0])
            require(False, "R2", f"{name} of block {b} is {actual[b]}, counted {expected[b]}")


def check_pool(state: State, tier: int) -> None:
    """Each frame is free, or holds the block that names it; lists and sums agree (R1)."""
    pool = state.pools[tier]
    name, count = TIER_NAME[tier], int(pool["num_frames"])
    first = int(pool["first"])
    frames = state.frames[first : first + count + 1]
    free = walk(frames["next"], int(pool["free_head"]), count, "R1", f"{name} free list")
    back = walk(frames["previous"], int(pool["free_tail"]), count, "R1", f"{name} free list back")
    require(free == back[::-1], "R1", f"the {name} free list reads otherwise backwards")
    require(len(free) == pool["num_free"], "R1", f"{name} num_free is {pool['num_free']}")
    holders = state.blocks[FRAME_FIELD[tier]]
    used = np.flatnonzero(holders)
    require(len(set(holders[used])) == len(used), "R1", f"two blocks in one {name} frame")
    require(bool((frames["block"][free] == 0).all()), "R1", f"a free {name} frame holds a block")
    for b in used:
        require(
            int(frames["block"][holders[b]]) == b, "R1", f"{name} frame {holders[b]} denies {b}"
        )
    require(
        len(free) + len(used) == count, "R1", f"{name}: {len(free)} free + {len(used)} != {count}"
    )
    require(frames["block"][0] == 0, "R1", f"{name} null frame holds a block")
    lru = walk(frames["next"], int(pool["oldest"]), count, "R2", f"{name} LRU")
    back = walk(frames["previous"], int(pool["newest"]), count, "R2", f"{name} LRU backwards")
    require(lru == back[::-1], "R2", f"the {name} LRU reads otherwise backwards")
    require(len(lru) == pool["num_evictable"], "R2", f"{name} num_evictable is off")
    bit = IN_DEVICE_LRU if tier == DEVICE else IN_HOST_LRU
    flagged = set(holders[np.flatnonzero(state.blocks["bits"] & bit)].tolist())
    require(set(lru) == flagged, "R2", f"the {name} LRU and its bits differ")
    check_evictable(state, tier, set(lru))
    check_lru_order(state, tier, lru, frames["block"])


def check_evictable(state: State, tier: int, lru: set[int]) -> None:
    """The LRU holds exactly the evictable frames (R2)."""
    blocks = state.blocks
    if tier == DEVICE:
        able = (blocks["num_resident"] == 0) & (blocks["num_pins"] == 0)
    else:
        able = blocks["ref_count"] == blocks["num_resident"]
    frames = blocks[FRAME_FIELD[tier]]
    expected = set(frames[able & (frames > 0)].tolist())
    require(lru == expected, "R2", f"{TIER_NAME[tier]} evictable: {sorted(lru ^ expected)[:4]}")


def check_lru_order(state: State, tier: int, lru: list[int], block_of: NDArray[np.int32]) -> None:
    """A cached child comes before its parent, else the parent could go first (R4)."""
    place = {int(block_of[f]): i for i, f in enumerate(lru)}
    for b, i in place.items():
        if tier == HOST and state.blocks["device_frame"][b]:
            continue  # its host frame is not its last tier
        node = int(state.blocks["node"][b])
        parent = int(state.nodes["parent"][node]) if node else 0
        if parent > 0:
            above = place.get(int(state.node_blocks[parent, GROUP]))
            last_tier = (
                tier == DEVICE
                or not state.blocks["device_frame"][int(state.node_blocks[parent, GROUP])]
            )
            if above is not None and last_tier:
                require(i < above, "R4", f"block {b} is newer than its parent in tier {tier}")


def check_blocks(state: State) -> None:
    """Each block id is free or live, live ones have a frame, counts are in range (R1, R2, R3)."""
    blocks = state.blocks
    limit = len(blocks) - 1
    free = set(walk(blocks["node"], int(state.ledger["block_free"][0]), limit, "R1", "block ids"))
    require(len(free) + state.ledger["num_blocks_used"][0] == limit, "R1", "block ids are lost")
    block_size = int(state.ledger["block_size"][0])
    host = state.frames[int(state.pools["first"][HOST]) :]
    exclusive = state.ledger["tier_policy"][0] == EXCLUSIVE
    for b in range(1, len(blocks)):
        block = blocks[b]
        require(int(block["bits"]) & (MARKED | BUSY) == 0, "R2", f"block {b} is left marked")
        has_frame = bool(block["device_frame"] or block["host_frame"])
        if b in free:
            require(not has_frame and block["ref_count"] == 0, "R1", f"free block {b} is in use")
            continue
        require(has_frame, "R1", f"live block {b} has no frame")
        owned = bool(block["ref_count"] or block["num_pins"] or block["node"])
        require(owned, "R1", f"block {b} is kept without owner")
        require(0 <= block["num_tokens"] <= block_size, "R2", f"block {b} has too many tokens")
        if block["host_frame"]:
            copied = int(host["num_tokens"][block["host_frame"]])
            require(copied <= block["num_tokens"], "R3", f"host copy of {b} claims {copied}")
            clean = copied == block["num_tokens"]
            lost = block["ref_count"] > block["num_resident"] or not block["device_frame"]
            kept = bool(int(block["bits"]) & UNSAVED and block["device_frame"])  # a copy failed
            require(
                lost or kept or not exclusive, "R2", f"block {b} is in both tiers under exclusive"
            )
            require(
                clean or kept or not lost, "R5", f"the only safe copy of block {b} is incomplete"
            )
        else:
            swapped = block["ref_count"] > block["num_resident"]
            require(not swapped, "R5", f"block {b} of a SWAPPED sequence has no host copy")


def check_cleaning(state: State) -> None:
    """The swept run is the oldest end of the device LRU; the ring has each queued id once (R2)."""
    ledger, pool, bits = state.ledger[0], state.pools[DEVICE], state.blocks["bits"]
    frames = state.frames[: int(pool["num_frames"]) + 1]
    lru = walk(frames["next"], int(pool["oldest"]), len(frames), "R2", "device LRU")
    swept = lru[: int(ledger["num_swept"])]
    marked = state.blocks["device_frame"][np.flatnonzero(bits & SWEPT)]
    require(set(swept) == set(marked.tolist()), "R2", "the swept frames are not the oldest")
    newest = swept[-1] if swept else 0
    require(newest == ledger["newest_swept"], "R2", f"newest_swept is {ledger['newest_swept']}")
    places = int(ledger["queue_begin"]) + np.arange(int(ledger["num_queued"]))
    ring = state.to_clean[places % len(state.to_clean)].tolist()
    queued = np.flatnonzero(bits & QUEUED).tolist()
    require(sorted(ring) == queued, "R2", "the ring of blocks to clean and their bits differ")


def check_trie(state: State) -> None:
    """Nodes: found where their hash says, parents and blocks agree, full blocks only (R4)."""
    nodes, bits = state.nodes, int(state.ledger["id_bits"][0])
    index = state.index & np.uint32((1 << bits) - 1)
    tags = (nodes["hash"][index].astype(np.int64) << bits & 0xFFFFFFFF) | index
    require(bool((tags == state.index)[index > 0].all()), "R4", "an index entry has another's hash")
    live = [int(n) for n in np.flatnonzero(state.node_blocks[:, GROUP])]
    require(len(live) == state.ledger["num_nodes"][0], "R4", "num_nodes is off")
    indexed = sorted(int(n) for n in index[index > 0])
    require(indexed == live, "R4", "the index and the nodes differ")
    children: Counter[int] = Counter()
    rows: set[tuple[int, bytes]] = set()
    block_size = int(state.ledger["block_size"][0])
    for n in live:
        b = int(state.node_blocks[n, GROUP])
        parent = int(nodes["parent"][n])
        require(int(state.blocks["node"][b]) == n, "R4", f"node {n} and block {b} disagree")
        require(int(state.blocks["num_tokens"][b]) == block_size, "R4", f"block {b} is not full")
        require(parent < 0 or state.node_blocks[parent, GROUP] > 0, "R4", f"parent of {n} is gone")
        children[parent] += 1
        row = (parent, state.node_keys[n].tobytes())
        require(row not in rows, "R4", f"node {n} is published twice")
        rows.add(row)
        check_reachable(state, n)
    for n in live:
        require(nodes["num_children"][n] == children[n], "R4", f"children of node {n}")
    for i in range(1, len(state.namespaces)):
        counted = state.namespaces["num_children"][i]
        require(counted == children[-i], "R4", f"children of namespace {i}")


def check_reachable(state: State, n: int) -> None:
    """No hole in the index between a node's home and its entry (R4)."""
    size = len(state.index)
    i = (int(state.nodes["hash"][n]) * size) >> 32
    ids = (1 << int(state.ledger["id_bits"][0])) - 1
    while int(state.index[i]) & ids != n:
        require(state.index[i] != 0, "R4", f"node {n} can't be found")
        i = (i + 1) % size


def check_sequences(state: State, tables: dict[int, list[int]]) -> None:
    """Lengths, states and published paths of sequences agree with their tables (R2, R4)."""
    block_size = int(state.ledger["block_size"][0])
    require(len(tables) == state.ledger["num_sequences"][0], "R2", "num_sequences is off")
    for s, table in tables.items():
        q = state.sequences[s]
        stored, step = int(q["num_stored"]), int(q["step"])
        require(q["state"] in (WAITING, RESIDENT, SWAPPED), "R2", f"state of sequence {s}")
        require(0 <= q["num_computed"] <= q["num_tokens"], "R2", f"num_computed of {s}")
        require(q["num_computed"] <= stored <= q["num_tokens"], "R2", f"num_stored of {s}")
        require(0 <= q["num_drafts"] <= q["num_tokens"], "R2", f"num_drafts of {s}")
        known = int(q["num_tokens"]) - int(q["num_unknown"])
        require(0 <= known <= q["num_tokens"], "R2", f"num_unknown of {s}")
        require(not (q["state"] == WAITING and table), "R2", f"WAITING {s} has blocks")
        require(not (step and q["state"] != RESIDENT), "R2", f"planned {s} is not RESIDENT")
        if not step:
            need = -(-stored // block_size)
            require(len(table) == need, "R2", f"sequence {s}: {len(table)} blocks for {stored}")
        check_path(state, s, table, block_size)
        require(q["num_published"] * block_size <= known, "R5", f"{s} published unknown tokens")


def check_path(state: State, s: int, table: list[int], block_size: int) -> None:
    """A sequence's published blocks form a path whose rows are its own tokens (R4)."""
    q = state.sequences[s]
    parent = -int(q["namespace"])
    for i in range(int(q["num_published"])):
        n = int(state.blocks["node"][table[i]])
        require(n > 0 and state.nodes["parent"][n] == parent, "R4", f"path of {s} breaks at {i}")
        start = int(q["keys_start"]) + i * block_size
        keys = state.tokens[start : start + block_size]
        require(np.array_equal(state.node_keys[n], keys), "R4", f"block {i} of {s}: other tokens")
        parent = n
    for above, b in pairwise(table):  # a published block never stands on one that is not its parent
        n = int(state.blocks["node"][b])
        parent_is_above = n == 0 or state.nodes["parent"][n] == state.blocks["node"][above]
        require(
            bool(parent_is_above), "R4", f"block {b} of {s} hangs on another block than {above}"
        )
    for i, b in enumerate(table[: int(q["num_stored"]) // block_size]):
        require(int(state.blocks["num_tokens"][b]) == block_size, "R5", f"block {i} of {s}")


def check_spans(state: State) -> None:
    """No two rows overlap (R2)."""
    live = np.flatnonzero(state.sequences["state"])
    spans = []
    for s in live:
        q = state.sequences[s]
        capacity = int(q["tokens_capacity"])
        for start in {int(q["tokens_start"]), int(q["keys_start"])}:
            if capacity:
                spans.append((start, start + capacity))
    check_disjoint(spans, int(state.ledger["tokens_top"][0]), "tokens")
    rows = [state.tables[s, GROUP] for s in live]
    check_disjoint(
        [(int(r["start"]), int(r["start"] + r["capacity"])) for r in rows if r["capacity"]],
        int(state.ledger["table_top"][0]),
        "table",
    )


def check_disjoint(spans: list[tuple[int, int]], top: int, name: str) -> None:
    """Spans do not overlap and end below the top."""
    end = 0
    for start, stop in sorted(spans):
        require(start >= end, "R2", f"two {name} spans overlap at {start}")
        end = stop
    require(end <= top, "R2", f"a {name} span lies above {top}")
