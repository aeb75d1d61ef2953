"""Entry points for tokens whose values are still on a device: appended first, learnt later.

Such a token is counted like any other, and computed: the device has its value. What compares
tokens, the trie, leaves it out until it is learnt (R4, R5). Unknown tokens are a sequence's last
ones, never beside drafts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .address import Addresses
from .decide import DRAFTS_PENDING, GROW_TOKENS, OK
from .jit import entry_point
from .publish import publish
from .spans import ensure_tokens, span_capacity
from .state import opened

Ids = NDArray[np.int32]


@entry_point
def append_unknown(addresses: Addresses, seqs: Ids, counts: NDArray[np.int64]) -> int:
    """Append `counts[i]` tokens to each sequence; 0 stands for their values. O(tokens)."""
    state = opened(addresses)
    ledger = state.ledger[0]
    entries = np.int64(0)
    for i in range(seqs.shape[0]):
        sequence = state.sequences[seqs[i]]
        if sequence.num_drafts and counts[i]:
            ledger.error_row = i
            return DRAFTS_PENDING
        length = sequence.num_tokens + counts[i]
        if length > sequence.tokens_capacity:
            entries += 2 * span_capacity(length)
    if ledger.tokens_top + entries > state.tokens.shape[0]:
        ledger.error_needed = ledger.tokens_top + entries
        return GROW_TOKENS
    for i in range(seqs.shape[0]):
        s = int(seqs[i])
        sequence = state.sequences[s]
        ensure_tokens(state, s, int(sequence.num_tokens + counts[i]))
        for j in range(counts[i]):
            state.tokens[sequence.tokens_start + sequence.num_tokens + j] = 0
            state.tokens[sequence.keys_start + sequence.num_tokens + j] = 0
        sequence.num_tokens += counts[i]
        sequence.num_unknown += counts[i]
    return OK


@entry_point
def learn(
    addresses: Addresses,
    seqs: Ids,
    counts: NDArray[np.int64],
    values: NDArray[np.int32],
) -> None:
    """The values of the first `counts[i]` unknown tokens of each sequence, one after another; what
    is full by now is published, for a sequence in an open step when that ends. O(tokens)."""
    state = opened(addresses)
    at = np.int64(0)
    for i in range(seqs.shape[0]):
        s = int(seqs[i])
        sequence = state.sequences[s]
        first = sequence.num_tokens - sequence.num_unknown
        for j in range(counts[i]):
            state.tokens[sequence.tokens_start + first + j] = values[at + j]
            state.tokens[sequence.keys_start + first + j] = values[at + j]
        at += counts[i]
        sequence.num_unknown -= counts[i]
        if sequence.step == 0:
            publish(state, s)
