"""`Ledger`: the Python face of the compiled ledger. It grows arrays, makes plans, names errors.

It knows record numbers and tokens, no handles, no tensors and no devices. Each method is one
Manager call: one compiled call, its error code turned into an exception, and, where bytes have to
move, the `Plan` that says how.
"""

from __future__ import annotations

import secrets
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvmem.plan import Plan

from . import decide, ops_sequences, ops_steps, ops_tiers
from .empty_state import make_state
from .growth import span_capacity
from .learning import LearningState
from .raising import Refusal, refuse
from .sealing import NO_PLAN
from .state import DEVICE, FREED, GROUP, NO_SEQUENCE, RESIDENT, SWAPPED
from .step_arrays import HAS_PLAN, IS_FILLED, NUM_TOKENS, WANTS_CLEANING, StepArrays
from .verify import verify

Ids = NDArray[np.int32]


class Ledger(LearningState):
    """Blocks, frames, tables and the trie of one Manager. Not thread-safe: the Manager locks."""

    def __init__(
        self,
        *,
        device_blocks: int,
        host_blocks: int,
        block_size: int,
        tier_policy: str,
        watermarks: tuple[int, int] = (0, 0),
        record_fills: bool = False,
        clears: bool = False,
        quarantine: bool = False,
        hash_seed: int | None = None,
    ) -> None:
        self.block_size = block_size
        state = make_state(
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            block_size=block_size,
            tier_policy=tier_policy,
            watermarks=watermarks,
            record_fills=record_fills,
            clears=clears,
            quarantine=quarantine,
            hash_seed=secrets.randbits(128) if hash_seed is None else hash_seed,
        )
        super().__init__(state)
        self.open_steps: dict[int, StepArrays] = {}  # by epoch
        self._spare: deque[StepArrays] = deque()  # of ended steps, the longest ended first
        self._asking = StepArrays()  # of questions that plan nothing
        self._hashes = np.zeros(16, np.int64)
        self._need = np.zeros(2, np.int64)

    # --- sequences ------------------------------------------------------------------------------

    def create(
        self,
        tokens: Ids,
        *,
        namespace: bytes,
        keys: Ids | None = None,
        priority: int = 0,
        publish: bool = True,
        max_cached: int = -1,
    ) -> int:
        """A WAITING sequence. O(tokens)."""
        self._room_for_sequences(1)
        self._room_for_tokens(2 * span_capacity(len(tokens)))
        number = self.namespace_id(namespace)
        s = ops_sequences.create(
            self.addresses,
            tokens,
            _NO_IDS if keys is None else keys,
            number,
            priority,
            publish,
            max_cached,
        )
        return int(s)

    def look_up(self, s: int) -> Ids:
        """The cached blocks that continue a sequence's table, by id. No side effect."""
        most = int(self.state.sequences["num_tokens"][s]) // self.block_size
        if most > len(self._found):
            self._found = np.zeros(2 * most, np.int32)
        asking = self._asking.addresses
        count = ops_steps.look_up_cached(self.addresses, asking, s, self._found)
        return self._found[:count].copy()

    def num_cached(self, s: int) -> int:
        """Tokens of a sequence that the trie served; before its first plan, what it would serve
        now. O(1), then O(tokens hit)."""
        sequence = self.state.sequences[s]
        if sequence["queried"]:
            return int(sequence["num_cached"])
        return len(self.look_up(s)) * self.block_size

    def append(self, seqs: Ids, counts: NDArray[np.int64] | None, tokens: Ids, draft: bool) -> None:
        """Append `counts[i]` of `tokens` to each sequence, without counts one each. O(tokens)."""
        counts = _ONE_EACH if counts is None else counts
        while code := ops_sequences.append(self.addresses, seqs, counts, tokens, draft):
            if not self._retry(code):
                raise refuse(self.state, code)

    def accept(self, seqs: Ids, accepted: NDArray[np.int64], tokens: Ids) -> Plan:
        """Keep `accepted[i]` drafts of each, drop the others, append one token each."""
        while code := ops_sequences.accept(self.addresses, seqs, accepted, tokens):
            if not self._retry(code):
                raise refuse(self.state, code)
        return self.seal()

    def truncate(self, seqs: Ids, lengths: NDArray[np.int64]) -> Plan:
        """Cut each sequence to `lengths[i]` tokens."""
        code = ops_sequences.truncate(self.addresses, seqs, lengths)
        if code:
            raise refuse(self.state, code)
        return self.seal()

    def fork(self, s: int, count: int) -> list[int]:
        """`count` sequences that share all blocks of `s`. O(count * (tokens + blocks))."""
        if self.state.sequences["step"][s]:
            self.state.ledger["error_row"][0] = 0
            raise refuse(self.state, decide.IN_STEP)
        length = int(self.state.sequences["num_tokens"][s])
        blocks = int(self.state.tables["num_blocks"][s, GROUP])
        self._room_for_sequences(count)
        self._room_for_tokens(2 * count * span_capacity(length))
        self._room_for_table(count * span_capacity(blocks))
        parent = self.state.sequences[s]
        start, keys_start = int(parent["tokens_start"]), int(parent["keys_start"])
        tokens = self.state.tokens[start : start + length].copy()
        keys = self.state.tokens[keys_start : keys_start + length].copy()
        children = []
        for _ in range(count):
            child = ops_sequences.create(
                self.addresses,
                tokens,
                _NO_IDS if keys_start == start else keys,
                int(parent["namespace"]),
                int(parent["priority"]),
                bool(parent["publish"]),
                int(parent["max_cached"]),
            )
            ops_sequences.fork_into(self.addresses, s, child)
            children.append(int(child))
        return children

    def free(self, seqs: Ids) -> Plan:
        """End sequences; those in an open step end with it."""
        ops_sequences.free(self.addresses, seqs)
        return self.seal()

    def tokens_of(self, s: int) -> Ids:
        """A copy of a sequence's tokens."""
        q = self.state.sequences[s]
        start = int(q["tokens_start"])
        return self.state.tokens[start : start + int(q["num_tokens"])].copy()

    def table_of(self, s: int) -> Ids:
        """A copy of a sequence's block table."""
        table = self.state.tables[s, GROUP]
        start = int(table["start"])
        return self.state.table[start : start + int(table["num_blocks"])].copy()

    # --- steps ----------------------------------------------------------------------------------

    def _decide(
        self,
        arrays: StepArrays,
        seqs: Ids,
        num_tokens: Ids | None,
        max_tokens: int | None,
        reserve: int,
        *,
        need_all: bool,
        act: bool,
    ) -> int:
        """Ask for a step in these arrays and, with `act`, plan it; the code, never one to grow."""
        budget = -1 if max_tokens is None else max_tokens
        if budget > 0:
            many = budget > 65536  # else counting costs more than the room that it saves
            known = self.state.sequences["num_tokens"][seqs].sum() if many else budget
            size = 2 * (min(budget, int(known)) // self.block_size + 2 * len(seqs)) + 16
            if size > len(self._hashes):
                self._hashes = np.zeros(size, np.int64)
        hashes = self._hashes if budget > 0 else self._hashes[:1]
        arrays.ask(seqs, num_tokens)
        while True:
            code = ops_steps.plan_step(
                self.addresses, arrays.addresses, len(seqs), num_tokens is not None, self._found,
                budget, reserve, need_all, act, hashes, self._need,
            )  # fmt: skip
            if code == decide.OK or not self._retry(code):
                return int(code)

    def _take_arrays(self) -> StepArrays:
        """Arrays for a step; never those of the step that ended last, which may still be read."""
        return self._spare.popleft() if len(self._spare) > 1 else StepArrays()

    def plan_step(
        self,
        seqs: Ids,
        *,
        num_tokens: Ids | None = None,
        max_tokens: int | None = None,
        reserve: int = 0,
        need_all: bool = True,
    ) -> tuple[Plan, StepArrays]:
        """Plan a step over these sequences, see decide.py. Raises Refusal, changing nothing. The
        arrays are used again by the second step planned after this one has ended."""
        arrays = self._take_arrays()
        code = self._decide(
            arrays, seqs, num_tokens, max_tokens, reserve, need_all=need_all, act=True
        )
        if code:
            self._spare.appendleft(arrays)
            refusal = refuse(self.state, code)
            short = self.lacking(
                seqs, num_tokens=num_tokens, max_tokens=max_tokens, reserve=reserve
            )
            if code == decide.TOO_LONG:
                longest = self.blocks_for(int(self.state.sequences["num_tokens"][seqs].max()))
                short = max(short, longest + reserve - int(self.state.pools["num_frames"][DEVICE]))
            refusal.short = short
            raise refusal
        report = arrays.whole.report.tolist()
        if not report[IS_FILLED]:
            arrays.make_longer(report[NUM_TOKENS])
            ops_steps.fill_step(self.addresses, arrays.addresses, len(seqs))
            report = arrays.whole.report.tolist()
        arrays.take(report, self.state.frame_table)
        self.wants_cleaning = report[WANTS_CLEANING] != 0
        self.open_steps[arrays.epoch] = arrays
        plan = self._sealed(report, arrays.epoch - 1) if report[HAS_PLAN] else arrays.plan
        plan.step_epoch = arrays.epoch
        return plan, arrays

    def lacking(
        self, seqs: Ids, *, num_tokens: Ids | None, max_tokens: int | None, reserve: int
    ) -> int:
        """Device blocks that a step over all these rows lacks, as `decide` counts them (R7)."""
        pool, ledger = self.state.pools[DEVICE], self.state.ledger[0]
        old = int(pool["num_free"]), int(pool["num_frames"])
        pool["num_free"] = pool["num_frames"] = 1 << 29
        try:
            self._decide(
                self._asking, seqs, num_tokens, max_tokens, reserve, need_all=True, act=False
            )
        finally:
            pool["num_free"], pool["num_frames"] = old
        taken = int(ledger["num_needed"]) + int(ledger["num_reclaimed"]) + reserve
        return taken - old[0] - int(pool["num_evictable"])

    def end_step(self, epoch: int, *, commit: bool) -> Plan:
        """End an open step: count and publish, or put everything back (a spoiled one always)."""
        arrays = self.open_steps.pop(epoch)
        if self.spoiled and epoch in self.spoiled:
            self.spoiled.discard(epoch)
            commit = False
        has_plan = ops_steps.end_step(
            self.addresses, arrays.addresses, len(arrays.rows), epoch, commit
        )
        self._spare.append(arrays)
        return self._sealed(arrays.whole.report.tolist(), epoch) if has_plan else NO_PLAN

    def fits(
        self,
        seqs: Ids,
        *,
        num_tokens: Ids | None = None,
        max_tokens: int | None = None,
        reserve: int = 0,
    ) -> str:
        """ "yes", "later" or "never": what `plan_step` with all rows would do (R7)."""
        if reserve > int(self.state.pools["num_frames"][DEVICE]):
            return "never"
        code = self._decide(
            self._asking, seqs, num_tokens, max_tokens, reserve, need_all=True, act=False
        )
        if code == decide.IN_STEP:
            raise refuse(self.state, code)
        return {decide.OK: "yes", decide.TOO_LONG: "never"}.get(code, "later")

    def update_table(self, arrays: StepArrays) -> None:
        """Bring the dense table of an open step in line. O(rows + entries changed)."""
        columns = -(-arrays.max_seq_len // self.block_size)
        arrays.show_table(columns)
        ops_steps.patch_table(self.addresses, arrays.addresses, len(arrays.rows))

    # --- tiers ----------------------------------------------------------------------------------

    def _in_state(self, seqs: Ids, state: int) -> Ids:
        """Those of the records that are in a state."""
        return np.ascontiguousarray(seqs[self.state.sequences["state"][seqs] == state])

    def _num_entries(self, seqs: Ids) -> int:
        """Table entries of these sequences: no call on them copies more blocks."""
        return int(self.state.tables["num_blocks"][seqs, GROUP].sum())

    def swap_out(self, seqs: Ids) -> Plan:
        """Make RESIDENT sequences SWAPPED; the others are left as they are."""
        seqs = self._in_state(seqs, RESIDENT)
        self._room_for_lists(self._num_entries(seqs))
        code = ops_tiers.swap_out(self.addresses, seqs, self._need)
        if code:
            raise refuse(self.state, code)
        return self.seal()

    def give_up(self, seqs: Ids) -> Plan:
        """Let sequences keep only their tokens."""
        code = ops_tiers.give_up(self.addresses, seqs)
        if code:
            raise refuse(self.state, code)
        return self.seal()

    def swap_in(self, seqs: Ids) -> Plan:
        """Make SWAPPED sequences RESIDENT; the others are left as they are."""
        seqs = self._in_state(seqs, SWAPPED)
        self._room_for_lists(self._num_entries(seqs))
        code = ops_tiers.swap_in(self.addresses, seqs, self._need)
        if code:
            raise refuse(self.state, code)
        return self.seal()

    def evict(self, num_blocks: int, tier: int) -> tuple[int, Plan]:
        """Evict up to `num_blocks` cached blocks of a tier; how many it were."""
        most = min(num_blocks, int(self.state.pools["num_evictable"][tier]))
        self._room_for_lists(most)
        count = ops_tiers.evict(self.addresses, most, tier)
        return int(count), self.seal()

    def clean(self, max_blocks: int) -> Plan:
        """Copy up to `max_blocks` blocks to the host tier ahead of their eviction, as the tier
        policy has it. No block changes its state. O(max_blocks)."""
        self._room_for_lists(max_blocks)
        ops_tiers.clean(self.addresses, max_blocks)
        return self.seal()

    def change_pins(self, blocks: Ids, change: int) -> Plan:
        """Pin blocks or unpin them. Raises Refusal when a block has too many pins."""
        if change > 0 and len(blocks) and self.state.blocks["num_pins"][blocks].max() >= 32767:
            raise refuse(self.state, decide.TOO_MANY_PINS)
        ops_tiers.change_pins(self.addresses, blocks, change)
        return self.seal()

    def reset(self, namespace: bytes | None) -> Plan:
        """Forget cached content of a namespace, or of all."""
        if self.open_steps:  # whether or not that namespace exists: others must not be told
            raise refuse(self.state, decide.IN_STEP)
        number = 0 if namespace is None else self._namespaces.get(namespace, -1)
        if number >= 0:
            roots = np.zeros(len(self.state.nodes), np.int32)
            ops_tiers.reset(self.addresses, number, roots)
        return self.seal()

    # --- checks ---------------------------------------------------------------------------------

    def verify(self) -> None:
        """Check R1-R5 on the records, see verify.py. Raises LedgerCorrupt."""
        sources = [
            int(b)
            for arrays in self.open_steps.values()
            for b in arrays.rows["copy_source"][arrays.rows["reason"] == decide.PLANNED]
            if b
        ]
        verify(self.state, sources)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def dump(self) -> str:
        """Counters and pools in words, for `verify`."""
        names = self.state.ledger.dtype.names or ()
        counters = ", ".join(f"{n}={int(self.state.ledger[n][0])}" for n in names)
        return f"{counters}; pools {self.state.pools.tolist()}"

    def is_live(self, s: int) -> bool:
        """True when the record holds a sequence that was not freed."""
        q = self.state.sequences[s]
        return bool(q["state"] != NO_SEQUENCE and not q["at_end"] & FREED)


_NO_IDS = np.zeros(0, np.int32)  # writable: a read-only array is a type of its own to Numba
_ONE_EACH = np.zeros(0, np.int64)  # counts that were not given


__all__ = ["Ledger", "Refusal", "StepArrays"]
