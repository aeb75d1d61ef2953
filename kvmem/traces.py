"""Reading public traces of KV-cache use: JSON lines, one request a line, plain or gzip.

A trace says when requests came, how long they were, and which blocks of their prompts were equal.
It holds no text. Equal hash ids mean equal block and equal whole prefix before it.

    layout      time          tokens a block    traces
    mooncake    milliseconds  512               conversation, synthetic, toolagent
    bailian     seconds       16                Alibaba's qwen-bailian traces

A file is input from outside: every line is measured before it is parsed and every field checked
before it is used; JSON is all that is understood.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvmem.checks import choice, shown
from kvmem.errors import FormatError

MAX_LINE_BYTES = 16 << 20
MAX_TOKENS = 2**31 - 1  # of a request
MAX_HASH_ID = 2**63 - 1
MAX_MS = 2**53  # a float still tells one millisecond from the next

_GZIP_MAGIC = b"\x1f\x8b"
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class TraceLayout:
    """What the numbers of a trace mean."""

    name: str
    block_size: int  # tokens a hash id stands for; the last block of a prompt may be partial
    ms_per_unit: int  # of `timestamp`


LAYOUTS = {
    "mooncake": TraceLayout("mooncake", block_size=512, ms_per_unit=1),
    "bailian": TraceLayout("bailian", block_size=16, ms_per_unit=1000),
}


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace."""

    timestamp_ms: float  # since the start of the trace
    input_length: int  # tokens of the prompt
    output_length: int  # tokens generated
    hash_ids: NDArray[np.int64]  # [ceil(input_length / block_size)], one a block of the prompt


def read_trace(path: str | os.PathLike[str], *, layout: str = "mooncake") -> Iterator[TraceRequest]:
    """The requests of a trace file, in the order of its lines; a line is read when it is asked for.

    `layout`: "mooncake" or "bailian". Raises FormatError with the number of the first line that is
    not what it has to be, ValueError for an unknown layout, OSError when the file can't be opened.
    Memory: one line, at most `MAX_LINE_BYTES`. O(bytes).
    """
    return _requests(path, LAYOUTS[choice("layout", layout, tuple(LAYOUTS))])


def _requests(path: str | os.PathLike[str], layout: TraceLayout) -> Iterator[TraceRequest]:
    name = os.path.basename(os.fspath(path))
    with _opened(path) as file:
        number = 0
        while line := _next_line(file, name, number + 1):
            number += 1
            try:
                yield _request(line, layout)
            except _BadLineError as bad:
                _refuse(name, number, str(bad))


class _BadLineError(Exception):
    """What is wrong with a line; the reader adds where it is."""


def _refuse(name: str, number: int, what: str) -> NoReturn:
    raise FormatError(f"{shown(name)}, line {number}: {what}") from None


def _opened(path: str | os.PathLike[str]) -> IO[bytes] | gzip.GzipFile:
    """The bytes of a file, unpacked if it begins as gzip does, whatever its name."""
    file = open(path, "rb")  # noqa: SIM115
    try:
        magic = file.read(len(_GZIP_MAGIC))
        file.seek(0)
        if magic == _GZIP_MAGIC:
            file.close()
            return gzip.open(path, "rb")
    except BaseException:
        file.close()
        raise
    return file


def _next_line(file: IO[bytes] | gzip.GzipFile, name: str, number: int) -> bytes:
    """The next line; b"" at the end of the file."""
    try:
        line = file.readline(MAX_LINE_BYTES + 1)
    except EOFError:
        _refuse(name, number, "the gzip data end too early; fetch the file again")
    except (gzip.BadGzipFile, zlib.error) as error:
        _refuse(name, number, f"the gzip data are damaged ({error}); fetch the file again")
    if len(line) > MAX_LINE_BYTES:
        _refuse(name, number, f"longer than {MAX_LINE_BYTES} bytes; allowed: one request a line")
    return line


def _request(line: bytes, layout: TraceLayout) -> TraceRequest:
    """A line as a request. Raises _BadLineError."""
    try:
        fields = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _BadLineError(
            f"no JSON ({type(error).__name__}); allowed: one object a line"
        ) from None
    if not isinstance(fields, dict):
        raise _BadLineError(f"a JSON {type(fields).__name__}; allowed: one object a line")
    for name in _FIELDS:
        if name not in fields:
            raise _BadLineError(f"the field {name!r} is missing")
    length = _count("input_length", fields["input_length"], MAX_TOKENS)
    hash_ids = fields["hash_ids"]
    if not isinstance(hash_ids, list):
        raise _BadLineError(f"hash_ids is a {type(hash_ids).__name__}; allowed: a list of integers")
    blocks = -(-length // layout.block_size)
    if len(hash_ids) != blocks:
        raise _BadLineError(
            f"{len(hash_ids)} hash_ids for input_length={length}; {blocks} blocks of "
            f"{layout.block_size} tokens hold that ({layout.name} layout)"
        )
    for hash_id in hash_ids:
        _count("hash_ids", hash_id, MAX_HASH_ID)
    return TraceRequest(
        timestamp_ms=_milliseconds(fields["timestamp"], layout.ms_per_unit),
        input_length=length,
        output_length=_count("output_length", fields["output_length"], MAX_TOKENS),
        hash_ids=np.array(hash_ids, np.int64),
    )


def _no_constant(name: str) -> NoReturn:
    """JSON has no NaN and no Infinity, Python's reader does."""
    raise ValueError(name)


def _count(name: str, value: Any, high: int) -> int:
    """A JSON integer in 0..high."""
    if type(value) is not int:
        raise _BadLineError(f"{name}: {shown(value)} is no integer")
    if not 0 <= value <= high:
        raise _BadLineError(f"{name}: {shown(value)} is out of range; allowed: 0 to {high}")
    return value


def _milliseconds(value: Any, ms_per_unit: int) -> float:
    """A JSON number of time units as milliseconds."""
    if type(value) not in (int, float):
        raise _BadLineError(f"timestamp: {shown(value)} is no number")
    if not (0 <= value <= MAX_MS / ms_per_unit and math.isfinite(value)):
        raise _BadLineError(
            f"timestamp: {shown(value)} is out of range; allowed: 0 to {MAX_MS // ms_per_unit}"
        )
    return float(value) * ms_per_unit
