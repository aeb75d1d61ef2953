"""The random workload of tests/faults on the simulated device, through faults and restarts.

Everything is looked at by kernels on the simulated compute stream, in their turn: each slot of each
row before and after the write, and what attention makes of the stamps. What a kernel finds fails
the device; so does an injected fault, and then the Manager has to say so (R8) and a new one is
made. `RaceError` and anything else that was not injected is a breach.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch

import kvmem
from kvmem.config import ZERO_ON_FREE
from kvmem.ledger.jit import JIT_DISABLED
from kvmem.ledger.state import DEVICE, HOST
from kvmem.sim_options import MODES, SITES, SimOptions
from kvmem.store.device import Stream
from kvmem.store.sim import SimDevice, SimFault
from tests.faults.driver import Driver
from tests.faults.world import Broken, Known, Opened, Setup, require, stamps

ALLOCATIONS = ("device_alloc", "host_alloc")
#: Tier policies that are drawn; "write_back" stands for the one with watermarks, None for that
#: without.
POLICIES = (None, "write_back", "write_through", "exclusive", "none")
SLOPES = np.array([0.0, 0.25])  # ALiBi: the order of the tokens counts in the second head
NUM_HEADS = 2
#: Attention adds numbers up to 65,536 in float32; a wrong stamp is off by hundreds.
TOLERANCE = 0.5


def drawn_options(rng: random.Random, seed: int, *, faults: bool) -> SimOptions:
    """A swarm: mode, lateness and each fault's rate are drawn anew for each seed."""
    rates: dict[str, float] = {}
    if faults:
        rates = {site: rng.choice((0, 0.05, 0.2)) for site in ("copy_before", "copy_after")}
        rates |= {site: rng.choice((0, 0, 0.001, 0.003)) for site in ("event", "sticky")}
        rates |= {site: rng.choice((0, 0.1, 0.4)) for site in ALLOCATIONS}
        rates["slow_copy"] = rng.choice((0, 0.2, 0.6))
    return SimOptions(
        seed=seed,
        mode=rng.choice((*MODES, "random", "late")),
        not_yet=rng.choice((0.0, 0.25, 0.6)),
        copy_engines=rng.choice((1, 2, 2)),
        late_results=rng.random() < 0.5,
        poison=rng.random() < 0.5,
        faults=rates,
    )


def drawn_policy(seed: int, host_blocks: int) -> dict[str, Any]:
    """A tier policy, by dice of its own: the other draws of a seed do not hang on it."""
    if host_blocks == 0:
        return {}
    policy = random.Random(f"{seed}:policy").choice(POLICIES)
    return {"tier_policy": policy, "watermarks": (0.4, 0.7) if policy == "write_back" else None}


def drawn_setup(seed: int, num_ops: int, *, faults: bool = True) -> Setup:
    """What a seed stands for."""
    rng = random.Random(f"{seed}:setup")
    return Setup(
        device_blocks=rng.choice((5, 6, 7, 10, 12)),
        host_blocks=(host_blocks := rng.choice((0, 4, 7, 7, 12, 16))),
        **drawn_policy(seed, host_blocks),
        zero_on_free=random.Random(f"{seed}:zero").choice(("never", "never", *ZERO_ON_FREE)),
        block_size=rng.choice((1, 2, 2, 4)),
        debug=rng.random() < 0.25,
        num_ops=num_ops,
        hold_out=rng.random() < 0.3,
        racing=True,
        sim=drawn_options(rng, seed, faults=faults),
    )


class Restart(Exception):
    """An injected fault failed the device."""


