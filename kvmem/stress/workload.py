"""What one thread does to a Manager: random operations over sequences of its own.

Other threads may take the room of these sequences between any two calls; only what an open step
has stays. So a worker expects nothing of where its blocks are, and everything of what is in them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvmem.cache import Pin
from kvmem.manager import Manager
from kvmem.sequence import Sequence
from kvmem.step import Step
from kvmem.stress.body import Body, Tracked
from kvmem.stress.breach import REFUSALS, Mismatch
from kvmem.stress.options import StressOptions
from kvmem.stress.stamps import Stamps
from kvmem.swapper import Transfer

NAMESPACES = (None, "tenant")
NUM_PREFIXES = 4
MAX_TOKEN = 2**31 - 1
HOWS = ("swap", "auto", "auto", "recompute")
MOST_ROWS = 8


class Abandoned(Exception):
    """Raised in the body of a step that is to be aborted."""


def drawn_tokens(generator: np.random.Generator, count: int) -> NDArray[np.int32]:
    """Token ids that no other sequence has by chance."""
    return generator.integers(0, MAX_TOKEN, count, dtype=np.int32)


class Worker:
    """One thread's sequences and operations. It lives as long as the run; ``begin`` gives it a
    Manager, and ``operate`` does one operation."""

    def __init__(
        self,
        number: int,
        options: StressOptions,
        stamps: Stamps,
        prefixes: list[NDArray[np.int32]],
        quota: int,
    ) -> None:
        self.number = number
        self.options = options
        self.prefixes = prefixes
        self.quota = quota  # sequences live at once
        self._stamps = stamps
        self._rng = random.Random(f"{options.seed}:{number}")
        self._generator = np.random.default_rng([options.seed, number])
        self.operations: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.num_begun = 0  # operations; the watchdog looks at it
        self.num_sequences = self.num_tokens = self.num_lost = 0
        self.rows_checked = self.attentions_checked = 0
        acts = self._acts()
        self._kinds, self._weights = list(acts), [weight for weight, _ in acts.values()]
        self._run = {kind: act for kind, (_, act) in acts.items()}
        self.live: dict[int, Tracked] = {}
        self._pins: list[Pin] = []

    def begin(self, manager: Manager) -> None:
        """Forget the former Manager and go on with this one."""
        self.m = manager
        self.body = Body(manager, self._stamps, self.number)
        self.live = {}
        self._pins = []

    def operate(self) -> None:
        """One operation; for want of room it may change nothing. Raises Mismatch and whatever else
        a Manager raises that is no refusal."""
        if len(self.live) < self.quota and self._rng.random() < 0.5:
            kind = "create"
        else:
            (kind,) = self._rng.choices(self._kinds, self._weights)
        self.num_begun += 1
        self.operations[kind] += 1
        try:
            self._run[kind]()
        except REFUSALS:
            self.refusals[kind] += 1

    def count_checked(self) -> None:
        """Take over what the body of the steps has compared."""
        checked = self.body.checked
        self.rows_checked += checked.rows
        self.attentions_checked += checked.attentions
        checked.rows = checked.attentions = 0

    def live_blocks(self) -> int:
        """Blocks that the live sequences would take."""
        size = self.options.block_size
        return sum(-(-len(t.tokens) // size) for t in self.live.values())

    def release_pins(self) -> None:
        """Let all pinned blocks go."""
        while self._pins:
            self._pins.pop().release()

    def _acts(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """Each kind of operation: how often, and what."""
        return {
            "create": (6, self._create),
            "step": (36, self._step),
            "append": (6, self._append),
            "abort": (3, self._abort),
            "cancel": (2, self._cancel),
            "fork": (4, self._fork),
            "truncate": (4, self._truncate),
            "swap_out": (8, self._swap_out),
            "swap_in": (5, self._swap_in),
            "prefetch": (3, self._prefetch),
            "exchange": (6, self._exchange),
            "make_room": (3, self._make_room),
            "free_in_flight": (3, self._free_in_flight),
            "free": (2, self._free_one),
            "pin": (2, self._pin),
            "unpin": (3, self.release_pins),
            "evict": (2, self._evict),
            "match": (1, self._match),
            "look": (1, self._look),
        }

    # --- sequences ------------------------------------------------------------------------------

    def _create(self) -> None:
        """A prompt that begins as others do, and ends as no other does."""
        if len(self.live) >= self.quota:
            self.free(self._rng.choice(list(self.live.values())))
        rng, longest = self._rng, self.options.max_tokens
        target = rng.randint(max(1, longest // 2), longest)
        length = rng.randint(1, max(1, 3 * target // 4))
        most = length if rng.random() < 0.7 else 0
        shared = rng.choice(self.prefixes)[: rng.randint(0, most)]
        own = drawn_tokens(self._generator, length - len(shared))
        tokens = np.concatenate((shared, own))
        namespace = rng.choice(NAMESPACES)
        chain = self._stamps.extended(np.zeros(0, np.uint64), tokens, namespace)
        seq = self.m.create(tokens, namespace=namespace, priority=rng.randint(0, 1))
        self.live[seq.id] = Tracked(seq, namespace, tokens, chain, target)
        self.num_sequences += 1
        self.num_tokens += length

    def extend(self, tracked: Tracked, count: int) -> None:
        """Append tokens, and only then know of them: a refused append changed nothing."""
        tokens = drawn_tokens(self._generator, count)
        self.m.append([tracked.seq], tokens, counts=[count])
        tracked.chain = self._stamps.extended(tracked.chain, tokens, tracked.namespace)
        tracked.tokens = np.concatenate((tracked.tokens, tokens))
        self.num_tokens += count

    def _append(self) -> None:
        """Some tokens at once: the next steps compute them in chunks."""
        for tracked in self._some(2):
            room = tracked.target - len(tracked.tokens)
            if room > 0:
                self.extend(tracked, self._rng.randint(1, room))

    def _fork(self) -> None:
        room = self.quota - len(self.live)
        for tracked in self._some(1):
            if room < 1:
                self.free(tracked)
                continue
            for seq in self.m.fork(tracked.seq, self._rng.randint(1, min(room, 2))):
                self.live[seq.id] = Tracked(
                    seq, tracked.namespace, tracked.tokens, tracked.chain, tracked.target
                )
                self.num_sequences += 1

    def _truncate(self) -> None:
        """Cut, and perhaps go on at once with other tokens in the same slots."""
        for tracked in self._some(2):
            length = self._rng.randint(1, len(tracked.tokens))
            self.m.truncate([tracked.seq], length)
            tracked.tokens, tracked.chain = tracked.tokens[:length], tracked.chain[:length]
            if self._rng.random() < 0.7 and length < tracked.target:
                self.extend(tracked, 1)

    def free(self, tracked: Tracked) -> None:
        """End it and forget it."""
        self.m.free([tracked.seq])
        del self.live[tracked.seq.id]

    def _free_one(self) -> None:
        for tracked in self._some(1):
            self.free(tracked)

    # --- steps ----------------------------------------------------------------------------------

    def _plan(self) -> tuple[list[Sequence], int | None]:
        """Rows for a step, each with something pending, in the order that make_room asks for."""
        chosen = self._some(MOST_ROWS)
        for tracked in chosen:
            if tracked.num_pending == 0 and len(tracked.tokens) < tracked.target:
                self.extend(tracked, 1)
        seqs = sorted((t.seq for t in chosen), key=lambda seq: (-seq.priority, seq.id))
        size = self.options.block_size
        return seqs, self._rng.choice((None, None, size - 1 or 1, 4 * size))

    def _step(self) -> None:
        """Room, plan, body with its checks; sequences that are done end."""
        seqs, budget = self._plan()
        rest = self._rng.random()
        if rest < 0.85:
            self.m.make_room(seqs, max_tokens=budget)
        fit = "all" if rest < 0.1 or rest > 0.95 else "some"
        self.compute(self.m.step(seqs, max_tokens=budget, fit=fit))
        for seq in seqs:
            tracked = self.live[seq.id]
            if len(tracked.tokens) >= tracked.target and tracked.num_pending == 0:
                self.free(tracked)

    def compute(self, step: Step) -> None:
        """Its body, with all checks. Where copies are made to fail, what is wrong in it is no
        breach if leaving the step says that K/V was lost."""
        mismatch: Mismatch | None = None
        with step:
            try:
                self.body.run(step, self.live)
            except Mismatch as found:
                if not self.options.faults:
                    raise
                mismatch = found
        if mismatch is not None:
            raise mismatch

    def _abort(self) -> None:
        """The body raises after its first layers; all has to be as before."""
        seqs, budget = self._plan()
        try:
            with self.m.step(seqs, max_tokens=budget, fit="some") as step:
                layers = self._rng.randint(0, self.options.num_layers)
                self.body.run(step, self.live, num_layers=layers)
                raise Abandoned
        except Abandoned:
            pass
        except Mismatch:
            if not self.options.faults:  # an aborted step doesn't tell of lost K/V
                raise

    def _cancel(self) -> None:
        """Planned and never entered."""
        seqs, budget = self._plan()
        self.m.step(seqs, max_tokens=budget, fit="some").cancel()

    # --- tiers ----------------------------------------------------------------------------------

    def _swap_out(self) -> None:
        seqs = [t.seq for t in self._some(4)]
        self._perhaps_wait(self.m.swap_out(seqs, self._rng.choice(HOWS)))
        if self._rng.random() < 0.5:
            self.m.evict(self._rng.choice((1, 4, 64)))

    def _swap_in(self) -> None:
        self._perhaps_wait(self.m.swap_in([t.seq for t in self._some(2)]))

    def _prefetch(self) -> None:
        self._perhaps_wait(self.m.prefetch([t.seq for t in self._some(4)]))

    def _exchange(self) -> None:
        """Some out, their frames given up, others into these at once."""
        some = self._some(6)
        half = len(some) // 2
        self.m.swap_out([t.seq for t in some[:half]], "auto")
        self.m.evict(self._rng.choice((4, 64)))
        self._perhaps_wait(self.m.prefetch([t.seq for t in some[half:]]))

    def _make_room(self) -> None:
        seqs = [t.seq for t in self._some(4)]
        if seqs:
            self.m.make_room(seqs, how=self._rng.choice(HOWS))

    def _free_in_flight(self) -> None:
        """Start a transfer of a sequence and end it at once, perhaps with a child left."""
        for tracked in self._some(1):
            try:
                if tracked.seq.state == "SWAPPED":
                    self.m.swap_in([tracked.seq])
                else:
                    self.m.swap_out([tracked.seq], "swap")
                    if self._rng.random() < 0.5:
                        self.m.swap_in([tracked.seq])  # and back, behind its own copy out
            finally:  # also where there was no room for it
                self.free(tracked)

    def _evict(self) -> None:
        self.m.evict(self._rng.choice((1, 8, 1000)), self._rng.choice(("device", "host")))

    def _perhaps_wait(self, transfer: Transfer) -> None:
        if self._rng.random() < 0.3:
            transfer.wait(self.options.hang_seconds)

    # --- the cache, and looking -----------------------------------------------------------------

    def _pin(self) -> None:
        """The first blocks of a prompt that others share; one pin a worker, so room stays."""
        self.release_pins()
        tokens = self._rng.choice(self.prefixes)[: 2 * self.options.block_size]
        self._pins.append(self.m.pin(tokens, namespace=self._rng.choice(NAMESPACES)))

    def _match(self) -> None:
        tokens = self._rng.choice(self.prefixes)
        found = self.m.match(tokens, namespace=self._rng.choice(NAMESPACES))
        assert found.num_tokens == found.on_device + found.on_host <= len(tokens), found

    def _look(self) -> None:
        """Rules and sums at any moment; tokens as they were given."""
        self.m.verify()
        stats = self.m.stats()
        for tier in (stats.device, stats.host):
            assert tier.free + tier.held == tier.total, tier
        for tracked in self._some(2):
            assert np.array_equal(tracked.seq.tokens, tracked.tokens), tracked.seq

    def _some(self, most: int) -> list[Tracked]:
        """Up to so many of the live sequences, in random order."""
        live = list(self.live.values())
        return self._rng.sample(live, min(len(live), self._rng.randint(1, most)))
