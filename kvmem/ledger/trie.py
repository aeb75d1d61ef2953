"""The prefix trie: nodes found by an open-addressing table, compared by their tokens (R4).

A node stands for one full block behind one prefix: (parent node or namespace, token row). The
table only says where to look; a hit needs the same parent and the same token row, so a hash
collision costs a probe and can never serve wrong K/V. Hashes are chained from the parent's,
start from a random seed, and keep 32 bits. Deletion shifts entries back, so there are no
tombstones (Knuth, The Art of Computer Programming 3, 6.4, algorithm R).

A parent is a node id, or minus a namespace id for the first block of a prefix. `start` is the
index in `state.tokens` of a row's first key.
"""

from __future__ import annotations

import numpy as np

from .jit import compiled
from .state import GROUP, State

MASK = 0xFFFFFFFF
FACTOR = 0x5BD1E995  # odd and below 2**31: its product with 32 bits stays within int64


@compiled
def mix(value: int) -> int:
    """Spread 32 bits over 32 bits. O(1)."""
    value = ((value ^ (value >> 16)) * FACTOR) & MASK
    value = ((value ^ (value >> 13)) * FACTOR) & MASK
    return value ^ (value >> 15)


@compiled
def parent_hash(state: State, parent: int) -> int:
    """The hash that children of `parent` are chained from. O(1)."""
    if parent > 0:
        return np.int64(state.nodes[parent].hash)
    return mix((np.int64(state.ledger[0].hash_seed) - parent * 0x3779B97F) & MASK)


@compiled
def hash_row(state: State, chained: int, start: int) -> int:
    """The hash of the token row at `start` behind the hash `chained`. O(block_size)."""
    value = mix((chained + 1) & MASK)
    for i in range(start, start + state.ledger[0].block_size):
        value = ((value ^ (np.int64(state.tokens[i]) & MASK)) * FACTOR) & MASK
        value ^= value >> 15
    return mix(value)


@compiled
def home(state: State, row_hash: int) -> int:
    """The index entry where a hash belongs. O(1)."""
    return (row_hash * state.index.shape[0]) >> 32


@compiled
def after(state: State, i: int) -> int:
    """The index entry behind `i`, cyclically. O(1)."""
    i += 1
    return 0 if i == state.index.shape[0] else i


@compiled
def has_row(state: State, n: int, start: int) -> bool:
    """True when node `n` has the token row at `start`. O(block_size)."""
    for j in range(state.ledger[0].block_size):
        if state.node_keys[n, j] != state.tokens[start + j]:
            return False
    return True


@compiled
def find_child(state: State, parent: int, row_hash: int, start: int) -> int:
    """The node behind `parent` with the token row at `start`, else 0. O(block_size)."""
    i = home(state, row_hash)
    while True:
        n = int(state.index[i])
        if n == 0:
            return 0
        node = state.nodes[n]
        if node.hash == row_hash and node.parent == parent and has_row(state, n, start):
            return n
        i = after(state, i)


@compiled
def count_child(state: State, parent: int, change: int) -> None:
    """Add `change` to the number of children of a node or namespace. O(1)."""
    if parent > 0:
        state.nodes[parent].num_children += change
    else:
        state.namespaces[-parent].num_children += change


@compiled
def insert_node(state: State, parent: int, row_hash: int, start: int, b: int) -> int:
    """Make the node of block `b`; the caller knows there is none yet. O(block_size)."""
    ledger = state.ledger[0]
    n = int(ledger.node_free)
    ledger.node_free = state.nodes[n].parent
    ledger.num_nodes += 1
    state.nodes[n].parent = parent
    state.nodes[n].num_children = 0
    state.nodes[n].hash = row_hash
    state.node_blocks[n, GROUP] = b
    for j in range(ledger.block_size):
        state.node_keys[n, j] = state.tokens[start + j]
    count_child(state, parent, 1)
    i = home(state, row_hash)
    while state.index[i] != 0:
        i = after(state, i)
    state.index[i] = n
    return n


@compiled
def close_gap(state: State, gap: int) -> None:
    """Move later entries up so that none is cut off from its home by the hole. O(probes)."""
    i = gap
    while True:
        i = after(state, i)
        other = int(state.index[i])
        if other == 0:
            return
        at = home(state, np.int64(state.nodes[other].hash))
        # an entry whose home lies cyclically in (gap, i] must stay where it is
        stays = (gap < at and at <= i) if gap <= i else (at > gap or at <= i)
        if not stays:
            state.index[gap] = other
            state.index[i] = 0
            gap = i


@compiled
def remove_node(state: State, n: int) -> None:
    """Forget a node; its block is no longer found. O(probes)."""
    ledger = state.ledger[0]
    i = home(state, np.int64(state.nodes[n].hash))
    while state.index[i] != n:
        i = after(state, i)
    state.index[i] = 0
    close_gap(state, i)
    count_child(state, int(state.nodes[n].parent), -1)
    state.node_blocks[n, GROUP] = 0
    state.nodes[n].hash = 0
    state.nodes[n].parent = ledger.node_free
    ledger.node_free = n
    ledger.num_nodes -= 1
