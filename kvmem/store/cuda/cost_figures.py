"""The figures of a cost model, and the file that keeps them for the next process.

A file is believed only if it is whole, of this format, of the same device, driver and runtime, and
says nothing that no machine could do: anything else is as if it weren't there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import tempfile
from bisect import bisect
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from cuda_kernels.cuda.compile import cache_folder

Way = Literal["copies", "batch", "staged"]
Direction = Literal["out", "in"]

#: The simplest first: of two that are equally fast it is taken.
WAYS: tuple[Way, ...] = ("copies", "batch", "staged")
#: From the device to the host, and back.
DIRECTIONS: tuple[Direction, ...] = ("out", "in")

#: Part of each file; a new number when figures of an older kvmem mean something else.
FORMAT = "kvmem.copy_costs/1"
_MOST_FILE_BYTES = 1 << 16


#: Bytes of a run at which the shape of a line is known, ascending.
RUN_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)
STRAIGHT = (1.0,) * len(RUN_BYTES)


@dataclass(frozen=True, slots=True)
class Costs:
    """The line of one way in one direction, in seconds, and how far the machine is from a line.

    ``shape``: what a run takes, as a multiple of what the line says, for each size of
    ``RUN_BYTES``. Drivers copy runs of some sizes in another way than others: of 16 KiB in the
    time of 64 KiB, say, as was published of one.
    """

    per_call: float
    per_run: float
    per_byte: float
    error: float  # by how much a repeated copy took longer than the fastest, as a part of that
    shape: tuple[float, ...] = STRAIGHT

    def seconds(self, num_runs: int, num_bytes: int) -> float:
        """What a copy of so many runs and bytes in all takes."""
        line = self.per_run * num_runs + self.per_byte * num_bytes
        if self.shape != STRAIGHT and num_bytes:
            line *= self._bend(num_bytes / num_runs)
        return self.per_call + line

    def _bend(self, run_bytes: float) -> float:
        """The shape at any size: straight between the known ones, over the logarithm of bytes."""
        above = bisect(RUN_BYTES, run_bytes)
        if above in (0, len(RUN_BYTES)):
            return self.shape[max(above - 1, 0)]
        low, high = RUN_BYTES[above - 1], RUN_BYTES[above]
        share = math.log(run_bytes / low) / math.log(high / low)
        return self.shape[above - 1] * (1 - share) + self.shape[above] * share

    def plausible(self) -> bool:
        """Whether any machine could be like that: what no file is believed without."""
        rates = (self.per_call, self.per_run, self.per_byte, self.error)
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            return False
        slow = self.per_call > 1 or self.per_run > 0.1 or self.per_byte > 1e-6  # under 1 MB/s
        is_bent = all(0.01 <= bend <= 100 for bend in self.shape)
        return not slow and is_bent and self.per_byte > 1e-14  # over 100 TB/s


@dataclass(frozen=True, slots=True)
class Key:
    """What figures hang on; those of another key are never used."""

    device: str
    uuid: str
    driver: str
    runtime: str
    pinned: bool = True  # whether the host side was page-locked


#: None: the way is not there, or nothing is known of it.
Figures = dict[tuple[Way, Direction], Costs | None]


def cache_place(key: Key, folder: Path | None = None) -> Path:
    """The file of a key."""
    digest = hashlib.sha256(json.dumps([FORMAT, asdict(key)], sort_keys=True).encode())
    return (folder or cache_folder()) / f"copies-{digest.hexdigest()[:32]}.json"


def read_figures(place: Path, key: Key) -> Figures | None:
    """Figures of a file, None for one that isn't there, isn't whole, or isn't to be believed."""
    text = _read(place)
    if text is None:
        return None
    try:
        head = json.loads(text)
        if head["format"] != FORMAT or head["key"] != asdict(key):
            return None
        return _parsed(head["seconds"])
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None


def write_figures(place: Path, key: Key, costs: Figures) -> None:
    """Whole or not at all, whoever else writes; a folder that can't be written is no error."""
    seconds = {
        direction: {way: _dumped(costs[way, direction]) for way in WAYS} for direction in DIRECTIONS
    }
    text = json.dumps({"format": FORMAT, "key": asdict(key), "seconds": seconds}, indent=1)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, suffix=".part", delete=False) as file:
            try:
                file.write(text.encode())
                file.flush()
                os.replace(file.name, place)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError:
        return


def _read(place: Path) -> bytes | None:
    """A small regular file; one of another kind could keep the reader waiting for ever."""
    try:
        file = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        text = os.read(file, _MOST_FILE_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(file)
    return text if len(text) <= _MOST_FILE_BYTES else None


def _parsed(seconds: Any) -> Figures:
    """Raises ValueError, KeyError or TypeError for anything that `write_figures` didn't write."""
    found: Figures = {}
    for direction in DIRECTIONS:
        if set(seconds[direction]) != set(WAYS):
            raise ValueError("ways")
        for way in WAYS:
            found[way, direction] = _costs(seconds[direction][way])
        if found["copies", direction] is None:
            raise ValueError("no figures of the way that is always there")
    return found


def _costs(record: Any) -> Costs | None:
    if record is None:
        return None
    if set(record) != {field.name for field in fields(Costs)}:
        raise ValueError("terms")
    shape = record["shape"]
    if type(shape) is not list or len(shape) != len(RUN_BYTES):
        raise ValueError("shape")
    numbers = [*shape, *(value for name, value in record.items() if name != "shape")]
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError("numbers")
    costs = Costs(**record | {"shape": tuple(shape)})
    if not costs.plausible():
        raise ValueError("implausible")
    return costs


def _dumped(costs: Costs | None) -> dict[str, Any] | None:
    return None if costs is None else asdict(costs)
