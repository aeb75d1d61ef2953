"""Sizes in bytes, written by people and for people: "8GiB" -> 8589934592 -> "8.00 GiB"."""

from __future__ import annotations

import re

_UNIT_BYTES = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]{0,3})\s*", re.ASCII)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

#: What a message says is allowed.
SIZE_FORMS = 'a number and B, KiB, MiB, GiB, TiB (KB, MB, GB, TB), such as "8GiB"'


def parse_size(text: str) -> int | None:
    """Bytes meant by ``text``, or None where it is no size. Without a unit: bytes."""
    match = _SIZE.fullmatch(text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNIT_BYTES:
        return None
    if "." in match[1]:
        return int(float(match[1]) * _UNIT_BYTES[unit])
    return int(match[1]) * _UNIT_BYTES[unit]


def with_unit(num_bytes: int) -> str:
    """``num_bytes`` for a person: 2949120 -> "2.81 MiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"
