"""The state of the blocks that run together: registers, threads, memories, time.

All threads of a wave are lanes of NumPy vectors, block after block, so one instruction costs one
pass over the wave. `Step` is an instruction made ready to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.ptx.errors import OutOfBounds, UnknownPtx
from tests.ptx.memory import Memory, Threads
from tests.ptx.program import Address, Instruction, Operand, Vector
from tests.ptx.registers import TYPES, Mask, Registers

WARP = 32
SHARED_BASE = 1024  # where a block's shared memory begins; 0 stays an address of nothing
SHARED_WINDOW = 0x7F << 40  # where generic addresses of shared memory lie
_BLOCK_SPAN = 1 << 32  # of shared memory: one block behind the other

Execute = Callable[["Wave", Mask], None]


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction ready to run; ``kind`` says what the scheduler has to do with it.

    ``plain`` runs in the threads given; ``warp`` first waits for the lanes in ``members``;
    ``block`` is a barrier; ``branch`` goes to ``target``; ``exit`` ends threads.
    """

    source: Instruction
    kind: str = "plain"
    execute: Execute | None = None
    members: Operand | None = None
    target: int = 0
    uniform: bool = False


class Copy(NamedTuple):
    """Asynchronous copies of 16 bytes, begun by one instruction; a row each."""

    thread: NDArray[np.int64]  # number in the wave
    target: NDArray[np.uint64]
    source: NDArray[np.uint64]
    whole: NDArray[np.bool_]  # else zeros, and nothing is read


class Wave:
    """Some consecutive blocks of a grid, run together."""

    def __init__(
        self,
        registers: Registers,
        memory: Memory,
        shared: Memory,
        block_size: int,
        num_blocks: int,
        first_block: int,
        arguments: dict[str, NDArray[Any]],
    ) -> None:
        self.registers = registers
        self.memory = memory
        self.shared = shared
        self.block_size = block_size
        self.num_threads = block_size * num_blocks
        self.arguments = arguments
        self.time = 0
        number = np.arange(self.num_threads, dtype=np.int64)
        self.lane = number % block_size % WARP
        self.block = number // block_size
        never = np.full(self.num_threads, -1, np.int64)
        self.copies: list[Copy] = []  # asynchronous ones that nobody has waited for yet
        self.threads = Threads(number + first_block * block_size, never, never.copy(), block_size)

    # -- operands ----------------------------------------------------------------------------------

    def read(self, operand: Operand, kind: str, mask: Mask) -> NDArray[Any]:
        """The operand in all threads as a vector or a scalar that broadcasts."""
        return self.registers.read(operand, TYPES[kind], mask)

    def full(self, operand: Operand, kind: str, mask: Mask) -> NDArray[Any]:
        """The operand as a vector over all threads."""
        value = self.registers.read(operand, TYPES[kind], mask)
        return np.full(self.num_threads, value) if value.ndim == 0 else value

    def write(self, operand: Operand, value: NDArray[Any], mask: Mask) -> None:
        self.registers.write(operand, value, mask)

    def address(self, operand: Operand, space: str, mask: Mask) -> NDArray[np.uint64]:
        """Addresses of the active threads in the memory of a state space."""
        if not isinstance(operand, Address):
            raise UnknownPtx(f"{operand!r} is not an address")
        size = "u64"
        base = operand.base
        name = getattr(base, "name", None)
        if space == "shared" and name in self.registers.bits:
            size = "u32" if self.registers.bits[name].itemsize == 4 else "u64"
        at = self.full(base, size, mask).astype(np.uint64) + np.uint64(operand.offset % 2**64)
        block = self.block
        if mask is not None:
            at, block = at[mask], block[mask]
        if space == "shared":
            if (at >= _BLOCK_SPAN).any():
                wrong = int(at[at >= _BLOCK_SPAN][0])
                raise OutOfBounds(f"shared address {wrong:#x} is beyond 32 bits")
            at = at + block.astype(np.uint64) * np.uint64(_BLOCK_SPAN)
        return at

    def active(self, mask: Mask) -> Threads:
        """The threads of an access."""
        return self.threads if mask is None else self.chosen(mask)

    def chosen(self, which: NDArray[Any]) -> Threads:
        """Some threads, by a mask or by their numbers in the wave."""
        all_of = self.threads
        return Threads(
            all_of.number[which],
            all_of.block_time[which],
            all_of.warp_time[which],
            all_of.block_size,
        )

    def space(self, name: str) -> Memory:
        return self.shared if name == "shared" else self.memory


def shared_memory(variables: dict[str, tuple[int, int]], num_blocks: int, grain: int) -> Memory:
    """The shared variables of each block of a wave, each a buffer of its own, not initialised."""
    memory = Memory("shared", grain)
    buffers = [
        (name, block * _BLOCK_SPAN + at, np.zeros(size, np.uint8), True, False)
        for block in range(num_blocks)
        for name, (at, size) in layout(variables).items()
    ]
    memory.map(buffers)
    return memory


def layout(variables: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Address and size of each shared variable of a block."""
    places, end = {}, SHARED_BASE
    for name, (alignment, size) in variables.items():
        end = -(-end // alignment) * alignment
        places[name] = (end, size)
        end += size
    return places


def lanes_of(vector: Operand) -> tuple[Operand, ...]:
    """The parts of a vector operand; one alone is a vector of one."""
    return vector.parts if isinstance(vector, Vector) else (vector,)