class SimDriver(Driver):
    """`Driver` on a simulated device."""

    def __init__(self, seed: int, setup: Setup, *, looks: float = 0.1) -> None:
        self.seed = seed
        self.looks = looks  # share of calls after which all records are compared
        self._looking = random.Random(f"{seed}:looks")
        self.ops: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.aborts_in_flight = 0
        self.num_managers = self.num_turns = self.num_checked = 0
        self.digests: list[str] = []
        self.rng = random.Random(seed)
        self.setup = setup
        self.prefixes = [[self.rng.randrange(2) for _ in range(12)] for _ in range(2)]
        self.lost: dict[int, int] = {}  # sequence id -> the last step planned when it was told
        self.num_failed = 0  # transfers
        self.aborted: set[int] = set()  # steps that counted nothing
        self.doubts: list[tuple[tuple[int, int], Broken]] = []
        self.begin()

    # --- Managers that come and go ----------------------------------------------------------------

    @property
    def device(self) -> SimDevice:
        return self.store.device  # type: ignore[no-any-return]

    def begin(self) -> None:
        """Make a Manager; a refused arena is one more fault."""
        assert self.setup.sim is not None
        while True:
            self.num_managers += 1
            sim = dataclasses.replace(self.setup.sim, seed=self.seed * 1000 + self.num_managers)
            try:
                made = kvmem.Manager(dataclasses.replace(self.setup, sim=sim).config())
            except kvmem.ConfigError as error:
                require("injected fault" in str(error), f"refused without a fault: {error}")
                self.struck["device_alloc" if "device arena" in str(error) else "host_alloc"] += 1
                continue
            self.start(made, self.seed)
            self.watch_losses()
            return

    def watch_losses(self) -> None:
        """Note what the new Manager tells of failed copies."""
        self.lost.clear()
        self.aborted.clear()
        self.doubts.clear()
        self.num_failed = 0
        losses = self.m._runtime.losses
        told = losses.add

        def add(*arguments: Any) -> tuple[int, ...]:
            ids = told(*arguments)
            epoch = int(self.state.ledger["epoch"][0])
            self.lost |= dict.fromkeys(ids, epoch)
            self.num_failed += 1
            return ids

        losses.add = add  # type: ignore[method-assign]

    def count_device(self) -> None:
        """Add up what the device of a Manager that ends has seen."""
        for site in SITES:
            self.struck[site] += self.device.faults.struck[site]
            self.passed[site] += self.device.faults.passed[site]
        self.num_turns += self.device.scheduler.num_turns
        self.num_checked += self.device.clocks.num_checked
        self.digests.append(self.device.log.digest())

    def failed(self, raised: Exception) -> None:
        """A call raised: a fault that was injected, and the Manager says so (R8), or a breach."""
        error = self.device.error
        if error is None and isinstance(raised, kvmem.TransferError) and self.num_failed:
            self.refusals["lost"] += 1  # told by the call, which did nothing
            return
        if error is None:
            raise raised
        if not isinstance(error, SimFault):
            error.add_note(f"device log: {self.device.log.tail(12)}")
            raise error
        require(
            isinstance(raised, kvmem.DeviceUnavailable | kvmem.TransferError),
            f"a failed device was told as {type(raised).__name__}: {raised}",
        )
        for queue in self.store._transfers.values():
            told = [f for f in queue.pending if not f.reached and self.device.query(f)]
            require(not told, f"{len(told)} transfers of a failed device count as done (R5)")
        acts = (partial(self.m.create, [1]), partial(self.m.step, []), self.m.stats, self.m.poll)
        for act in acts:
            try:
                act()
            except kvmem.DeviceUnavailable:
                continue
            raise Broken(f"{act} did not say that the device has failed (R8)")
        for opened in self.opened:
            opened.step.cancel()  # legal, and a no-op for the device
        self.count_device()
        Driver.close(self)
        self.begin()

    def close(self) -> None:
        self.count_device()
        super().close()

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        ops = self.operations()
        functions, weights = [f for f, _ in ops], [w for _, w in ops]
        for _ in range(self.setup.num_ops):
            (op,) = self.rng.choices(functions, weights)
            self.log.append(op.__name__)
            self.ops[op.__name__.removeprefix("op_")] += 1
            try:
                op()
                self.check()
            except Exception as raised:
                self.failed(raised)
        self.liveness()

    def liveness(self) -> None:
        """Faults off: all work ends, all memory comes back (R9)."""
        while True:
            self.device.faults.enabled = False
            try:
                self.let_go()
                self.device.drain()
                self.finish()
                self.device.drain()
            except Exception as raised:  # one that struck before and comes up only now
                self.failed(raised)
                continue
            require(self.device.error is None, f"the device failed: {self.device.error}")
            return

    def deep(self) -> bool:
        return self._looking.random() < self.looks

    def check(self) -> None:
        if self.doubts:
            self.m.poll()
            for row, error in self.doubts:
                if not self.is_lost(row):
                    raise error
            self.doubts.clear()
        if self.deep():
            super().check()

    # --- failed copies ----------------------------------------------------------------------------

    def is_lost(self, row: tuple[int, int]) -> bool:
        """Whether a failed copy that was told explains what a step saw of a sequence. None is told
        where it was freed, or the step aborted, before."""
        number, epoch = row
        gone = number not in self.known or epoch in self.aborted  # nothing of it was kept
        return (gone and self.num_failed > 0) or self.lost.get(number, -1) >= epoch

    def doubt(self, row: tuple[int, int], error: Broken) -> None:
        """A kernel saw a wrong stamp: a copy has failed, which will be told, or it is a breach."""
        if not self.device.failed and not self.is_lost(row):
            raise error
        self.doubts.append((row, error))

    def check_given_up(self, opened: Opened, error: kvmem.TransferError) -> None:
        """Nothing of the step counts; who lost K/V is told, all others are as before."""
        self.refusals["given up"] += 1
        lost, rows = {number for number, _ in error.lost}, {s.id for s in opened.step.seqs}
        known = {s.id for s in opened.step.seqs if s.id in self.known}
        require(self.num_failed > 0, f"a step was given up without a failed copy: {error}")
        require(lost <= rows, "a step told of sequences that it does not have")
        require(bool(lost) or known < rows, "a step was given up and nobody lost anything")
        self.check_restored(opened, at_once=False)

    def has_lost(self, number: int) -> bool:
        return number in self.lost

    def check_restored(self, opened: Opened, at_once: bool) -> None:
        self.aborted.add(opened.step._epoch)
        super().check_restored(opened, at_once)

    def unchanged(self, before: dict[str, Any], act: str) -> None:
        """As ever, unless a failed copy was recovered from inside the call."""
        super().unchanged(before if before.get("failed") == self.num_failed else {}, act)

    def arrays(self) -> dict[str, Any]:
        arrays = super().arrays()
        return arrays | {"failed": self.num_failed} if arrays else arrays

    def in_order(self, seqs: list[kvmem.Sequence]) -> list[kvmem.Sequence]:
        """As `make_room` ranks them, so that others don't use up the tokens of the best."""
        return sorted(seqs, key=lambda seq: (-seq.priority, seq.id))

    def operations(self) -> list[Any]:
        more = [
            (self.op_free_in_flight, 6), (self.op_abort_in_flight, 6), (self.op_cancel, 4),
            (self.op_round_trip, 14), (self.op_fork_in_flight, 4), (self.op_open_step, 6),
            (self.op_crossed_steps, 4), (self.op_late_duplicate, 4),
            (self.op_create, 8), (self.op_append, 16), (self.op_swap_out, 4),
            (self.op_swap_in, 4), (self.op_exchange, 6), (self.op_prefetch, 2), (self.op_reset, 1),
        ]  # fmt: skip
        return [*super().operations(), *more]

    # --- aborts -----------------------------------------------------------------------------------

    def in_flight(self, k: Known) -> bool:
        """Whether a copy from or to a frame of this sequence has not ended yet."""
        queues = self.store._transfers
        ended = []
        for name in ("out", "in"):
            queue = queues[name]
            reached = sum(fence.reached for fence in queue.pending)
            ended.append(queue._first - 1 + reached)
        state = self.state
        for b in k.seq.block_ids:
            for tier, field in ((DEVICE, "device_frame"), (HOST, "host_frame")):
                f = int(state.blocks[field][b])
                if f:
                    frame = state.frames[int(state.pools["first"][tier]) + f]
                    if frame["fence_out"] > ended[0] or frame["fence_in"] > ended[1]:
                        return True
        return False

    def op_free(self) -> None:
        before = dict(self.known)
        flying = {i for i, k in before.items() if self.in_flight(k)}
        super().op_free()
        self.aborts_in_flight += len(flying - self.known.keys())

    def op_free_in_flight(self) -> None:
        """Start a transfer of one sequence and free it at once (case 43)."""
        live = [k for k in self.live() if k.seq.state != "WAITING"]
        if not live:
            return
        k = self.rng.choice(live)
        try:
            if k.seq.state == "SWAPPED":
                self.m.swap_in([k.seq])
            else:
                self.m.swap_out([k.seq], "swap")
                if self.rng.random() < 0.5:
                    self.m.swap_in([k.seq])  # and back, behind its own copy out (case 45)
        except (kvmem.OutOfBlocks, kvmem.TierError):
            self.refusals["swap before free"] += 1
        if self.rng.random() < 0.3 and len(self.known) < 6:
            (child,) = self.m.fork(k.seq)
            self.known[child.id] = Known(child, k.namespace, list(k.tokens), k.drafts, k.publish)
        self.aborts_in_flight += self.in_flight(k)
        self.m.free([k.seq])
        del self.known[k.seq.id]

    def op_round_trip(self) -> None:
        """Out, the frames given up, and perhaps in again at once, into other frames."""
        chosen = [k for k in self.pick(2) if k.seq.state == "RESIDENT"]
        if not chosen or self.swap_out(chosen, "swap") is None:
            return
        self.m.evict(self.rng.choice((1, 2, 100)))
        if self.rng.random() < 0.7:
            self.m.prefetch([k.seq for k in self.pick(3)])
        if self.rng.random() < 0.2:  # what is only just coming in has no host copy any more
            self.m.evict(self.rng.choice((2, 100)), "host")
            self.swap_out([k for k in self.pick(2) if k.seq.state == "RESIDENT"], "swap")

    def op_crossed_steps(self) -> None:
        """Two steps that share frames end in the wrong order; then their frames go."""
        resident = [k for k in self.live() if k.seq.state == "RESIDENT" and not k.drafts]
        if not resident or len(self.known) >= 6:
            return
        k = self.rng.choice(resident)
        (child,) = self.m.fork(k.seq)
        both = [k, Known(child, k.namespace, list(k.tokens), 0, k.publish)]
        self.known[child.id] = both[1]
        steps = []
        for each in both:
            self.m.append([each.seq], [1])
            each.tokens.append(1)
            steps.append(self.plan([each.seq], "some", None, None, 0))
        for opened in reversed(steps):
            if opened is not None:
                self.run_step(opened, abort=self.rng.random() < 0.3, at_once=False)
        self.leave(both)

    def op_late_duplicate(self) -> None:
        """Two compute the same; the first goes out and comes back while the second merges."""
        if len(self.known) >= 5:
            return
        tokens = self.rng.choice(self.prefixes)[: self.rng.choice((2, 4, 6))]
        both = [Known(self.m.create(tokens), None, list(tokens)) for _ in range(2)]
        self.known |= {k.seq.id: k for k in both}
        steps = [self.plan([k.seq], "some", None, None, 0) for k in both]
        for k, opened in zip(reversed(both), reversed(steps), strict=True):
            if opened is not None:
                self.run_step(opened, abort=False, at_once=False)
                if k is both[1]:
                    self.leave([k])
        self.m.append([both[0].seq], [0])
        both[0].tokens.append(0)
        opened = self.plan([both[0].seq], "some", None, None, 0)
        if opened is not None:
            self.run_step(opened, abort=False, at_once=True)

    def leave(self, chosen: list[Known]) -> None:
        """Out, and what is wanted next comes into the frames that got free."""
        resident = [k for k in chosen if k.seq.state == "RESIDENT"]
        if resident and self.swap_out(resident, "swap") is not None:
            self.m.evict(100)
            self.m.prefetch([*(k.seq for k in self.pick(2))])

    def op_fork_in_flight(self) -> None:
        """A child of a sequence that is swapped, or on its way in; both go on at once."""
        swapped = [k for k in self.live() if k.seq.state == "SWAPPED"]
        if not swapped or len(self.known) >= 6:
            return
        k = self.rng.choice(swapped)
        if self.rng.random() < 0.7:
            try:
                self.m.swap_in([k.seq])
            except kvmem.OutOfBlocks:
                self.refusals["swap before fork"] += 1
        (child,) = self.m.fork(k.seq)
        self.known[child.id] = Known(child, k.namespace, list(k.tokens), k.drafts, k.publish)
        if k.drafts == 0:
            tokens = [self.rng.randrange(2)]
            self.m.append([child], tokens)
            self.known[child.id].tokens += tokens
        opened = self.plan([child, k.seq][: self.rng.choice((1, 2))], "some", None, None, 0)
        if opened is not None:
            self.run_step(opened, abort=self.rng.random() < 0.3, at_once=True)

    def op_open_step(self) -> None:
        """A step that stays open while others come and go; up to three."""
        chosen = self.pick(3) if len(self.opened) < 3 else []
        opened = self.plan([k.seq for k in chosen], "some", None, None, 0) if chosen else None
        if opened is not None:
            self.opened.append(opened)

    def op_abort_in_flight(self) -> None:
        """A step over what is only just coming in, whose body raises."""
        chosen = [k for k in self.live() if k.seq.state == "SWAPPED"][:2]
        opened = self.plan([k.seq for k in chosen], "some", None, None, 0) if chosen else None
        if opened is not None:
            self.aborts_in_flight += sum(self.in_flight(self.known[s.id]) for s in opened.step.seqs)
            self.run_step(opened, abort=True, at_once=True)

    def op_cancel(self) -> None:
        """A step that is planned and never entered."""
        chosen = self.pick(3)
        opened = self.plan([k.seq for k in chosen], "some", 4, None, 0) if chosen else None
        if opened is not None:
            self.aborts_in_flight += sum(self.in_flight(self.known[s.id]) for s in opened.step.seqs)
            opened.step.cancel()
            self.check_restored(opened, at_once=True)

    # --- looking ----------------------------------------------------------------------------------

    def views(self) -> tuple[Any, Any]:
        """The raw arena: only kernels of the compute stream look at it."""
        store = self.store
        frames = store.num_blocks[DEVICE] + 1
        typed = store._device_arena.typed(store.layout.dtype)[:frames]
        key, value = store.layout.views(typed, 0)
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
        """A kernel that compares when it is its turn."""
        used = np.array(frames[: -(-len(expected) // self.setup.block_size)], np.int32)
        if not len(used):
            return
        look = super().compare

        def compare() -> None:
            try:
                look(key, value, used, expected, where, row)
            except Broken as error:
                self.doubt(row, error)

        reads = ((self.store._device_arena, np.unique(used)),)
        self.device.launch(Stream.COMPUTE, compare, reads=reads)

    def attend(self, step: kvmem.Step, every: dict[int, Known]) -> None:
        """Attention with equal scores is a mean of V, weighted by distance in the second head."""
        if not step.num_tokens or JIT_DISABLED:  # the kernel of attention exists compiled only
            return
        query = torch.zeros(step.num_tokens, NUM_HEADS, 2)
        out = step.attend(0, query, alibi=SLOPES)
        expected, row_of = [], []
        for seq, length, count in zip(
            step.seqs, step.seq_lens.tolist(), step.host.num_tokens.tolist(), strict=True
        ):
            k = every[seq.id]
            rows = stamps(k.namespace, k.tokens[:length]).astype(np.float64) + 0.5
            distance = np.arange(length - count, length)[:, None] - np.arange(length)[None, :]
            weights = np.exp(-SLOPES[:, None, None] * distance) * (distance >= 0)
            weights /= weights.sum(-1, keepdims=True)
            expected.append(np.einsum("hqk,kd->qhd", weights, rows))
            row_of += [(seq.id, step._epoch)] * count
        wanted = np.concatenate(expected)
        self.device.launch(Stream.COMPUTE, partial(self.check_attention, out, wanted, row_of))

    def check_attention(
        self, out: torch.Tensor, wanted: np.ndarray, row_of: list[tuple[int, int]]
    ) -> None:
        """Runs behind the attention on its stream."""
        worst = np.abs(out.numpy() - wanted).max(axis=(1, 2))
        for i in np.flatnonzero(~(worst <= TOLERANCE)):  # NaN is no number <= it
            error = Broken(f"attention of sequence {row_of[i][0]} is off by {worst[i]}")
            self.doubt(row_of[i], error)


def drive(seed: int, setup: Setup, *, looks: float = 0.1) -> SimDriver:
    """Run one seed to its end; raises what it finds, with how to run it again."""
    driver = SimDriver(seed, setup, looks=looks)
    try:
        driver.run()
    except BaseException as error:
        error.add_note(
            f"replay: python -m tests.sim.programme --first {seed} --seeds 1 --ops "
            f"{setup.num_ops}; {sum(driver.ops.values())} operations, last: {driver.log[-6:]}"
        )
        raise
    finally:
        driver.close()
    return driver
