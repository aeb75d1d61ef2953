"""What happened, for tools that draw or log it: a bounded record, and the library's own listeners.

A user takes the record with ``Manager.events()``; nothing of the user's is called back. Metrics
listen, because they must see each event and may not take the record from the user.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_EVENTS = 4096
Fields = tuple[float, str, tuple[int, ...], int, int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, and the blocks that were copied for it."""

    time: float  # seconds, monotonic clock
    kind: str  # "step", "abort", "swap_out", "swap_in", "prefetch", "recompute", "evict",
    # "reset", "free", "make_room", "clean", "lost" (a copy failed)
    sequence_ids: tuple[int, ...]
    blocks_out: int  # blocks copied device to host by the call
    blocks_in: int  # blocks copied host to device by the call
    how: tuple[str, ...] = ()  # "make_room": what became of each sequence, "swap" or "recompute"


class EventLog:
    """The last `MAX_EVENTS` events; older ones are dropped."""

    def __init__(self) -> None:
        # a plain tuple now, an Event when somebody asks: a step adds one
        self._events: deque[Fields] = deque(maxlen=MAX_EVENTS)
        # Called under the Manager's lock at each event: must be quick and must not raise.
        self.listeners: tuple[Callable[[Event], None], ...] = ()
        self.refusals = [0, 0]  # calls that found too little room, by tier

    def add(
        self,
        kind: str,
        sequence_ids: tuple[int, ...],
        out: int = 0,
        into: int = 0,
        how: tuple[str, ...] = (),
    ) -> None:
        """Note an event and tell the listeners. O(1) without them."""
        fields = (time.monotonic(), kind, sequence_ids, out, into, how)
        self._events.append(fields)
        for listener in self.listeners:
            listener(Event(*fields))

    def take(self) -> list[Event]:
        """All events since the last call, oldest first."""
        events = [Event(*fields) for fields in self._events]
        self._events.clear()
        return events
