"""A CUDA runtime that registers host memory as the real one does, and refuses it as told.

It knows what is registered, refuses overlaps and what is not mapped, keeps a last error until
somebody takes it, and notes each call. Its error codes carry the real names and numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


class Error(enum.IntEnum):
    """Some of ``cudaError_t``."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorCudartUnloading = 4
    cudaErrorMapBufferObjectFailed = 205
    cudaErrorAlreadyMapped = 208
    cudaErrorECCUncorrectable = 214
    cudaErrorOperatingSystem = 304
    cudaErrorIllegalAddress = 700
    cudaErrorContextIsDestroyed = 709
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713
    cudaErrorLaunchFailure = 719
    cudaErrorNotPermitted = 800
    cudaErrorNotSupported = 801
    cudaErrorUnknown = 999


@dataclass
class FakeCudart:
    """``fail_at[n]`` is what the n-th registration answers; ``budget`` the bytes it may hold."""

    budget: int | None = None
    fail_at: dict[int, Error | int | Exception] = field(default_factory=dict)
    fail_unregister: dict[int, Error | Exception] = field(default_factory=dict)  # by its number
    sticky: Error | None = None  # an error that stays, however often it is taken
    before_unregister: Callable[[], None] = lambda: None
    after_register: Callable[[], None] = lambda: None
    live: dict[int, int] = field(default_factory=dict)  # address -> bytes
    calls: list[tuple[str, int, int]] = field(default_factory=list)  # (what, address, bytes)
    last: int = 0

    cudaHostRegisterPortable = 1

    def registered(self) -> list[tuple[int, int]]:
        """(address, bytes) of each registration that was made, in order."""
        return [(address, size) for what, address, size in self.calls if what == "register"]

    def unregistered(self) -> list[int]:
        """The addresses given to cudaHostUnregister, in order."""
        return [address for what, address, _ in self.calls if what == "unregister"]

    def cudaHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        number = sum(what != "unregister" for what, _, _ in self.calls)
        answer = self.fail_at.get(number, self._answer(address, size))
        if flags != self.cudaHostRegisterPortable:
            answer = Error.cudaErrorInvalidValue
        if isinstance(answer, Exception):
            raise answer
        self.calls.append(("refused" if answer else "register", address, size))
        if not answer:
            self.live[address] = size
            self.after_register()
        return self._done(answer)

    def cudaHostUnregister(self, address: int) -> tuple[int]:
        self.before_unregister()
        answer = self.fail_unregister.get(len(self.unregistered()), Error.cudaSuccess)
        self.calls.append(("unregister", address, 0))
        if isinstance(answer, Exception):
            raise answer
        assert not answer or address in self.live
        if not answer:
            if address not in self.live:
                return self._done(Error.cudaErrorHostMemoryNotRegistered)
            assert is_mapped(address, self.live[address]), "unmapped while it was registered"
            del self.live[address]
        return self._done(answer)

    def cudaGetLastError(self) -> tuple[int]:
        taken, self.last = self.last, self.sticky or 0
        return (taken,)

    def _answer(self, address: int, size: int) -> Error:
        if not size or not is_mapped(address, size):
            return Error.cudaErrorInvalidValue
        for other, length in self.live.items():
            if address < other + length and other < address + size:
                return Error.cudaErrorHostMemoryAlreadyRegistered
        if self.budget is not None and sum(self.live.values()) + size > self.budget:
            return Error.cudaErrorMemoryAllocation
        return Error.cudaSuccess

    def _done(self, answer: Error | int) -> tuple[int]:
        if answer:
            self.last = int(answer) if self.sticky is None else self.sticky
        return (answer,)


def is_mapped(address: int, size: int) -> bool:
    """Whether the process has all of these addresses."""
    end = address + size
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            address = last
        if address >= end:
            return True
    return False
