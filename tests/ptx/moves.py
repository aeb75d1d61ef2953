"""Opcodes that move or convert values: mov, cvt, cvta, ld, st."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.decode import BITS, FLOATS, INTEGERS, Decoder, expect, only, type_of, unknown
from tests.ptx.errors import OutOfBounds, UnknownPtx
from tests.ptx.program import Address, Instruction, Symbol, Vector
from tests.ptx.registers import TYPES, Mask
from tests.ptx.wave import SHARED_WINDOW, Step, Wave, lanes_of

Values = NDArray[Any]

#: Hints that say where a cache should keep a line; they don't change what is loaded.
_HINTS = {
    "ca", "cg", "cs", "cv", "wb", "wt", "L1::no_allocate", "L1::evict_first", "L1::evict_last",
    "L1::evict_normal", "L2::64B", "L2::128B", "L2::256B",
}  # fmt: skip


def move(ins: Instruction) -> Step:
    kind = type_of(ins, (*FLOATS, *INTEGERS, *BITS, "pred"))
    only(ins, set())
    expect(ins, 2)
    target, source = ins.operands
    if isinstance(target, Vector):
        return _unpack(ins, target, kind)
    if isinstance(source, Vector):
        return _pack(ins, source, kind)

    def execute(wave: Wave, mask: Mask) -> None:
        wave.write(target, wave.read(source, kind, mask), mask)

    return Step(ins, execute=execute)


def _part(ins: Instruction, vector: Vector, kind: str) -> str:
    bits = 8 * TYPES[kind].itemsize // len(vector.parts)
    if f"b{bits}" not in BITS:
        raise unknown(ins, f"a vector of {len(vector.parts)} in {kind}")
    return f"b{bits}"


def _unpack(ins: Instruction, target: Vector, kind: str) -> Step:
    part = TYPES[_part(ins, target, kind)]

    def execute(wave: Wave, mask: Mask) -> None:
        value = wave.full(ins.operands[1], kind, mask)
        parts = np.ascontiguousarray(value).view(part).reshape(-1, len(target.parts))
        for i, operand in enumerate(target.parts):
            wave.write(operand, parts[:, i].copy(), mask)

    return Step(ins, execute=execute)


def _pack(ins: Instruction, source: Vector, kind: str) -> Step:
    part = _part(ins, source, kind)

    def execute(wave: Wave, mask: Mask) -> None:
        parts = np.stack([wave.full(operand, part, mask) for operand in source.parts], axis=1)
        wave.write(ins.operands[0], parts.view(TYPES[kind])[:, 0], mask)

    return Step(ins, execute=execute)


# -- conversions ----------------------------------------------------------------------------------


def to_bfloat16(value: Values) -> Values:
    """The bits of float32 values rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_float16(value: Values) -> Values:
    return np.asarray(value, np.float32).astype(np.float16).view(np.uint16)


def from_bfloat16(bits: Values) -> Values:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


