"""The machine code of every kernel that ships, held against what its module claims.

The figures are the assembler's own and a disassembler's; docs/kernels.md keeps them as a table.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from cuda_kernels.cuda.compile import compile_for_each
from cuda_kernels.cuda.kernel import Claims, KernelSource
from cuda_kernels.cuda.registry import MODULES, shipped_kernels
from tests.ptx.device import CACHE, needs_compiler
from tools import kernel_table
from tools.kernel_table import CAPABILITIES, Facts, Resources, breaches_of

ROOT = Path(__file__).resolve().parents[2]
PTXAS = kernel_table.program("ptxas")

needs_disassembler = pytest.mark.skipif(
    bool(kernel_table.missing()), reason=kernel_table.missing() or "present"
)
each_kernel = pytest.mark.parametrize("source", shipped_kernels(), ids=lambda source: source.name)


@cache
def page() -> str:
    text = kernel_table.PAGE.read_text()
    if f"Made by {kernel_table.versions()}." not in text:
        pytest.skip(f"the table was made by other tools than {kernel_table.versions()}")
    return text


def test_every_kernel_is_registered() -> None:
    """A module that describes kernels is in the list, and none has another's name."""
    described = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "cuda_kernels").rglob("*.py")
        if re.search(r"\bKernelSource\(\n", path.read_text())
    }
    assert described == set(MODULES)
    names = [source.name for source in shipped_kernels()]
    assert len(names) == len(set(names)) > 30


@needs_compiler
@needs_disassembler
@each_kernel
def test_claims_are_kept(source: KernelSource) -> None:
    """In the machine code, and as the page tells it."""
    found = kernel_table.facts_of(source, CACHE)
    assert [fact.capability for fact in found] == list(CAPABILITIES)
    assert not [text for fact in found for text in fact.breaches()]
    row = kernel_table.row(source, found)
    assert row in page().splitlines(), "stale: python -m tools.kernel_table --write"


@needs_compiler
@pytest.mark.skipif(PTXAS is None, reason="no ptxas: CUDA's toolkit or nvidia-cuda-nvcc brings it")
@each_kernel
def test_ptxas_agrees(source: KernelSource) -> None:
    """An assembler of another release than the linker's: nothing spilled, the cap kept."""
    assert PTXAS is not None
    made = compile_for_each(source, CAPABILITIES, CACHE)
    for capability, one in zip(CAPABILITIES, made, strict=True):
        found = kernel_table.assembled(one.ptx, capability, PTXAS)
        assert source.claims is not None
        assert not breaches_of(found, source.claims.max_registers)


@needs_compiler
def test_the_page_has_the_whole_table() -> None:
    """A row a kernel in its order, and no other; what stands in a row is `test_claims_are_kept`."""
    rows = re.findall(r"^\| `(\w+)` \| \d", page(), re.M)
    assert rows == [source.name for source in shipped_kernels()]
    table = re.search(r"^Made by .*\n\n(?:\|.*\n)+", page(), re.M)
    assert table is not None
    assert kernel_table.put(page(), table[0].removesuffix("\n")) == page()


# -- the gate itself -------------------------------------------------------------------------------

SPILLED = """
ptxas info    : 0 bytes gmem
ptxas info    : Function properties for k
    40 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 512 bytes smem
"""


def test_figures_are_read_from_a_log() -> None:
    assert kernel_table.read_log(SPILLED) == Resources(255, 40, 52, 512)
    assert breaches_of(kernel_table.read_log(SPILLED), 255) == ["40 bytes of stack, 52 spilled"]
    with pytest.raises(RuntimeError, match="no registers"):
        kernel_table.read_log("ptxas info: all is well")


def test_each_broken_claim_is_told() -> None:
    source = KernelSource("m", "k", (), 128, claims=Claims(32, 4, tensor_cores=True))
    sound = Facts(source, (9, 0), Resources(32, 0, 0, 0), 4, 1, 0)
    assert not sound.breaches()
    for broken, told in [
        (Facts(source, (9, 0), Resources(33, 0, 0, 0), 4, 1, 0), "33 registers, claimed 32"),
        (Facts(source, (9, 0), Resources(32, 8, 0, 0), 4, 1, 0), "8 bytes of stack"),
        (Facts(source, (9, 0), Resources(32, 0, 4, 0), 4, 1, 0), "4 spilled"),
        (Facts(source, (9, 0), Resources(32, 0, 0, 0), 3, 1, 0), "3 loads of 16 bytes, claimed 4"),
        (Facts(source, (9, 0), Resources(32, 0, 0, 0), 4, 0, 0), "tensor cores claimed"),
        (Facts(source, (9, 0), Resources(32, 0, 0, 0), 4, 1, 2), "2 accesses to local memory"),
    ]:
        (text,) = broken.breaches()
        assert told in text
        assert text.startswith("k on sm_90: ")
    bare = KernelSource("m", "k", (), 128)
    assert Facts(bare, (9, 0), Resources(1, 0, 0, 0), 0, 0, 0).breaches() == ["k states no claims"]


LOCAL = """
from numba import cuda, float32, int64
from cuda_kernels.cuda.prims import load_float, store_float

def indexed(size):
    def kernel(source: int, at: int) -> None:
        values = cuda.local.array(size, float32)
        for i in range(size):
            values[i] = load_float(source + i * 4)
        store_float(source, values[int64(at)])
    return kernel
"""


@needs_compiler
@needs_disassembler
def test_an_array_on_the_stack_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: an index that isn't known puts a local array on the stack; no wide load."""
    (tmp_path / "planted_kernel.py").write_text(LOCAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = KernelSource(
        "planted_kernel", "indexed", ("int64", "int64"), 32, (("size", 300),), claims=Claims(255, 1)
    )
    told = kernel_table.facts_of(source, tmp_path)[1].breaches()
    assert any("bytes of stack" in text for text in told)
    assert any("accesses to local memory" in text for text in told)
    assert any("0 loads of 16 bytes, claimed 1" in text for text in told)
