"""`Sequence`: the handle of one token sequence. It holds no tensors and no tokens itself."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NoReturn

from kvmem.errors import UnknownSequence
from kvmem.ledger.state import RESIDENT, SWAPPED, WAITING

if TYPE_CHECKING:
    from kvmem.runtime import Runtime
    from kvmem.tokens import TokenArray

STATE_NAMES = {WAITING: "WAITING", RESIDENT: "RESIDENT", SWAPPED: "SWAPPED"}


class Sequence:
    """A handle made by `Manager.create` or `Manager.fork`; end it with `Manager.free`.

    Two handles are equal only if they are the same object. Dropping one that was not freed warns
    (ResourceWarning) and frees it at the Manager's next call. Reading a field of a freed handle
    raises UnknownSequence; `id` and `is_freed` stay readable.
    """

    __slots__ = ("__weakref__", "_id", "_record", "_runtime")

    def __init__(self, runtime: Runtime, record: int) -> None:
        self._runtime: Runtime = runtime
        self._record = record
        self._id = int(runtime.ledger.state.sequences["arrival"][record])
        runtime.handles[record] = self
        runtime.live[id(self)] = record

    @property
    def id(self) -> int:
        """A number that grows with each sequence of a Manager and is never used again."""
        return self._id

    @property
    def is_freed(self) -> bool:
        """True after `Manager.free`, and for all handles after `Manager.close`."""
        return self._record == 0 or self._runtime.closed

    @property
    def num_tokens(self) -> int:
        """Known tokens, drafts included."""
        return self._field("num_tokens")

    @property
    def num_computed(self) -> int:
        """Tokens that need no computing any more. `num_tokens - num_computed` are pending."""
        return self._field("num_computed")

    @property
    def num_cached(self) -> int:
        """Tokens served by the prefix cache; until the first step plans it, what would be served
        now. O(1), then O(tokens hit)."""
        self._runtime.check_open()
        with self._runtime.lock:
            return self._runtime.ledger.num_cached(self._live())

    @property
    def num_drafts(self) -> int:
        """Draft tokens not accepted yet, the last of `num_tokens`."""
        return self._field("num_drafts")

    @property
    def num_swaps(self) -> int:
        """Times this sequence was swapped out."""
        return self._field("num_swaps")

    @property
    def lost_from(self) -> int | None:
        """The first token whose K/V a failed copy took, None when nothing is lost or a later step
        was planned. Its tokens from there on are pending again."""
        self._runtime.check_open()
        with self._runtime.lock:
            self._live()
            return self._runtime.losses.first_token(self._id)

    @property
    def priority(self) -> int:
        """Higher is kept longer by `make_room`."""
        return self._field("priority")

    @property
    def state(self) -> str:
        """ "WAITING" (claims no blocks), "RESIDENT" (all on the device) or "SWAPPED"."""
        return STATE_NAMES[self._field("state")]

    @property
    def tokens(self) -> TokenArray:
        """A copy of the known tokens, int32 `[num_tokens]`. O(tokens); waits for those that were
        sampled on a GPU just now."""
        self._runtime.check_open()
        self._runtime.await_tokens([self])
        with self._runtime.lock:
            return self._runtime.ledger.tokens_of(self._live())

    @property
    def block_ids(self) -> list[int]:
        """The block ids of its table; for `Manager.block`. O(blocks)."""
        self._runtime.check_open()
        with self._runtime.lock:
            return [int(b) for b in self._runtime.ledger.table_of(self._live())]

    def __eq__(self, other: object) -> bool:
        return self is other  # said outright, so that comparing lists of handles asks nobody else

    __hash__ = object.__hash__

    def _end(self) -> None:
        """Mark the handle as freed; the Manager frees the record."""
        self._runtime.handles.pop(self._record, None)
        self._runtime.live.pop(id(self), None)
        self._record = 0

    def _field(self, name: str) -> int:
        self._runtime.check_open()
        with self._runtime.lock:  # else another thread's free could come between check and read
            return int(self._runtime.ledger.state.sequences[name][self._live()])

    def _live(self) -> int:
        """The record number; raises UnknownSequence after free. The lock is held."""
        if self._record == 0:
            raise UnknownSequence(f"sequence {self._id} was freed; create a new one")
        return self._record

    def __repr__(self) -> str:
        if self.is_freed:
            return f"<Sequence {self._id} freed>"
        return f"<Sequence {self._id} {self.state} {self.num_computed}/{self.num_tokens} tokens>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Sequence cannot be pickled or copied; send its tokens")

    def __del__(self) -> None:
        if not getattr(self, "_record", 0):
            return
        self._runtime.live.pop(id(self), None)  # before another object can have this id
        if not self._runtime.closed:
            self._runtime.dropped.append(self._record)
            warnings.warn(
                f"sequence {self._id} was dropped without Manager.free",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
