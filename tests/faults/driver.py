"""A seeded random workload on a real Manager that notices when a rule breaks.

Every token's K/V is a stamp of its whole prefix and namespace, so that any wrong reuse shows when
it is read. Copy streams are held at random and let go only for what a plan says it waits for: a
forgotten fence reads what has not arrived. `verify()` runs after each operation, and a plain model
of tokens, drafts and priorities is compared.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import kvmem
from kvmem.ledger.state import DEVICE, GROUP, HOST, RESIDENT
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
    debug: bool = False
    num_ops: int = 160
    racing: bool = False  # copies run while the next calls do; else they end unless held

    def config(self) -> kvmem.Config:
        """The Config it stands for: one layer, one head, two floats a token each for K and V."""
        return kvmem.Config(
            num_layers=1,
            num_kv_heads=1,
            head_dim=2,
            dtype=torch.float32,
            device="cpu",
            block_size=self.block_size,
            device_blocks=self.device_blocks,
            host_blocks=self.host_blocks,
            tier_policy=self.tier_policy,
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
    nodes: set[tuple[Any, ...]]
    freed: dict[int, Known] = field(default_factory=dict)  # it still stamps what it computes


def stamps(namespace: str | None, tokens: list[int]) -> np.ndarray:
    """float32 `[len(tokens), 2]`: two exact numbers that stand for each prefix."""
    code = zlib.crc32(repr(namespace).encode())
    rows = []
    for token in tokens:
        code = zlib.crc32(bytes((token,)), code)
        rows.append((code >> 16, code & 0xFFFF))
    return np.array(rows, np.float32).reshape(len(tokens), 2)


class Driver:
    """Random operations on one Manager, from one seed."""

    def __init__(self, seed: int, setup: Setup) -> None:
        self.rng = random.Random(seed)
        self.setup = setup
        self.m = kvmem.Manager(setup.config())
        self.state.ledger["hash_seed"] = seed + 1  # the same index in each run
        self.known: dict[int, Known] = {}
        self.opened: list[Opened] = []
        self.pins: list[kvmem.Pin] = []
        self.held: set[Stream] = set()
        self.log: list[str] = []
        self.prefixes = [[self.rng.randrange(2) for _ in range(12)] for _ in range(2)]

    # --- state ----------------------------------------------------------------------------------

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
        q = self.state.sequences[k.seq.record]
        names = ("num_computed", "num_stored", "num_published", "num_cached", "queried")
        return (k.seq.state, k.seq.block_ids, *(int(q[n]) for n in names))

    def arrays(self) -> dict[str, Any]:
        """Copies of all records but scratch, to prove that a refused call changed nothing."""
        state = self.state
        skip = ("ledger", "out_list", "in_list", "copy_list", "fill_list")
        copies = {n: np.array(getattr(state, n)) for n in state._fields if n not in skip}
        copies["ledger"] = {
            n: int(state.ledger[n][0]) for n in state.ledger.dtype.names if n not in SCRATCH_FIELDS
        }
        return copies

    def unchanged(self, before: dict[str, Any], act: str) -> None:
        """Require that nothing but room was added since (R8)."""
        after = self.arrays()
        for name, old in before.items():
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

    # --- running --------------------------------------------------------------------------------

    def run(self) -> None:
        """All operations, then the end; raises at the first breach."""
        ops = self.operations()
        names, weights = [op.__name__ for op, _ in ops], [w for _, w in ops]
        for _ in range(self.setup.num_ops):
            op = ops[self.rng.choices(range(len(ops)), weights)[0]][0]
            self.log.append(op.__name__)
            op()
            self.check()
        assert names
        self.finish()

    def close(self) -> None:
        """End the Manager whatever its state."""
        for opened in self.opened:
            opened.step._ended = True
        for pin in self.pins:
            pin._released = True
        self.m.close()

    def operations(self) -> list[tuple[Callable[[], None], int]]:
        """What can happen, with how often."""
        return [
            (self.op_create, 10), (self.op_append, 12), (self.op_draft, 5), (self.op_accept, 6),
            (self.op_step, 30), (self.op_end_step, 8), (self.op_fork, 5), (self.op_truncate, 5),
            (self.op_free, 6), (self.op_swap_out, 8), (self.op_swap_in, 4), (self.op_prefetch, 2),
            (self.op_bounce, 3), (self.op_exchange, 6), (self.op_make_room, 5), (self.op_pin, 4), (self.op_unpin, 4),
            (self.op_evict, 4), (self.op_match, 4), (self.op_hold, 6), (self.op_settle, 6),
            (self.op_reset, 2),
        ]  # fmt: skip

    def check(self) -> None:
        """Rules and model, after each operation."""
        if not self.held and not self.setup.racing:
            self.wait_for_copies()
        self.m.verify()
        bs = self.setup.block_size
        for k in self.known.values():
            require(k.seq.tokens.tolist() == k.tokens, f"tokens of sequence {k.seq.id} changed")
            require(k.seq.num_drafts == k.drafts, f"drafts of sequence {k.seq.id}")
            published = int(self.state.sequences["num_published"][k.seq.record])
            require(
                published * bs <= len(k.tokens) - k.drafts,
                f"sequence {k.seq.id} published tokens that are not accepted (R5)",
            )

    # --- sequences ------------------------------------------------------------------------------

    def op_create(self) -> None:
        if len(self.known) >= 6:
            return
        rng = self.rng
        prefix = rng.choice(self.prefixes)[: rng.choice((2, 4, 4, 6, 8, 12))]
        tokens = prefix + [rng.randrange(2) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        namespace = rng.choice((None, None, "tenant"))
        publish = rng.random() < 0.9
        seq = self.m.create(
            tokens, namespace=namespace, priority=rng.choice((0, 0, 1)), publish=publish
        )
        require(seq.num_cached <= len(tokens), "create forecasts more than there is")
        self.known[seq.id] = Known(seq, namespace, tokens, publish=publish)

    def op_append(self) -> None:
        for k in self.pick(3):
            if k.drafts == 0 and len(k.tokens) < 20:
                tokens = [self.rng.randrange(2) for _ in range(self.rng.choice((1, 1, 2)))]
                self.m.append([k.seq], tokens, counts=[len(tokens)])
                k.tokens += tokens

    def op_draft(self) -> None:
        for k in self.pick(1):
            if len(k.tokens) < 18:
                tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 4))]
                self.m.append([k.seq], tokens, counts=[len(tokens)], draft=True)
                k.tokens += tokens
                k.drafts += len(tokens)

    def op_accept(self) -> None:
        drafted = [k for k in self.live() if k.drafts]
        if not drafted:
            return
        k = self.rng.choice(drafted)
        kept = self.rng.randint(0, k.drafts)
        token = self.rng.randrange(2)
        self.m.accept([k.seq], [kept], [token])
        k.tokens = [*k.tokens[: len(k.tokens) - k.drafts + kept], token]
        k.drafts = 0

    def op_fork(self) -> None:
        for k in self.pick(1):
            if len(self.known) < 6:
                (child,) = self.m.fork(k.seq)
                self.known[child.id] = Known(
                    child, k.namespace, list(k.tokens), k.drafts, k.publish
                )

    def op_truncate(self) -> None:
        for k in self.pick(1):
            length = self.rng.randint(max(1, len(k.tokens) - 5), len(k.tokens))
            k.drafts = max(0, k.drafts - (len(k.tokens) - length))
            k.tokens = k.tokens[:length]
            self.m.truncate([k.seq], length)

    def op_free(self) -> None:
        live = self.live(free_only=self.rng.random() < 0.8)
        if not live:
            return
        k = self.rng.choice(live)
        for opened in self.opened:
            if any(s.id == k.seq.id for s in opened.step.seqs):
                opened.freed[k.seq.id] = k
        self.m.free([k.seq])
        del self.known[k.seq.id]

    # --- steps ----------------------------------------------------------------------------------

    def op_step(self) -> None:
        if len(self.opened) >= 2:
            return self.op_end_step()
        chosen = self.pick(4)
        seqs = [k.seq for k in chosen]
        if not seqs:
            return None
        rng = self.rng
        fit = rng.choice(("all", "some", "some"))
        budget = rng.choice((None, None, 1, 3, 6))
        limits = None
        if rng.random() < 0.2:
            limits = [rng.randint(0, s.num_tokens - s.num_computed) for s in seqs]
        reserve = rng.choice((0, 0, 0, 1))
        opened = self.plan(seqs, fit, budget, limits, reserve)
        if opened is None:
            return None
        if rng.random() < 0.25:
            self.opened.append(opened)
        else:
            self.run_step(opened, abort=rng.random() < 0.2, at_once=True)
        return None

    def plan(
        self,
        seqs: list[kvmem.Sequence],
        fit: str,
        budget: int | None,
        limits: list[int] | None,
        reserve: int,
    ) -> Opened | None:
        """Plan a step; a refusal must agree with `can_fit` (R7) and change nothing (R8)."""
        plain = fit == "all" and budget is None and limits is None and reserve == 0
        forecast = self.m.can_fit(seqs=seqs) if plain else None
        self.m.poll()
        before = {s.id: self.fields(self.known[s.id]) for s in seqs}
        nodes = self.node_paths()
        arrays = self.arrays()
        try:
            step = self.m.step(
                seqs, fit=fit, max_tokens=budget, num_tokens=limits, reserve_blocks=reserve
            )
        except (kvmem.OutOfBlocks, kvmem.SequenceTooLong) as error:
            require(fit == "all", "fit='some' raised")
            self.unchanged(arrays, "step")
            if forecast is not None:
                never = isinstance(error, kvmem.SequenceTooLong)
                require(forecast == ("never" if never else "later"), f"can_fit said {forecast}")
            return None
        require(forecast in (None, "yes"), f"can_fit said {forecast}, the step was planned (R7)")
        return Opened(step, before, nodes)

    def op_end_step(self) -> None:
        if self.opened:
            opened = self.opened.pop(self.rng.randrange(len(self.opened)))
            self.run_step(opened, abort=self.rng.random() < 0.25, at_once=False)

    def run_step(self, opened: Opened, *, abort: bool, at_once: bool) -> None:
        """Enter, check what is read, write stamps, read all back, leave or raise."""
        step = opened.step
        computed = [s.num_computed if not s.is_freed else -1 for s in step.seqs]
        self.let_arrive(step._plan)
        try:
            with step:
                self.write_and_read(opened)
                if abort:
                    raise BodyFailed
        except BodyFailed:
            self.check_restored(opened, at_once)
            return
        for seq, first, count in zip(step.seqs, computed, step.host.num_tokens, strict=True):
            if not seq.is_freed:
                require(seq.num_computed == first + count, f"num_computed of {seq.id} after a step")

    def let_arrive(self, plan: Any) -> None:
        """Let streams go as far as the plan says that the step waits for, and no further."""
        if Stream.IN not in self.held and self.held:
            self.store.wait("in", plan.step_after_in, 0.1)  # may itself wait for what is held
        out, into = self.store.retired()
        if plan.step_after_out > out or plan.step_after_in > into:
            self.let_go()

    def write_and_read(self, opened: Opened) -> None:
        """Stamp the step's tokens and compare every slot of its rows with its stamp."""
        step = opened.step
        every = {**self.known, **opened.freed}
        key, value = (x.numpy() for x in self.m.kv(0))
        bs = self.setup.block_size
        table = step.block_table.numpy()
        rows, starts, lens = [], step.query_start.tolist(), step.seq_lens.tolist()
        slots, positions = step.slot_mapping.tolist(), step.positions.tolist()
        for i, seq in enumerate(step.seqs):
            k = every[seq.id]
            for at in range(starts[i], starts[i + 1]):
                self.check_slot(slots[at], int(table[i, positions[at] // bs]), positions[at])
            expected = stamps(k.namespace, k.tokens)
            first = positions[starts[i]]
            require(
                step.tokens[starts[i] : starts[i + 1]].tolist() == k.tokens[first : lens[i]],
                f"the step feeds other tokens of {seq.id}",
            )
            stored = first if slots[starts[i]] >= 0 else first + 1
            self.compare(key, value, table[i], expected[:stored], f"before, sequence {seq.id}")
            rows.append(expected[first : lens[i]])
        stamp = np.concatenate(rows) if rows else np.zeros((0, 2), np.float32)
        one = torch.from_numpy(stamp.reshape(len(stamp), 1, 2).copy())
        step.write(0, one, one + 0.5)
        for i, seq in enumerate(step.seqs):
            k = every[seq.id]
            expected = stamps(k.namespace, k.tokens[: lens[i]])
            self.compare(key, value, table[i], expected, f"after, sequence {seq.id}")

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

    def compare(
        self, key: Any, value: Any, frames: Any, expected: np.ndarray, where: str
    ) -> None:
        """Slots of a row of frames equal the stamps (R11)."""
        bs = self.setup.block_size
        used = -(-len(expected) // bs)
        got = key[frames[:used], :, 0, :].reshape(-1, 2)[: len(expected)]
        also = value[frames[:used], :, 0, :].reshape(-1, 2)[: len(expected)] - 0.5
        for name, data in (("K", got), ("V", also)):
            wrong = np.flatnonzero((data != expected).any(1))
            require(len(wrong) == 0, f"{where}: {name} of positions {wrong[:4]} is not its stamp")

    def check_restored(self, opened: Opened, at_once: bool) -> None:
        """After an abort all is as before, but a SWAPPED row stays RESIDENT (R8)."""
        for seq in opened.step.seqs:
            if seq.id in opened.freed or seq.id not in self.known:
                continue
            before, after = opened.before[seq.id], self.fields(self.known[seq.id])
            require(after[1:] == before[1:], f"sequence {seq.id} is {after}, was {before} (R8)")
            state = "RESIDENT" if before[0] == "SWAPPED" else before[0]
            require(after[0] == state, f"sequence {seq.id} is {after[0]} after an abort")
        if at_once:
            require(self.node_paths() <= opened.nodes, "an aborted step published (R5)")

    # --- tiers ----------------------------------------------------------------------------------

    def op_swap_out(self) -> None:
        chosen = self.pick(2)
        how = self.rng.choice(("swap", "swap", "swap", "auto", "recompute"))
        self.swap_out(chosen, how)

    def swap_out(self, chosen: list[Known], how: str) -> kvmem.Transfer | None:
        """Swap out; refused only for want of host room, and then nothing changed (R8)."""
        seqs = [k.seq for k in chosen]
        arrays = self.arrays()
        try:
            transfer = self.m.swap_out(seqs, how)
        except (kvmem.OutOfBlocks, kvmem.TierError):
            require(how == "swap", f"how={how} raised")
            self.unchanged(arrays, "swap_out")
            return None
        for k in chosen:
            require(k.seq.state != "RESIDENT", f"sequence {k.seq.id} is still RESIDENT")
        return transfer

    def op_swap_in(self) -> None:
        seqs = [k.seq for k in self.pick(2)]
        arrays = self.arrays()
        try:
            self.m.swap_in(seqs)
        except kvmem.OutOfBlocks:
            self.unchanged(arrays, "swap_in")
            return
        require(all(s.state != "SWAPPED" for s in seqs), "swap_in left one SWAPPED")

    def op_prefetch(self) -> None:
        self.m.prefetch([k.seq for k in self.pick(3)])

    def op_exchange(self) -> None:
        """One comes in and another goes out, perhaps into host frames still being read."""
        swapped = [k for k in self.live() if k.seq.state == "SWAPPED"]
        resident = [k for k in self.live() if k.seq.state == "RESIDENT"]
        if swapped and resident:
            try:
                self.m.swap_in([self.rng.choice(swapped).seq])
            except kvmem.OutOfBlocks:
                return
            self.swap_out([self.rng.choice(resident)], "swap")

    def op_bounce(self) -> None:
        """Out, in, out again: the second time every block is clean and nothing moves."""
        resident = [k for k in self.live() if k.seq.state == "RESIDENT"]
        if not resident:
            return
        k = self.rng.choice(resident)
        if self.swap_out([k], "swap") is None:
            return
        try:
            self.m.swap_in([k.seq])
        except kvmem.OutOfBlocks:
            return
        again = self.swap_out([k], "swap")
        require(again is not None, "a clean sequence needs no host room")
        assert again is not None
        require(again.num_blocks == 0, f"{again.num_blocks} clean blocks were copied out again")

    def op_make_room(self) -> None:
        seqs = [k.seq for k in self.pick(4)]
        if not seqs:
            return
        rank = {k.seq.id: (-k.seq.priority, k.seq.id) for k in self.known.values()}
        fresh = {
            k.seq.id
            for k in self.known.values()
            if self.state.sequences["fresh"][k.seq.record] and k.seq.state == "RESIDENT"
        }
        busy = {s.id for o in self.opened for s in o.step.seqs}
        best = min(rank[s.id] for s in seqs)
        victims = [v.id for v in self.m.make_room(seqs, how=self.rng.choice(("auto", "recompute")))]
        require(not busy & set(victims), "a victim is in an open step")
        require(all(rank[v] > best for v in victims), "a victim ranks before the best of the list")
        order = [(v not in fresh, rank[v]) for v in victims]
        require(
            order == sorted(order, reverse=True),
            "victims are not taken from the worst up, those just swapped in last",
        )

    def op_pin(self) -> None:
        if len(self.pins) >= 2:
            return
        for k in self.pick(1):
            try:
                self.pins.append(self.m.pin(k.seq))
            except kvmem.PinError:
                pass

    def op_unpin(self) -> None:
        if self.pins:
            self.pins.pop(self.rng.randrange(len(self.pins))).release()

    def op_evict(self) -> None:
        tier = self.rng.choice(("device", "device", "host"))
        self.m.evict(self.rng.randint(1, 4), tier)

    def op_match(self) -> None:
        """A match is exactly the longest cached path; the forecast of create agrees."""
        tokens = self.rng.choice(self.prefixes)[: self.rng.randint(1, 12)]
        name = self.rng.choice(NAMESPACES)
        number = self.m._runtime.ledger._namespaces.get(
            b"" if name is None else b"s" + name.encode(), 0
        )
        paths, bs = self.node_paths(), self.setup.block_size
        length = 0
        while length + bs <= len(tokens) and (number, *tokens[: length + bs]) in paths:
            length += bs
        found = self.m.match(tokens, name)
        require(found.num_tokens == length, f"match found {found.num_tokens} of {length} (R4)")
        require(found.on_device + found.on_host == length, "match splits its tokens wrongly")

    def op_reset(self) -> None:
        try:
            self.m.reset(self.rng.choice((None, "tenant")))
        except RuntimeError:
            require(bool(self.opened), "reset refused without an open step")

    # --- streams and content --------------------------------------------------------------------

    def op_hold(self) -> None:
        self.let_go()
        self.wait_for_copies()
        for stream in self.rng.choice(((), (Stream.OUT,), (Stream.IN,), COPY_STREAMS)):
            self.store.device.hold(stream)
            self.held.add(stream)

    def let_go(self) -> None:
        for stream in COPY_STREAMS:
            self.store.device.release(stream)
        self.held.clear()

    def wait_for_copies(self) -> None:
        for direction, name in (("out", "last_out"), ("in", "last_in")):
            last = int(self.state.ledger[name][0])
            require(self.store.wait(direction, last, 20.0), f"{direction} {last} never ends (R9)")
        self.m.poll()

    def op_settle(self) -> None:
        """Let all copies end; without open steps compare every block in both tiers."""
        self.let_go()
        self.wait_for_copies()
        if not self.opened:
            self.check_content()
        stats = self.m.stats()
        require(stats.bytes_out == stats.bytes_out_done, "bytes out differ from the device's (R10)")
        require(stats.bytes_in == stats.bytes_in_done, "bytes in differ from the device's (R10)")

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
            stored = int(self.state.sequences["num_stored"][k.seq.record])
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

    # --- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Compute all that is pending within a bound (R9), then give all back (DRAIN)."""
        while self.opened:
            self.op_end_step()
            self.check()
        while self.pins:
            self.op_unpin()
            self.check()
        self.complete()
        self.op_settle()
        self.drain()

    def complete(self) -> None:
        """make_room and fit="some" end within a bound, freeing what is done."""
        for _ in range(120):
            todo = [k for k in self.known.values()]
            if not todo:
                return
            for k in todo:
                if k.seq.num_computed == len(k.tokens) or len(k.tokens) > self.capacity():
                    self.m.free([k.seq])
                    del self.known[k.seq.id]
            seqs = [k.seq for k in self.known.values()]
            victims = {v.id for v in self.m.make_room(seqs, how="auto", max_tokens=8)}
            step = self.plan([s for s in seqs if s.id not in victims], "some", 8, None, 0)
            assert step is not None
            self.run_step(step, abort=False, at_once=True)
            self.check()
        raise Broken("work does not end within its bound (R9)")

    def capacity(self) -> int:
        """Tokens that surely fit: a copy on write needs one block more until the step ends."""
        return (self.setup.device_blocks - 1) * self.setup.block_size

    def drain(self) -> None:
        """Evict everything: each tier is empty again and nothing is cached (R9)."""
        for tier in ("device", "host"):
            self.m.evict(1000, tier)
            self.check()
        stats = self.m.stats()
        require(stats.device.free == stats.device.total, "device frames are lost (DRAIN)")
        require(stats.host.free == stats.host.total, "host frames are lost (DRAIN)")
        require(stats.cached_nodes == 0, "nodes are left (DRAIN)")
        require(int(self.state.ledger["num_blocks_used"][0]) == 0, "block ids are lost (DRAIN)")


def drive(seed: int, setup: Setup) -> None:
    """Run one seed; raises what it finds, with the operations that led there."""
    driver = Driver(seed, setup)
    try:
        driver.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, {len(driver.log)} operations, last: {driver.log[-6:]}")
        raise
    finally:
        driver.close()


__all__ = ["Broken", "Driver", "Setup", "drive", "stamps", "RESIDENT"]