_ROUND: dict[str, Callable[[Values], Values]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def to_integer(value: Values, how: str, dtype: np.dtype[Any]) -> Values:
    """Round and saturate; NaN becomes 0."""
    limits = np.iinfo(dtype)
    rounded = np.nan_to_num(_ROUND[how](value.astype(np.float64)), nan=0.0)
    inside = (rounded > float(limits.min)) & (rounded < float(limits.max))
    edge = np.where(rounded > 0, limits.max, limits.min).astype(dtype)
    return np.where(inside, np.where(inside, rounded, 0).astype(dtype), edge)


#: The sizes of fp8_e4m3 by the seven bits behind the sign; the last is NaN.
_E4M3 = np.array(
    [
        (m if e == 0 else 8 + m) * 2.0 ** (max(e, 1) - 10)
        for e in range(16)
        for m in range(8)
    ],
    np.float16,
)  # fmt: skip


def convert(ins: Instruction) -> Step:
    expect(ins, 2, 3)
    if len(ins.modifiers) < 2:
        raise unknown(ins, "two types are needed")
    to, source = ins.modifiers[-2:]
    given = only(ins, {"rn", "rz", "ftz", *_ROUND}, types=2)
    if source == "e4m3x2":
        return _widen_pair(ins, to, given)
    if to in ("bf16x2", "f16x2"):
        return _convert_pair(ins, to, given)
    function = _conversion(ins, to, source, given)
    read_as = "u16" if source == "bf16" else source

    def execute(wave: Wave, mask: Mask) -> None:
        value = wave.read(ins.operands[1], read_as, mask)
        wave.write(ins.operands[0], np.asarray(function(value)), mask)

    return Step(ins, execute=execute)


def _conversion(
    ins: Instruction, to: str, source: str, given: set[str]
) -> Callable[[Values], Values]:
    """What a conversion does to a vector; the result has the type of the register."""
    if to == "bf16" and source == "f32" and given == {"rn"}:
        return to_bfloat16
    if to == "f32" and source == "bf16" and not given:
        return from_bfloat16
    if to not in TYPES or source not in TYPES or "pred" in (to, source):
        raise unknown(ins, "types are not known")
    dtype, float_source = TYPES[to], source[0] == "f"
    if dtype.kind != "f" and float_source:
        how = sorted(given - {"ftz"})
        if len(how) != 1 or how[0] not in _ROUND:
            raise unknown(ins, "a rounding to integers is needed")
        return lambda value: to_integer(value, how[0], dtype)
    if given - {"rn", "ftz"}:
        raise unknown(ins, "rounding is not known")
    return lambda value: value.astype(dtype)


def _convert_pair(ins: Instruction, to: str, given: set[str]) -> Step:
    """Two floats in one word: the first operand goes into the upper half."""
    if ins.modifiers[-1] != "f32" or given != {"rn"} or len(ins.operands) != 3:
        raise unknown(ins, "only two f32, .rn")
    narrow = to_bfloat16 if to == "bf16x2" else to_float16

    def execute(wave: Wave, mask: Mask) -> None:
        upper = narrow(wave.read(ins.operands[1], "f32", mask)).astype(np.uint32)
        lower = narrow(wave.read(ins.operands[2], "f32", mask)).astype(np.uint32)
        wave.write(ins.operands[0], np.asarray((upper << np.uint32(16)) | lower), mask)

    return Step(ins, execute=execute)


def _widen_pair(ins: Instruction, to: str, given: set[str]) -> Step:
    """Two fp8_e4m3 of 16 bits to two float16, exactly: the lower byte into the lower half."""
    if to != "f16x2" or given != {"rn"} or len(ins.operands) != 2:
        raise unknown(ins, "only cvt.rn.f16x2.e4m3x2")

    def execute(wave: Wave, mask: Mask) -> None:
        pair = wave.full(ins.operands[1], "b16", mask)
        low, high = (
            np.where(size == 0x7F, np.float16(np.nan), _E4M3[size]).view(np.uint16)
            | (part & np.uint16(0x80)) << np.uint16(8)
            for part in (pair, pair >> np.uint16(8))
            for size in (part & np.uint16(0x7F),)
        )
        packed = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
        wave.write(ins.operands[0], packed, mask)

    return Step(ins, execute=execute)


def convert_address(ins: Instruction) -> Step:
    """Between generic addresses and those of a space. Global ones are the same."""
    type_of(ins, ("u64",))
    given = only(ins, {"to", "global", "shared"})
    expect(ins, 2)
    window = np.uint64(SHARED_WINDOW if "shared" in given else 0)

    def execute(wave: Wave, mask: Mask) -> None:
        value = wave.full(ins.operands[1], "u64", mask)
        if "to" not in given:
            wave.write(ins.operands[0], value + window, mask)
            return
        active = value if mask is None else value[mask]
        if "shared" in given and (active < window).any():
            raise OutOfBounds("a generic address outside shared memory is taken for a shared one")
        wave.write(ins.operands[0], value - window, mask)

    return Step(ins, execute=execute)


# -- loads and stores -----------------------------------------------------------------------------


def load(ins: Instruction) -> Step:
    if ins.modifiers[0] == "param":
        return _load_parameter(ins)
    space, kind, count = _access(ins, {"nc", *_HINTS})
    constant = "nc" in ins.modifiers
    if constant and space != "global":
        raise unknown(ins, ".nc is for global memory")
    targets = lanes_of(ins.operands[0])
    dtype = TYPES[kind]

    def execute(wave: Wave, mask: Mask) -> None:
        at = wave.address(ins.operands[1], space, mask)
        active = wave.active(mask)
        found = wave.space(space).load(at, dtype, count, active, wave.time, constant=constant)
        for i, target in enumerate(targets):
            values = found[:, i]
            if mask is not None:
                values = np.zeros(wave.num_threads, dtype)
                values[mask] = found[:, i]
            wave.write(target, np.ascontiguousarray(values), mask)

    return Step(ins, execute=execute)


def store(ins: Instruction) -> Step:
    space, kind, count = _access(ins, set(_HINTS))
    sources = lanes_of(ins.operands[1])

    def execute(wave: Wave, mask: Mask) -> None:
        at = wave.address(ins.operands[0], space, mask)
        parts = [wave.full(operand, kind, mask) for operand in sources]
        values = np.stack(parts if mask is None else [part[mask] for part in parts], axis=1)
        wave.space(space).store(at, values, wave.active(mask), wave.time)

    assert len(sources) == count
    return Step(ins, execute=execute)


def _access(ins: Instruction, allowed: set[str]) -> tuple[str, str, int]:
    """Space, type and number of elements of a load or store."""
    kind = type_of(ins, (*FLOATS, *INTEGERS, *BITS, "u8", "s8", "b8"))
    given = only(ins, {"global", "shared", "v2", "v4", *allowed})
    spaces = given & {"global", "shared"}
    if len(spaces) != 1:
        raise unknown(ins, "a state space is needed")
    expect(ins, 2)
    count = 4 if "v4" in given else 2 if "v2" in given else 1
    vector = ins.operands[0 if ins.opcode == "ld" else 1]
    if len(lanes_of(vector)) != count or count * TYPES[kind].itemsize > 16:
        raise unknown(ins, "the vector has another size")
    return spaces.pop(), kind, count


def _load_parameter(ins: Instruction) -> Step:
    kind = type_of(ins, (*FLOATS, *INTEGERS, *BITS))
    only(ins, {"param"})
    source = ins.operands[1]
    if not isinstance(source, Address) or not isinstance(source.base, Symbol) or source.offset:
        raise unknown(ins, "only whole parameters by name")
    name, dtype = source.base.name, TYPES[kind]

    def execute(wave: Wave, mask: Mask) -> None:
        value = wave.arguments[name]
        if value.dtype.itemsize != dtype.itemsize:
            raise UnknownPtx(f"parameter {name} of {value.dtype} is read as {dtype}")
        wave.write(ins.operands[0], value.view(dtype), mask)

    return Step(ins, execute=execute)


DECODERS: dict[str, Decoder] = {
    "mov": move,
    "cvt": convert,
    "cvta": convert_address,
    "ld": load,
    "st": store,
}
