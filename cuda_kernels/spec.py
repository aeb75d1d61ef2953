"""The shape of an operation's spec: one object per operation, read by tests and docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Spec:
    """What an operation takes and gives, as data.

    ``axes`` names each dimension; ``tensors`` maps a parameter to its dimensions and dtype in
    words; ``tolerance`` maps a storage dtype to the allowed error relative to ``relative_to``
    (0 = bit-equal); ``reference`` is the float64 or byte-exact NumPy version; ``make_inputs(rng,
    ...)`` draws valid arguments from a seeded generator.
    """

    name: str
    axes: Mapping[str, str]
    tensors: Mapping[str, str]
    tolerance: Mapping[str, float]
    relative_to: str
    reference: Callable[..., Any]
    make_inputs: Callable[..., Any]
