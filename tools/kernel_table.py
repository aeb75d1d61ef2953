"""What the machine code of each CUDA kernel needs, held against what its module claims.

    python -m tools.kernel_table            print the table; exit status 1 if a claim is broken
    python -m tools.kernel_table --write    and put it into docs/kernels.md

Registers, stack and spills are what the assembler in nvJitLink told when it made the code that
would be loaded; loads and matrix instructions are counted in its disassembly.
Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cuda_kernels.cuda.compile import TOOLS, MissingLibrary, compile_for_each, require_distribution
from cuda_kernels.cuda.kernel import KernelSource
from cuda_kernels.cuda.registry import shipped_kernels

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"
CACHE = ROOT / ".cache" / "cuda"
CAPABILITIES = ((8, 0), (9, 0))
DISASSEMBLER = "nvidia-cuda-nvdisasm"
#: Of those that make machine code, the ones whose versions change the table.
TABLE_TOOLS = (*(name for name in TOOLS if name != "cuda-core"), DISASSEMBLER)
HEAD = "| kernel | registers | shared bytes | 16-byte loads | matrix products |"

_WIDE = re.compile(r"\bLDG(?:STS)?\.[\w.]*\b128\b")
_MATRIX = re.compile(r"\bH(?:G)?MMA\b")
_LOCAL = re.compile(r"\b(?:LDL|STL)\b")


@dataclass(frozen=True, slots=True)
class Resources:
    """What an assembler tells of a kernel: registers a thread, bytes of a thread or a block."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """A kernel's machine code for one compute capability."""

    source: KernelSource
    capability: tuple[int, int]
    resources: Resources
    wide_loads: int
    matrix_products: int
    local_accesses: int  # instructions that read or write a thread's own memory

    def breaches(self) -> list[str]:
        """The claims that this code breaks, in words."""
        claims = self.source.claims
        if claims is None:
            return [f"{self.source.name} states no claims"]
        where = f"{self.source.name} on sm_{self.capability[0]}{self.capability[1]}"
        found = [f"{where}: {text}" for text in breaches_of(self.resources, claims.max_registers)]
        if self.local_accesses:
            found.append(f"{where}: {self.local_accesses} accesses to local memory")
        if self.wide_loads < claims.min_wide_loads:
            found.append(
                f"{where}: {self.wide_loads} loads of 16 bytes, claimed {claims.min_wide_loads}"
            )
        if (self.matrix_products > 0) != claims.tensor_cores:
            said = "claimed" if claims.tensor_cores else "not claimed"
            found.append(f"{where}: {self.matrix_products} matrix products, tensor cores {said}")
        return found


def breaches_of(resources: Resources, max_registers: int) -> list[str]:
    """What an assembler's figures break: registers above the cap, a stack, spills."""
    found = []
    if resources.registers > max_registers:
        found.append(f"{resources.registers} registers, claimed {max_registers}")
    if resources.stack_bytes or resources.spill_bytes:
        found.append(f"{resources.stack_bytes} bytes of stack, {resources.spill_bytes} spilled")
    return found


# -- finding out -----------------------------------------------------------------------------------


def missing() -> str:
    """Why the facts can't be had here; empty if they can."""
    try:
        for name in ("numba-cuda", "cuda-core"):
            require_distribution(name)
        disassembler()
    except MissingLibrary as error:
        return str(error)
    return ""


def program(name: str) -> str | None:
    """The path of one of CUDA's programs, from a package or a toolkit; None if it isn't there."""
    try:
        require_distribution("cuda-pathfinder")
    except MissingLibrary:
        return None
    from cuda.pathfinder import find_nvidia_binary_utility

    found: str | None = find_nvidia_binary_utility(name)
    return found


def disassembler() -> str:
    """The path of nvdisasm; MissingLibrary names the package that brings it."""
    found = program("nvdisasm")
    if found is None:
        raise MissingLibrary(f"nvdisasm was not found; {DISASSEMBLER} brings it")
    return found


