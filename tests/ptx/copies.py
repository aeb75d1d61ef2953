"""Asynchronous copies from global to shared memory: `cp.async` and the wait for all of a thread's.

A copy reads at some time between the instruction and the wait, so the source is looked at twice,
and what it stores may be touched by nobody in between, its own thread included. After the wait it
is a store of that thread: the others need a barrier that comes later than the wait.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.decode import Decoder, expect, unknown
from tests.ptx.errors import PtxError
from tests.ptx.program import Immediate, Instruction
from tests.ptx.registers import Mask
from tests.ptx.wave import Copy, Step, Wave

_WORD = np.dtype(np.uint32)
_LINE = 16
_FORM = ("async", "cg", "shared", "global")
_HINTS = ((), ("L2::64B",), ("L2::128B",), ("L2::256B",))


def copy(ins: Instruction) -> Step:
    if ins.modifiers == ("async", "wait_all"):
        expect(ins, 0)
        return Step(ins, execute=await_all)
    if ins.modifiers[:4] != _FORM or ins.modifiers[4:] not in _HINTS:
        raise unknown(ins, "only cp.async.cg.shared.global, and cp.async.wait_all")
    expect(ins, 4)
    target, source, width, size = ins.operands
    if width != Immediate(_LINE):
        raise unknown(ins, "only 16 bytes")

    def execute(wave: Wave, mask: Mask) -> None:
        thread = np.arange(wave.num_threads) if mask is None else np.flatnonzero(mask)
        count = wave.full(size, "u32", mask)[thread]
        if not np.isin(count, (0, _LINE)).all():
            raise PtxError("a copy of a part of 16 bytes isn't modelled")
        begun = Copy(
            thread,
            wave.address(target, "shared", mask),
            wave.address(source, "global", mask),
            count == _LINE,
        )
        read(wave, begun)
        wave.shared.begin_copy(begun.target, _LINE, wave.chosen(thread), wave.time)
        wave.copies.append(begun)

    return Step(ins, execute=execute)


def read(wave: Wave, begun: Copy) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """What the sources hold now."""
    found = np.zeros((begun.thread.size, _LINE // 4), np.uint32)
    whole = begun.whole
    if whole.any():
        threads = wave.chosen(begun.thread[whole])
        found[whole] = wave.memory.load(begun.source[whole], _WORD, 4, threads, wave.time)
    return found


def await_all(wave: Wave, mask: Mask) -> None:
    left = []
    for begun in wave.copies:
        done = np.ones(begun.thread.size, np.bool_) if mask is None else mask[begun.thread]
        arrived = Copy(*(part[done] for part in begun))
        if arrived.thread.size:
            wave.shared.end_copy(arrived.target, read(wave, arrived), wave.time)
        if not done.all():
            left.append(Copy(*(part[~done] for part in begun)))
    wave.copies = left


DECODERS: dict[str, Decoder] = {"cp": copy}
