"""What failed copies took from whom, until it is computed again.

The ledger cuts a sequence to what it still has; this remembers it for the caller, by sequence id:
which sequences lost K/V, from which token on, and whose last sample was drawn over lost K/V. A
sequence is off the list once a later step was planned over it. Guarded by the Manager's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmem.errors import TransferError
from kvmem.ledger import Ledger
from kvmem.ledger.losses import Loss

#: Failed transfers whose outcome is kept for `Transfer.wait`.
MAX_FAILED = 1024

Lost = tuple[tuple[int, int], ...]  # (sequence id, first lost token)


class _Entry(NamedTuple):
    record: int
    first_token: int
    is_void: bool
    epoch: int  # the last step planned when it was found out


class Losses:
    """The losses of one Manager."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._by_id: dict[int, _Entry] = {}
        self._untold: list[int] = []  # ids that `take` has not told yet
        self._failed: dict[tuple[int, int], tuple[Lost, Exception | None]] = {}

    def add(
        self, tier: int, transfer_id: int, error: Exception | None, losses: list[Loss]
    ) -> tuple[int, ...]:
        """Note a failed transfer to a tier; returns the ids of the sequences that lost K/V."""
        self._drop_old()
        sequences = self._ledger.state.sequences
        epoch = int(self._ledger.state.ledger["epoch"][0])
        lost = []
        for loss in losses:
            number = int(sequences["arrival"][loss.record])
            old = self._current(number)
            first, void = loss.first_token, loss.is_void
            if old is not None:
                first, void = min(first, old.first_token), void or old.is_void
            self._by_id[number] = _Entry(loss.record, first, void, epoch)
            lost.append((number, loss.first_token))
        ids = tuple(number for number, _ in lost)
        self._untold += [number for number in ids if number not in self._untold]
        self._failed[tier, transfer_id] = (tuple(lost), error)
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        return ids

    def first_token(self, number: int) -> int | None:
        """The first token of a sequence whose K/V was lost and not planned again since."""
        entry = self._current(number)
        return None if entry is None else entry.first_token

    def of(self, numbers: Iterable[int]) -> Lost:
        """Those of these sequences that lost K/V and were not planned since."""
        found = ((number, self._current(number)) for number in numbers)
        return tuple((number, entry.first_token) for number, entry in found if entry is not None)

    def take(self) -> list[int]:
        """The ids of sequences that lost K/V since the last call."""
        told, self._untold = self._untold, []
        return told

    def check_transfers(self, transfers: Iterable[tuple[int, int]]) -> None:
        """Raise TransferError when one of these (tier, id) failed."""
        for key in transfers:
            if key in self._failed:
                lost, error = self._failed[key]
                raise TransferError(
                    f"the copies failed ({_short(error)}); {_told(lost)}", lost=lost
                ) from error

    def check_samples(self, records: NDArray[np.int32]) -> None:
        """Raise TransferError when the last sample of one of these is void. O(1) while nothing was
        ever lost."""
        if not self._by_id:
            return
        numbers = self._ledger.state.sequences["arrival"][records].tolist()
        entries = ((number, self._current(number)) for number in numbers)
        void = tuple((n, e.first_token) for n, e in entries if e is not None and e.is_void)
        if void:
            raise TransferError(
                f"append: what was sampled last is void, a copy had failed before; {_told(void)}; "
                "drop their tokens of this call, append those of the others",
                lost=void,
            )

    def step_error(self, numbers: Iterable[int]) -> TransferError:
        """The error of a step over lost K/V."""
        lost = self.of(numbers)
        return TransferError(
            f"the step was given up, a copy it needed failed; {_told(lost)}; step again", lost=lost
        )

    def _current(self, number: int) -> _Entry | None:
        """The entry of a sequence, unless a step was planned over it since, or it was freed."""
        entry = self._by_id.get(number)
        if entry is None:
            return None
        sequence = self._ledger.state.sequences[entry.record]
        if sequence["arrival"] == number and sequence["last_step"] <= entry.epoch:
            return entry
        return None

    def _drop_old(self) -> None:
        self._by_id = {n: e for n, e in self._by_id.items() if self._current(n) is not None}


def _told(lost: Lost) -> str:
    """Who lost what, in words; the first few."""
    if not lost:
        return "no sequence lost K/V"
    some = ", ".join(f"sequence {number} from token {first}" for number, first in lost[:4])
    more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
    return f"lost: {some}{more}"


def _short(error: Exception | None) -> str:
    return "unknown" if error is None else f"{type(error).__name__}: {error}"[:80]
