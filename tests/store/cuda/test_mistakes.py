"""Would anything notice? Each wait, record and synchronize of the CUDA store, removed."""

from __future__ import annotations

import pytest

from tests.cuda_double.kernels import double_kernels
from tests.store.cuda.mistakes import MISTAKES, outcome

SEEDS = range(1, 5)
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # a scene that fails leaves handles
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    double_kernels(monkeypatch)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_mistake_is_noticed(name: str) -> None:
    found = outcome(MISTAKES[name], SEEDS)
    assert found is not None, f"{name}: nothing noticed it"
    print(f"{name:40} {found}")


def test_nothing_is_noticed_without_a_mistake() -> None:
    for scene in {scene: one for one in MISTAKES.values() for scene in one.scenes}.values():
        for seed in SEEDS[:2]:
            assert outcome(scene, range(seed, seed + 1), plant=False) is None
