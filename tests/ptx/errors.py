"""What the interpreter refuses, one class for each way in which PTX is wrong."""

from __future__ import annotations


class PtxError(Exception):
    """PTX that is not run, or that did what it may not do; the message names the instruction."""


class UnknownPtx(PtxError):
    """A directive, opcode, modifier or operand that the interpreter doesn't know. Never skipped."""


class OutOfBounds(PtxError):
    """An access that isn't wholly inside one mapped buffer, or inside the block's shared memory."""


class Misaligned(PtxError):
    """An access whose address isn't a multiple of its size (16 for four words)."""


class ReadOnly(PtxError):
    """A store to a buffer that the kernel may only read."""


class Uninitialised(PtxError):
    """A read of a register, or of a byte of memory, that nothing has written."""


class Race(PtxError):
    """Two accesses to one byte, one of them a store, that no barrier orders."""


class Divergent(PtxError):
    """An instruction for whole warps, or for named lanes, that not all of them have come to."""


class Stuck(PtxError):
    """Threads that wait for each other for ever, or a kernel that runs past its limit."""
