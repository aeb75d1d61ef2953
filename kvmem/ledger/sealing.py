"""The plans of a ledger from sealing to their end: followed while in flight, retired, or failed."""

from __future__ import annotations

import numpy as np

from kvmem.plan import Plan

from . import ops_steps
from .flights import Flights
from .growth import GrowingState
from .losses import Loss, let_go, rehearse
from .sealed import plan_of
from .state import State
from .step_arrays import REPORT_LENGTH, WANTS_CLEANING

NO_PLAN = Plan()  # of a call that moves nothing


class SealingState(GrowingState):
    """A `GrowingState` that seals what compiled functions listed, as plans."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.spoiled: set[int] = set()  # open steps over blocks that a failed copy took
        self.failed_blocks = [0, 0]  # blocks of transfers that failed, by the tier they went to
        self.wants_cleaning = False  # after the last plan: `clean` would find something
        self._flights = Flights()
        self._report = np.zeros(REPORT_LENGTH, np.int64)
        self._retired = (0, 0)

    def seal(self) -> Plan:
        """The plan of the call just made; its ids are issued, its lists emptied."""
        has_plan = ops_steps.seal_plan(self.addresses, self._report)
        self.wants_cleaning = bool(self._report[WANTS_CLEANING])
        if not has_plan:
            return NO_PLAN
        return self._sealed(self._report.tolist(), int(self.state.ledger["epoch"][0]))

    def _sealed(self, report: list[int], epoch: int) -> Plan:
        """The plan that was sealed; `epoch` is the last step planned before it."""
        plan = plan_of(self.state, report)
        for part in (*plan.earlier, plan):
            self._flights.add(self.state, part, epoch)
        return plan

    @property
    def issued(self) -> tuple[int, int]:
        """The last out id and the last in id given to a plan."""
        ledger = self.state.ledger
        return int(ledger["last_out"][0]), int(ledger["last_in"][0])

    def retire(self, out_id: int, in_id: int) -> None:
        """Note that transfers up to these ids are done."""
        if (out_id, in_id) != self._retired:
            self._retired = (out_id, in_id)
            self.state.ledger["retired_out"][0] = out_id
            self.state.ledger["retired_in"][0] = in_id

    def rehearse_failure(self) -> None:
        """Compile what a failed copy would run, on a failure that concerns nobody."""
        rehearse(self.state, self.addresses)

    def fail(self, tier: int, transfer_id: int) -> tuple[list[Loss], Plan]:
        """Let go of what a failed transfer to a tier took: the sequences that lost K/V, cut to what
        they still have (those in an open step, which is spoiled, when it ends). Before `retire`
        learns of the transfer. O(transfers in flight), O(table entries + nodes) for a loss."""
        failure = self._flights.failed(self.state, tier, transfer_id)
        self.failed_blocks[tier] += failure.num_blocks
        losses, spoiled = let_go(self.state, self.addresses, failure)
        self.spoiled |= spoiled
        return losses, self.seal()
