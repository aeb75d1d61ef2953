"""What the decoders of all opcodes share: exact checks of modifiers and operands."""

from __future__ import annotations

from collections.abc import Callable

from tests.ptx.errors import UnknownPtx
from tests.ptx.program import Instruction
from tests.ptx.registers import TYPES
from tests.ptx.wave import Step

Decoder = Callable[[Instruction], Step]

FLOATS = ("f32", "f64")
SIGNED = ("s16", "s32", "s64")
INTEGERS = ("u16", "u32", "u64", *SIGNED)
BITS = ("b16", "b32", "b64")


def unknown(ins: Instruction, why: str) -> UnknownPtx:
    return UnknownPtx(f"{ins.text}: {why}")


def type_of(ins: Instruction, allowed: tuple[str, ...]) -> str:
    """The type, which is the last modifier; one of those allowed."""
    kind = ins.modifiers[-1] if ins.modifiers else ""
    if kind not in allowed or kind not in TYPES:
        raise unknown(ins, f"type .{kind} is not known for {ins.opcode}")
    return kind


def only(ins: Instruction, allowed: set[str], *, types: int = 1) -> set[str]:
    """The modifiers before the type(s); each must be one of those allowed."""
    given = set(ins.modifiers[: len(ins.modifiers) - types])
    if given - allowed:
        raise unknown(ins, f"modifiers {sorted(given - allowed)} are not known")
    return given


def expect(ins: Instruction, *counts: int) -> None:
    """Refuse an instruction with another number of operands."""
    if len(ins.operands) not in counts:
        raise unknown(ins, f"{len(ins.operands)} operands")
