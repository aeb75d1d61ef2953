"""Every exception that kvmem raises on purpose.

::

    KVMemError (Exception)
    ├── ConfigError        (ValueError)    a setting, or a combination, that cannot be
    ├── OutOfBlocks        (MemoryError)   no room now; who holds what, what is short, what helps
    ├── SequenceTooLong    (ValueError)    can never fit; setting, value
    ├── UnknownSequence    (KeyError)      freed, or of another Manager
    ├── NotResident        (RuntimeError)  content asked for where it is not
    ├── PinError           (ValueError)    a pin or release that cannot be; a live pin forbids it
    ├── ShapeError         (ValueError)    tensor of wrong shape, dtype, device or stride
    ├── TierError          (OSError)       a lower tier is off, refused, or failed
    ├── TransferError      (RuntimeError)  a transfer failed or was cancelled
    ├── FormatError        (ValueError)    a file is not what it claims to be
    ├── CorruptEntry                       the header is sound, the bytes are not (R11)
    ├── DeviceUnavailable  (RuntimeError)  no such device, or it failed for good (R8)
    ├── RaceError          (RuntimeError)  two accesses that nothing orders; device="sim" only (R6)
    └── ManagerClosed      (RuntimeError)  used after close(), or in a forked child

A wrong Python type is a plain ``TypeError``, a bad argument value a plain ``ValueError``. A message
names the parameter, what came, what is allowed and what to do, in at most 300 characters; it never
holds token contents or a namespace. A call that raises has changed nothing (R8).
"""

from __future__ import annotations

from dataclasses import dataclass


class KVMemError(Exception):
    """Base of all errors below, so that one ``except`` catches them."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument: quotes around a whole sentence.
        return str(self.args[0]) if self.args else ""


class ConfigError(KVMemError, ValueError):
    """A setting or a combination of settings is wrong or does not fit the machine."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A sequence that holds blocks of a tier, as an OutOfBlocks names it."""

    sequence_id: int
    state: str  # "RESIDENT" holds device blocks, "SWAPPED" host blocks
    priority: int
    num_blocks: int  # blocks of that tier in its table
    num_shared: int  # of these, blocks that other tables name too: they stay when it goes
    num_pinned: int  # of these, blocks that a live Pin keeps on the device
    reason: str  # why it is there: "in an open step", "pinned" (all of it), "being copied",
    # or just "resident" or "swapped": nothing but a call is needed to make it go


class OutOfBlocks(KVMemError, MemoryError):
    """There is no room now. Nothing was changed; the same call may succeed later (R7, R8).

    Attributes, in blocks of ``tier`` ("device" or "host") unless said otherwise:

    - ``needed`` by the row that found no room (by the call, where there are no rows); ``free``,
      ``evictable`` (cached content nobody uses), ``pinned`` (by ``pins`` live Pins).
    - ``holders``: the sequences that hold the tier, at most 8 ``Holder``, the largest first;
      ``more_holders`` and ``more_blocks`` sum up the others. A shared block counts for each.
    - ``short_blocks`` and ``short_bytes``: what the whole call lacks, all its rows together.
    - ``setting`` and ``value``: the Config field and the number for it with which this call would
      have succeeded now, all else being equal: the same sequences, pins and cached content.
    """

    def __init__(
        self,
        message: str = "",
        *,
        tier: str = "device",
        needed: int = 0,
        free: int = 0,
        evictable: int = 0,
        pinned: int = 0,
        pins: int = 0,
        holders: tuple[Holder, ...] = (),
        more_holders: int = 0,
        more_blocks: int = 0,
        short_blocks: int = 0,
        short_bytes: int = 0,
        setting: str = "",
        value: int = 0,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.pinned = pinned
        self.pins = pins
        self.holders = holders
        self.more_holders = more_holders
        self.more_blocks = more_blocks
        self.short_blocks = short_blocks
        self.short_bytes = short_bytes
        self.setting = setting
        self.value = value


class SequenceTooLong(KVMemError, ValueError):
    """The sequence can never fit, whatever else leaves: it is longer than the device tier.

    ``setting`` and ``value``: as in OutOfBlocks, the Config field and the number for it with which
    this call would have succeeded now.
    """

    def __init__(self, message: str = "", *, setting: str = "", value: int = 0) -> None:
        super().__init__(message)
        self.setting = setting
        self.value = value


class UnknownSequence(KVMemError, KeyError):
    """The handle names no live sequence of this Manager: it was freed, or belongs to another."""


class NotResident(KVMemError, RuntimeError):
    """Content was asked for in a tier where it is not."""


class PinError(KVMemError, ValueError):
    """A pin or a release that cannot be, or an act that a live pin forbids."""


class ShapeError(KVMemError, ValueError):
    """A tensor has the wrong shape, dtype, device or stride."""


class TierError(KVMemError, OSError):
    """A lower tier is off, refused the request, or failed."""


class TransferError(KVMemError, RuntimeError):
    """A copy between the tiers failed. The Manager stays usable, unless its device failed with it.

    ``lost``: (sequence id, first token) of each sequence whose K/V is lost from that token on. Its
    tokens are pending again: step it, and it computes them once more.
    """

    def __init__(self, message: str = "", *, lost: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.lost = lost


class FormatError(KVMemError, ValueError):
    """A file is not what it claims to be: kind, version, model, layout or length."""


class CorruptEntry(KVMemError):
    """Bytes came back other than they went out: a checksum differs (R11)."""


class DeviceUnavailable(KVMemError, RuntimeError):
    """There is no such device, or it failed for good and the Manager says so from now on (R8)."""


class RaceError(KVMemError, RuntimeError):
    """Two conflicting accesses to a frame are not ordered (R6): a bug of kvmem or of an engine's
    own kernels. Raised by ``device="sim"`` only, whatever order they happened to take.

    ``first`` and ``second`` tell of each access: which stream and what, and the calls that queued
    it, innermost first.
    """

    def __init__(self, message: str = "", *, first: str = "", second: str = "") -> None:
        super().__init__(message)
        self.first = first
        self.second = second

    def again(self) -> RaceError:
        """The same for another call, with a traceback of its own."""
        return RaceError(str(self), first=self.first, second=self.second)


class ManagerClosed(KVMemError, RuntimeError):
    """Used after ``close()``, or in a forked child, which owns neither threads nor memory."""
