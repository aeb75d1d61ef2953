"""Fences of a CUDA device: events that are used again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvmem.store.cuda.api import Cuda
from kvmem.store.device import Fence

#: Seconds between two looks at what the host waits for: at first, and at most.
FIRST_LOOK, LAST_LOOK = 20e-6, 1e-3


def look_until(
    reached: Callable[[], bool], check: Callable[[], None], timeout: float | None = None
) -> bool:
    """Look ever less often until ``reached``; False when ``timeout`` seconds passed first.
    ``check`` raises what makes waiting useless."""
    end = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_LOOK
    while not reached():
        check()
        if end is not None and time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LAST_LOOK)
    return True


class EventPool:
    """Events that nobody asks for any more. Thread-safe, as its deque is.

    An event may be recorded anew while a stream still waits for its last record: a wait means what
    was recorded when it was queued. So an event comes back when its fence is dropped, reached or
    not; none is made in the steady state.
    """

    def __init__(self, cuda: Cuda, *, timing: bool = False) -> None:
        self._cuda, self._timing = cuda, timing
        self._free: deque[Any] = deque()
        self.num_made = 0

    def take(self) -> Any:
        """An event to record."""
        try:
            return self._free.pop()
        except IndexError:
            self.num_made += 1
            return self._cuda.new_event(timing=self._timing)

    def give(self, event: Any) -> None:
        """Take an event back."""
        self._free.append(event)


class CudaFence(Fence):
    """An event of the pool from `record` on; it goes back there with the fence."""

    __slots__ = ("_pool", "event", "reached")

    def __init__(self, label: str, pool: EventPool) -> None:
        super().__init__(label)
        self._pool = pool
        self.event: Any = None
        self.reached = False

    def __del__(self) -> None:
        event = getattr(self, "event", None)
        if event is not None:
            self._pool.give(event)
