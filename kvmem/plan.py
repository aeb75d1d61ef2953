"""The seam between the ledger (integers) and the store (bytes): one `Plan` per Manager call.

A plan is flat int32 arrays and a few ids. The ledger makes it, the store runs it, in the order of
making; nothing else passes between the two, so that several stores (one a tensor-parallel rank)
can run the same plans.

Order (R6) is told by three counters that only grow:

- out transfers (device to host) 1, 2, 3, ... on one stream, in order;
- in transfers (host to device) 1, 2, 3, ... on another stream, in order;
- steps (epochs) 1, 2, 3, ... on the compute stream.

After a transfer n means: all of that direction with an id up to n are done. After a step n means
step n itself has ended (others may be open; they hold what they use). 0: nothing to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


_EMPTY = np.empty(0, np.int32)
_EMPTY.setflags(write=False)


def _none() -> Ids:
    return _EMPTY


@dataclass(slots=True)
class Plan:
    """What the store has to do for one call. All arrays are int32 and one-dimensional."""

    out_id: int = 0  # 0: this plan has no out transfer
    out_device: Ids = field(default_factory=_none)  # device frame -> host frame
    out_host: Ids = field(default_factory=_none)
    out_tokens: Ids = field(default_factory=_none)  # filled slots of each block
    out_generation: Ids = field(default_factory=_none)  # of the host frames: which use of them
    fill_frames: Ids = field(default_factory=_none)  # device frames to poison (debug), on the out
    # stream after the copies of this plan
    out_after_step: int = 0  # the last step that wrote what is copied
    out_after_in: int = 0  # the last in transfer that reads the host frames now written

    in_id: int = 0  # 0: this plan has no in transfer
    in_host: Ids = field(default_factory=_none)  # host frame -> device frame
    in_device: Ids = field(default_factory=_none)
    in_tokens: Ids = field(default_factory=_none)
    in_generation: Ids = field(default_factory=_none)  # of the host frames: the use that wrote them
    in_layers: int = 0  # so many layers a fence, 0: one fence for all
    in_after_step: int = 0  # the last step that used the device frames now written
    in_after_out: int = 0  # the last out transfer that uses either frame

    step_epoch: int = 0  # 0: this plan has no step
    step_after_in: int = 0
    step_after_out: int = 0
    copy_source: Ids = field(default_factory=_none)  # copy-on-write, on the compute stream
    copy_target: Ids = field(default_factory=_none)
    copy_tokens: Ids = field(default_factory=_none)

    earlier: tuple[Plan, ...] = ()  # copies in rounds, to be submitted before this plan, in order

    @property
    def num_out(self) -> int:
        """Blocks copied device to host, in all rounds."""
        count = len(self.out_device)
        return count + sum(len(plan.out_device) for plan in self.earlier) if self.earlier else count

    @property
    def num_in(self) -> int:
        """Blocks copied host to device, in all rounds."""
        count = len(self.in_device)
        return count + sum(len(plan.in_device) for plan in self.earlier) if self.earlier else count
