"""Calls of the double that fail as told: the nth of a name, once or for good."""

from __future__ import annotations

import enum
from collections import Counter


class Error(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorIllegalAddress = 700
    cudaErrorNotReady = 600
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713
    cudaErrorNotSupported = 801


LASTING = {Error.cudaErrorIllegalAddress}


class Faults:
    """What fails, and what CUDA remembers of it. Calls of torch are named as ``Event.record``."""

    def __init__(self) -> None:
        self._planned: dict[tuple[str, int], Error] = {}
        self.calls: Counter[str] = Counter()
        self.struck: list[str] = []
        self.lost: Error | None = None
        self.last_error = Error.cudaSuccess

    def fail(self, name: str, nth: int, error: Error) -> None:
        """Let the nth call of a name from now on (the next is 1) fail."""
        self._planned[name, self.calls[name] + nth] = error

    def begin(self, name: str) -> Error:
        """The answer to the next call of a name."""
        self.calls[name] += 1
        error = self._planned.pop((name, self.calls[name]), None)
        if error is not None and not self.lost:
            self.struck.append(name)
        error = self.lost or error or Error.cudaSuccess
        if error in LASTING:
            self.lost = error
        if error:
            self.last_error = error
        return error

    def begin_torch(self, name: str) -> None:
        """The same for a call of torch, which raises, and takes what CUDA remembers."""
        error = self.begin(name)
        if error:
            self.last_error = self.lost or Error.cudaSuccess
            raise RuntimeError(f"CUDA error: {error.name} ({name}, double)")
