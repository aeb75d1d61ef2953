"""The trie against a dict, with honest hashes and with colliding ones (R4)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvmem.ledger import Ledger
from kvmem.ledger.state import GROUP
from kvmem.ledger.trie import MASK
from tests.ledger import leaves
from tests.ledger.play import Play

BLOCK = 4
HASHES: dict[str, Callable[[int], int]] = {
    "as they are": lambda h: h,
    "all equal": lambda h: 5,
    "all at the end": lambda h: MASK,  # the probe wraps around
    "two bits": lambda h: h & 0xC0000000,
}


class Rows:
    """Nodes of a small ledger by (parent, token row), beside a dict of what must be there."""

    def __init__(self, squash: Callable[[int], int], seed: int) -> None:
        self.ledger = Ledger(
            device_blocks=10,
            host_blocks=6,
            block_size=BLOCK,
            tier_policy="write_back",
            hash_seed=seed,
        )
        self.state = self.ledger.state
        self.state.tokens[:64] = np.arange(64) // 3 % 5
        self.squash = squash
        self.known: dict[tuple[int, int], int] = {}

    def hash(self, parent: int, start: int) -> int:
        return self.squash(int(leaves.chain(self.state, parent, start)))

    def find(self, parent: int, start: int) -> int:
        return int(leaves.find(self.state, parent, self.hash(parent, start), start))

    def insert(self, parent: int, start: int) -> None:
        b = len(self.known) + 1
        n = leaves.insert(self.state, parent, self.hash(parent, start), start, b)
        self.known[(parent, start)] = int(n)

    def remove(self, key: tuple[int, int]) -> None:
        leaves.forget(self.state, self.known.pop(key))


@pytest.mark.parametrize("squash", HASHES.values(), ids=HASHES.keys())
def test_random_inserts_and_removals_agree_with_a_dict(
    squash: Callable[[int], int], seed: int
) -> None:
    rng, rows = random.Random(seed), Rows(squash, seed)
    starts = {tuple(rows.state.tokens[i : i + BLOCK].tolist()): i for i in range(60)}
    for _ in range(300):
        parent = rng.choice([-1, -2, *rows.known.values()])
        start = rng.choice(list(starts.values()))
        key = (parent, start)
        assert rows.find(parent, start) == rows.known.get(key, 0)
        childless = [k for k, n in rows.known.items() if rows.state.nodes["num_children"][n] == 0]
        if childless and (len(rows.known) == 16 or rng.random() < 0.4):
            rows.remove(rng.choice(childless))
        elif key not in rows.known and len(rows.known) < 16:
            rows.insert(parent, start)
        assert rows.state.ledger["num_nodes"][0] == len(rows.known)
        for (above, at), n in rows.known.items():
            assert rows.find(above, at) == n
            assert rows.state.nodes["num_children"][n] == sum(p == n for p, _ in rows.known)
    for key in sorted(rows.known, key=lambda k: -rows.known[k]):
        if rows.state.nodes["num_children"][rows.known[key]] == 0:
            rows.remove(key)


def test_the_hash_depends_on_the_seed_the_parent_and_each_token() -> None:
    one, other = Rows(lambda h: h, 1), Rows(lambda h: h, 2)
    assert one.hash(-1, 0) != other.hash(-1, 0)
    assert one.hash(-1, 0) != one.hash(-2, 0)
    before = one.hash(-1, 0)
    for i in range(BLOCK):
        one.state.tokens[i] ^= 1 << 30
        assert one.hash(-1, 0) != before
        one.state.tokens[i] ^= 1 << 30
    assert one.hash(-1, 0) == before <= MASK


def test_the_hash_is_the_same_compiled_and_plain() -> None:
    """A figure from plain Python's unbounded integers, cut to 64 bits at the end."""
    rows = Rows(lambda h: h, 2**31 - 1)
    rows.state.tokens[:BLOCK] = [2**31 - 1, 0, -(2**31), -7]  # ids of extras are negative
    keys = rows.state.hash_keys.tolist()
    root = (keys[0] * 4 >> 32) & MASK
    words = [1, root, *rows.state.tokens[:BLOCK].tolist()]
    total = sum(key * word for key, word in zip(keys, words, strict=True))
    assert rows.hash(-3, 0) == (total >> 32) & MASK


def test_a_collision_never_serves_other_tokens() -> None:
    rows = Rows(lambda h: 9, 3)
    rows.state.tokens[:12] = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4]
    rows.insert(-1, 0)
    assert rows.find(-1, 8) == rows.known[(-1, 0)]  # the same row elsewhere in memory
    assert rows.find(-1, 4) == 0
    assert rows.find(-2, 0) == 0  # another namespace
    rows.remove((-1, 0))


def test_a_full_index_of_random_prefixes(make_play: Callable[..., Play], seed: int) -> None:
    play = make_play(24, 24, 2)
    rng = random.Random(seed)
    known: set[tuple[int, ...]] = set()
    for _ in range(60):
        tokens = [rng.randrange(3) for _ in range(rng.choice((2, 4, 6)))]
        s = play.made(tokens, rng.choice((b"", b"tenant")))
        play.free(s)
        known.add(tuple(tokens))
    assert play.of("num_nodes") == len(play.paths())
    assert play.of("num_nodes") == np.count_nonzero(play.state.node_blocks[:, GROUP])
