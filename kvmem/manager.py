"""`Manager`: the object an engine embeds. Each method checks, takes the lock and delegates."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch

from kvmem import cache, inspect_state
from kvmem.block import Block
from kvmem.cache import Match, Pin
from kvmem.checks import boolean, choice, integer
from kvmem.config import Config
from kvmem.events import Event
from kvmem.extras import checked_extras
from kvmem.ledger import Refusal
from kvmem.ledger.verify import LedgerCorrupt
from kvmem.memory_check import check_memory
from kvmem.planning import plan_step
from kvmem.runtime import TIERS, Ids, Runtime
from kvmem.sampled import append_sampled
from kvmem.sequence import Sequence
from kvmem.stats import Stats
from kvmem.step import Step
from kvmem.store.making import Progress
from kvmem.store.store import Store
from kvmem.swapper import Room, Swapper, Transfer
from kvmem.tokens import check_token_values, count_array, namespace_key, token_array

MAX_PRIORITY = 2**31 - 1
FITS = ("all", "some")


class Manager:
    """Paged KV-cache memory for one engine: blocks, prefix cache, two tiers, kernels.

    Thread-safe: one lock serialises the calls, and nothing waits for a device under it. `with`
    closes it. A call that raises has changed nothing, except that unreferenced cached content may
    have been evicted (R8). Raises TypeError for anything but a Config, ConfigError when the arenas
    do not fit the machine. Costs the arenas' address space; pages are taken when first written.

    On a GPU the host tier is page-locked at once, some 0.1 s a GiB: `progress(done, total)` hears
    of it in bytes, and ends it by raising (nothing stays locked then). DeviceUnavailable where
    there is no such GPU.
    """

    def __init__(self, config: Config, *, progress: Progress | None = None) -> None:
        if not isinstance(config, Config):
            raise TypeError(f"config must be a kvmem.Config, not {type(config).__name__}")
        check_memory(config)
        self._runtime = Runtime(config, progress)
        self._swapper = Swapper(self._runtime)
        self._finalizer = weakref.finalize(self, Store.close, self._runtime.store)

    # --- sequences ------------------------------------------------------------------------------

    def create(
        self,
        tokens: object,
        *,
        namespace: str | bytes | None = None,
        priority: int = 0,
        extras: list[tuple[int, int, bytes]] | tuple[tuple[int, int, bytes], ...] = (),
        publish: bool = True,
        max_cached: int | None = None,
    ) -> Sequence:
        """A WAITING sequence with these tokens (int32 array or tensor; a list costs a conversion).

        Host bookkeeping only: legal in every state of the tiers. `num_cached` forecasts what the
        prefix cache serves; the hit itself is taken when a step plans the sequence. `namespace`
        (tenant, adapter) is the root of an own cache. `extras`: (start, length, digest of at least
        16 bytes) for positions whose K/V depends on more than the token. `publish=False` keeps its
        blocks out of the cache; `max_cached` limits the hit (tokens). Raises TypeError, ValueError.
        O(tokens).
        """
        array = token_array("tokens", tokens)
        key = namespace_key(namespace)
        priority = integer("priority", priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        publish = boolean("publish", publish)
        limit = -1
        if max_cached is not None:
            limit = integer("max_cached", max_cached, low=0, high=MAX_PRIORITY)
        covered = checked_extras(extras, len(array))
        with self._runtime.entered():
            keys = None
            if covered:
                keys = self._runtime.extras.keys(array, covered)
                if keys is None:
                    publish, limit = False, 0
            record = self._runtime.ledger.create(
                array,
                namespace=key,
                keys=keys,
                priority=priority,
                publish=publish,
                max_cached=limit,
            )
            return Sequence(self._runtime, record)

    def append(
        self, seqs: list[Sequence], tokens: object, *, counts: object = None, draft: bool = False
    ) -> None:
        """Append one token to each sequence, or `counts[i]` of them (ragged, one after another).

        On a GPU they may be a 1-D tensor there, int32 or int64, taken without waiting for it; its
        values, which are trusted, go into the next step's `tokens` on the GPU, and blocks are
        published when they have arrived here. `fork`, `truncate`, `accept`, `Sequence.tokens` and
        an `append` of other tokens wait for those of their sequences.

        Host bookkeeping only, never OutOfBlocks. Draft tokens are computed but not published until
        `accept`; plain tokens may not follow unaccepted drafts. Raises UnknownSequence, TypeError,
        ValueError; TransferError when the last step of one ran over K/V that a failed copy took, so
        that what it sampled is void (`lost` names them; drop their tokens). O(tokens).
        """
        draft = boolean("draft", draft)
        runtime = self._runtime
        if runtime.sampled is not None:
            if not draft and append_sampled(runtime, seqs, tokens, counts):
                return
            runtime.await_tokens(seqs)
        array = token_array("tokens", tokens, check_values=False)
        runtime.begin()
        try:
            records = runtime.records(seqs)
            runtime.losses.check_samples(records)
            each, total = None, len(records)
            if counts is not None:
                each = count_array("counts", counts, len(records), "sequence")
                total = int(each.sum())
            if total != len(array):
                check_token_values("tokens", array)
                raise ValueError(
                    f"tokens has {len(array)} entries, counts ask for {total} over "
                    f"{len(records)} sequences; give one token a sequence, or counts"
                )
            try:
                runtime.ledger.append(records, each, array, draft)
            except Refusal as refusal:
                check_token_values("tokens", array)
                raise runtime.explain(refusal, seqs, "append") from None
        finally:
            runtime.lock.release()

    def accept(self, seqs: list[Sequence], num_accepted: object, tokens: object) -> None:
        """Keep the first `num_accepted[i]` drafts of each sequence, drop the others, append the
        next token `tokens[i]`. K/V of kept drafts stays; their full blocks are published.
        Raises UnknownSequence, TypeError, ValueError (more than there are drafts). O(drafts)."""
        array = token_array("tokens", tokens)
        self._runtime.await_tokens(seqs)
        with self._runtime.entered():
            records = self._runtime.records(seqs)
            accepted = count_array("num_accepted", num_accepted, len(records), "sequence")
            if len(array) != len(records):
                raise ValueError(
                    f"tokens has {len(array)} entries for {len(records)} sequences; give one each"
                )
            self._run("accept", seqs, self._runtime.ledger.accept, records, accepted, array)

    def fork(self, seq: Sequence, n: int = 1) -> list[Sequence]:
        """`n` sequences that share all blocks of `seq`; the first write into a shared block copies
        it. Legal when swapped out. Raises ValueError, UnknownSequence, RuntimeError in an open
        step. O(n * (tokens + blocks)), no bytes move."""
        n = integer("n", n, low=1, high=1 << 20)
        self._runtime.await_tokens([seq])
        with self._runtime.entered():
            record = self._runtime.record(seq, "seq")
            try:
                children = self._runtime.ledger.fork(record, n)
            except Refusal as refusal:
                raise self._runtime.explain(refusal, [seq], "fork") from None
            return [Sequence(self._runtime, child) for child in children]

    def truncate(self, seqs: list[Sequence], num_tokens: object) -> None:
        """Cut each sequence to `num_tokens` (one number, or one each). What is cut is unpublished
        only where nobody shares it. Raises ValueError for more than there are. O(blocks freed)."""
        self._runtime.await_tokens(seqs)
        with self._runtime.entered():
            records = self._runtime.records(seqs)
            lengths = count_array("num_tokens", num_tokens, len(records), "sequence")
            have = self._runtime.ledger.state.sequences["num_tokens"][records]
            if (lengths > have).any():
                row = int(np.flatnonzero(lengths > have)[0])
                raise ValueError(
                    f"num_tokens[{row}] is {lengths[row]}; allowed: 0 to {have[row]}, the tokens "
                    f"of that sequence"
                )
            self._run("truncate", seqs, self._runtime.ledger.truncate, records, lengths)

    def free(self, seqs: list[Sequence]) -> None:
        """End sequences; their full blocks stay cached until evicted. Legal in an open step (they
        go when it ends) and with copies in flight. Raises UnknownSequence. O(blocks)."""
        with self._runtime.entered():
            runtime = self._runtime
            records = runtime.records(seqs)
            runtime.forget_list()
            runtime.submit(runtime.ledger.free(records))
            runtime.events.add("free", tuple(seq.id for seq in seqs))
            for seq in seqs:
                seq._end()

    # --- steps ----------------------------------------------------------------------------------

    def step(
        self,
        seqs: list[Sequence],
        *,
        max_tokens: int | None = None,
        num_tokens: object = None,
        fit: str = "all",
        reserve_blocks: int = 0,
    ) -> Step:
        """Plan a batch: hits, frames, copies, swap-ins, slots, tables. Use it with `with`.

        Rows in the order given; each computes what is pending, at most `num_tokens[i]`, all
        together at most `max_tokens`. With `max_tokens` a row whose next block an earlier row of
        this step computes waits for it and shares it. WAITING and SWAPPED sequences become
        RESIDENT. `fit="all"` plans every row or raises OutOfBlocks / SequenceTooLong; "some" plans
        what fits and tells the rest in `left_out`. `reserve_blocks` stay untaken. Several steps may
        be open on disjoint sequences. Raises UnknownSequence, ValueError, RuntimeError (a sequence
        in another open step). O(tokens + blocks that become resident).
        """
        choice("fit", fit, FITS)
        budget = _optional("max_tokens", max_tokens)
        reserve = integer("reserve_blocks", reserve_blocks, low=0, high=MAX_PRIORITY)
        runtime = self._runtime
        runtime.begin()
        try:
            runtime.poll()
            records = runtime.records(seqs)
            limits = None if num_tokens is None else self._row_limits(records, num_tokens)
            try:
                return plan_step(
                    runtime,
                    records,
                    num_tokens=limits,
                    max_tokens=budget,
                    reserve=reserve,
                    need_all=fit == "all",
                )
            except Refusal as refusal:
                raise runtime.explain(refusal, seqs, "step") from None
        finally:
            runtime.lock.release()

    def can_fit(
        self,
        num_tokens: int = 0,
        *,
        tokens: object = None,
        seqs: list[Sequence] | tuple[Sequence, ...] = (),
        namespace: str | bytes | None = None,
    ) -> str:
        """Would a step over `seqs` and a new sequence fit: "yes", "later" or "never".

        The new one has `tokens` (cached ones count as hits), or `num_tokens` unknown ones. Decided
        by the function that `step` uses (R7), without a change; a hint, since others may come in
        between. Raises as `step` and `create` do.
        """
        extra = integer("num_tokens", num_tokens, low=0, high=MAX_PRIORITY)
        array = None if tokens is None else token_array("tokens", tokens)
        key = namespace_key(namespace)
        with self._runtime.entered():
            runtime = self._runtime
            ledger = runtime.ledger
            records = runtime.records(seqs)
            self._check_idle(records)
            reserve = ledger.blocks_for(extra)
            if array is None:
                return ledger.fits(records, reserve=reserve)
            record = ledger.create(array, namespace=key, publish=False)
            try:
                return ledger.fits(np.append(records, np.int32(record)), reserve=reserve)
            finally:
                runtime.submit(ledger.free(np.array([record], np.int32)))

    # --- tiers ----------------------------------------------------------------------------------

    def swap_out(self, seqs: list[Sequence], how: str = "swap") -> Transfer:
        """Let sequences give up the device. Copies go on while others compute.

        "swap" reserves a host frame for each dirty block, else raises OutOfBlocks(tier="host") or
        TierError with nothing changed; "recompute" keeps only the tokens; "auto" swaps where there
        is room and gives up the rest. Pinned blocks stay. A WAITING sequence: no-op; a SWAPPED one
        too, except that "recompute" gives up its host blocks.
        Raises UnknownSequence, RuntimeError in an open step. O(blocks). It waits for no copy, but
        outside of steps for older ones where 1,024 are on the way already.
        """
        self._runtime.limit_queues()
        with self._runtime.entered():
            return self._swapper.swap_out(seqs, how)

    def swap_in(self, seqs: list[Sequence], *, by_layer: int | None = None) -> Transfer:
        """Bring SWAPPED sequences back; others: no-op. Raises OutOfBlocks with nothing changed when
        not all fit. O(blocks), and waits as little as `swap_out`.

        `by_layer=n`: every n layers arrive by themselves, first layers first, so that a step may
        begin with the first while later ones are under way (`write`, `attend` and `group` of a
        layer wait for it). Worth it for long sequences and a slow link; with `debug` all come at
        once.
        """
        layers = 0
        if by_layer is not None:
            layers = integer("by_layer", by_layer, low=1, high=self.config.num_layers)
        self._runtime.limit_queues()
        with self._runtime.entered():
            return self._swapper.swap_in(seqs, layers)

    def prefetch(self, seqs: list[Sequence]) -> Transfer:
        """As `swap_in`, in order and as far as there is room; never OutOfBlocks."""
        self._runtime.limit_queues()
        with self._runtime.entered():
            return self._swapper.prefetch(seqs)

    def make_room(
        self,
        seqs: list[Sequence],
        *,
        max_tokens: int | None = None,
        num_tokens: object = None,
        reserve_blocks: int = 0,
        how: str = "auto",
    ) -> list[Sequence]:
        """Swap out victims so that the best of `seqs` find room; returns those swapped out.

        Plan the step with `fit="some"` afterwards, without them, in the order of rank: priority,
        then first come. Victims have lower priority than the best of `seqs`, or came later; `seqs`
        themselves may be among them. One swapped in and not yet stepped is spared while there is
        another. So the first in rank is in each such step, and nobody waits longer than those
        before it take. What is in an open step stays, and so does what is pinned: one that finds
        no room beside the pins, whoever else goes, is itself the first to go. A row that can never
        fit makes nobody go. Where that is not enough, or the host tier is full and `how` is "swap",
        what can be done is done, and the step's `left_out` tells the rest. An event "make_room" and
        a debug line of the log tell who went, and how.
        """
        budget = _optional("max_tokens", max_tokens)
        reserve = integer("reserve_blocks", reserve_blocks, low=0, high=MAX_PRIORITY)
        self._runtime.limit_queues()
        with self._runtime.entered():
            records = self._runtime.records(seqs)
            self._check_idle(records)
            limits = None if num_tokens is None else self._row_limits(records, num_tokens)
            room = Room(self._runtime.ledger, seqs, limits, budget, reserve)
            return self._swapper.make_room(list(seqs), how, room)

    def evict(self, num_blocks: int, tier: str = "device") -> int:
        """Evict up to `num_blocks` cached blocks of a tier, oldest first; returns how many."""
        count = integer("num_blocks", num_blocks, low=0, high=MAX_PRIORITY)
        number = TIERS.index(choice("tier", tier, TIERS))
        self._runtime.limit_queues()
        with self._runtime.entered():
            done, plan = self._runtime.ledger.evict(count, number)
            self._runtime.submit(plan)
            self._runtime.events.add("evict", (), plan.num_out)
            return done

    def poll(self) -> list[Sequence]:
        """Note which transfers have ended; each `step` does it too. Never waits.

        Returns the sequences whose K/V was taken by a copy that failed since the last call, mostly
        none: `Sequence.lost_from` tells from which token on it is pending again. Like `step` it
        also queues copies of background cleaning, when the link is idle.
        """
        with self._runtime.entered():
            runtime = self._runtime
            runtime.poll()
            if runtime.cleaner.is_on:
                runtime.cleaner.run()
            lost = set(runtime.losses.take())
            return [seq for seq in runtime.handles.values() if seq.id in lost] if lost else []

    # --- the prefix cache -----------------------------------------------------------------------

    def match(self, tokens: object, namespace: str | bytes | None = None) -> Match:
        """How much of a prompt is cached now, in whole blocks. No side effect. O(tokens hit)."""
        array = token_array("tokens", tokens)
        namespace_key(namespace)  # a wrong type raises before the lock is taken
        with self._runtime.entered():
            return cache.match(self._runtime, array, namespace)

    def pin(self, seq_or_tokens: object, *, namespace: str | bytes | None = None) -> Pin:
        """Keep the cached blocks of a sequence or a prompt on the device until the Pin's release.

        Covers the leading full, published blocks that are on the device now; `Pin.num_tokens` says
        how many tokens that is. `namespace` is that of tokens; a sequence knows its own. Raises
        PinError when it covers none. O(blocks).
        """
        if isinstance(seq_or_tokens, Sequence):
            with self._runtime.entered():
                record = self._runtime.record(seq_or_tokens, "seq_or_tokens")
                blocks: Ids = cache.published_blocks(self._runtime, record)
                return cache.pin_blocks(self._runtime, blocks)
        array = token_array("seq_or_tokens", seq_or_tokens)
        namespace_key(namespace)
        with self._runtime.entered():
            blocks = cache.find(self._runtime, array, namespace)
            return cache.pin_blocks(self._runtime, blocks)

    def reset(self, namespace: str | bytes | None = None) -> None:
        """Forget cached content in all tiers: of a namespace (its adapter was unloaded), or with
        None of everything (new weights).

        Live sequences go on with what they hold but publish no more. Pinned blocks stay until
        released, unfindable. Raises RuntimeError while a step is open. O(blocks).
        """
        key = None if namespace is None else namespace_key(namespace)
        with self._runtime.entered():
            try:
                self._runtime.submit(self._runtime.ledger.reset(key))
            except Refusal:
                raise RuntimeError("reset: a step is open; end it first") from None
            self._runtime.events.add("reset", ())

    # --- looking --------------------------------------------------------------------------------

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of a layer in the device arena, `[frames, block_size, num_kv_heads,
        head_dim | v_head_dim]`, strided, no copy; frame 0 is the null frame. For own kernels, which
        multiply what fp8_e4m3 holds by the config's scales."""
        self._runtime.check_open()
        num = integer("layer", layer, low=0, high=self.config.num_layers - 1)
        return self._runtime.store.kv(num)

    def block(self, block_id: int) -> Block:
        """A view of a block by id. Raises ValueError for an id that does not exist."""
        last = len(self._runtime.ledger.state.blocks) - 1
        with self._runtime.entered():
            return Block(self._runtime, integer("block_id", block_id, low=1, high=last))

    def stats(self) -> Stats:
        """Counters and the state of both tiers. O(blocks)."""
        with self._runtime.entered():
            return inspect_state.stats(self._runtime)

    def snapshot(self) -> dict[str, Any]:
        """Who holds which frame, for `kvmem.picture` and own tools. O(frames).

        `tiers[name]["owner"]` is int32, one a frame: 0 free, > 0 the id of its only sequence,
        -1 cached, -2 shared, -3 pinned, -4 being copied.
        """
        with self._runtime.entered():
            return inspect_state.snapshot(self._runtime)

    def events(self) -> list[Event]:
        """What happened since the last call (at most 4,096 events, older ones are dropped)."""
        with self._runtime.entered():
            return self._runtime.events.take()

    def verify(self) -> None:
        """Check rules R1-R5 now; raises AssertionError naming the first breach with the state.
        With `debug` also the guards of the arenas, and that nobody wrote to a free device frame.
        O(everything)."""
        with self._runtime.entered():
            try:
                self._runtime.ledger.verify()
            except LedgerCorrupt as breach:
                dump = self._runtime.ledger.dump()
                raise LedgerCorrupt(f"{breach}; {dump}") from None
            breaches = self._runtime.store.check_guards(inspect_state.filled_frames(self._runtime))
            if breaches:
                raise LedgerCorrupt("; ".join(breaches))

    @property
    def config(self) -> Config:
        """The Config it was made with."""
        return self._runtime.config

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._runtime.closed

    # --- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abandon what is queued, end the workers within 5 s, give the memory back. A second call:
        no-op, and in a forked child. Handles and views of this Manager are dead afterwards."""
        if self._runtime.fork.in_child:
            return
        with self._runtime.lock:
            if self._runtime.closed:
                return
            self._runtime.closed = True
            self._runtime.forget_list()
        self._finalizer()

    def __enter__(self) -> Manager:
        self._runtime.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self.config
        state = "closed" if self.closed else f"{config.device_blocks}+{config.host_blocks} blocks"
        return f"<kvmem.Manager {config.device} {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Manager cannot be pickled or copied; make one from its Config")

    # --- inside ---------------------------------------------------------------------------------

    def _run(self, act: str, seqs: list[Sequence], function: Any, *arguments: Any) -> None:
        """Call the ledger, submit its plan if it made one, word its refusal."""
        try:
            plan = function(*arguments)
        except Refusal as refusal:
            raise self._runtime.explain(refusal, seqs, act) from None
        if plan is not None:
            self._runtime.submit(plan)

    def _check_idle(self, records: Ids) -> None:
        """Raise RuntimeError for a row in an open step."""
        busy = np.flatnonzero(self._runtime.ledger.state.sequences["step"][records])
        if len(busy):
            raise RuntimeError(f"row {int(busy[0])} is in an open step; end that step first")

    def _row_limits(self, records: Ids, num_tokens: object) -> Ids:
        """The tokens asked for, one number a row, checked to be within what is pending."""
        self._check_idle(records)
        state = self._runtime.ledger.state.sequences
        limits = count_array("num_tokens", num_tokens, len(records), "sequence")
        pending = state["num_tokens"][records] - state["num_computed"][records]
        over = np.flatnonzero(limits > pending)
        if len(over):
            row = int(over[0])
            raise ValueError(
                f"num_tokens[{row}] is {limits[row]}; allowed: 0 to {pending[row]}, what is pending"
            )
        return limits.astype(np.int32)


def _optional(name: str, value: object) -> int | None:
    return None if value is None else integer(name, value, low=0, high=MAX_PRIORITY)
