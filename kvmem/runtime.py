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

from kvmem import refusals
from kvmem.cleaner import Cleaner
from kvmem.config import Config
from kvmem.errors import ManagerClosed, UnknownSequence
from kvmem.events import EventLog
from kvmem.extras import ExtraKeys
from kvmem.fork import ForkGuard
from kvmem.ledger import Ledger, Refusal
from kvmem.ledger.state import DEVICE, HOST
from kvmem.recovery import Losses
from kvmem.sampled import SampledTokens
from kvmem.sequence import Sequence
from kvmem.store.device import Stream
from kvmem.store.store import Store

if TYPE_CHECKING:
    from kvmem.plan import Plan
    from kvmem.store.making import Progress

Ids = NDArray[np.int32]
TIERS = ("device", "host")
LOG = logging.getLogger("kvmem")
#: Transfers of a direction on the way at once: each takes a fence, and about a kilobyte.
MAX_QUEUED = 1024


def _new_ledger(config: Config) -> Ledger:
    return Ledger(
        device_blocks=config.device_blocks,
        host_blocks=config.host_blocks,
        block_size=config.block_size,
        tier_policy=config.tier_policy,
        watermarks=_watermarks(config),
        record_fills=config.zero_on_free == "always"
        or config.debug
        or (config.sim is not None and config.sim.poison),
        clears=config.zero_on_free == "cross_namespace",
        quarantine=config.debug,
    )


class Runtime:
    """The inside of one Manager."""

    def __init__(self, config: Config, progress: Progress | None = None) -> None:
        self.config = config
        for warning in config.plan().warnings:
            LOG.warning(warning)
        self.lock = threading.RLock()
        self.store = Store(config, progress=progress)
        try:
            self.ledger = _new_ledger(config)
        except BaseException:
            self.store.close()
            raise
        self.failed = self.store.failed  # copies that failed and were not recovered from yet
        self.losses = Losses(self.ledger)
        self.cleaner = Cleaner(self)
        self.extras = ExtraKeys()
        self.events = EventLog()
        self.live: dict[int, int] = {}  # id() of each live handle -> its record
        self.handles: weakref.WeakValueDictionary[int, Sequence] = weakref.WeakValueDictionary()
        self.abandoned: deque[int] = deque()  # epochs of steps dropped without an end
        self.dropped: deque[int] = deque()  # records whose handle was dropped without free
        self.unpinned: deque[Ids] = deque()  # blocks of Pins dropped without release
        self.pins: weakref.WeakSet[object] = weakref.WeakSet()  # live Pins
        self.closed = False
        self.fork = ForkGuard()
        #: On a GPU: tokens that were sampled there, on their way here.
        self.sampled = SampledTokens(self) if self.store.sample is not None else None
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
        were dropped, copies that failed, a device that did."""
        if self.closed or self.fork.in_child:  # it must not wait for a lock its parent held
            self.check_open()
        self.lock.acquire()
        if (
            self.closed
            or self.abandoned
            or self.dropped
            or self.unpinned
            or self.failed
            or self.sampled
            or self.store.error
        ):
            try:
                self.check_open()
                self.store.check_usable()
                self.recover()
                self._sweep()
                if self.sampled:
                    self.sampled.arrive()
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

    def recover(self) -> None:
        """Let go of what failed copies took. The device lists a failure before the transfer counts
        as done, so nothing is built on it afterwards (R5)."""
        while self.failed:
            ticket = self.failed.pop(0)
            tier = HOST if ticket.stream is Stream.OUT else DEVICE
            losses, plan = self.ledger.fail(tier, ticket.transfer_id)
            ids = self.losses.add(tier, ticket.transfer_id, ticket.error, losses)
            LOG.warning(
                "a copy to the %s tier failed (%s); sequences that lost K/V: %s",
                TIERS[tier], type(ticket.error).__name__, list(ids),
            )  # fmt: skip
            self.events.add("lost", ids)
            self.submit(plan)

    def poll(self) -> None:
        """Note which transfers are done, so that later plans don't wait for them. Never waits."""
        done = self.store.retired()
        if self.failed:
            self.recover()
        self.ledger.retire(*done)

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

    def await_tokens(self, seqs: object) -> None:
        """Wait, under no lock, until all tokens of these handles are known: those that were sampled
        on a GPU just now are not. What is no list of handles is ignored."""
        if self.sampled and isinstance(seqs, list | tuple):
            self.check_open()
            self.sampled.await_tokens(seqs)

    # --- plans ----------------------------------------------------------------------------------

    def limit_queues(self) -> None:
        """Hold back who swaps faster than the link copies. Under no lock, and not while a step is
        open: that step may be what the transfers wait for."""
        if not self.ledger.open_steps:
            self.store.wait_for_room(MAX_QUEUED)

    def submit(self, plan: Plan) -> None:
        """Give a plan's copies to the store, in the ledger's order. Never waits."""
        for earlier in plan.earlier:
            self.store.submit(earlier)
        if plan.out_id or plan.in_id or plan.step_epoch:
            self.store.submit(plan)

    # --- errors ---------------------------------------------------------------------------------

    def explain(self, refusal: Refusal, seqs: list[Sequence], act: str) -> Exception:
        """A refusal of the ledger as the exception a user can act on."""
        return refusals.explain(self, refusal, seqs, act)


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
