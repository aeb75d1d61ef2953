"""Atomic operations: `atom` and `red`, one thread after the other in ascending order.

Atomics on one place don't race with each other; with plain accesses they do, unless a barrier lies
between. They order nothing else: an algorithm that publishes data by an atomic and a fence would be
called a race.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.decode import BITS, FLOATS, INTEGERS, Decoder, expect, only, type_of, unknown
from tests.ptx.program import Instruction
from tests.ptx.registers import TYPES, Mask
from tests.ptx.wave import Step, Wave

Scalar = Any
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[Scalar, Scalar], Scalar]]] = {
    "add": (("u32", "s32", "u64", "f32", "f64"), lambda old, value: old + value),
    "min": (INTEGERS, min),
    "max": (INTEGERS, max),
    "exch": (BITS, lambda old, value: value),
    "and": (BITS, lambda old, value: old & value),
    "or": (BITS, lambda old, value: old | value),
    "xor": (BITS, lambda old, value: old ^ value),
    "inc": (("u32",), lambda old, value: type(old)(0) if old >= value else old + type(old)(1)),
}
_ORDERS = {"relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "sys"}


def atomic(ins: Instruction) -> Step:
    """`atom.<space>.<operation>.<type> d, [a], b` (with a `c` for cas), and `red` without d."""
    operations = set(ins.modifiers) & {*_OPERATIONS, "cas"}
    if len(operations) != 1:
        raise unknown(ins, "the operation is not known")
    name = operations.pop()
    kinds = BITS if name == "cas" else _OPERATIONS[name][0]
    kind = type_of(ins, tuple(k for k in kinds if k in (*FLOATS, *INTEGERS, *BITS)))
    given = only(ins, {"global", "shared", name, *_ORDERS})
    if len(given & {"global", "shared"}) != 1:
        raise unknown(ins, "a state space is needed")
    space = "shared" if "shared" in given else "global"
    operands = ins.operands if ins.opcode == "atom" else (None, *ins.operands)
    wanted = 4 if name == "cas" else 3
    expect(ins, wanted if ins.opcode == "atom" else wanted - 1)
    target, address, *sources = operands
    assert address is not None
    dtype = TYPES[kind]

    def execute(wave: Wave, mask: Mask) -> None:
        at = wave.address(address, space, mask)
        memory = wave.space(space)
        values = [wave.full(source, kind, mask) for source in sources if source is not None]
        if mask is not None:
            values = [value[mask] for value in values]
        cells = memory.update(at, dtype, wave.active(mask), wave.time)
        flat = memory.flat.view(dtype)
        before = np.empty(cells.size, dtype)
        for i, cell in enumerate(cells):
            old = flat[cell]
            before[i] = old
            if name == "cas":
                flat[cell] = values[1][i] if old == values[0][i] else old
            else:
                flat[cell] = _OPERATIONS[name][1](old, values[0][i])
        if target is not None:
            found = before
            if mask is not None:
                found = np.zeros(wave.num_threads, dtype)
                found[mask] = before
            wave.write(target, found, mask)

    return Step(ins, execute=execute)


DECODERS: dict[str, Decoder] = {"atom": atomic, "red": atomic}
