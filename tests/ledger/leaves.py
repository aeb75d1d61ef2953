"""Leaf functions of the ledger as entry points: compiled ones have no Python wrapper of their own.

Under NUMBA_DISABLE_JIT=1 these are plain calls.
"""

from __future__ import annotations

from kvmem.ledger import free_list, lru, spans, trie
from kvmem.ledger.address import Addresses, addresses_of
from kvmem.ledger.jit import entry_point
from kvmem.ledger.state import LAYOUT, State, opened


@entry_point
def _take_free(addresses: Addresses, tier: int) -> int:
    return free_list.take_free(opened(addresses), tier)


def take_free(state: State, tier: int) -> int:
    return _take_free(addresses_of(state, LAYOUT), tier)


@entry_point
def _take_free_beside(addresses: Addresses, tier: int, wanted: int) -> int:
    return free_list.take_free_beside(opened(addresses), tier, wanted)


def take_free_beside(state: State, tier: int, wanted: int) -> int:
    return _take_free_beside(addresses_of(state, LAYOUT), tier, wanted)


@entry_point
def _give_free(addresses: Addresses, tier: int, f: int) -> None:
    free_list.give_free(opened(addresses), tier, f)


def give_free(state: State, tier: int, f: int) -> None:
    _give_free(addresses_of(state, LAYOUT), tier, f)


@entry_point
def _append_newest(addresses: Addresses, tier: int, f: int) -> None:
    lru.append_newest(opened(addresses), tier, f)


def append_newest(state: State, tier: int, f: int) -> None:
    _append_newest(addresses_of(state, LAYOUT), tier, f)


@entry_point
def _remove(addresses: Addresses, tier: int, f: int) -> None:
    lru.remove(opened(addresses), tier, f)


def remove(state: State, tier: int, f: int) -> None:
    _remove(addresses_of(state, LAYOUT), tier, f)


@entry_point
def _find(addresses: Addresses, parent: int, row_hash: int, start: int) -> int:
    return trie.find_child(opened(addresses), parent, row_hash, start)


def find(state: State, parent: int, row_hash: int, start: int) -> int:
    return _find(addresses_of(state, LAYOUT), parent, row_hash, start)


@entry_point
def _insert(addresses: Addresses, parent: int, row_hash: int, start: int, b: int) -> int:
    return trie.insert_node(opened(addresses), parent, row_hash, start, b)


def insert(state: State, parent: int, row_hash: int, start: int, b: int) -> int:
    return _insert(addresses_of(state, LAYOUT), parent, row_hash, start, b)


@entry_point
def _forget(addresses: Addresses, n: int) -> None:
    trie.remove_node(opened(addresses), n)


def forget(state: State, n: int) -> None:
    _forget(addresses_of(state, LAYOUT), n)


@entry_point
def _chain(addresses: Addresses, parent: int, start: int) -> int:
    state = opened(addresses)
    return trie.hash_row(state, trie.parent_hash(state, parent), start)


def chain(state: State, parent: int, start: int) -> int:
    return _chain(addresses_of(state, LAYOUT), parent, start)


@entry_point
def _take_span(addresses: Addresses, length: int) -> int:
    return spans.take_tokens_span(opened(addresses), length)


def take_span(state: State, length: int) -> int:
    return _take_span(addresses_of(state, LAYOUT), length)


@entry_point
def _give_span(addresses: Addresses, start: int, capacity: int) -> None:
    state = opened(addresses)
    spans.give_span(state, spans.TOKENS, state.tokens, start, capacity)


def give_span(state: State, start: int, capacity: int) -> None:
    _give_span(addresses_of(state, LAYOUT), start, capacity)


@entry_point
def span_capacity(length: int) -> int:
    return spans.span_capacity(length)
