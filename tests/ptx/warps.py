"""Opcodes of whole warps: shuffles, votes, warp barriers, matrix products.

The forms with a mask of lanes (`shfl.sync`, `vote.sync`, `bar.warp.sync`) wait until the lanes it
names have come, which is the scheduler's part. The aligned ones (`mma`, `movmatrix`, `ldmatrix`)
need all 32 lanes of a warp at once; one lane elsewhere makes them meaningless, and here it raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.decode import Decoder, expect, only, type_of, unknown
from tests.ptx.errors import Divergent, PtxError
from tests.ptx.moves import from_bfloat16
from tests.ptx.program import Instruction, Operand, Pair
from tests.ptx.registers import Mask
from tests.ptx.wave import WARP, Step, Wave, lanes_of

Values = NDArray[Any]


def shuffle(ins: Instruction) -> Step:
    if len(ins.modifiers) != 3 or ins.modifiers[0] != "sync" or ins.modifiers[2] != "b32":
        raise unknown(ins, "only shfl.sync.<mode>.b32")
    mode = ins.modifiers[1]
    if mode not in ("bfly", "down", "up", "idx"):
        raise unknown(ins, f"mode .{mode} is not known")
    expect(ins, 5)
    target, source, by, clamp, members = ins.operands
    both = target if isinstance(target, Pair) else None

    def execute(wave: Wave, mask: Mask) -> None:
        lane = wave.lane
        value = wave.full(source, "b32", mask)
        step = wave.full(by, "u32", mask).astype(np.int64) & 31
        packed = wave.full(clamp, "u32", mask).astype(np.int64)
        segment, bound = (packed >> 8) & 31, packed & 31
        lowest = lane & segment
        highest = lowest | (bound & ~segment)
        origin, inside = source_lane(mode, lane, step, segment, lowest, highest)
        origin = np.where(inside, origin, lane)
        thread = np.arange(wave.num_threads) - lane + origin
        _check_sources(wave, mask, thread, wave.full(members, "u32", mask))
        wave.write(both.first if both else target, value[thread], mask)
        if both:
            wave.write(both.second, inside, mask)

    return Step(ins, "warp", execute, members)


def source_lane(
    mode: str, lane: Values, by: Values, segment: Values, lowest: Values, highest: Values
) -> tuple[Values, Values]:
    """The lane each lane reads, and whether it is inside its segment."""
    if mode == "up":
        return lane - by, lane - by >= highest
    if mode == "down":
        return lane + by, lane + by <= highest
    if mode == "bfly":
        return lane ^ by, (lane ^ by) <= highest
    origin = lowest | (by & ~segment)
    return origin, origin <= highest


def _check_sources(wave: Wave, mask: Mask, thread: Values, members: Values) -> None:
    """A value is defined only if its lane takes part."""
    if mask is None:
        return
    if not mask[thread][mask].all():
        raise Divergent("a shuffle reads a lane that doesn't take part")


def vote(ins: Instruction) -> Step:
    if len(ins.modifiers) != 3 or ins.modifiers[0] != "sync":
        raise unknown(ins, "only vote.sync.<mode>.<type>")
    mode, kind = ins.modifiers[1:]
    if (mode, kind) not in (("ballot", "b32"), ("all", "pred"), ("any", "pred"), ("uni", "pred")):
        raise unknown(ins, "mode is not known")
    expect(ins, 3)

    def execute(wave: Wave, mask: Mask) -> None:
        here = np.ones(wave.num_threads, np.bool_) if mask is None else mask
        said = wave.full(ins.operands[1], "pred", mask)
        yes = (said & here).reshape(-1, WARP)
        no = (~said & here).reshape(-1, WARP)
        if mode == "ballot":
            weights = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
            result = (yes * weights).sum(axis=1, dtype=np.uint32)
        elif mode == "any":
            result = yes.any(axis=1)
        elif mode == "all":
            result = ~no.any(axis=1)
        else:
            result = ~(yes.any(axis=1) & no.any(axis=1))
        wave.write(ins.operands[0], np.repeat(result, WARP), mask)

    return Step(ins, "warp", execute, ins.operands[2])


def warp_barrier(ins: Instruction) -> Step:
    """`bar.warp.sync`: orders the memory accesses of the lanes it names."""
    expect(ins, 1)

    def execute(wave: Wave, mask: Mask) -> None:
        here = slice(None) if mask is None else mask
        members = wave.full(ins.operands[0], "u32", mask)[here]
        if (members != 0xFFFFFFFF).any():
            raise PtxError("a warp barrier of some lanes: their order isn't kept")
        wave.threads.warp_time[here] = wave.time

    return Step(ins, "warp", execute, ins.operands[0])


def whole_warps(wave: Wave, mask: Mask, what: str) -> NDArray[np.bool_]:
    """Which warps run an aligned instruction; each must be there with all its lanes."""
    if mask is None:
        return np.ones(wave.num_threads // WARP, np.bool_)
    lanes = mask.reshape(-1, WARP)
    some = lanes.any(axis=1)
    if not lanes[some].all():
        warp = int(np.argmax(some & ~lanes.all(axis=1)))
        raise Divergent(f"{what} in {int(lanes[warp].sum())} of 32 lanes of warp {warp}")
    return some


def transpose_matrix(ins: Instruction) -> Step:
    if ins.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise unknown(ins, "only movmatrix.sync.aligned.m8n8.trans.b16")
    expect(ins, 2)

    def execute(wave: Wave, mask: Mask) -> None:
        whole_warps(wave, mask, "movmatrix")
        words = np.ascontiguousarray(wave.full(ins.operands[1], "b32", mask))
        halves = words.view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
        wave.write(ins.operands[0], np.ascontiguousarray(halves).view(np.uint32).reshape(-1), mask)

    return Step(ins, execute=execute)


def load_matrices(ins: Instruction) -> Step:
    """`ldmatrix`: lane 8 * i + j gives the address of row j of matrix i."""
    if ins.modifiers != ("sync", "aligned", "m8n8", "x4", "trans", "shared", "b16"):
        raise unknown(ins, "only ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
    expect(ins, 2)
    targets = lanes_of(ins.operands[0])
    if len(targets) != 4:
        raise unknown(ins, "four registers are needed")

    def execute(wave: Wave, mask: Mask) -> None:
        whole_warps(wave, mask, "ldmatrix")
        at = wave.address(ins.operands[1], "shared", mask)
        word = np.dtype(np.uint32)
        rows = wave.shared.load(at, word, 4, wave.active(mask), wave.time)
        halves = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 4, 8, 8)
        words = np.ascontiguousarray(halves.transpose(1, 0, 3, 2)).view(word).reshape(4, -1)
        for target, found in zip(targets, words, strict=True):
            values = found
            if mask is not None:
                values = np.zeros(wave.num_threads, word)
                values[mask] = found
            wave.write(target, values, mask)

    return Step(ins, execute=execute)


# Where the fragments of m16n8k16 lie: lane = 4 * group + quad; each register holds two elements.
_LANE = np.arange(WARP)
_GROUP, _QUAD = _LANE >> 2, _LANE & 3
_A_PARTS = ((0, 0), (8, 0), (0, 8), (8, 8))  # row and column added, a register each
_B_PARTS = (0, 8)  # row added
_C_PARTS = ((0, 0), (0, 1), (8, 0), (8, 1))


def multiply_matrices(ins: Instruction) -> Step:
    head, types = ins.modifiers[:5], ins.modifiers[5:]
    if head != ("sync", "aligned", "m16n8k16", "row", "col"):
        raise unknown(ins, "only mma.sync.aligned.m16n8k16.row.col")
    if types not in (("f32", "bf16", "bf16", "f32"), ("f32", "f16", "f16", "f32")):
        raise unknown(ins, "types are not known")
    expect(ins, 4)
    d, a, b, c = (lanes_of(operand) for operand in ins.operands)
    if [len(part) for part in (d, a, b, c)] != [4, 4, 2, 4]:
        raise unknown(ins, "the fragments have other sizes")
    brain = types[1] == "bf16"

    def execute(wave: Wave, mask: Mask) -> None:
        whole_warps(wave, mask, "mma")
        warps = wave.num_threads // WARP
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        for register, (row, column) in zip(a, _A_PARTS, strict=True):
            for e, half in enumerate(_halves(wave, register, mask, brain)):
                left[:, _GROUP + row, 2 * _QUAD + e + column] = half
        for register, row in zip(b, _B_PARTS, strict=True):
            for e, half in enumerate(_halves(wave, register, mask, brain)):
                right[:, 2 * _QUAD + e + row, _GROUP] = half
        product = left @ right
        for into, addend, (row, column) in zip(d, c, _C_PARTS, strict=True):
            part = product[:, _GROUP + row, 2 * _QUAD + column].reshape(-1)
            total = part + wave.full(addend, "f32", mask)
            wave.write(into, total.astype(np.float32), mask)

    return Step(ins, execute=execute)


def _halves(wave: Wave, register: Operand, mask: Mask, brain: bool) -> tuple[Values, Values]:
    """The lower and the upper element of a register, per warp and lane."""
    words = np.ascontiguousarray(wave.full(register, "b32", mask))
    bits = words.view(np.uint16).reshape(-1, WARP, 2)
    values = from_bfloat16(bits) if brain else bits.view(np.float16).astype(np.float32)
    return values[:, :, 0], values[:, :, 1]


def active_lanes(ins: Instruction) -> Step:
    """`activemask` would tell how lanes happen to be scheduled; nothing may hang on it."""
    type_of(ins, ("b32",))
    only(ins, set())
    raise unknown(ins, "what it gives depends on scheduling")


DECODERS: dict[str, Decoder] = {
    "shfl": shuffle,
    "vote": vote,
    "ldmatrix": load_matrices,
    "movmatrix": transpose_matrix,
    "mma": multiply_matrices,
    "activemask": active_lanes,
}
