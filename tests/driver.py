"""A tiny engine for tests: K/V of a token is a stamp of its whole prefix, so wrong reuse shows.

`Driver.step` writes the stamps and compares attention with a dense float64 reference over exactly
the tokens of each row (EQ); `check_content` reads the blocks of all live sequences in both tiers
(R11); `drain` lets go of everything and finds both tiers empty (DRAIN); `state_of` is what SAME
compares.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import kvmem
from kvmem.store.device import Stream

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "block_size": 4,
    "device_blocks": 8,
    "host_blocks": 8,
    "debug": True,
}
#: `KVMEM_TEST_DEVICE=sim` runs whatever uses this driver on the simulated device (tests/sim),
#: "cuda" on the double of a GPU (tests/store/cuda).
DEVICE: dict[str, Any] = {"device": os.environ.get("KVMEM_TEST_DEVICE", "cpu")}
if DEVICE["device"] == "sim":
    DEVICE["sim"] = kvmem.SimOptions(
        mode=os.environ.get("KVMEM_TEST_MODE", "random"), seed=int(os.environ["KVMEM_SEED"])
    )
NUM_HEADS = 2
# Of the ledger's record: scratch of the call in progress and detail of the last refusal.
SCRATCH = {"error_row", "error_needed", "error_available", "num_needed", "num_reclaimed"}
SCRATCH |= {"arrivals", "sequence_free"}

Array = NDArray[Any]


def tokens_of(stop: int, start: int = 0) -> Array:
    """Tokens start, start + 1, ..., stop - 1 as int32."""
    return np.arange(start, stop, dtype=np.int32)


class Driver:
    """One Manager and all handles made through it."""

    def __init__(self, **settings: Any) -> None:
        self.config = kvmem.Config(**{**SMALL, **DEVICE, **settings})
        self.manager = kvmem.Manager(self.config)
        self.live: list[kvmem.Sequence] = []
        self.pins: list[kvmem.Pin] = []
        self._salts: dict[int, tuple[bytes, list[tuple[int, int, bytes]]]] = {}
        self._numbers = np.random.default_rng(7)

    def beside(self) -> Driver:
        """A second engine on the same Manager, for another thread; `drain` of the first ends all
        that `live` and `pins` of the first hold."""
        other = copy.copy(self)
        other.live, other.pins, other._salts = [], [], {}
        other._numbers = np.random.default_rng(8)
        return other

    # --- handles --------------------------------------------------------------------------------

    def create(self, tokens: Any, **options: Any) -> kvmem.Sequence:
        seq = self.manager.create(tokens, **options)
        salt = repr(options.get("namespace")).encode()
        self._salts[seq.id] = (salt, list(options.get("extras", ())))
        self.live.append(seq)
        return seq

    def fork(self, seq: kvmem.Sequence, n: int = 1) -> list[kvmem.Sequence]:
        children = self.manager.fork(seq, n)
        for child in children:
            self._salts[child.id] = self._salts[seq.id]
        self.live += children
        return children

    def free(self, *seqs: kvmem.Sequence) -> None:
        self.manager.free(list(seqs))
        self.live = [seq for seq in self.live if seq not in seqs]

    def pin(self, what: Any, **options: Any) -> kvmem.Pin:
        pin = self.manager.pin(what, **options)
        self.pins.append(pin)
        return pin

    # --- stamps ---------------------------------------------------------------------------------

    def stamps(self, seq: kvmem.Sequence) -> list[bytes]:
        """One digest a token: of the namespace, the tokens up to it, and the extras over them."""
        salt, extras = self._salts[seq.id]
        digest, found = salt, []
        for position, token in enumerate(seq.tokens.tolist()):
            cover = b"".join(d for start, n, d in extras if start <= position < start + n)
            digest = hashlib.blake2b(digest + b"%d;" % token + cover, digest_size=16).digest()
            found.append(digest)
        return found

    def rows(self, digests: list[bytes], layer: int) -> tuple[Array, Array]:
        """K and V of stamped tokens, float32 `[tokens, num_kv_heads, head_dim | v_head_dim]`."""
        config = self.config
        heads, width, value_width = config.num_kv_heads, config.head_dim, config.v_head_dim
        numbers = heads * (width + value_width)
        raw = b"".join(hashlib.shake_128(digest).digest(2 * numbers) for digest in digests)
        data = np.frombuffer(raw, np.int16).reshape(-1, heads, width + value_width)
        data = (data / np.float32(32768) * (layer + 1)).astype(np.float32)
        return data[..., :width].copy(), data[..., width:].copy()

    # --- steps ----------------------------------------------------------------------------------

    def step(self, seqs: list[kvmem.Sequence], **options: Any) -> kvmem.Step:
        """Plan, write stamps, compare attention, end. Returns the ended step."""
        with self.manager.step(seqs, **options) as step:
            self.run_or_lose(step)
        return step

    def run_or_lose(self, step: kvmem.Step) -> None:
        """The body of a step, which may see wrong K/V where a copy failed: leaving says so."""
        try:
            self.run(step)
        except AssertionError:
            runtime = self.manager._runtime
            if not runtime.failed and not runtime.ledger.spoiled:
                raise

    def run(self, step: kvmem.Step) -> None:
        """The body of a step."""
        starts = step.query_start.tolist()
        lengths = step.seq_lens.tolist()
        host = step.host
        for row, begin, length in zip(
            step.block_table.tolist(), host.table_start, lengths, strict=True
        ):
            end = begin + -(-length // self.config.block_size)
            frames = host.frame_table[begin:end].tolist()
            assert row == frames + [0] * (len(row) - len(frames))
        stamps = [self.stamps(seq)[:n] for seq, n in zip(step.seqs, lengths, strict=True)]
        for i, seq in enumerate(step.seqs):
            part = slice(starts[i], starts[i + 1])
            count = starts[i + 1] - starts[i]
            first = lengths[i] - count
            assert step.positions[part].tolist() == list(range(first, lengths[i]))
            assert step.tokens[part].tolist() == seq.tokens[first : lengths[i]].tolist()
        mine = [
            d for i, row in enumerate(stamps) for d in row[len(row) - starts[i + 1] + starts[i] :]
        ]
        for layer in range(self.config.num_layers):
            key, value = self.rows(mine, layer)
            step.write(layer, torch.from_numpy(key), torch.from_numpy(value))
            self._attend(step, layer, stamps, starts)

    def write(self, step: kvmem.Step) -> None:
        """A body without attention, whose result would be waited for: only the stamps go in."""
        starts, lengths = step.query_start.tolist(), step.seq_lens.tolist()
        digests: list[bytes] = []
        for i, (seq, length) in enumerate(zip(step.seqs, lengths, strict=True)):
            digests += self.stamps(seq)[length - (starts[i + 1] - starts[i]) : length]
        for layer in range(self.config.num_layers):
            key, value = self.rows(digests, layer)
            step.write(layer, torch.from_numpy(key), torch.from_numpy(value))

    def _attend(
        self, step: kvmem.Step, layer: int, stamps: list[list[bytes]], starts: list[int]
    ) -> None:
        config = self.config
        heads = NUM_HEADS * config.num_kv_heads
        shape = (step.num_tokens, heads, config.head_dim)
        query = self._numbers.standard_normal(shape).astype(np.float32)
        out = step.attend(layer, torch.from_numpy(query))
        assert isinstance(out, torch.Tensor)
        for i, row in enumerate(stamps):
            keys, values = self.rows(row, layer)
            part = slice(starts[i], starts[i + 1])
            expected = dense_attention(query[part], keys, values)
            np.testing.assert_allclose(out[part].numpy(), expected, atol=2e-5, rtol=0)

    def check_content(self) -> None:
        """Every computed token of every live sequence has its stamp, wherever it is (R11)."""
        self.wait()
        for seq in self.live:
            stamps, size = self.stamps(seq)[: seq.num_computed], self.config.block_size
            blocks = [self.manager.block(b) for b in seq.block_ids]
            for i, block in enumerate(blocks):
                digests = stamps[i * size : (i + 1) * size]
                if digests:
                    self._check_block(block, digests)

    def _check_block(self, block: kvmem.Block, digests: list[bytes]) -> None:
        assert block.device != "none"
        for layer in range(self.config.num_layers):
            keys, values = self.rows(digests, layer)
            if block.frame_ids[0]:
                np.testing.assert_array_equal(block.k_data(layer)[: len(keys)].numpy(), keys)
                np.testing.assert_array_equal(block.v_data(layer)[: len(keys)].numpy(), values)
            else:
                host_keys, host_values = block.host_data(layer)
                np.testing.assert_array_equal(host_keys[: len(keys)].numpy(), keys)
                np.testing.assert_array_equal(host_values[: len(keys)].numpy(), values)

    # --- streams --------------------------------------------------------------------------------

    @property
    def store(self) -> Any:
        return self.manager._runtime.store

    @property
    def state(self) -> Any:
        return self.manager._runtime.ledger.state

    def hold(self, *names: str) -> None:
        """Keep copy streams ("out", "in") from starting their next copy."""
        for name in names:
            self.store.device.hold(Stream[name.upper()])

    def release(self, *names: str) -> None:
        for name in names or ("out", "in"):
            self.store.device.release(Stream[name.upper()])

    def wait(self) -> None:
        """Until every transfer submitted has ended."""
        for direction in ("out", "in"):
            self.store.wait(direction, self.store._transfers[direction].last, 60)
        self.manager.poll()

    # --- ends -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """DRAIN: nothing is held once everything was let go (R9)."""
        manager = self.manager
        for pin in self.pins:
            if not pin.released:
                pin.release()
        self.pins.clear()
        self.free(*self.live)
        self.release()
        self.wait()
        manager.evict(1 << 30)
        manager.evict(1 << 30, "host")
        self.wait()
        manager.verify()
        stats = manager.stats()
        assert stats.device.free == stats.device.total, stats
        assert stats.host.free == stats.host.total, stats
        assert stats.cached_nodes == 0
        assert stats.sequences_waiting + stats.sequences_resident + stats.sequences_swapped == 0
        assert not self.state.blocks["ref_count"].any()
        assert not self.state.blocks["num_pins"].any()
        assert int(self.state.ledger["num_blocks_used"][0]) == 0

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """verify, DRAIN, close: the end of each test that got so far."""
        try:
            if kind is None and not self.manager.closed:
                self.manager.verify()
                self.drain()
        finally:
            self.manager.close()


def dense_attention(query: Array, keys: Array, values: Array) -> Array:
    """Causal attention in float64 of the last tokens of one sequence over all its tokens."""
    num_queries, num_heads, width = query.shape
    length = len(keys)
    group = num_heads // keys.shape[1]
    k = np.repeat(keys.astype(np.float64), group, axis=1)
    v = np.repeat(values.astype(np.float64), group, axis=1)
    scores = np.einsum("qhd,khd->hqk", query.astype(np.float64), k) / np.sqrt(width)
    positions = np.arange(length - num_queries, length)[:, None]
    scores = np.where(np.arange(length)[None, :] <= positions, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def state_of(manager: kvmem.Manager) -> dict[str, Any]:
    """Everything of a Manager that a call which raises must leave alone (SAME, R8): not what lies
    in unused rows of the arrays, nor the number that the next sequence gets."""
    runtime = manager._runtime
    state, store = runtime.ledger.state, runtime.store
    dump: dict[str, Any] = {
        f"ledger.{name}": int(state.ledger[name][0])
        for name in state.ledger.dtype.names
        if name not in SCRATCH
    }
    for name in ("pools", "blocks", "frames", "nodes", "node_blocks", "node_keys", "index"):
        dump[name] = np.asarray(getattr(state, name)).tobytes()
    for name in ("num_children", "num_sequences"):
        dump[f"namespaces.{name}"] = np.trim_zeros(state.namespaces[name], "b").tolist()
    for s in np.flatnonzero(state.sequences["state"]):
        dump[f"sequence {s}"] = (
            state.sequences[s].tobytes(),
            state.tables[s].tobytes(),
            runtime.ledger.tokens_of(s).tobytes(),
            runtime.ledger.table_of(s).tobytes(),
        )
    dump["namespaces by name"] = dict(runtime.ledger._namespaces)
    dump["open steps"] = sorted(runtime.ledger.open_steps)
    dump["extras"] = dict(runtime.extras._ids)
    dump["handles"] = sorted(runtime.handles)
    dump["transfers"] = {name: queue.last for name, queue in store._transfers.items()}
    for name, arena in store.arenas().items():
        dump[f"{name} bytes"] = hashlib.sha256(arena.tensor.cpu().numpy()).hexdigest()
    return dump


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """SAME, naming what differs."""
    changed = [name for name in before if before[name] != after.get(name)]
    assert not changed and before.keys() == after.keys(), (
        f"changed by a call that raised: {changed}"
    )


class GoodWork:
    """Random legal calls on a Driver, from a seed; shortages are part of the work."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self._driver = driver
        self._random = random.Random(seed)
        self._acts = [
            self._create,
            self._step,
            self._step,
            self._append,
            self._fork,
            self._truncate,
        ]
        self._acts += [self._free, self._swap_out, self._swap_in, self._look, self._pin]

    def run(self, count: int) -> None:
        for _ in range(count):
            self._random.choice(self._acts)()

    def _some(self) -> list[kvmem.Sequence]:
        live = self._driver.live
        return self._random.sample(live, self._random.randint(0, min(3, len(live))))

    def _create(self) -> None:
        if len(self._driver.live) < 5:
            length = self._random.randint(0, 14)
            start = self._random.randrange(2)
            self._driver.create([start + i // 3 for i in range(length)])

    def _step(self) -> None:
        self._driver.step(
            list(self._driver.live), fit="some", max_tokens=self._random.randint(0, 12)
        )

    def _append(self) -> None:
        seqs = self._some()
        self._driver.manager.append(seqs, [self._random.randrange(3) for _ in seqs])

    def _fork(self) -> None:
        seqs = self._some()
        if seqs and len(self._driver.live) < 5:
            self._driver.fork(seqs[0])

    def _truncate(self) -> None:
        seqs = self._some()
        lengths = [self._random.randint(0, seq.num_tokens) for seq in seqs]
        self._driver.manager.truncate(seqs, lengths)

    def _free(self) -> None:
        if len(self._driver.live) > 2:
            self._driver.free(self._random.choice(self._driver.live))

    def _swap_out(self) -> None:
        self._driver.manager.swap_out(self._some(), how=self._random.choice(["auto", "recompute"]))

    def _swap_in(self) -> None:
        self._driver.manager.prefetch(self._some())

    def _look(self) -> None:
        self._driver.manager.match([0, 0, 0, 1, 1, 1, 2, 2])
        self._driver.manager.can_fit(4, seqs=self._some())

    def _pin(self) -> None:
        try:
            pin = self._driver.manager.pin([0, 0, 0, 1])
        except kvmem.PinError:
            return
        pin.release()
