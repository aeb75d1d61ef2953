"""A real Manager, a plain model beside it, and what must hold between the two at any moment."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import kvmem
from kvmem.ledger.empty_state import make_hash_keys
from kvmem.ledger.state import DEVICE, GROUP, HOST
from kvmem.sim_options import SimOptions
from kvmem.store.device import Stream

NAMESPACES = (None, "tenant")
COPY_STREAMS = (Stream.OUT, Stream.IN)
SCRATCH_FIELDS = {
    "error_row", "error_needed", "error_available", "num_reclaimed", "num_needed",
    "retired_out", "retired_in",
}  # fmt: skip


class Broken(AssertionError):
    """The driver saw something that a rule forbids."""


class BodyFailed(Exception):
    """Raised by the driver itself inside a step."""


def require(condition: bool, message: str) -> None:
    """Raise Broken unless the rule holds."""
    if not condition:
        raise Broken(message)


@dataclass(frozen=True)
class Setup:
    """One small Manager and how long it is driven."""

    device_blocks: int = 7
    host_blocks: int = 7
    block_size: int = 2
    tier_policy: str | None = None
    watermarks: tuple[float, float] | None = None
    zero_on_free: str = "never"
    debug: bool = False
    num_ops: int = 160
    hold_out: bool = False  # what bounces comes back while its copies out are held
    racing: bool = False  # copies run while the next calls do; else they end unless held
    sim: SimOptions | None = None  # on the simulated device, which is always racing

    def config(self) -> kvmem.Config:
        """The Config it stands for: one layer, one head, two floats a token each for K and V."""
        return kvmem.Config(
            num_layers=1,
            num_kv_heads=1,
            head_dim=2,
            dtype=torch.float32,
            device="cpu" if self.sim is None else "sim",
            sim=self.sim,
            block_size=self.block_size,
            device_blocks=self.device_blocks,
            host_blocks=self.host_blocks,
            tier_policy=self.tier_policy,
            watermarks=self.watermarks,
            zero_on_free=self.zero_on_free,
            debug=self.debug,
        )


@dataclass
class Known:
    """What the model knows of a sequence."""

    seq: kvmem.Sequence
    namespace: str | None
    tokens: list[int]
    drafts: int = 0
    publish: bool = True


@dataclass
class Opened:
    """A planned step and what an abort has to bring back."""

    step: kvmem.Step
    before: dict[int, tuple[Any, ...]]
    nodes: set[tuple[Any, ...]] | None  # None: not looked at this time
    freed: dict[int, Known] = field(default_factory=dict)  # it still stamps what it computes


def stamps(namespace: str | None, tokens: list[int]) -> np.ndarray:
    """float32 `[len(tokens), 2]`: two exact numbers that stand for each prefix."""
    code = zlib.crc32(repr(namespace).encode())
    rows = []
    for token in tokens:
        code = zlib.crc32(bytes((token,)), code)
        rows.append((code >> 16, code & 0xFFFF))
    return np.array(rows, np.float32).reshape(len(tokens), 2)


class World:
    """One Manager, what is known of it, and the checks."""

    def __init__(self, seed: int, setup: Setup) -> None:
        self.rng = random.Random(seed)
        self.setup = setup
        self.refusals: Counter[str] = Counter()
        self.start(kvmem.Manager(setup.config()), seed)
        self.prefixes = [[self.rng.randrange(2) for _ in range(12)] for _ in range(2)]

    num_failed = 0  # transfers, for a driver whose copies may fail

    def start(self, manager: kvmem.Manager, seed: int) -> None:
        """Forget everything and go on with a new Manager."""
        self.m = manager
        keys = make_hash_keys(seed, manager.config.block_size)  # the same index in each run
        self.state.hash_keys[:] = keys
        self.known: dict[int, Known] = {}
        self.opened: list[Opened] = []
        self.pins: list[kvmem.Pin] = []
        self.held: set[Stream] = set()
        self.log: list[str] = []

    def deep(self) -> bool:
        """Whether to compare all records this time; a faster driver may do it now and then."""
        return True

    @property
    def state(self) -> Any:
        return self.m._runtime.ledger.state

    @property
    def store(self) -> Any:
        return self.m._runtime.store

    def live(self, *, free_only: bool = True) -> list[Known]:
        """Sequences, those in open steps left out."""
        busy = {s.id for o in self.opened for s in o.step.seqs} if free_only else set()
        return [k for i, k in self.known.items() if i not in busy]

    def pick(self, most: int) -> list[Known]:
        """Some of the sequences that no open step has, in random order."""
        live = self.live()
        return self.rng.sample(live, min(len(live), self.rng.randint(1, most)))

    def fields(self, k: Known) -> tuple[Any, ...]:
        """What an abort restores of a sequence."""
        q = self.state.sequences[k.seq._record]
        names = ("num_computed", "num_stored", "num_published", "num_cached", "queried")
        return (k.seq.state, k.seq.block_ids, *(int(q[n]) for n in names))

    def arrays(self) -> dict[str, Any]:
        """Copies of all records but scratch, to prove that a refused call changed nothing."""
        if not self.deep():
            return {}
        state = self.state
        skip = ("ledger", "out_list", "in_list", "copy_list", "fill_list", "lookahead")
        copies = {n: np.array(getattr(state, n)) for n in state._fields if n not in skip}
        copies["ledger"] = {
            n: int(state.ledger[n][0]) for n in state.ledger.dtype.names if n not in SCRATCH_FIELDS
        }
        return copies

    def unchanged(self, before: dict[str, Any], act: str) -> None:
        """Count a refusal; require that nothing but room was added since (R8)."""
        self.refusals[act] += 1
        if not before:
            return
        after = self.arrays()
        if not after:
            return
        for name, old in before.items():
            if name == "failed":  # how many copies had failed
                continue
            if name == "ledger":
                require(old == after[name], f"{act} was refused but changed the ledger (R8)")
            else:
                same = np.array_equal(old, after[name][: len(old)])
                require(same, f"{act} was refused but changed {name} (R8)")

    def node_paths(self) -> set[tuple[Any, ...]]:
        """Each cached node as (namespace id, its whole token path)."""
        return {self.path_of(int(n)) for n in np.flatnonzero(self.state.node_blocks[:, GROUP])}

    def path_of(self, n: int) -> tuple[Any, ...]:
        tokens: list[int] = []
        for _ in range(200):
            tokens[:0] = self.state.node_keys[n].tolist()
            n = int(self.state.nodes["parent"][n])
            if n <= 0:
                return (-n, *tokens)
        raise Broken("the trie has a loop of parents (R4)")

    def check(self) -> None:
        """Rules and model, after each operation."""
        if not self.setup.racing:
            self.let_copies_end()
        self.m.verify()
        bs = self.setup.block_size
        for k in self.known.values():
            require(k.seq.tokens.tolist() == k.tokens, f"tokens of sequence {k.seq.id} changed")
            require(k.seq.num_drafts == k.drafts, f"drafts of sequence {k.seq.id}")
            published = int(self.state.sequences["num_published"][k.seq._record])
            require(
                published * bs <= len(k.tokens) - k.drafts,
                f"sequence {k.seq.id} published tokens that are not accepted (R5)",
            )

    def let_go(self) -> None:
        for stream in COPY_STREAMS:
            self.store.device.release(stream)
        self.held.clear()

    def hold_only(self, stream: Stream) -> None:
        """Let all copies end, then hold one stream."""
        self.let_go()
        self.wait_for_copies()
        self.store.device.hold(stream)
        self.held.add(stream)

    def let_copies_end(self) -> None:
        """Wait until each copy stream is empty, held, or waits for one that is: so a run without
        races is the same each time."""
        device = self.store.device._state
        streams = [s for s in COPY_STREAMS if s in device.queues]
        with device.changed:
            device.num_waiting += 1  # else nobody wakes us
            ended = device.changed.wait_for(
                lambda: not any(device.is_ready(s) for s in streams), 20.0
            )
            device.num_waiting -= 1
        require(ended, "copies never end (R9)")
        if not self.held:
            self.wait_for_copies()

    def wait_for_copies(self) -> None:
        """Until none is left; a poll may queue more of them, to clean."""
        waited = (-1, -1)
        while waited != (issued := self.m._runtime.ledger.issued):
            waited = issued
            for direction, last in zip(("out", "in"), issued, strict=True):
                given = self.store._transfers[direction].last  # fewer after a failure
                ended = self.store.wait(direction, min(last, given), 20.0)
                require(ended, f"{direction} {last} never ends (R9)")
            self.m.poll()

    def check_content(self) -> None:
        """Each block holds its owners' stamps, in whichever tiers it is (R11)."""
        names = {i: n for n, i in self.m._runtime.ledger._namespaces.items()}
        expected: dict[int, np.ndarray] = {}
        bs = self.setup.block_size
        for n in np.flatnonzero(self.state.node_blocks[:, GROUP]):
            number, *tokens = self.path_of(int(n))
            name = names.get(number, b"")
            rows = stamps(name[1:].decode() if name else None, list(tokens))
            expected[int(self.state.node_blocks[n, GROUP])] = rows[-bs:]
        for k in self.known.values():
            stored = int(self.state.sequences["num_stored"][k.seq._record])
            rows = stamps(k.namespace, k.tokens[:stored])
            for i, b in enumerate(k.seq.block_ids):
                part = rows[i * bs : (i + 1) * bs]
                if len(part) > len(expected.get(b, ())):
                    expected[b] = part
        for b, rows in expected.items():
            self.check_block(b, rows)

    def check_block(self, b: int, rows: np.ndarray) -> None:
        block = self.state.blocks[b]
        tiers = [(DEVICE, int(block["device_frame"]), len(rows))]
        h = int(block["host_frame"])
        if h:
            host = self.state.frames[int(self.state.pools["first"][HOST]) + h]
            tiers.append((HOST, h, min(len(rows), int(host["num_tokens"]))))
        for tier, frame, count in tiers:
            if frame:
                key, value = (x.numpy() for x in self.store.block_view(tier, frame, 0))
                same = (key[:count, 0] == rows[:count]).all()
                same = same and (value[:count, 0] == rows[:count] + 0.5).all()
                require(bool(same), f"block {b} in tier {tier} does not hold its stamps (R11)")

    def views(self) -> tuple[Any, Any]:
        """K and V of the device arena."""
        key, value = self.m.kv(0)
        return key.numpy(), value.numpy()

    def compare(
        self,
        key: Any,
        value: Any,
        frames: Any,
        expected: np.ndarray,
        where: str,
        row: tuple[int, int],
    ) -> None:
        """Slots of a row of frames, of a (sequence id, step), equal the stamps (R11)."""
        bs = self.setup.block_size
        used = -(-len(expected) // bs)
        got = key[frames[:used], :, 0, :].reshape(-1, 2)[: len(expected)]
        also = value[frames[:used], :, 0, :].reshape(-1, 2)[: len(expected)] - 0.5
        for name, data in (("K", got), ("V", also)):
            wrong = np.flatnonzero((data != expected).any(1))
            require(
                len(wrong) == 0,
                f"{where}, sequence {row[0]}: {name} of positions {wrong[:4]} is not its stamp",
            )

    def check_slot(self, slot: int, frame: int, position: int) -> None:
        """A slot lies in the row's own frame, which nobody shares (R3)."""
        bs = self.setup.block_size
        if slot < 0:
            return
        require(slot == frame * bs + position % bs, f"slot {slot} of position {position}")
        b = int(self.state.frames["block"][int(self.state.pools["first"][DEVICE]) + frame])
        block = self.state.blocks[b]
        shared = block["ref_count"] != 1 or block["node"] != 0 or block["num_pins"] != 0
        require(not shared, f"the step writes into shared block {b} (R3)")
