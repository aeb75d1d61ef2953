"""The prefix trie: nodes found by an open-addressing table, compared by their tokens (R4).

A node stands for one full block behind one prefix: (parent node or namespace, token row). The
table only says where to look; a hit needs the same parent and the same token row, so a hash
collision costs a probe and can never serve wrong K/V. Deletion shifts entries back, so there are
no tombstones (Knuth, The Art of Computer Programming 3, 6.4, algorithm R).

Hashes are 32 bits and chained: the parent's is one more word of the row. They are multilinear,
`(k[0] + sum k[i] * word[i]) mod 2**64 >> 32` with secret random 64-bit k: strongly universal
(Lemire and Kaser, Strongly universal string hashing is fast, 2014), so no tokens can be prepared
to collide; and the products do not wait for each other, so they run as vectors.

A parent is a node id, or minus a namespace id for the first block of a prefix. `start` is the
index in `state.tokens` of a row's first key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import compiled, prefetch, wrap
from .state import GROUP, LOOKAHEAD, State

MASK = 0xFFFFFFFF


@compiled
def parent_hash(state: State, parent: int) -> int:
    """The hash that children of `parent` are chained from. O(1)."""
    if parent > 0:
        return np.int64(state.nodes[parent].hash)
    return (wrap(int(state.hash_keys[0]) * (1 - parent)) >> 32) & MASK


@compiled
def hash_row(state: State, chained: int, start: int) -> int:
    """The hash of the token row at `start` behind the hash `chained`. O(block_size)."""
    block_size = state.node_keys.shape[1]
    keys, words = state.hash_keys[2:], state.tokens[start : start + block_size]
    total = 0
    for i in range(block_size):
        total = wrap(total + int(keys[i]) * int(words[i]))
    first, second = int(state.hash_keys[0]), int(state.hash_keys[1])
    return (wrap(int(total) + first + second * int(chained)) >> 32) & MASK


@compiled
def home(state: State, row_hash: int) -> int:
    """The index entry where a hash belongs. O(1)."""
    return (row_hash * state.index.shape[0]) >> 32


@compiled
def node_in(state: State, held: int) -> int:
    """The node of an index entry, 0 none. O(1)."""
    return int(held) & ((1 << int(state.ledger[0].id_bits)) - 1)


@compiled
def entry_of(state: State, n: int, row_hash: int) -> int:
    """The index entry of a node: what a search reads of it when the hash is another one. O(1)."""
    return (int(n) | int(row_hash) << int(state.ledger[0].id_bits)) & MASK


@compiled
def after(state: State, i: int) -> int:
    """The index entry behind `i`, cyclically. O(1)."""
    i += 1
    return 0 if i == state.index.shape[0] else i


@compiled
def has_row(state: State, n: int, start: int) -> bool:
    """True when node `n` has the token row at `start`. O(block_size)."""
    block_size = state.node_keys.shape[1]
    keys, words = state.node_keys[n], state.tokens[start : start + block_size]
    difference = np.int32(0)  # no early way out: so it is done in vectors
    for j in range(block_size):
        difference = np.int32(difference | (keys[j] ^ words[j]))
    return bool(difference == 0)


@compiled
def find_child(state: State, parent: int, row_hash: int, start: int) -> int:
    """The node behind `parent` with the token row at `start`, else 0. O(block_size)."""
    i = home(state, row_hash)
    while True:
        held = int(state.index[i])
        if held == 0:
            return 0
        n = node_in(state, held)
        if held == entry_of(state, n, row_hash):
            node = state.nodes[n]
            if node.hash == row_hash and node.parent == parent and has_row(state, n, start):
                return n
        i = after(state, i)


@compiled
def find_path(
    state: State, parent: int, start: int, most: int, found: NDArray[np.int32], top: int
) -> int:
    """Follow the trie from `parent` along up to `most` rows from `start`, the blocks into
    `found[top:]`; return how many. O(their tokens).

    A row's hash needs no lookup, so some rows are hashed ahead and their records asked for: the
    cache misses of a long prompt overlap.
    """
    block_size = state.node_keys.shape[1]
    count = 0
    chained = parent_hash(state, parent)
    while count < most:
        batch = min(LOOKAHEAD, most - count)
        for k in range(batch):
            chained = hash_row(state, chained, start + (count + k) * block_size)
            state.lookahead[k] = chained
            prefetch(state.index, home(state, chained))
        for k in range(batch):
            n = node_in(state, int(state.index[home(state, int(state.lookahead[k]))]))
            prefetch(state.nodes, n)
            prefetch(state.node_keys, n)
            prefetch(state.node_blocks, n)
        for k in range(batch):
            row_hash = int(state.lookahead[k])
            parent = find_child(state, parent, row_hash, start + count * block_size)
            if parent == 0:
                return count
            found[top + count] = state.node_blocks[parent, GROUP]
            prefetch(state.blocks, int(found[top + count]))
            count += 1
    return count


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
    keys, words = state.node_keys[n], state.tokens[start : start + ledger.block_size]
    for j in range(ledger.block_size):
        keys[j] = words[j]
    count_child(state, parent, 1)
    i = home(state, row_hash)
    while state.index[i] != 0:
        i = after(state, i)
    state.index[i] = entry_of(state, n, row_hash)
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
        at = home(state, np.int64(state.nodes[node_in(state, other)].hash))
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
    while node_in(state, int(state.index[i])) != n:
        i = after(state, i)
    state.index[i] = 0
    close_gap(state, i)
    count_child(state, int(state.nodes[n].parent), -1)
    state.node_blocks[n, GROUP] = 0
    state.nodes[n].hash = 0
    state.nodes[n].parent = ledger.node_free
    ledger.node_free = n
    ledger.num_nodes -= 1


@compiled
def has_children(state: State, b: int) -> bool:
    """True when a published block has a cached child. O(1)."""
    n = state.blocks[b].node
    return bool(n != 0 and state.nodes[n].num_children > 0)
