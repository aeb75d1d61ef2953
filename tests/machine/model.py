"""A naive model of a Manager: lists, dicts and sets, one object a sequence, no frames of its own.

It knows each sequence's tokens and what their K/V has to be. What only the LRU decides, which
cached blocks are still there, is read from the Manager (`World`) and held against what may be
there; everything else is computed here, by rules that are as short as they can be.

A token's K/V is a stamp: numbers drawn from a hash of its namespace and of all keys up to it. So a
block that is served for other tokens, another place or another tenant never holds the right ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem import Manager, Sequence
from kvmem.tokens import namespace_key

LAYERS, HEAD_DIM = 2, 4
WIDTH = LAYERS * 2 * HEAD_DIM  # of a stamp: K then V of each layer
MASK = 2**64 - 1
SPREAD = np.random.default_rng(7).integers(1, 2**63, WIDTH, dtype=np.uint64) * 2 + 1

Extra = tuple[int, int, bytes]
Chain = int  # the hash of a namespace and of all keys up to a position
Floats = NDArray[np.float32]
KnownRows = dict[Any, tuple[tuple[Chain, ...], Floats]]


def digest_number(*parts: object) -> int:
    """64 bits that stand for these parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def root_of(namespace: object) -> Chain:
    """The chain before the first token of a namespace."""
    return digest_number("root", namespace_key(namespace))


def after(chain: Chain, key: int) -> Chain:
    """The chain one key further."""
    mixed = ((chain ^ (key + 0x632BE59BD9B4E019)) * 0x9E3779B97F4A7C15) & MASK
    return mixed ^ (mixed >> 29)


def stamps(chains: list[Chain]) -> Floats:
    """What K/V holds at these positions: `[positions, WIDTH]`, exact in float32, in [0, 1)."""
    numbers = np.array(chains, np.uint64)[:, None] * SPREAD[None, :]
    return (numbers >> np.uint64(41)).astype(np.float32) / np.float32(2**23)


def extra_key(digest: bytes, length: int, covered: bytes, offset: int) -> int:
    """The key of a position that an extra covers."""
    return digest_number("extra", digest, length, covered, offset)


def keys_of(tokens: list[int], extras: list[Extra]) -> list[int]:
    """What tells the positions of a prompt apart: tokens, or what an extra puts there."""
    keys = list(tokens)
    for start, length, digest in extras:
        covered = np.array(tokens[start : start + length], np.int32).tobytes()
        for i in range(length):
            keys[start + i] = extra_key(digest, length, covered, i)
    return keys


