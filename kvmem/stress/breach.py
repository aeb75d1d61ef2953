"""What a run may meet: a refusal, an injected fault, or a breach of what kvmem promises."""

from __future__ import annotations

import re
import traceback
from dataclasses import asdict, dataclass

from kvmem.errors import (
    CorruptEntry,
    DeviceUnavailable,
    OutOfBlocks,
    PinError,
    RaceError,
    TierError,
    TransferError,
)

#: For want of room: legal, counted, and tried again later.
REFUSALS = (OutOfBlocks, TierError, PinError)
_INJECTED = re.compile(r"injected fault (\w+)")


@dataclass(frozen=True, slots=True)
class Breach:
    """Something that must not be. ``kind``: "content" (K/V or attention is not its stamp), "race",
    "corrupt", "verify" (R1-R5), "leak", "hang", "device" (it failed, and no fault was injected) or
    "error" (any other exception). Fields that don't apply are None."""

    kind: str
    message: str
    sequence: int | None = None
    position: int | None = None
    layer: int | None = None
    expected: str | None = None
    found: str | None = None
    thread: int | None = None
    detail: str = ""  # stacks or a traceback, many lines

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class Mismatch(Exception):
    """A row that was read is not its stamp. Carries the Breach."""

    def __init__(self, breach: Breach) -> None:
        super().__init__(breach.message)
        self.breach = breach


def fault_of(error: BaseException, *, injected: bool) -> str | None:
    """The site of the injected fault behind an error, or None where there is none.

    A failed copy (TransferError) that doesn't say its site is "transfer".
    """
    if not injected or not isinstance(error, TransferError | DeviceUnavailable):
        return None
    chain: BaseException | None = error
    while chain is not None:
        if found := _INJECTED.search(str(chain)):
            return found[1]
        chain = chain.__cause__ or chain.__context__
    return "transfer" if isinstance(error, TransferError) else None


def breach_of(error: BaseException, thread: int | None) -> Breach:
    """The breach that an unexpected exception stands for."""
    if isinstance(error, Mismatch):
        return error.breach
    kind, detail = "error", "".join(traceback.format_exception(error))
    if isinstance(error, RaceError):
        kind, detail = "race", f"first: {error.first}\nsecond: {error.second}"
    elif isinstance(error, CorruptEntry):
        kind = "corrupt"
    elif isinstance(error, AssertionError):
        kind = "verify"
    elif isinstance(error, TimeoutError):
        kind = "hang"
    elif isinstance(error, DeviceUnavailable | TransferError):
        kind = "device"
    message = " ".join(str(error).split())[:300] or type(error).__name__
    if kind == "error":
        message = f"{type(error).__name__}: {message}"
    return Breach(kind, message, thread=thread, detail=detail)
