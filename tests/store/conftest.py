"""Stores that are closed, and whose guards are looked at, whatever a test does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvmem.store import Store
from kvmem.store.device import Stream
from tests.store.fakes import FakeConfig


@pytest.fixture
def make_store() -> Iterator[Callable[..., Store]]:
    """``make_store(**config fields)``; at the end guards must be whole and workers gone."""
    made: list[Store] = []

    def make(**fields: Any) -> Store:
        made.append(Store(FakeConfig(**fields)))
        return made[-1]

    yield make
    for store in made:
        for stream in (Stream.OUT, Stream.IN):
            store.device.release(stream)
        if not store.closed:
            assert store.check_guards() == []
        store.close()
        assert not any(thread.is_alive() for thread in store.device._threads)
