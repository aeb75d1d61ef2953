"""Opcodes that steer: branches, returns, barriers; and those without an effect here."""

from __future__ import annotations

from tests.ptx.decode import Decoder, expect, unknown
from tests.ptx.errors import PtxError
from tests.ptx.program import Immediate, Instruction
from tests.ptx.registers import Mask
from tests.ptx.warps import warp_barrier
from tests.ptx.wave import Step, Wave


def branch(ins: Instruction) -> Step:
    """The target is filled in by the machine, which knows the labels."""
    expect(ins, 1)
    if set(ins.modifiers) - {"uni"}:
        raise unknown(ins, "modifiers are not known")
    return Step(ins, "branch", uniform="uni" in ins.modifiers)


def leave(ins: Instruction) -> Step:
    expect(ins, 0)
    if set(ins.modifiers) - {"uni"}:
        raise unknown(ins, "modifiers are not known")
    return Step(ins, "exit")


def barrier(ins: Instruction) -> Step:
    """`bar.sync 0` and `barrier.sync 0`, for all threads of the block; or `bar.warp.sync`."""
    if ins.modifiers == ("warp", "sync"):
        return warp_barrier(ins)
    expect(ins, 1)
    known = (("sync",), ("sync", "aligned"), ("cta", "sync"), ("cta", "sync", "aligned"))
    if ins.modifiers not in known or ins.operands != (Immediate(0),):
        raise unknown(ins, "only barrier 0 of all threads")
    return Step(ins, "block")


def nothing(ins: Instruction) -> Step:
    """Prefetches and fences: they change no value, and order no plain accesses here."""
    allowed = {
        "prefetch": {("global", "L1"), ("global", "L2")},
        "membar": {("cta",), ("gl",), ("sys",)},
        "fence": {(order, scope) for order in ("acq_rel", "sc") for scope in ("cta", "gpu", "sys")},
    }
    if ins.modifiers not in allowed[ins.opcode]:
        raise unknown(ins, "modifiers are not known")
    return Step(ins, execute=lambda wave, mask: None)


def trap(ins: Instruction) -> Step:
    expect(ins, 0)

    def execute(wave: Wave, mask: Mask) -> None:
        raise PtxError("the kernel ran into a trap")

    return Step(ins, execute=execute)


DECODERS: dict[str, Decoder] = {
    "bra": branch,
    "ret": leave,
    "exit": leave,
    "bar": barrier,
    "barrier": barrier,
    "prefetch": nothing,
    "membar": nothing,
    "fence": nothing,
    "trap": trap,
}
