"""Entry points for sequences: create, append, accept, truncate, fork, free.

One compiled call a Manager call, whatever the batch. Each checks everything first and writes
afterwards (R8); it returns a code of decide.py, with the detail in `LEDGER.error_*`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .address import Addresses
from .decide import BAD_TOKEN, DRAFTS_PENDING, GROW_TOKENS, IN_STEP, OK, TOO_MANY_ACCEPTED
from .jit import compiled, entry_point
from .publish import publish
from .residency import settle_lists
from .sequence import any_in_step, cut, end_sequence
from .spans import ensure_table, ensure_tokens, span_capacity, take_tokens_span
from .state import FREED, GROUP, RESIDENT, WAITING, State, opened

Ids = NDArray[np.int32]


@entry_point
def create(
    addresses: Addresses,
    values: NDArray[np.int32],
    keys: NDArray[np.int32],
    namespace: int,
    priority: int,
    publish_blocks: bool,
    max_cached: int,
) -> int:
    """A WAITING sequence with these tokens; `keys` (empty: the tokens) is what the trie compares.
    Python made room for one record and the spans. O(tokens)."""
    state = opened(addresses)
    ledger = state.ledger[0]
    s = int(ledger.sequence_free)
    sequence, table = state.sequences[s], state.tables[s, GROUP]
    ledger.sequence_free = sequence.next_free
    ledger.num_sequences += 1
    ledger.arrivals += 1
    sequence.state = WAITING
    sequence.namespace = namespace
    sequence.priority = priority
    sequence.arrival = ledger.arrivals
    sequence.num_tokens = sequence.num_drafts = 0
    sequence.num_computed = sequence.num_stored = sequence.num_published = 0
    sequence.num_cached = sequence.queried = sequence.num_swaps = 0
    sequence.max_cached = max_cached
    sequence.publish = 1 if publish_blocks else 0
    sequence.step = sequence.last_step = sequence.fence_in = 0
    sequence.fresh = sequence.at_end = 0
    sequence.lost = 0
    sequence.num_unknown = 0
    sequence.left_in = 0
    sequence.table_changed = ledger.clock
    sequence.tokens_capacity = 0
    sequence.tokens_start = sequence.keys_start = 0
    table.start = table.capacity = table.num_blocks = 0
    state.namespaces[namespace].num_sequences += 1
    num_tokens = values.shape[0]
    if num_tokens:
        ensure_tokens(state, s, num_tokens)
        if keys.shape[0]:
            # a second span of the same capacity; Python made room for both
            sequence.keys_start = take_tokens_span(state, num_tokens)
            copied = state.tokens[sequence.keys_start :]
            for i in range(num_tokens):
                copied[i] = keys[i]
        copied = state.tokens[sequence.tokens_start :]
        for i in range(num_tokens):
            copied[i] = values[i]
        sequence.num_tokens = num_tokens
    return s


@compiled
def append_to(
    state: State, s: int, values: NDArray[np.int32], at: int, count: int, draft: bool
) -> None:
    """Append `values[at:at + count]` to one sequence; the spans have room. O(count)."""
    sequence = state.sequences[s]
    ensure_tokens(state, s, sequence.num_tokens + count)
    for j in range(count):
        position = sequence.num_tokens + j
        state.tokens[sequence.tokens_start + position] = values[at + j]
        state.tokens[sequence.keys_start + position] = values[at + j]
    sequence.num_tokens += count
    if draft:
        sequence.num_drafts += count


@compiled
def append_checked(
    state: State, seqs: Ids, counts: NDArray[np.int64], values: NDArray[np.int32], draft: bool
) -> int:
    """OK when `append` may write, else what stops it. O(tokens)."""
    ledger = state.ledger[0]
    one_each = counts.shape[0] == 0
    lowest = np.int32(0)
    for j in range(values.shape[0]):
        lowest = min(lowest, values[j])
    if lowest < 0:
        return BAD_TOKEN
    entries = np.int64(0)
    for i in range(seqs.shape[0]):
        sequence = state.sequences[seqs[i]]
        count = np.int64(1) if one_each else counts[i]
        if sequence.num_drafts and not draft and count:
            ledger.error_row = i
            return DRAFTS_PENDING
        length = sequence.num_tokens + count
        if length > sequence.tokens_capacity:
            entries += 2 * span_capacity(length)
    if ledger.tokens_top + entries > state.tokens.shape[0]:
        ledger.error_needed = ledger.tokens_top + entries
        return GROW_TOKENS
    return OK


@entry_point
def append(
    addresses: Addresses,
    seqs: Ids,
    counts: NDArray[np.int64],
    values: NDArray[np.int32],
    draft: bool,
) -> int:
    """Append `counts[i]` tokens to each sequence; without counts one each. O(tokens)."""
    state = opened(addresses)
    code = append_checked(state, seqs, counts, values, draft)
    if code != OK:
        return code
    if counts.shape[0] == 0:
        for i in range(seqs.shape[0]):
            append_to(state, int(seqs[i]), values, i, np.int64(1), draft)
        return OK
    at = np.int64(0)
    for i in range(seqs.shape[0]):
        append_to(state, int(seqs[i]), values, at, int(counts[i]), draft)
        at += counts[i]
    return OK


@entry_point
def accept(
    addresses: Addresses, seqs: Ids, accepted: NDArray[np.int64], values: NDArray[np.int32]
) -> int:
    """Keep the first drafts of each sequence, drop the others, append one token. O(dropped)."""
    state = opened(addresses)
    ledger = state.ledger[0]
    entries = np.int64(0)
    for i in range(seqs.shape[0]):
        sequence = state.sequences[seqs[i]]
        ledger.error_row = i
        if sequence.step:
            return IN_STEP
        if accepted[i] > sequence.num_drafts:
            ledger.error_available = sequence.num_drafts
            return TOO_MANY_ACCEPTED
        if sequence.num_tokens + 1 > sequence.tokens_capacity:
            entries += 2 * span_capacity(sequence.num_tokens + 1)
    if ledger.tokens_top + entries > state.tokens.shape[0]:
        ledger.error_needed = ledger.tokens_top + entries
        return GROW_TOKENS
    for i in range(seqs.shape[0]):
        s = int(seqs[i])
        sequence = state.sequences[s]
        dropped = sequence.num_drafts - accepted[i]
        cut(state, s, int(sequence.num_tokens - dropped))
        sequence.num_drafts = 0
        append_to(state, s, values, i, np.int64(1), np.bool_(False))
        publish(state, s)
    return OK


@entry_point
def truncate(addresses: Addresses, seqs: Ids, lengths: NDArray[np.int64]) -> int:
    """Cut each sequence to a length that Python checked. O(blocks released)."""
    state = opened(addresses)
    if any_in_step(state, seqs):
        return IN_STEP
    for i in range(seqs.shape[0]):
        cut(state, int(seqs[i]), int(lengths[i]))
    return OK


@entry_point
def fork_into(addresses: Addresses, s: int, child: int) -> None:
    """Let a fresh sequence share all blocks of another; tokens were copied, the table array has
    room. O(blocks)."""
    state = opened(addresses)
    source, target = state.sequences[s], state.sequences[child]
    table, copy = state.tables[s, GROUP], state.tables[child, GROUP]
    ensure_table(state, child, GROUP, int(table.num_blocks))
    for i in range(table.num_blocks):
        b = int(state.table[table.start + i])
        state.table[copy.start + i] = b
        state.frame_table[copy.start + i] = state.frame_table[table.start + i]
        state.blocks[b].ref_count += 1
        if source.state == RESIDENT:
            state.blocks[b].num_resident += 1
        settle_lists(state, b)
    copy.num_blocks = table.num_blocks
    target.state = source.state
    target.num_drafts = source.num_drafts
    target.num_computed = source.num_computed
    target.num_stored = source.num_stored
    target.num_published = source.num_published
    target.num_cached = source.num_cached
    target.queried = source.queried
    target.last_step = source.last_step
    target.fence_in = source.fence_in
    target.fresh = source.fresh


@entry_point
def free(addresses: Addresses, seqs: Ids) -> None:
    """End each sequence; one in an open step goes when the step ends. O(blocks)."""
    state = opened(addresses)
    for i in range(seqs.shape[0]):
        sequence = state.sequences[seqs[i]]
        if sequence.step:
            sequence.at_end |= FREED
        else:
            end_sequence(state, int(seqs[i]))