@dataclass(eq=False)
class ModelSequence:
    """One sequence as the user sees it, and what its blocks must hold."""

    handle: Sequence
    namespace: object
    tokens: list[int]
    keys: list[int]
    publish: bool = True
    max_cached: int | None = None
    priority: int = 0
    state: str = "WAITING"
    drafts: int = 0
    computed: int = 0
    stored: int = 0  # tokens with K/V; above `computed` only on a full hit
    cached: int = 0
    queried: bool = False
    fresh: bool = False  # swapped in and not stepped since
    step: object = None  # the open step it is planned in
    chains: list[Chain] = field(default_factory=list)
    rows: Floats = field(default_factory=lambda: np.zeros((0, WIDTH), np.float32))

    def __post_init__(self) -> None:
        self.record = self.handle._record
        self.id = self.handle.id
        self.extend([], start=0)

    def extend(self, more: list[int], *, start: int | None = None) -> None:
        """Append tokens (their own keys) and bring chains and stamps up to date."""
        begin = len(self.tokens) if start is None else start
        self.tokens.extend(more)
        self.keys.extend(more)
        chain = self.chains[begin - 1] if begin else root_of(self.namespace)
        for key in self.keys[begin:]:
            chain = after(chain, key)
            self.chains.append(chain)
        self.rows = np.concatenate([self.rows[:begin], stamps(self.chains[begin:])])

    def cut(self, length: int) -> None:
        """Keep the first tokens."""
        self.drafts = max(0, self.drafts - (len(self.tokens) - length))
        for values in (self.tokens, self.keys, self.chains):
            del values[length:]
        self.rows = self.rows[:length]
        self.computed = min(self.computed, length)
        self.stored = min(self.stored, length)
        self.cached = min(self.cached, length)

    def give_up(self) -> None:
        """Back to tokens alone."""
        self.state, self.fresh = "WAITING", False
        self.computed = self.stored = self.cached = 0

    def copy_for(self, child: Sequence) -> ModelSequence:
        """A fork."""
        twin = ModelSequence(
            child, self.namespace, list(self.tokens), list(self.keys), self.publish, self.max_cached
        )
        names = ("priority", "state", "drafts", "computed", "stored", "cached", "queried", "fresh")
        for name in names:
            setattr(twin, name, getattr(self, name))
        return twin

    @property
    def num_known(self) -> int:
        """Tokens that are no drafts."""
        return len(self.tokens) - self.drafts

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is kept longer."""
        return (-self.priority, self.id)

    def full_chains(self, block_size: int) -> list[Chain]:
        """The chains at the ends of its full, stored, accepted blocks."""
        count = min(self.stored, self.num_known) // block_size
        return [self.chains[(i + 1) * block_size - 1] for i in range(count)]


class World:
    """What the Manager holds right now: read from its records, interpreted here."""

    def __init__(
        self, manager: Manager, known: dict[Any, tuple[tuple[Chain, ...], Floats]]
    ) -> None:
        runtime: Any = manager._runtime
        self.ledger = runtime.ledger
        state = self.ledger.state
        self.device_frame: list[int] = state.blocks["device_frame"].tolist()
        self.host_frame: list[int] = state.blocks["host_frame"].tolist()
        self.num_tokens: list[int] = state.blocks["num_tokens"].tolist()
        self.cached: dict[Chain, int] = {}  # chain at the end of a cached block -> its id
        self.node_rows: dict[int, Floats] = {}  # cached block -> what it must hold
        self._names = {number: name for name, number in self.ledger._namespaces.items()}
        self._extras = sorted((first, key) for key, first in runtime.extras._ids.items())
        self._known = known
        self._ends: dict[int, Chain] = {}
        self._nodes, self._node_keys = state.nodes, state.node_keys
        self._node_blocks = state.node_blocks[:, 0].tolist()
        for node, block in enumerate(self._node_blocks):
            if block:
                self.cached[self._end_of(node)] = block

    def table(self, seq: ModelSequence) -> list[int]:
        """The block ids of a sequence, also of one that was freed in an open step."""
        return [int(b) for b in self.ledger.table_of(seq.record)]

    def _end_of(self, node: int) -> Chain:
        if node < 0:
            return digest_number("root", self._names[-node])
        if node not in self._ends:
            before = self._end_of(int(self._nodes["parent"][node]))
            row = tuple(self._node_keys[node].tolist())
            entry = self._known.get((before, row))
            if entry is None:
                chain, chains = before, []
                for key in row:
                    chain = after(chain, key if key >= 0 else self._extra(key))
                    chains.append(chain)
                entry = self._known[before, row] = (tuple(chains), stamps(chains))
            self._ends[node] = entry[0][-1]
            self.node_rows[self._node_blocks[node]] = entry[1]
        return self._ends[node]

    def _extra(self, key: int) -> int:
        for first, (digest, length, covered) in reversed(self._extras):
            if first <= -key < first + length:
                return extra_key(digest, length, covered, -key - first)
        raise AssertionError(f"key {key} of a node belongs to no extra")


@dataclass
class RowPlan:
    """What the model says about one row of a step."""

    seq: ModelSequence
    reason: str = "planned"
    num_tokens: int = 0
    found: list[int] = field(default_factory=list)
    computed: int = 0  # position of its first token
    stored: int = 0  # tokens with K/V before it writes
    copy_source: int = 0  # the block it copies on write
    table: list[int] = field(default_factory=list)  # before the step
    before: dict[str, Any] = field(default_factory=dict)  # what an abort puts back, by field


class Planner:
    """The naive answer to "what does this step do, and is there room": sets and sums (R7)."""

    def __init__(self, model: Model, world: World, *, budget: int | None, reserve: int) -> None:
        self.model, self.world = model, world
        self.budget, self.reserve = budget, reserve
        self.room = model.device_free(world) + len(model.device_evictable(world))
        self.evictable = set(model.device_evictable(world))
        self.wanted: set[int] = set()  # blocks that planned rows need on the device
        self.taken = 0
        self.claimed = 0
        self.computing: set[Chain] = set()
        self.publishing_step = budget is not None

    def plan(self, seqs: list[ModelSequence], limits: list[int] | None = None) -> list[RowPlan]:
        """Each row in order."""
        each = [None] * len(seqs) if limits is None else limits
        return [self.row(seq, limit) for seq, limit in zip(seqs, each, strict=True)]

    def refusal(self, rows: list[RowPlan]) -> str:
        """Why not all of these rows fit: "room", "never", or "" if they do."""
        if self.reserve > self.model.device_blocks:
            return "never"
        if any(row.reason == "never" for row in rows):
            return "never"  # before any shortage: nobody is to wait for it
        reasons = [row.reason for row in rows if row.reason == "room"]
        if not reasons and self.left < self.reserve:  # rows that compute nothing did not ask for it
            reasons.append("room")
        return reasons[0] if reasons else ""

    @property
    def left(self) -> int:
        """Frames that the planned rows leave."""
        return self.room - self.taken - self.claimed

    def row(self, seq: ModelSequence, limit: int | None) -> RowPlan:
        size, row = self.model.block_size, RowPlan(seq, table=self.world.table(seq))
        row.found, next_chain = self.model.hits(seq, self.world)
        row.stored = seq.stored + len(row.found) * size
        row.computed = seq.computed
        if row.found:
            row.computed = max(seq.computed, min(row.stored, seq.num_known - 1))
        pending = len(seq.tokens) - row.computed
        wish = pending if limit is None else min(limit, pending)
        row.reason = self._reason(seq, wish, next_chain)
        if row.reason == "planned":
            row.num_tokens = wish if self.budget is None else min(wish, self.budget)
            self._take(row)
        if row.reason == "planned" and self.budget is not None:
            self.budget -= row.num_tokens
            if seq.publish and next_chain is not None:
                first, end = row.stored // size, row.computed + row.num_tokens
                for i in range(first, seq.num_known // size):
                    if i == first or i * size < end:
                        self.computing.add(seq.chains[(i + 1) * size - 1])
        return row

    def _reason(self, seq: ModelSequence, wish: int, next_chain: Chain | None) -> str:
        if wish == 0:
            return "idle"
        if self.model.blocks_for(len(seq.tokens)) + self.reserve > self.model.device_blocks:
            return "never"
        if self.budget == 0:
            return "budget"
        if self.budget is not None and next_chain in self.computing:
            return "arriving"
        return "planned"

    def _take(self, row: RowPlan) -> None:
        seq, world, size = row.seq, self.world, self.model.block_size
        wants = set(row.found) | (set(row.table) if seq.state != "RESIDENT" else set())
        wants -= self.wanted
        take = sum(1 for b in wants if not world.device_frame[b])
        claim = sum(1 for b in wants if b in self.evictable)
        end = max(row.stored, row.computed + row.num_tokens)
        take += self.model.blocks_for(end) - len(row.table) - len(row.found)
        if not row.found and end > row.stored and row.stored % size:
            b = row.table[row.stored // size]
            if self.model.is_shared(b, world):
                row.copy_source = b
                take += 1
        if take + claim + self.reserve > self.left:
            row.reason, row.num_tokens, row.copy_source = "room", 0, 0
            return
        self.taken += take
        self.claimed += claim
        self.wanted |= wants


class Model:
    """All sequences, pins and open steps of one Manager, and what follows from them."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        config = manager.config
        self.block_size = config.block_size
        self.device_blocks, self.host_blocks = config.device_blocks, config.host_blocks
        self.live: list[ModelSequence] = []
        self.ending: list[ModelSequence] = []  # freed in an open step
        self.copy_sources: list[int] = []  # blocks that open steps copied on write, once each
        self.pins: list[tuple[Any, list[int], list[Floats]]] = []  # pin, block ids, contents
        self.published: dict[Chain, object] = {}  # what may be cached -> its namespace
        self.known: KnownRows = {}
        self.counts = dict.fromkeys(
            (
                "steps",
                "prefix_query_tokens",
                "prefix_hit_tokens",
                "blocks_copied_on_write",
                "swap_outs",
                "swap_ins",
                "recomputes",
            ),
            0,
        )

    def world(self) -> World:
        """What is there now."""
        return World(self.manager, self.known)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def holders(self) -> list[ModelSequence]:
        """All that own blocks."""
        return self.live + self.ending

    # --- who relies on what -----------------------------------------------------------------------

    def references(self, world: World) -> dict[int, int]:
        """How many tables (and copies on write under way) name each block."""
        count: dict[int, int] = {}
        for seq in self.holders():
            for b in world.table(seq):
                count[b] = count.get(b, 0) + 1
        for b in self.copy_sources:
            count[b] = count.get(b, 0) + 1
        return count

    def pinned(self) -> set[int]:
        """Blocks that a live pin names."""
        return {b for _, blocks, _ in self.pins for b in blocks}

    def is_shared(self, block: int, world: World) -> bool:
        """True when a write into it has to copy it first (R3)."""
        cached = block in world.node_rows
        return cached or self.references(world)[block] > 1 or block in self.pinned()

    def device_free(self, world: World) -> int:
        """Frames that hold nothing."""
        return self.device_blocks - sum(1 for f in world.device_frame if f)

    def device_evictable(self, world: World) -> set[int]:
        """Blocks on the device that nobody relies on there."""
        used = self.pinned() | set(self.copy_sources)
        for seq in self.holders():
            if seq.state == "RESIDENT":
                used.update(world.table(seq))
        return {b for b, f in enumerate(world.device_frame) if f and b not in used}

    def host_free(self, world: World) -> int:
        """Host frames that hold nothing."""
        return self.host_blocks - sum(1 for f in world.host_frame if f)

    def host_evictable(self, world: World) -> set[int]:
        """Blocks with a host copy that no SWAPPED sequence relies on."""
        used: set[int] = set()
        for seq in self.holders():
            if seq.state == "SWAPPED":
                used.update(world.table(seq))
        return {b for b, f in enumerate(world.host_frame) if f and b not in used}

    # --- the cache --------------------------------------------------------------------------------

    def path(self, chains: list[Chain], first: int, limit: int, world: World) -> list[int]:
        """Cached blocks `first` to `limit` of a prompt, up to the first that is missing."""
        found = []
        for i in range(first, limit):
            block = world.cached.get(chains[(i + 1) * self.block_size - 1])
            if block is None:
                break
            found.append(block)
        return found

    def hits(self, seq: ModelSequence, world: World) -> tuple[list[int], Chain | None]:
        """The cached blocks that continue a sequence, and the chain of the block after them if all
        its tokens are known."""
        size = self.block_size
        first, known = seq.stored // size, seq.num_known // size
        published = int(world.ledger.state.sequences["num_published"][seq.record])
        assert published <= first
        if published != first or first >= known:
            return [], None
        limit = known
        if seq.max_cached is not None:
            limit = min(known, seq.max_cached // size)
        found = [] if seq.stored % size else self.path(seq.chains, first, limit, world)
        end = first + len(found)
        return found, seq.chains[(end + 1) * size - 1] if end < known else None

    def note_published(self, seq: ModelSequence) -> None:
        """Its full blocks may be in the trie from now on."""
        if seq.publish:
            for chain in seq.full_chains(self.block_size):
                self.published[chain] = namespace_key(seq.namespace)

    def forget_published(self, namespace: object, *, everything: bool) -> None:
        """A reset: nothing of it may be served any more."""
        key = namespace_key(namespace)
        self.published = {
            chain: name for chain, name in self.published.items() if not everything and name != key
        }
        for seq in self.holders():
            if everything or namespace_key(seq.namespace) == key:
                if self.world().table(seq):
                    seq.publish = False
                else:
                    seq.cached = 0
