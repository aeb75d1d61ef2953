"""Registers of all threads of a wave: one NumPy vector a register, and what was ever written.

A register holds bits of its width; an instruction's type says how they are read. Vectors are never
changed in place, so a move may share them. Reading a register in a thread that never wrote it
raises, unless its value is thrown away.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.errors import Uninitialised, UnknownPtx
from tests.ptx.program import Immediate, Operand, Register, Special, Symbol

Vector = NDArray[Any]
Mask = NDArray[np.bool_] | None  # None: all threads of the wave

#: PTX type -> NumPy type. `b` types are bits, read as unsigned.
TYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    "b8": np.dtype(np.uint8),
    "u8": np.dtype(np.uint8),
    "s8": np.dtype(np.int8),
    "b16": np.dtype(np.uint16),
    "u16": np.dtype(np.uint16),
    "s16": np.dtype(np.int16),
    "f16": np.dtype(np.float16),
    "b32": np.dtype(np.uint32),
    "u32": np.dtype(np.uint32),
    "s32": np.dtype(np.int32),
    "f32": np.dtype(np.float32),
    "b64": np.dtype(np.uint64),
    "u64": np.dtype(np.uint64),
    "s64": np.dtype(np.int64),
    "f64": np.dtype(np.float64),
}
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def bits_type(kind: str) -> np.dtype[Any]:
    """The NumPy type of a register's bits; 8-bit registers don't exist in PTX."""
    dtype = TYPES.get(kind)
    if dtype is None or kind.endswith("8"):
        raise UnknownPtx(f"registers of type .{kind} are not known")
    return dtype if kind == "pred" else UNSIGNED[dtype.itemsize]


class Registers:
    """The registers of one wave, and its special registers and symbols."""

    def __init__(
        self,
        kinds: dict[str, str],
        special: dict[str, Vector],
        symbols: dict[str, int],
        num_threads: int,
    ) -> None:
        self.bits = {name: bits_type(kind) for name, kind in kinds.items()}
        self.values: dict[str, Vector] = {}
        self.unwritten: dict[str, NDArray[np.bool_] | None] = {}
        self.special = special
        self.symbols = symbols
        self.num_threads = num_threads

    def read(self, operand: Operand, dtype: np.dtype[Any], mask: Mask) -> Vector:
        """The operand in each thread as `dtype`; a literal is a scalar that broadcasts."""
        if isinstance(operand, Register):
            return self._register(operand.name, dtype, mask)
        if isinstance(operand, Immediate):
            return literal(operand, dtype)
        if isinstance(operand, Special):
            found = self.special.get(operand.name)
            if found is None:
                raise UnknownPtx(f"special register {operand.name} is not known")
            return found.astype(dtype)
        if isinstance(operand, Symbol) and operand.name in self.symbols:
            return np.asarray(self.symbols[operand.name]).astype(dtype)
        raise UnknownPtx(f"operand {operand!r} is not known here")

    def _register(self, name: str, dtype: np.dtype[Any], mask: Mask) -> Vector:
        value = self.values.get(name)
        if value is None:
            raise Uninitialised(f"register {name} is read, but was never written")
        unwritten = self.unwritten[name]
        if unwritten is not None and (unwritten if mask is None else unwritten & mask).any():
            raise Uninitialised(f"register {name} is read in a thread that never wrote it")
        if value.dtype == dtype:
            return value
        if value.dtype.itemsize == dtype.itemsize and dtype.kind != "b" and value.dtype.kind != "b":
            return value.view(dtype)
        if value.dtype.itemsize > dtype.itemsize and dtype.kind != "b":
            return value.astype(UNSIGNED[dtype.itemsize]).view(dtype)
        raise UnknownPtx(f"register {name} of {value.dtype} is read as {dtype}")

    def write(self, operand: Operand, value: Vector, mask: Mask) -> None:
        """Store a vector in a register, in the threads of the mask; `_` throws it away.

        A narrower value is extended: with its sign if its type has one.
        """
        if not isinstance(operand, Register):
            if operand == Symbol("_"):
                return
            raise UnknownPtx(f"{operand!r} can't be written")
        name = operand.name
        bits = self.bits[name]
        if value.dtype != bits:
            if bits.kind == "b" or value.dtype.kind == "b" or value.dtype.itemsize > bits.itemsize:
                raise UnknownPtx(f"register {name} of {bits} is written as {value.dtype}")
            if value.dtype.itemsize == bits.itemsize:
                value = value.view(bits)
            elif value.dtype.kind == "f":
                value = value.view(UNSIGNED[value.dtype.itemsize]).astype(bits)
            else:
                value = value.astype(bits)
        if value.ndim == 0:
            value = np.full(self.num_threads, value)
        if mask is None:
            self.values[name] = value
            self.unwritten[name] = None
            return
        old = self.values.get(name)
        if old is None:
            self.values[name] = value
            self.unwritten[name] = ~mask
            return
        self.values[name] = np.where(mask, value, old)
        unwritten = self.unwritten[name]
        if unwritten is not None:
            left = unwritten & ~mask
            self.unwritten[name] = left if left.any() else None


def literal(operand: Immediate, dtype: np.dtype[Any]) -> Vector:
    """A literal as a scalar of `dtype`: integers wrap, floats are given by their bits."""
    if operand.float_bits == 32:
        return np.asarray(operand.value, np.uint32).view(np.float32).astype(dtype)
    if operand.float_bits == 64:
        return np.asarray(operand.value, np.uint64).view(np.float64).astype(dtype)
    if dtype.kind == "b":
        return np.asarray(bool(operand.value))
    if dtype.kind == "f":
        if operand.value:
            raise UnknownPtx(f"integer literal {operand.value} as {dtype}")
        return np.asarray(0, dtype)
    wrapped = operand.value & ((1 << (8 * dtype.itemsize)) - 1)
    return np.asarray(wrapped, UNSIGNED[dtype.itemsize]).view(dtype)
