"""A GPU's kernels run as their CPU twins here."""

from __future__ import annotations

import pytest

from tests.cuda_double.kernels import double_kernels


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    double_kernels(monkeypatch)
