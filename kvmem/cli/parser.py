"""An argument parser whose every mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from typing import NoReturn

from kvmem.sizes import SIZE_FORMS, parse_size

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_LONGEST = 240  # characters of a message, before the hint
_SHOWN = 40  # characters of a value in a message
MAX_WHOLE = 2**62


class BadInputFile(Exception):
    """A file named on the command line can't be read, or is not what it should be. Status 3."""


class LineParser(argparse.ArgumentParser):
    """As argparse, but with no usage block before an error, and with the nearest known name."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)  # a flag added later must not change a meaning
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print ``message`` on one line, with the nearest name and where help is; exit 2."""
        line = one_line(self._explained(message))
        print(f"{self.prog}: {line[:_LONGEST]} ({self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def _explained(self, message: str) -> str:
        if unknown := _UNKNOWN.fullmatch(message):
            word = unknown[1].split()[0] if unknown[1].split() else unknown[1]
            kind = "flag" if word.startswith("-") else "argument"
            return f"unknown {kind} {shown(word)}{self.nearest(word, self.flags())}"
        return message

    def flags(self) -> list[str]:
        """Every flag of this parser, e.g. ``--kv-heads``."""
        return [flag for action in self._actions for flag in action.option_strings]

    @staticmethod
    def nearest(word: str, names: list[str]) -> str:
        """``; did you mean x?`` for the most similar of ``names``, or nothing."""
        found = difflib.get_close_matches(word.split("=")[0][:_SHOWN], names, n=1)
        return f"; did you mean {found[0]}?" if found else ""


def one_line(text: str) -> str:
    """``text`` without line breaks and without characters that would steer a terminal."""
    spaced = " ".join(text.split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in spaced)


def shown(text: str) -> str:
    """A word of the command line as a message shows it."""
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def whole(text: str) -> int:
    """The int in ``text``, for argparse."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is not a whole number") from None
    if abs(value) > MAX_WHOLE:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is too large; at most {MAX_WHOLE}")
    return value


def counted(text: str) -> int:
    """An int >= 1, for argparse."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is too small; give 1 or more")
    return value


def number(text: str) -> float:
    """A finite number, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is no number; give e.g. 0.5 or 1e-6")
    return value


def seconds(text: str) -> float:
    """A duration of 0.1 s to a day, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(
            f"{shown(text)!r} is no duration; give seconds from 0.1 to 86400"
        )
    return value


def memory(text: str) -> int | float | str:
    """Bytes as int, a share as float, anything else as it came: the Config judges it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def size(text: str) -> int:
    """Bytes >= 1, for argparse."""
    value = parse_size(text)
    if not value or value > MAX_WHOLE:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is no size; give {SIZE_FORMS}")
    return value


def add_kv_dtype(group: argparse._ActionsContainer) -> None:
    """The flag of what K and V are stored as, the same in each command that takes a dtype."""
    group.add_argument(
        "--kv-dtype", metavar="NAME", help="what K and V are stored as: fp8_e4m3; default: --dtype"
    )
