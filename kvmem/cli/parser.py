"""An argument parser whose every mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import NoReturn

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_BAD_CHOICE = re.compile(r"argument \w+: invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
_LONGEST = 200  # characters of a message, before the hint


class LineParser(argparse.ArgumentParser):
    """As argparse, but with no usage block before an error, and with the nearest known name."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)  # a flag added later must not change a meaning
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print ``message`` on one line, with the nearest name and where help is; exit 2."""
        line = " ".join(self._explained(message).split())
        print(f"{self.prog}: {line[:_LONGEST]} ({self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def _explained(self, message: str) -> str:
        if unknown := _UNKNOWN.fullmatch(message):
            word = unknown[1].split()[0] if unknown[1].split() else unknown[1]
            kind = "flag" if word.startswith("-") else "argument"
            return f"unknown {kind} {word}{self._nearest(word, self.flags())}"
        if choice := _BAD_CHOICE.fullmatch(message):
            names = re.findall(r"[\w-]+", choice[2])
            return f"unknown command {choice[1]!r}{self._nearest(choice[1], names)}"
        return message

    def flags(self) -> list[str]:
        """Every flag of this parser, e.g. ``--kv-heads``."""
        return [flag for action in self._actions for flag in action.option_strings]

    @staticmethod
    def _nearest(word: str, names: list[str]) -> str:
        found = difflib.get_close_matches(word.split("=")[0], names, n=1)
        return f"; did you mean {found[0]}?" if found else ""
