"""Ledgers that are verified and drained at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ledger.play import Play


@pytest.fixture
def make_play() -> Iterator[Callable[..., Play]]:
    """`make_play(device, host, block, ...)`."""
    made: list[Play] = []

    def make(*sizes: int, **options: Any) -> Play:
        made.append(Play(*sizes, **options))
        return made[-1]

    yield make
    for play in made:
        play.ledger.verify()
        play.drain()


@pytest.fixture
def play(make_play: Callable[..., Play]) -> Play:
    """8 device and 8 host blocks of 4 tokens."""
    return make_play()
