"""The arrays of one ledger and their growth. Compiled functions never allocate: Python grows what
they find too short, before a call or when a call returns a GROW code, and calls again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import decide
from .address import addresses_of
from .spans import FIRST_UNEVEN, LINE, SMALLEST
from .state import LAYOUT, State, grown


def span_capacity(length: int) -> int:
    """Entries of the span that holds `length` entries, as spans.py has it."""
    c = 0
    while (capacity := (SMALLEST << c) + (LINE if c >= FIRST_UNEVEN else 0)) < length:
        c += 1
    return capacity


class GrowingState:
    """The `State` of a ledger, replaced by a longer one when it grows, and its namespaces."""

    def __init__(self, state: State) -> None:
        self._hold(state)
        self._namespaces: dict[bytes, int] = {}
        self._free_namespaces = list(range(1, len(state.namespaces)))
        self._found: NDArray[np.int32] = np.zeros(256, np.int32)

    # --- arrays ---------------------------------------------------------------------------------

    def _hold(self, state: State) -> None:
        """Take these arrays for the ledger's, and their addresses for its calls."""
        self.state = state
        self.addresses = addresses_of(state, LAYOUT)

    def _grow(self, *names: str, length: int) -> None:
        """Let arrays of the state have at least `length` rows."""
        longer = {name: grown(getattr(self.state, name), length) for name in names}
        self._hold(self.state._replace(**longer))

    def _room_for_tokens(self, entries: int) -> None:
        need = int(self.state.ledger["tokens_top"][0]) + entries
        if need > len(self.state.tokens):
            self._grow("tokens", length=need)

    def _room_for_table(self, entries: int) -> None:
        need = int(self.state.ledger["table_top"][0]) + entries
        if need > len(self.state.table):
            self._grow("table", "frame_table", length=need)

    def _room_for_sequences(self, count: int) -> None:
        used = int(self.state.ledger["num_sequences"][0])
        old = len(self.state.sequences)
        if used + count < old:
            return
        self._grow("sequences", "tables", length=used + count + 1)
        # the new records are the free list's new head, the old head its end
        new = np.arange(old, len(self.state.sequences), dtype=np.int32)
        self.state.sequences["next_free"][new[:-1]] = new[1:]
        self.state.sequences["next_free"][new[-1]] = self.state.ledger["sequence_free"][0]
        self.state.ledger["sequence_free"][0] = new[0]

    def _room_for_lists(self, length: int) -> None:
        if length > len(self.state.out_list):
            self._grow("out_list", "in_list", "copy_list", length=length)

    def _retry(self, code: int) -> bool:
        """Grow what a compiled function found too short; True when it is worth calling again."""
        needed = int(self.state.ledger["error_needed"][0])
        if code == decide.GROW_TOKENS:
            self._grow("tokens", length=needed)
        elif code == decide.GROW_TABLE:
            self._grow("table", "frame_table", length=needed)
        elif code == decide.GROW_LISTS:
            self._room_for_lists(needed)
        elif code == decide.GROW_SCRATCH:
            self._found = np.zeros(2 * needed, np.int32)
        else:
            return False
        return True

    # --- namespaces -----------------------------------------------------------------------------

    def knows_namespace(self, name: bytes) -> bool:
        """True when something was ever created in it and it was not forgotten since."""
        return name in self._namespaces

    def namespace_id(self, name: bytes) -> int:
        """The number of a namespace, made if new; unused ones are forgotten now and then."""
        known = self._namespaces.get(name)
        if known is not None:
            return known
        if not self._free_namespaces:
            self._forget_namespaces()
        number = self._free_namespaces.pop()
        self._namespaces[name] = number
        return number

    def _forget_namespaces(self) -> None:
        """Take back the numbers of namespaces without blocks and sequences; make more if most are
        in use. Amortised O(1) a new namespace."""
        used = self.state.namespaces
        for name, i in list(self._namespaces.items()):
            if not used["num_children"][i] and not used["num_sequences"][i]:
                del self._namespaces[name]
                self._free_namespaces.append(i)
                frames = self.state.frames["namespace"]
                frames[frames == i] = -1  # the number will be another's (R12)
        old = len(used)
        if 2 * len(self._free_namespaces) < old:
            self._grow("namespaces", length=2 * old)
            self._free_namespaces.extend(range(old, len(self.state.namespaces)))
