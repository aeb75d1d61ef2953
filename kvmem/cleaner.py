"""Background cleaning: blocks are copied to the host tier while no other copy is on the way.

Runs in the calls that plan a step and in `Manager.poll()`, with the Manager's lock held, and only
queues copies. What is copied, and when it is worth it, the ledger says (ledger/cleaning.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmem.runtime import Runtime

CLEAN_BYTES = 64 << 20  # on the way at once: a millisecond or two of a fast link
MAX_CLEAN_BLOCKS = 256


class Cleaner:
    """Copies ahead of evictions for one Manager."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        config = runtime.config
        self.is_on = config.tier_policy == "write_through" or config.watermarks is not None
        block_bytes = config.geometry.frame_bytes
        self.max_blocks = max(1, min(MAX_CLEAN_BLOCKS, CLEAN_BYTES // block_bytes))

    def run(self) -> None:
        """Queue the next copies, at most `max_blocks`, if the link is idle. O(blocks copied)."""
        runtime, ledger = self._runtime, self._runtime.ledger
        if runtime.store.retired() != ledger.issued:
            return  # copies that somebody may wait for, or those of the last time
        plan = ledger.clean(self.max_blocks)
        runtime.submit(plan)
        if plan.num_out:
            runtime.events.add("clean", (), plan.num_out)
