"""Fields that are None for a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
_LONGEST = 160  # characters of a reason


class Reasons(dict[str, str]):
    """Why fields of a record are None: field name -> one line."""

    def get_or_say(self, name: str, read: Callable[[], Value]) -> Value | None:
        """What ``read`` returns, or None with the reason under ``name``; nothing gets out.

        A driver that goes away half-way, a library too old for a call, a file without a right to
        read it: each is an exception of its own kind, and none may cost the rest of the report.
        """
        try:
            value = read()
        except Exception as error:
            self[name] = in_words(error)
            return None
        if value is None:
            self.setdefault(name, "not available")
        return value


def in_words(error: BaseException) -> str:
    """An exception as one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_LONGEST]
