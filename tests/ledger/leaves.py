"""Leaf functions of the ledger as entry points: compiled ones have no Python wrapper of their own.

Under NUMBA_DISABLE_JIT=1 these are plain calls.
"""

from __future__ import annotations

from kvmem.ledger import free_list, lru, spans, trie
from kvmem.ledger.jit import entry_point
from kvmem.ledger.state import State


@entry_point
def take_free(state: State, tier: int) -> int:
    return free_list.take_free(state, tier)


@entry_point
def give_free(state: State, tier: int, f: int) -> None:
    free_list.give_free(state, tier, f)


@entry_point
def append_newest(state: State, tier: int, f: int) -> None:
    lru.append_newest(state, tier, f)


@entry_point
def remove(state: State, tier: int, f: int) -> None:
    lru.remove(state, tier, f)


@entry_point
def find(state: State, parent: int, row_hash: int, start: int) -> int:
    return trie.find_child(state, parent, row_hash, start)


@entry_point
def insert(state: State, parent: int, row_hash: int, start: int, b: int) -> int:
    return trie.insert_node(state, parent, row_hash, start, b)


@entry_point
def forget(state: State, n: int) -> None:
    trie.remove_node(state, n)


@entry_point
def chain(state: State, parent: int, start: int) -> int:
    return trie.hash_row(state, trie.parent_hash(state, parent), start)


@entry_point
def take_span(state: State, length: int) -> int:
    return spans.take_tokens_span(state, length)


@entry_point
def give_span(state: State, start: int, capacity: int) -> None:
    spans.give_span(state, spans.TOKENS, state.tokens, start, capacity)


@entry_point
def span_capacity(length: int) -> int:
    return spans.span_capacity(length)
