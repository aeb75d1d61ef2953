"""A kernel and a launch of it as data, so that tests can run what a GPU would be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Claims(NamedTuple):
    """What a kernel's machine code is held to, on each architecture (`tools/kernel_table.py`).

    Nothing may be spilled and nothing may lie on a stack; that goes without saying here.
    """

    max_registers: int  # a thread
    min_wide_loads: int  # instructions that load 16 bytes a lane from global memory
    tensor_cores: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class KernelSource:
    """Where a kernel's Python function comes from, and how it is compiled; one object a kernel.

    It is found by identity, since hashing its fields would take longer than the launch.

    ``maker`` is a function of ``module`` that takes the ``constants`` and returns the kernel, whose
    parameters have the Numba types ``parameters`` ("int64", "float32"). With ``by_capability`` it
    also takes ``capability``, since what it makes differs by it. ``threads`` is the size of a
    block; ``blocks`` is how many of them a processor shall hold at once at least, which bounds the
    registers. Nothing is imported before the kernel has to be compiled. ``claims`` change nothing
    in the machine code; a kernel that ships states them, and `registry.py` lists its module.
    """

    module: str
    maker: str
    parameters: tuple[str, ...]
    threads: int
    constants: tuple[tuple[str, int | str], ...] = ()
    blocks: int = 1
    by_capability: bool = False
    claims: Claims | None = None

    @property
    def name(self) -> str:
        """The name of the kernel in its PTX: its maker and constants."""
        return "_".join([self.maker, *(f"{key}_{value}" for key, value in self.constants)])


class Launch(NamedTuple):
    """One launch: kernel, grid (blocks along x, y, z) and arguments."""

    source: KernelSource
    grid: tuple[int, int, int]
    arguments: tuple[int | float, ...]


class Device(Protocol):
    """What launches kernels: a GPU (`launch.GpuDevice`), or an interpreter in tests."""

    def launch(self, launch: Launch, stream: int) -> None:
        """Queue a launch on a stream, given as its handle (0: the default stream)."""
