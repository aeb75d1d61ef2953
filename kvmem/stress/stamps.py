"""The K/V of a token as a function of all tokens up to it, so that a row read tells whose it is.

Equal prefixes of one namespace have equal stamps, because they share blocks. The version of a
sequence's content is in its tokens: whatever is written anew (after a truncation, in a fork) has
token ids drawn at random, and so another stamp in every row from there on. So stale K/V, that of
another sequence, of another position or of another layer differs from what is expected.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Chain = NDArray[np.uint64]
Rows = NDArray[np.float32]

_FACTOR = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_MODULUS = 2**64
NUM_GROUPED = 2  # query heads a K/V head
KEY, VALUE, QUERY = 0, 1, 2


class Stamps:
    """Stamps of one geometry. All calls are vectorised; nothing is kept but a few constants.

    A *chain* is uint64, one number a token: that of all tokens up to it. K, V and the queries are
    drawn from it: multiples of 1/32 within [-2, 2), exact in float32, float16 and bfloat16.
    """

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_dim: int, longest: int) -> None:
        powers, inverses = [1], [1]
        inverse = pow(_FACTOR, -1, _MODULUS)
        for _ in range(longest):
            powers.append(powers[-1] * _FACTOR % _MODULUS)
            inverses.append(inverses[-1] * inverse % _MODULUS)
        self._powers = np.array(powers, np.uint64)
        self._inverses = np.array(inverses, np.uint64)
        heads = num_kv_heads * (2 + NUM_GROUPED)
        count = num_layers * heads * head_dim
        factors = _mixed(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)
        each = factors.reshape(num_layers, heads, head_dim)
        self._factors = np.split(each, [num_kv_heads, 2 * num_kv_heads], axis=1)

    def extended(self, chain: Chain, tokens: NDArray[np.int32], namespace: str | None) -> Chain:
        """``chain`` with that of the tokens appended behind it. O(tokens)."""
        if len(chain):
            last = int(chain[-1])
        else:
            last = zlib.crc32(repr(namespace).encode()) + 1
        n = len(tokens)
        each = _mixed(tokens.astype(np.uint64)) * self._inverses[:n]
        # chain[i] = last * factor ** (i + 1) + sum of token[j] * factor ** (i - j)
        with np.errstate(over="ignore"):
            more = self._powers[:n] * np.cumsum(each) + self._powers[1 : n + 1] * np.uint64(last)
        return np.concatenate((chain, more))

    def rows(self, kind: int, layer: int, chain: Chain) -> Rows:
        """float32 ``[len(chain), heads, head_dim]``: KEY, VALUE or QUERY of the tokens."""
        drawn = _mixed(chain)[:, None, None] * self._factors[kind][layer]
        rows: Rows = ((drawn >> np.uint64(57)).astype(np.float32) - 64) / 32
        return rows


def attended(query: Rows, key: Rows, value: Rows) -> NDArray[np.float64]:
    """Causal attention in float64: the queries are those of the last tokens of ``key``.

    ``query`` ``[n, num_heads, head_dim]``, K and V ``[num_tokens, num_kv_heads, head_dim]``.
    """
    n, num_heads, head_dim = query.shape
    length, num_kv_heads, _ = key.shape
    grouped = query.reshape(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = grouped.transpose(1, 2, 0, 3).astype(np.float64)
    scores = grouped @ key.transpose(1, 2, 0)[:, None] * head_dim**-0.5
    ahead = np.arange(length)[None, :] > np.arange(length - n, length)[:, None]
    scores[..., ahead] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = weights @ value.transpose(1, 0, 2)[:, None]
    out: NDArray[np.float64] = mixed.transpose(2, 0, 1, 3).reshape(n, num_heads, head_dim)
    return out


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of the result hangs on each bit of the number (the end of splitmix64)."""
    x = numbers + np.uint64(_FACTOR)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
