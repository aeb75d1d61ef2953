"""Checks of single arguments, so that every entry point words the same mistake the same way.

Each returns the value in its plain form or raises: ``TypeError`` for a wrong Python type, else the
``error`` class given. A message says the parameter, what came, what is allowed, the nearest name.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Sequence

import numpy as np

_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """The repr of ``value``, cut so that a message stays within 300 characters."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def integer(
    name: str,
    value: object,
    *,
    low: int,
    high: int,
    error: type[ValueError] = ValueError,
) -> int:
    """``value`` as a plain int in ``low``..``high``. Booleans and floats are no integers here."""
    if type(value) is int and low <= value <= high:
        return value
    allowed = f"an integer >= {low} (at most {high})"
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {allowed}, not {shown(value)} ({type(value).__name__})")
    try:
        plain = operator.index(value)
    except TypeError:  # a float tensor has __index__ too, and refuses only when asked
        raise TypeError(
            f"{name} must be {allowed}, not {shown(value)} ({type(value).__name__})"
        ) from None
    if not low <= plain <= high:
        raise error(f"{name}={shown(plain)} is out of range: give {allowed}")
    return plain


def boolean(name: str, value: object) -> bool:
    """``value`` where it is a bool; anything else, 0 and 1 included, is a TypeError."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {shown(value)} ({type(value).__name__})")


def choice(
    name: str,
    value: object,
    supported: Sequence[str],
    *,
    planned: Iterable[str] = (),
    error: type[ValueError] = ValueError,
) -> str:
    """``value`` where it is one of ``supported``.

    ``planned`` names are documented, but not built yet: the message says so.
    """
    if type(value) is str and value in supported:
        return value
    listed = ", ".join(repr(x) for x in supported)
    if not isinstance(value, str):
        raise TypeError(
            f"{name} must be a str, one of {listed}, not {shown(value)} ({type(value).__name__})"
        )
    if value in supported:
        return value
    planned = tuple(planned)
    if value in planned:
        raise error(f"{name}={shown(value)} is not in this version; supported: {listed}")
    raise error(f"{name}={shown(value)} is unknown; supported: {listed}{nearest(value, supported)}")


def nearest(value: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the most similar of ``names``, or nothing."""
    found = difflib.get_close_matches(value[:_SHOWN_CHARACTERS].lower(), list(names), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
