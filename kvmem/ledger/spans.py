"""Ragged rows: each sequence's tokens and table lie in one span of a flat, growable array.

Spans have room for 16, 32, 64, ... entries, from 256 on for a cache line more: rows of one length
would else lie a power of two apart, where a decode step's one entry of each row competes for a few
places in the cache (100 ns instead of 5 ns a row, measured). A freed span is kept on the list of
its class, linked through its own first two entries; a row that outgrows its span moves to one of
twice the size, so a row of any length costs amortised O(1) an entry and kernels need one start
index a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import compiled
from .state import NUM_SPAN_CLASSES, State

SMALLEST = 16
LINE = 16  # entries of a cache line
FIRST_UNEVEN = 4  # class
TOKENS = 0  # kinds of span
TABLE = NUM_SPAN_CLASSES
NO_SPAN = (1 << 62) - 1  # end of a list, in the 31 + 31 bits a link has


@compiled
def class_capacity(c: int) -> int:
    """Entries of a span of class `c`. O(1)."""
    return (SMALLEST << c) + (LINE if c >= FIRST_UNEVEN else 0)


@compiled
def span_class(length: int) -> int:
    """The smallest class that holds `length` entries. O(log length)."""
    c = 0
    while class_capacity(c) < length:
        c += 1
    return c


@compiled
def span_capacity(length: int) -> int:
    """Entries of the span that holds `length` entries. O(log length)."""
    return class_capacity(span_class(length))


@compiled
def take_span(state: State, kind: int, array: NDArray[np.int32], top: int, length: int) -> int:
    """The start of a freed span for `length` entries, else `top` (the caller moves it). O(1)."""
    c = kind + span_class(length)
    start = int(state.spans[c].free_head)
    if start < 0:
        return top
    link = (int(array[start + 1]) << 31) | int(array[start])
    state.spans[c].free_head = -1 if link == NO_SPAN else link
    return start


@compiled
def give_span(state: State, kind: int, array: NDArray[np.int32], start: int, capacity: int) -> None:
    """Put a span back on the list of its class. O(1)."""
    c = kind + span_class(capacity)
    link = int(state.spans[c].free_head)
    if link < 0:
        link = NO_SPAN
    array[start] = link & 0x7FFFFFFF
    array[start + 1] = link >> 31
    state.spans[c].free_head = start


@compiled
def take_tokens_span(state: State, length: int) -> int:
    """A span of the token array for `length` entries; room was checked before. O(1)."""
    ledger = state.ledger[0]
    start = take_span(state, TOKENS, state.tokens, int(ledger.tokens_top), length)
    if start == ledger.tokens_top:
        ledger.tokens_top += span_capacity(length)
    return start


@compiled
def take_table_span(state: State, length: int) -> int:
    """A span of the table arrays for `length` entries; room was checked before. O(1)."""
    ledger = state.ledger[0]
    start = take_span(state, TABLE, state.table, int(ledger.table_top), length)
    if start == ledger.table_top:
        ledger.table_top += span_capacity(length)
    return start


@compiled
def ensure_table(state: State, s: int, g: int, length: int) -> None:
    """Let a sequence's table span hold `length` entries, moving it if need be. Amortised O(1)."""
    table = state.tables[s, g]
    if length <= table.capacity:
        return
    start = take_table_span(state, length)
    for i in range(table.num_blocks):
        state.table[start + i] = state.table[table.start + i]
        state.frame_table[start + i] = state.frame_table[table.start + i]
    if table.capacity:
        give_span(state, TABLE, state.table, int(table.start), int(table.capacity))
    table.start = start
    table.capacity = span_capacity(length)


@compiled
def ensure_tokens(state: State, s: int, length: int) -> None:
    """Let a sequence's token span (and key span) hold `length` entries. Amortised O(1)."""
    sequence = state.sequences[s]
    if length <= sequence.tokens_capacity:
        return
    old_tokens, old_keys = int(sequence.tokens_start), int(sequence.keys_start)
    capacity = int(sequence.tokens_capacity)
    sequence.tokens_start = take_tokens_span(state, length)
    for i in range(sequence.num_tokens):
        state.tokens[sequence.tokens_start + i] = state.tokens[old_tokens + i]
    if old_keys != old_tokens:
        sequence.keys_start = take_tokens_span(state, length)
        for i in range(sequence.num_tokens):
            state.tokens[sequence.keys_start + i] = state.tokens[old_keys + i]
        give_span(state, TOKENS, state.tokens, old_keys, capacity)
    else:
        sequence.keys_start = sequence.tokens_start
    if capacity:
        give_span(state, TOKENS, state.tokens, old_tokens, capacity)
    sequence.tokens_capacity = span_capacity(length)
