"""The end of a Manager: each live sequence is computed once more and read, then all is given back.

One thread does it, when the others are done. A sequence grows by a token for it: a step is what
waits for its copies, and what reads it with the checks of every other step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvmem.errors import TransferError
from kvmem.manager import Manager
from kvmem.stress.body import Tracked
from kvmem.stress.breach import Breach, Mismatch, fault_of
from kvmem.stress.leaks import Leaks
from kvmem.stress.workload import Worker

_ATTEMPTS = 200  # to step one sequence; each may be hit by an injected fault
_ALL = 2**31 - 1
_DRAIN_WITHIN = 30.0  # seconds without an end of the copies; frames left then are a leak


class Ending:
    """Reads, frees and drains. ``num_begun`` grows, for the watchdog."""

    def __init__(self, manager: Manager, workers: Sequence[Worker], leaks: Leaks) -> None:
        self._m, self._workers, self._leaks = manager, workers, leaks
        self.num_begun = 0

    def run(self) -> None:
        """Raises Mismatch for K/V that is not its stamp; what is not given back goes to ``leaks``.
        Raises DeviceUnavailable where an injected fault strikes for good."""
        for worker in self._workers:
            worker.release_pins()
        everyone = [(t, w) for w in self._workers for t in w.live.values()]
        everyone.sort(key=lambda pair: (-pair[0].seq.priority, pair[0].seq.id))
        for tracked, worker in everyone:  # who is kept longest first: it may send all others out
            self.num_begun += 1
            self._read(tracked, worker)
            worker.free(tracked)
        self._drain()
        self._m.verify()

    def _read(self, tracked: Tracked, worker: Worker) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                if tracked.num_pending == 0:
                    worker.extend(tracked, 1)
                # giving K/V up would hide it: only where swapping is not enough
                self._m.make_room([tracked.seq], how="swap" if attempt == 0 else "auto")
                step = self._m.step([tracked.seq], fit="some")
                worker.compute(step)
                if not step.left_out:
                    return
            except TransferError as error:
                site = fault_of(error, injected=worker.options.faults > 0)
                if site is None:
                    raise
                worker.faults[site] += 1
        sequence = tracked.seq.id
        message = f"sequence {sequence} finds no room although all others can go"
        raise Mismatch(Breach("error", message, sequence, thread=worker.number))

    def _drain(self) -> None:
        """Evict until both tiers are empty (R9); frames that stay are a leak."""
        deadline = time.monotonic() + _DRAIN_WITHIN
        while True:
            self.num_begun += 1
            self._m.poll()
            for tier in ("device", "host"):
                self._m.evict(_ALL, tier)
            stats = self._m.stats()
            device = stats.device.total - stats.device.free
            host = stats.host.total - stats.host.free
            if device == host == 0 or time.monotonic() > deadline:
                break
            if self.num_begun % 256 == 0:  # copies may be on their way; a simulated one needs calls
                time.sleep(0.001)
        leaks = self._leaks
        leaks.managers_drained += 1
        leaks.device_frames += device
        leaks.host_frames += host
        left = stats.sequences_waiting + stats.sequences_resident + stats.sequences_swapped
        if device or host or left:
            leaks.reasons.append(
                f"{device} device frames, {host} host frames and {left} sequences are left after "
                f"all was freed, unpinned and evicted (R9)"
            )
