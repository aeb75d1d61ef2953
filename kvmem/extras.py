"""Inputs that are no tokens (images, embeddings) as keys of the trie (R4).

An extra covers a range of positions. Its tokens are placeholders, so the trie compares other
numbers there: negative ids, one per position, interned by the whole of (digest, length, the
placeholder tokens). Equal extras get equal ids, different ones different ids; forgetting an entry
costs a hit and nothing else, since its ids are never given out again.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np

from kvmem.checks import integer, shown
from kvmem.tokens import TokenArray

MIN_DIGEST_BYTES = 16
MAX_ENTRIES = 1 << 16
MAX_IDS = 2**31 - 1

Extra = tuple[int, int, bytes]  # start, length, digest


def checked_extras(extras: object, num_tokens: int) -> list[Extra]:
    """`extras` as a list of (start, length, digest), in order, inside the tokens, apart."""
    if not isinstance(extras, list | tuple):
        raise TypeError(
            f"extras must be a list of (start, length, digest), not {type(extras).__name__}"
        )
    result: list[Extra] = []
    for i, extra in enumerate(extras):
        if not isinstance(extra, list | tuple) or len(extra) != 3:
            raise TypeError(f"extras[{i}] is {shown(extra)}; allowed: (start, length, digest)")
        start = integer(f"extras[{i}] start", extra[0], low=0, high=MAX_IDS)
        length = integer(f"extras[{i}] length", extra[1], low=1, high=MAX_IDS)
        digest = extra[2]
        if not isinstance(digest, bytes):
            raise TypeError(f"extras[{i}] digest is a {type(digest).__name__}; allowed: bytes")
        if len(digest) < MIN_DIGEST_BYTES:
            raise ValueError(
                f"extras[{i}] digest has {len(digest)} bytes; allowed: at least "
                f"{MIN_DIGEST_BYTES} (hash the input, with its type and shape)"
            )
        if start + length > num_tokens:
            raise ValueError(
                f"extras[{i}] covers positions {start} to {start + length - 1}; allowed: inside "
                f"the {num_tokens} tokens"
            )
        result.append((start, length, digest))
    result.sort(key=lambda extra: extra[0])
    for one, two in itertools.pairwise(result):
        if one[0] + one[1] > two[0]:
            raise ValueError(f"extras overlap at position {two[0]}; allowed: ranges apart")
    return result


class ExtraKeys:
    """The ids of one Manager's extras."""

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[bytes, int, bytes], int] = OrderedDict()
        self._next = 1

    def keys(self, tokens: TokenArray, extras: list[Extra]) -> TokenArray | None:
        """What the trie compares instead of `tokens`; None when the ids are used up (after 2**31
        positions), and then the sequence is neither served from the trie nor published."""
        keys = tokens.copy()
        for start, length, digest in extras:
            covered = tokens[start : start + length].tobytes()
            first = self._first_id(digest, length, covered)
            if first is None:
                return None
            keys[start : start + length] = -np.arange(first, first + length, dtype=np.int64)
        return keys

    def _first_id(self, digest: bytes, length: int, covered: bytes) -> int | None:
        key = (digest, length, covered)
        known = self._ids.get(key)
        if known is not None:
            self._ids.move_to_end(key)
            return known
        if self._next + length > MAX_IDS:
            return None
        self._ids[key] = self._next
        self._next += length
        if len(self._ids) > MAX_ENTRIES:
            self._ids.popitem(last=False)
        return self._ids[key]
