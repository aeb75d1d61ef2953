"""The log of a simulated device: each operation, fault and turn, in order; a hash of it all.

Lines name streams, numbers and frames, never addresses, times or hashes of objects: one seed and
one sequence of calls give one log in any process.
"""

from __future__ import annotations

import hashlib
from collections import deque

#: Lines that are kept for reading; the hash covers all.
KEPT_LINES = 512


class Log:
    """Lines as they come; the last ones are kept, all are hashed."""

    __slots__ = ("_hash", "lines", "num_lines")

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.num_lines = 0

    def add(self, line: str) -> None:
        """Append a line. O(its length)."""
        self.lines.append(line)
        self.num_lines += 1
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    def digest(self) -> str:
        """Hex digest of all lines up to now."""
        return self._hash.hexdigest()

    def tail(self, count: int) -> list[str]:
        """The last ``count`` lines of those kept."""
        return list(self.lines)[-count:]
