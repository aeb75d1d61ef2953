"""A ledger without a store: the tests play the engine and read the records."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem.ledger import Ledger, StepArrays
from kvmem.ledger.state import DEVICE, GROUP, HOST, RESIDENT, SWAPPED, WAITING
from kvmem.plan import Plan

STATES = {WAITING: "WAITING", RESIDENT: "RESIDENT", SWAPPED: "SWAPPED"}


def ids(*values: int) -> NDArray[np.int32]:
    """int32 values."""
    return np.array(values, np.int32)


def counts(*values: int) -> NDArray[np.int64]:
    """int64 values."""
    return np.array(values, np.int64)


class Play:
    """Short names for what a Manager would do with its ledger."""

    def __init__(
        self,
        device: int = 8,
        host: int = 8,
        block: int = 4,
        *,
        tier_policy: str = "write_back",
        watermarks: tuple[int, int] = (0, 0),
        fills: bool = False,
        hash_seed: int | None = 1,
    ) -> None:
        self.ledger = Ledger(
            device_blocks=device,
            host_blocks=host,
            block_size=block,
            tier_policy=tier_policy,
            watermarks=watermarks,
            record_fills=fills,
            hash_seed=hash_seed,
        )

    @property
    def state(self) -> Any:
        return self.ledger.state

    # --- acts -----------------------------------------------------------------------------------

    def create(self, tokens: Any, name: bytes = b"", **options: Any) -> int:
        """A sequence of these tokens; an int stands for 0, 1, 2, ..."""
        values = np.arange(tokens) if isinstance(tokens, int) else np.array(list(tokens))
        s = self.ledger.create(values.astype(np.int32), namespace=name, **options)
        self.ledger.verify()
        return s

    def plan(self, *seqs: int, **options: Any) -> tuple[Plan, StepArrays]:
        """An open step."""
        planned = self.ledger.plan_step(ids(*seqs), **options)
        self.ledger.verify()
        return planned

    def end(self, arrays: StepArrays, commit: bool = True) -> Plan:
        plan = self.ledger.end_step(arrays.epoch, commit=commit)
        self.ledger.verify()
        return plan

    def run(self, *seqs: int, **options: Any) -> tuple[Plan, StepArrays]:
        """A whole step."""
        plan, arrays = self.plan(*seqs, **options)
        self.end(arrays)
        return plan, arrays

    def made(self, tokens: Any, name: bytes = b"", **options: Any) -> int:
        """A sequence whose tokens are all computed."""
        s = self.create(tokens, name, **options)
        self.run(s)
        return s

    def append(self, s: int, *tokens: int, draft: bool = False) -> None:
        self.ledger.append(ids(s), counts(len(tokens)), ids(*tokens), draft)
        self.ledger.verify()

    def accept(self, s: int, kept: int, token: int) -> Plan:
        plan = self.ledger.accept(ids(s), counts(kept), ids(token))
        self.ledger.verify()
        return plan

    def truncate(self, s: int, length: int) -> Plan:
        plan = self.ledger.truncate(ids(s), counts(length))
        self.ledger.verify()
        return plan

    def fork(self, s: int, n: int = 1) -> list[int]:
        children = self.ledger.fork(s, n)
        self.ledger.verify()
        return children

    def free(self, *seqs: int) -> Plan:
        plan = self.ledger.free(ids(*seqs))
        self.ledger.verify()
        return plan

    def swap_out(self, *seqs: int) -> Plan:
        plan = self.ledger.swap_out(ids(*seqs))
        self.ledger.verify()
        return plan

    def swap_in(self, *seqs: int) -> Plan:
        plan = self.ledger.swap_in(ids(*seqs))
        self.ledger.verify()
        return plan

    def give_up(self, *seqs: int) -> Plan:
        plan = self.ledger.give_up(ids(*seqs))
        self.ledger.verify()
        return plan

    def evict(self, num_blocks: int, tier: int = DEVICE) -> tuple[int, Plan]:
        evicted = self.ledger.evict(num_blocks, tier)
        self.ledger.verify()
        return evicted

    def clean(self, max_blocks: int) -> Plan:
        plan = self.ledger.clean(max_blocks)
        self.ledger.verify()
        return plan

    def pin(self, *blocks: int, change: int = 1) -> Plan:
        plan = self.ledger.change_pins(ids(*blocks), change)
        self.ledger.verify()
        return plan

    def reset(self, name: bytes | None = None) -> Plan:
        plan = self.ledger.reset(name)
        self.ledger.verify()
        return plan

    # --- looking --------------------------------------------------------------------------------

    def q(self, s: int, field: str) -> int:
        """A field of a sequence."""
        if field == "num_cached":
            return self.ledger.num_cached(s)  # a forecast before the first plan
        return int(self.state.sequences[field][s])

    def b(self, block: int, field: str) -> int:
        """A field of a block."""
        return int(self.state.blocks[field][block])

    def of(self, field: str) -> int:
        """A field of the ledger's record."""
        return int(self.state.ledger[field][0])

    def pool(self, field: str, tier: int = DEVICE) -> int:
        return int(self.state.pools[field][tier])

    def at(self, s: int) -> str:
        """The state of a sequence by name."""
        return STATES[self.q(s, "state")]

    def table(self, s: int) -> list[int]:
        return [int(b) for b in self.ledger.table_of(s)]

    def found(self, tokens: Any, name: bytes = b"") -> int:
        """Cached blocks of a prompt."""
        s = self.create(tokens, name, publish=False)
        number = len(self.ledger.look_up(s))
        self.free(s)
        return number

    def host_frame(self, block: int, field: str) -> int:
        first = self.pool("first", HOST)
        return int(self.state.frames[field][first + self.b(block, "host_frame")])

    def device_frame(self, block: int, field: str) -> int:
        return int(self.state.frames[field][self.b(block, "device_frame")])

    def lru(self, tier: int = DEVICE) -> list[int]:
        """Blocks of the evictable frames, oldest first."""
        first, found = self.pool("first", tier), []
        f = self.pool("oldest", tier)
        while f:
            found.append(int(self.state.frames["block"][first + f]))
            f = int(self.state.frames["next"][first + f])
        return found

    def paths(self) -> Counter[tuple[int, ...]]:
        """Each node as its namespace id and token path, with the block it serves."""
        state, found = self.state, Counter[tuple[int, ...]]()
        for n in np.flatnonzero(state.node_blocks[:, GROUP]):
            tokens: list[int] = []
            i = int(n)
            while i > 0:
                tokens[:0] = state.node_keys[i].tolist()
                i = int(state.nodes["parent"][i])
            found[(-i, *tokens)] = int(state.node_blocks[n, GROUP])
        return found

    def meaning(self) -> dict[str, Any]:
        """All that a caller could tell apart: tables, counts, places, lists, nodes. The order of
        free lists, transfer ids and counters of stats() are left out."""
        state = self.state
        live = [int(s) for s in np.flatnonzero(state.sequences["state"])]
        names = ("state", "num_tokens", "num_drafts", "num_computed", "num_stored",
                 "num_published", "num_cached", "publish", "queried", "step")  # fmt: skip
        blocks = {}
        for b in range(1, len(state.blocks)):
            if self.b(b, "device_frame") or self.b(b, "host_frame"):
                fields = ("ref_count", "num_resident", "num_tokens", "num_pins", "bits")
                blocks[b] = (
                    *(self.b(b, f) for f in fields),
                    bool(self.b(b, "device_frame")),
                    bool(self.b(b, "host_frame")),
                    self.host_frame(b, "num_tokens") if self.b(b, "host_frame") else 0,
                )
        return {
            "sequences": {
                s: (*(self.q(s, f) for f in names), self.table(s), *self.ledger.tokens_of(s))
                for s in live
            },
            "blocks": blocks,
            "paths": self.paths(),
            "lru": (self.lru(DEVICE), self.lru(HOST)),
            "free": (self.pool("num_free"), self.pool("num_free", HOST)),
        }

    def drain(self) -> None:
        """Free, unpin and evict everything; each tier is empty again (DRAIN)."""
        for epoch in list(self.ledger.open_steps):
            self.ledger.end_step(epoch, commit=False)
        pinned = np.repeat(np.arange(len(self.state.blocks)), self.state.blocks["num_pins"])
        for b in pinned:
            self.pin(int(b), change=-1)
        live = [int(s) for s in np.flatnonzero(self.state.sequences["state"])]
        self.free(*live)
        self.evict(1000, DEVICE)
        self.evict(1000, HOST)
        assert self.pool("num_free") == self.pool("num_frames")
        assert self.pool("num_free", HOST) == self.pool("num_frames", HOST)
        assert self.of("num_nodes") == self.of("num_blocks_used") == 0
