"""A double of a GPU for each Manager of a test; nothing wrong may be left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cuda_double.opening import Double, install

Doubles = list[Double]


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Callable[[str, int], Doubles]]:
    """``doubles(mode, number)``: Managers on "cuda" get doubles in that mode from here on."""
    made: list[Doubles] = []

    def put(mode: str, number: int = 0) -> Doubles:
        made.append(install(monkeypatch, seed + number, mode))
        return made[-1]

    yield put
    for double in (double for some in made for double in some):
        double.check()
