"""Tokens that are counted before their values are known: sampled on a device, on their way here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmem.plan import Plan

from . import ops_unknown
from .raising import refuse
from .sealing import SealingState

Ids = NDArray[np.int32]


class LearningState(SealingState):
    """A `SealingState` that takes tokens first and their values later."""

    def append_unknown(self, seqs: Ids, counts: NDArray[np.int64]) -> None:
        """Append `counts[i]` tokens to each sequence, whose values come by `learn`. O(tokens)."""
        while code := ops_unknown.append_unknown(self.addresses, seqs, counts):
            if not self._retry(code):
                raise refuse(self.state, code)

    def learn(self, seqs: Ids, counts: NDArray[np.int64], values: Ids) -> Plan:
        """The values of the first `counts[i]` unknown tokens of each sequence. What is full now is
        published, which may free duplicates. O(tokens)."""
        ops_unknown.learn(self.addresses, seqs, counts, values)
        return self.seal()

    def num_unknown(self, seqs: Ids) -> NDArray[np.int32]:
        """Tokens of each sequence whose values are not known yet."""
        found: NDArray[np.int32] = self.state.sequences["num_unknown"][seqs]
        return found