def facts_of(source: KernelSource, folder: Path = CACHE) -> list[Facts]:
    """For each of `CAPABILITIES`: compile, or take from the cache (then 1 s), and look."""
    found = []
    for capability, made in zip(
        CAPABILITIES, compile_for_each(source, CAPABILITIES, folder), strict=True
    ):
        code = disassemble(made.cubin)
        found.append(
            Facts(
                source,
                capability,
                read_log(made.log),
                wide_loads=len(_WIDE.findall(code)),
                matrix_products=len(_MATRIX.findall(code)),
                local_accesses=len(_LOCAL.findall(code)),
            )
        )
    return found


def assembled(ptx: bytes, capability: tuple[int, int], ptxas: str) -> Resources:
    """What a ptxas, which may be of another release than the linker, tells of some PTX."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_bytes(ptx)
        command = [ptxas, "-v", f"-arch=sm_{capability[0]}{capability[1]}", "-o", os.devnull, text]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses the kernel: {done.stderr[:300]}")
    return read_log(done.stderr)


def read_log(log: str) -> Resources:
    """The figures in an assembler's log; of several functions the sum, of registers the most."""

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, log)]

    registers = numbers(r"Used (\d+) registers")
    stack = numbers(r"(\d+) bytes stack frame")
    if not registers or not stack:
        raise RuntimeError(f"the assembler's log tells no registers or no stack: {log[:300]}")
    return Resources(
        registers=max(registers),
        stack_bytes=sum(stack),
        spill_bytes=sum(numbers(r"(\d+) bytes spill (?:stores|loads)")),
        shared_bytes=max(numbers(r"(\d+) bytes smem"), default=0),
    )


def disassemble(cubin: bytes) -> str:
    """The machine code as text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [disassembler(), "--print-code", file]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=True
        ).stdout


# -- the table -------------------------------------------------------------------------------------


def versions() -> str:
    """The tools that the table hangs on, as it states them."""
    return ", ".join(f"{name} {require_distribution(name)}" for name in TABLE_TOOLS)


def table(facts: dict[KernelSource, list[Facts]]) -> str:
    """A row for each kernel, its figures for each of `CAPABILITIES`; and the tools behind them."""
    rule = re.sub(r"[^|]+", "---", HEAD)
    rows = (row(source, found) for source, found in facts.items())
    return "\n".join([f"Made by {versions()}.", "", HEAD, rule, *rows])


def row(source: KernelSource, found: list[Facts]) -> str:
    """A kernel's row: for each figure one of each architecture, and what is claimed."""
    claims = source.claims
    most, least = (claims.max_registers, claims.min_wide_loads) if claims else ("?", "?")

    def each(numbers: Iterable[int]) -> str:
        return ", ".join(map(str, numbers))

    return (
        f"| `{source.name}` | {each(f.resources.registers for f in found)} (at most {most}) "
        f"| {each(f.resources.shared_bytes for f in found)} "
        f"| {each(f.wide_loads for f in found)} (at least {least}) "
        f"| {each(f.matrix_products for f in found)} |"
    )


def put(page: str, text: str) -> str:
    """A page with its table replaced."""
    pattern = re.compile(
        r"^Made by [^\n]*\n\n" + re.escape(HEAD) + r"\n(?:\|[^\n]*(?:\n|$))+", re.M
    )
    if not pattern.search(page):
        raise ValueError("the page has no table of kernels")
    return pattern.sub(lambda _: text + "\n", page, count=1)


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> int:
    """Print the table and each broken claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args(arguments)
    reason = missing()
    if reason:
        show(f"no table: {reason}")
        return 2
    facts = {source: facts_of(source) for source in shipped_kernels()}
    show(table(facts))
    broken = [text for found in facts.values() for fact in found for text in fact.breaches()]
    for text in broken:
        show(f"BROKEN: {text}")
    if asked.write:
        PAGE.write_text(put(PAGE.read_text(), table(facts)))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
