"""Where the record of a frame lies in `state.frames`."""

from __future__ import annotations

from .jit import compiled
from .state import DEVICE, HOST, State


@compiled
def device_at(state: State, f: int) -> int:
    """The index in `state.frames` of a device frame. O(1)."""
    return int(state.pools[DEVICE].first + f)


@compiled
def host_at(state: State, h: int) -> int:
    """The index in `state.frames` of a host frame. O(1)."""
    return int(state.pools[HOST].first + h)
