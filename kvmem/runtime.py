"""What the parts of a Manager share: its config, ledger, store, lock, and the live handles.

One lock guards the ledger and the order of plans; nothing waits for a device under it. A plan is
submitted under the same lock hold that made it, so the store sees plans in the ledger's order (R6).
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvmem.cleaner import Cleaner
from kvmem.config import Config
from kvmem.errors import ManagerClosed, OutOfBlocks, PinError, SequenceTooLong, UnknownSequence
from kvmem.events import EventLog
from kvmem.extras import ExtraKeys
from kvmem.fork import ForkGuard
from kvmem.ledger import Ledger, Refusal
from kvmem.ledger import decide as codes
from kvmem.ledger.state import DEVICE, HOST
from kvmem.sequence import Sequence
from kvmem.store.store import Store

if TYPE_CHECKING:
    from kvmem.plan import Plan

Ids = NDArray[np.int32]
TIERS = ("device", "host")


class Runtime:
    """The inside of one Manager."""

    def __init__(self, config: Config) -> None:
        self.config = config
        for warning in config.plan().warnings:
            logging.getLogger("kvmem").warning(warning)
        self.lock = threading.RLock()
        self.store = Store(config)
        self.ledger = Ledger(
            device_blocks=config.device_blocks,
            host_blocks=config.host_blocks,
            block_size=config.block_size,
            tier_policy=config.tier_policy,
            watermarks=_watermarks(config),
            record_fills=config.debug or (config.sim is not None and config.sim.poison),
        )
        self.cleaner = Cleaner(self)
        self.extras = ExtraKeys()
        self.events = EventLog()
        self.live: dict[int, int] = {}  # id() of each live handle -> its record
        self.handles: weakref.WeakValueDictionary[int, Sequence] = weakref.WeakValueDictionary()
        self.abandoned: deque[int] = deque()  # epochs of steps dropped without an end
        self.dropped: deque[int] = deque()  # records whose handle was dropped without free
        self.unpinned: deque[Ids] = deque()  # blocks of Pins dropped without release
        self.closed = False
        self.fork = ForkGuard()
        self.last_list: list[Sequence] = []  # that `records` saw last; replaced, never written
        self._last_records: Ids = np.zeros(0, np.int32)
        self.last_ids: tuple[int, ...] = ()  # of the handles that `records` saw last

    # --- guards ---------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ManagerClosed after close() and in a forked child."""
        if self.closed:
            raise ManagerClosed("this Manager was closed; make a new one")
        if self.fork.in_child:
            raise ManagerClosed("a Manager does not survive fork; make a new one in the child")

    def begin(self) -> None:
        """What each entry point does first: guards, the lock (the caller releases it), handles that
        were dropped, a device that failed."""
        if self.closed or self.fork.in_child:  # it must not wait for a lock its parent held
            self.check_open()
        self.lock.acquire()
        if self.closed or self.abandoned or self.dropped or self.unpinned or self.store.error:
            try:
                self.check_open()
                self.store.check_usable()
                self._sweep()
            except BaseException:
                self.lock.release()
                raise

    def entered(self) -> Entered:
        """`begin`, and the release of the lock, as a `with` block."""
        return Entered(self)

    def _sweep(self) -> None:
        """End what was dropped without an end."""
        while self.abandoned:
            epoch = self.abandoned.popleft()
            self.store.end(epoch)
            self.submit(self.ledger.end_step(epoch, commit=False))
        while self.dropped:
            self.submit(self.ledger.free(np.array([self.dropped.popleft()], np.int32)))
        while self.unpinned:
            self.submit(self.ledger.change_pins(self.unpinned.popleft(), -1))

    def poll(self) -> None:
        """Note which transfers are done, so that later plans don't wait for them. Never waits."""
        self.ledger.retire(*self.store.retired())

    # --- handles --------------------------------------------------------------------------------

    def records(self, seqs: object) -> Ids:
        """The record numbers of a list of live handles of this Manager. The last list is kept:
        the same handles cost one comparison (0.4 us for 256)."""
        if self.last_list == seqs:  # identity: Sequence says so
            return self._last_records
        if not isinstance(seqs, list | tuple):
            raise TypeError(f"seqs must be a list of Sequence, not {type(seqs).__name__}")
        try:
            found = [self.live[key] for key in map(id, seqs)]
        except KeyError:
            found = [self.record(seq, "seqs", i) for i, seq in enumerate(seqs)]
        if len(set(found)) != len(found):
            row = next(i for i, r in enumerate(found) if r in found[:i])
            raise ValueError(f"seqs[{row}] is there twice; allowed: each sequence once")
        records = np.array(found, np.int32)
        self.last_list, self._last_records = list(seqs), records
        self.last_ids = tuple(self.ledger.state.sequences["arrival"][records].tolist())
        return records

    def record(self, seq: object, name: str, row: int | None = None) -> int:
        """The record number of one live handle of this Manager."""
        where = name if row is None else f"{name}[{row}]"
        if not isinstance(seq, Sequence):
            raise TypeError(f"{where} must be a Sequence, not {type(seq).__name__}")
        if seq.is_freed:
            raise UnknownSequence(f"{where}, sequence {seq.id}, was freed; create a new one")
        if seq._runtime is not self:
            raise UnknownSequence(
                f"{where}, sequence {seq.id}, belongs to another Manager; use that one"
            )
        return seq._record

    def forget_list(self) -> None:
        """Drop the kept list: one of its handles is no more."""
        self.last_list, self._last_records = [], np.zeros(0, np.int32)
        self.last_ids = ()

    # --- plans ----------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> None:
        """Give a plan's copies to the store, in the ledger's order. Never waits."""
        for earlier in plan.earlier:
            self.store.submit(earlier)
        if plan.out_id or plan.in_id or plan.step_epoch:
            self.store.submit(plan)

    # --- errors ---------------------------------------------------------------------------------

    def counts(self, tier: int) -> dict[str, int]:
        """Blocks of a tier as an OutOfBlocks carries them."""
        state = self.ledger.state
        pool = state.pools[tier]
        pinned = int(np.count_nonzero(state.blocks["num_pins"])) if tier == DEVICE else 0
        return {
            "free": int(pool["num_free"]),
            "evictable": int(pool["num_evictable"]),
            "pinned": pinned,
        }

    def out_of_blocks(self, tier: int, refusal: Refusal, act: str, advice: str) -> OutOfBlocks:
        """The error for a shortage, with what is there and what would help."""
        self.events.refusals[tier] += 1
        counts = self.counts(tier)
        total = int(self.ledger.state.pools["num_frames"][tier])
        detail = ", ".join(f"{value} {key}" for key, value in counts.items())
        holders = ("resident", "swapped")[tier]
        return OutOfBlocks(
            f"{act} needs {refusal.needed} blocks of the {TIERS[tier]} tier, {refusal.available} "
            f"are left for it; of {total} there: {detail}, the rest is held by {holders} "
            f"sequences; {advice}",
            tier=TIERS[tier],
            needed=refusal.needed,
            **counts,
        )

    def explain(self, refusal: Refusal, seqs: list[Sequence], act: str) -> Exception:
        """A refusal of the ledger as the exception a user can act on."""
        row = f"{act}: row {refusal.row}"
        code = refusal.code
        if code == codes.NO_DEVICE_ROOM:
            return self.out_of_blocks(
                DEVICE,
                refusal,
                row if act == "step" else act,
                "free or swap out others (make_room), pass fit='some', or raise device_blocks",
            )
        if code == codes.NO_HOST_ROOM:
            return self.out_of_blocks(
                HOST,
                refusal,
                act,
                "use how='recompute' or 'auto', free sequences, or raise host_blocks",
            )
        if code == codes.TOO_LONG:
            seq = seqs[refusal.row]
            total = int(self.ledger.state.pools["num_frames"][DEVICE])
            return SequenceTooLong(
                f"{row}, sequence {seq.id}: {seq.num_tokens} tokens need "
                f"{self.ledger.blocks_for(seq.num_tokens)} blocks (and those reserved), the device "
                f"tier has {total}; "
                f"truncate it or raise device_blocks"
            )
        if code == codes.IN_STEP:
            return RuntimeError(f"{row} is in an open step; end the step first")
        if code == codes.DRAFTS_PENDING:
            return ValueError(f"{row}: it has unaccepted drafts; call accept() first")
        if code == codes.TOO_MANY_PINS:
            return PinError("pin: a block has 32767 pins; release some")
        if code == codes.TOO_MANY_ACCEPTED:
            return ValueError(
                f"num_accepted[{refusal.row}] is more than the {refusal.available} drafts; "
                f"allowed: 0 to {refusal.available}"
            )
        raise AssertionError(f"unknown code {code}")


def _watermarks(config: Config) -> tuple[int, int]:
    """Frames of the device tier between which cleaning keeps what can be taken without a copy."""
    if config.watermarks is None:
        return (0, 0)
    low, high = (math.ceil(share * config.device_blocks) for share in config.watermarks)
    return low, high


class Entered:
    """The lock of a Runtime with its entry guards."""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __enter__(self) -> None:
        self._runtime.begin()

    def __exit__(self, *error: object) -> None:
        self._runtime.lock.release()
