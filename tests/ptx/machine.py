"""Runs a kernel's PTX on the CPU: blocks in waves, threads by the lowest program counter.

The order in which threads run is one of those a GPU may choose. What would come out differently in
another order is found by the memory's shadow instead (`memory.py`): a race is told in any schedule.
Threads that wait (at a barrier, at a shuffle for the lanes it names) let the others go first; when
nobody can go, the wait is for ever and raises.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx import arithmetic, atomics, control, copies, moves, warps
from tests.ptx.decode import Decoder, unknown
from tests.ptx.errors import Divergent, PtxError, Stuck
from tests.ptx.memory import Memory
from tests.ptx.program import Immediate, Instruction, Program, Symbol, parse
from tests.ptx.registers import TYPES, Mask, Registers
from tests.ptx.wave import WARP, Step, Wave, layout, shared_memory

DECODERS: dict[str, Decoder] = {
    **arithmetic.DECODERS,
    **atomics.DECODERS,
    **control.DECODERS,
    **copies.DECODERS,
    **moves.DECODERS,
    **warps.DECODERS,
}

RUNNING, AT_BARRIER, AT_WARP, ENDED = range(4)
ALL_LANES = (Immediate(-1), Immediate(0xFFFFFFFF))
WAVE_THREADS = 8192
MAX_STEPS = 2_000_000  # instructions of a wave: beyond it a loop doesn't end


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory a kernel may touch: bytes that appear at an address, and what is allowed.

    ``known`` says of each byte whether something wrote it, from launch to launch; without it
    ``initialised`` says so of all bytes, at each launch anew.
    """

    name: str
    address: int
    data: NDArray[Any]
    writable: bool = False
    initialised: bool = True
    known: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run took."""

    steps: int
    waves: int


class Kernel:
    """One kernel of a PTX module, decoded; every instruction is known before any is run."""

    def __init__(self, ptx: str) -> None:
        self.sha256 = hashlib.sha256(ptx.encode()).hexdigest()
        self.program: Program = parse(ptx)
        self.code = [self._decode(ins) for ins in self.program.code]

    def _decode(self, ins: Instruction) -> Step:
        decoder = DECODERS.get(ins.opcode)
        if decoder is None:
            raise unknown(ins, f"opcode {ins.opcode} is not known")
        step = decoder(ins)
        if step.kind != "branch":
            return step
        label = ins.operands[0]
        if not isinstance(label, Symbol) or label.name not in self.program.labels:
            raise unknown(ins, "the label is not known")
        return replace(step, target=self.program.labels[label.name])

    def narrowest(self, space: str) -> int:
        """The bytes of the narrowest access to a state space."""
        return min(
            (
                TYPES[ins.modifiers[-1]].itemsize
                for ins in self.program.code
                if ins.opcode in ("ld", "st", "atom", "red") and space in ins.modifiers
            ),
            default=1,
        )

    def run(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[int | float],
        buffers: Sequence[Buffer],
        *,
        wave_threads: int = WAVE_THREADS,
    ) -> Counts:
        """Run a grid of blocks; buffers that may be written are changed in place.

        Raises what `errors` lists, with the instruction; buffers are then as they were.
        """
        size = math.prod(block)
        if size % WARP or not size:
            raise ValueError(f"a block has {size} threads; only multiples of 32 are run")
        limit = self.program.max_threads
        if limit is not None and size > limit:
            raise ValueError(f"a block has {size} threads; the kernel says at most {limit}")
        memory = Memory("global", self.narrowest("global"))
        ordered = sorted(buffers, key=lambda buffer: buffer.address)
        memory.map([
            (b.name, b.address, b.data.reshape(-1).view(np.uint8), b.writable, b.initialised)
            for b in ordered
        ])  # fmt: skip
        for index, buffer in enumerate(ordered):
            if buffer.known is not None:
                memory.set_known(index, buffer.known)
        values = self._arguments(arguments)
        total, at_once = math.prod(grid), max(1, wave_threads // size)
        steps = waves = 0
        for first in range(0, total, at_once):
            count = min(at_once, total - first)
            wave = self._wave(grid, block, first, count, memory, values)
            with np.errstate(all="ignore"):
                steps += Scheduler(self.code, wave).run()
            waves += 1
        for index, buffer in enumerate(ordered):
            if buffer.writable:
                buffer.data.reshape(-1).view(np.uint8)[:] = memory.bytes_of(index)
            if buffer.known is not None:
                buffer.known[:] = memory.known_of(index)
        return Counts(steps, waves)

    def _arguments(self, arguments: Sequence[int | float]) -> dict[str, NDArray[Any]]:
        kinds = self.program.parameters
        if len(kinds) != len(arguments):
            raise ValueError(f"the kernel takes {len(kinds)} arguments, got {len(arguments)}")
        found = {}
        for (name, kind), value in zip(kinds.items(), arguments, strict=True):
            dtype = TYPES[kind]
            if dtype.kind == "f":
                found[name] = np.asarray(value, dtype)
            else:
                assert isinstance(value, int), f"{name} takes an integer"
                found[name] = np.asarray(value % 2**64, np.uint64).astype(dtype)
        return found

    def _wave(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        first: int,
        count: int,
        memory: Memory,
        arguments: dict[str, NDArray[Any]],
    ) -> Wave:
        size = math.prod(block)
        threads = np.tile(np.arange(size, dtype=np.int64), count)
        blocks = np.repeat(np.arange(first, first + count, dtype=np.int64), size)
        special = {"%laneid": (threads % WARP).astype(np.uint32)}
        for letter, inner, outer in zip("xyz", (0, 1, 2), (0, 1, 2), strict=True):
            tid = threads // math.prod(block[:inner]) % block[inner]
            ctaid = blocks // math.prod(grid[:outer]) % grid[outer]
            for name, value in (("tid", tid), ("ctaid", ctaid)):
                special[f"%{name}.{letter}"] = value.astype(np.uint32)
            for name, extent in (("ntid", block[inner]), ("nctaid", grid[outer])):
                special[f"%{name}.{letter}"] = np.full(threads.size, extent, np.uint32)
        symbols = {name: at for name, (at, _) in layout(self.program.shared).items()}
        registers = Registers(self.program.registers, special, symbols, threads.size)
        shared = shared_memory(self.program.shared, count, self.narrowest("shared"))
        return Wave(registers, memory, shared, size, count, first, arguments)


class Scheduler:
    """Chooses which threads of a wave run next."""

    def __init__(self, code: list[Step], wave: Wave) -> None:
        self.code = code
        self.wave = wave
        self.pc = np.zeros(wave.num_threads, np.int64)
        self.state = np.zeros(wave.num_threads, np.int8)
        self.steps = 0

    def run(self) -> int:
        """Run all threads to their end; returns the number of instructions."""
        while True:
            runnable = self.state == RUNNING
            if not runnable.any():
                if not self.release():
                    return self.steps
                continue
            pc = np.where(runnable, self.pc, len(self.code))
            at = int(pc.min())
            if at == len(self.code):
                raise PtxError("a thread runs past the end of the kernel")
            here = pc == at
            others = pc[~here]
            limit = int(others.min()) if others.size else len(self.code)
            self.run_from(at, here, limit)

    def run_from(self, at: int, here: NDArray[np.bool_], limit: int) -> None:
        """Run one group of threads in a straight line, up to where others stand."""
        mask: Mask = None if here.all() else here
        while at < limit:
            step = self.code[at]
            self.steps += 1
            self.wave.time += 1
            if self.steps > MAX_STEPS:
                raise Stuck(f"more than {MAX_STEPS} instructions: a loop that doesn't end")
            try:
                if step.kind != "plain" and not self.all_there(step, mask):
                    self.steer(step, at, here)
                    return
                active = self.guarded(step, mask)
                if active is None or active is mask or active.any():
                    assert step.execute is not None
                    step.execute(self.wave, active)
            except PtxError as error:
                if not getattr(error, "__notes__", None):
                    error.add_note(f"at instruction {at}: {step.source.text}")
                raise
            at += 1
        self.pc[here] = at

    def guarded(self, step: Step, mask: Mask) -> Mask:
        """The threads whose guard holds."""
        guard = step.source.guard
        if guard is None:
            return mask
        held = self.wave.full(guard, "pred", mask)
        if step.source.negated:
            held = ~held
        active = held if mask is None else held & mask
        return None if active.all() else active

    def all_there(self, step: Step, mask: Mask) -> bool:
        """Whether whole warps run an instruction that names all lanes: nobody has to wait."""
        if step.kind != "warp" or step.source.guard or step.members not in ALL_LANES:
            return False
        if mask is None:
            return True
        lanes = mask.reshape(-1, WARP)
        return bool((lanes.all(axis=1) == lanes.any(axis=1)).all())

    def steer(self, step: Step, at: int, here: NDArray[np.bool_]) -> None:
        """An instruction that changes who runs, or where."""
        if step.kind == "warp":
            self.meet(step, at, here)
            return
        held = self.guarded(step, None if here.all() else here)
        active = here if held is None else held
        self.pc[here] = at + 1
        if step.kind == "branch":
            if step.uniform:
                _whole(here, active, "bra.uni")
            self.pc[active] = step.target
        elif step.kind == "exit":
            self.state[active] = ENDED
        else:
            alive = self.state != ENDED
            _whole(alive, active, "a barrier")
            self.state[active] = AT_BARRIER

    def meet(self, step: Step, at: int, here: NDArray[np.bool_]) -> None:
        """Let lanes wait for those that their mask names; run the warps that are complete."""
        held = self.guarded(step, None if here.all() else here)
        arriving = here if held is None else held
        self.pc[here & ~arriving] = at + 1
        there = arriving | ((self.state == AT_WARP) & (self.pc == at))
        self.pc[arriving] = at
        self.state[arriving] = AT_WARP
        assert step.members is not None
        members = self.wave.full(step.members, "u32", there).astype(np.int64)
        if (((members >> self.wave.lane) & 1) == 0)[there].any():
            raise Divergent("a lane runs an instruction whose mask doesn't name it")
        lanes = there.reshape(-1, WARP)
        masks = members.reshape(-1, WARP)
        asked = np.where(lanes, masks, 0).max(axis=1)
        if (lanes & (masks != asked[:, None])).any():
            raise Divergent("lanes of one warp give different masks")
        named = (asked[:, None] >> np.arange(WARP)) & 1 == 1
        gone = (self.state == ENDED).reshape(-1, WARP)
        if (named & gone & lanes.any(axis=1)[:, None]).any():
            raise Divergent("an instruction names lanes that have ended")
        complete = lanes.any(axis=1) & ~(named & ~lanes).any(axis=1)
        ready = np.repeat(complete, WARP) & there
        if not ready.any():
            return
        assert step.execute is not None
        step.execute(self.wave, None if ready.all() else ready)
        self.pc[ready] = at + 1
        self.state[ready] = RUNNING

    def release(self) -> bool:
        """Nobody can run: open the barriers of complete blocks; False if all have ended."""
        states = self.state.reshape(-1, self.wave.block_size)
        if (states == ENDED).all():
            return False
        if (states == AT_WARP).any():
            thread = int(np.argmax(self.state == AT_WARP))
            at = int(self.pc[thread])
            raise Divergent(
                f"thread {thread} waits for lanes that don't come: {self.code[at].source.text}"
            )
        waiting = (states == AT_BARRIER).any(axis=1)
        ended = (states == ENDED).any(axis=1)
        if (waiting & ended).any():
            raise Stuck("threads wait at a barrier that others of their block never reach")
        opened = np.repeat(waiting, self.wave.block_size)
        self.state[opened] = RUNNING
        self.wave.threads.block_time[opened] = self.wave.time + 1
        self.wave.threads.warp_time[opened] = self.wave.time + 1
        return True


def _whole(here: NDArray[np.bool_], active: NDArray[np.bool_], what: str) -> None:
    """Of each warp, all of the lanes `here` must be active, or none."""
    lanes, wanted = active.reshape(-1, WARP), here.reshape(-1, WARP)
    some = lanes.any(axis=1)
    if (wanted & ~lanes)[some].any():
        raise Divergent(f"{what} in some lanes of a warp only")
