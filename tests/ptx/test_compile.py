"""Compiling without a GPU: what is assembled is what is interpreted; the cache; what is missing."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import cuda, types

from cuda_kernels.attention import cuda_call as attention
from cuda_kernels.block_copy import cuda_call as block_copy
from cuda_kernels.cache_write import cuda_call as cache_write
from cuda_kernels.cuda import compile as compiling
from cuda_kernels.cuda.compile import MissingLibrary, cache_key, compile_kernel, stable_names
from cuda_kernels.cuda.kernel import KernelSource
from cuda_kernels.frames import cuda_call as frames
from tests.ptx.device import InterpretedDevice, needs_compiler

ROOT = Path(__file__).resolve().parents[2]
KERNELS = [
    *cache_write.KERNELS.values(),
    *block_copy.KERNELS.values(),
    *frames.KERNELS.values(),
]
ATTENTION = [
    *attention.KERNELS.values(),
    *attention.TENSOR_KERNELS.values(),
    *attention.PROMPT_KERNELS.values(),
    *attention.MERGE_KERNELS.values(),
]
CASES = [((9, 0), source) for source in (*KERNELS, *ATTENTION)]
CASES += [((8, 0), source) for source in KERNELS]
SMALL = frames.KERNELS[0, 4]


def label(value: KernelSource | tuple[int, int]) -> str:
    return value.name if isinstance(value, KernelSource) else f"sm_{value[0]}{value[1]}"


@needs_compiler
@pytest.mark.parametrize(("capability", "source"), CASES, ids=label)
def test_what_is_interpreted_is_what_is_assembled(
    capability: tuple[int, int], source: KernelSource
) -> None:
    """By hashes: the interpreter's text, the cached PTX, and the machine code made of it again."""
    made, kernel = InterpretedDevice(capability).compiled(source)
    assert kernel.sha256 == hashlib.sha256(made.ptx).hexdigest() == made.hashes()[0]
    assert kernel.program.target == f"sm_{capability[0]}{capability[1]}"
    again, _ = compiling.assemble(made.ptx, capability)
    assert hashlib.sha256(again).hexdigest() == made.hashes()[1]
    assert kernel.program.name == source.name
    assert len(kernel.program.parameters) == len(source.parameters)
    assert kernel.program.max_threads == source.threads


@needs_compiler
def test_the_ptx_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever was compiled before in it: the bytes can be compared by whoever builds them."""
    code = """
import hashlib, sys
from cuda_kernels.attention import cuda_call as attention
from cuda_kernels.cuda.compile import make_ptx
from cuda_kernels.frames import cuda_call as frames
if sys.argv[1] == "late":
    make_ptx(frames.KERNELS[4, 0], [(9, 0)])
    make_ptx(attention.KERNELS[0, 1, 128], [(9, 0)])
for source in (frames.KERNELS[0, 4], attention.TENSOR_KERNELS[1, 64, 1]):
    print(hashlib.sha256(make_ptx(source, [(9, 0)])[0]).hexdigest())
"""
    early, late = (python(code, when).split() for when in ("early", "late"))
    assert early == late
    assert early[0] == compile_kernel(SMALL, (9, 0), tmp_path).hashes()[0]


@needs_compiler
@pytest.mark.parametrize("source", [SMALL, attention.MERGE_KERNELS[1]], ids=label)
def test_compiled_together_as_by_numba_alone(source: KernelSource) -> None:
    """Two architectures at once give what numba's public function gives for each."""
    both = [(9, 0), (8, 0)]
    maker = getattr(importlib.import_module(source.module), source.maker)
    for capability, ptx in zip(both, compiling.make_ptx(source, both), strict=True):
        text, _ = cuda.compile(
            maker(**dict(source.constants)),
            types.void(*(getattr(types, name) for name in source.parameters)),
            cc=capability,
            device=False,
            abi="numba",
            launch_bounds=(source.threads, source.blocks),
        )
        assert stable_names(text, source.name).encode() == ptx
        assert f".target sm_{capability[0]}0".encode() in ptx


@needs_compiler
def test_only_what_is_absent_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernel(SMALL, (9, 0), tmp_path)
    asked: list[Any] = []
    right = compiling.make_ptx

    def make_ptx(source: KernelSource, capabilities: Any) -> list[bytes]:
        asked.append(list(capabilities))
        return right(source, capabilities)

    monkeypatch.setattr(compiling, "make_ptx", make_ptx)
    found = compiling.compile_for_each(SMALL, [(8, 0), (9, 0)], tmp_path)
    assert asked == [[(8, 0)]]
    assert [one.from_cache for one in found] == [False, True]
    assert found[1].hashes() == first.hashes() != found[0].hashes()
    assert all(c.from_cache for c in compiling.compile_for_each(SMALL, [(9, 0), (8, 0)], tmp_path))


def python(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- the cache ------------------------------------------------------------------------------------


@needs_compiler
def test_a_warm_start_needs_neither_nvvm_nor_numba(tmp_path: Path) -> None:
    """A process that may import neither, and may load none of CUDA's libraries."""
    made = compile_kernel(SMALL, (9, 0), tmp_path)
    assert not made.from_cache
    code = """
import hashlib, sys
from pathlib import Path
from typing import Any
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite", "cuda"):
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Refuse())
from cuda_kernels.cuda.compile import compile_kernel
from cuda_kernels.frames import cuda_call
made = compile_kernel(cuda_call.KERNELS[0, 4], (9, 0), Path(sys.argv[1]))
assert made.from_cache
print(*made.hashes())
"""
    assert python(code, str(tmp_path)).split() == list(made.hashes())


@needs_compiler
def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    made = compile_kernel(SMALL, (9, 0), tmp_path)
    (place,) = tmp_path.iterdir()
    data = place.read_bytes()
    for damaged in (b"", data[:100], data[:-1], data[:-1] + b"x", b"{}\n" + data):
        place.write_bytes(damaged)
        again = compile_kernel(SMALL, (9, 0), tmp_path)
        assert not again.from_cache
        assert again.hashes() == made.hashes()
        assert compile_kernel(SMALL, (9, 0), tmp_path).from_cache
    assert len(list(tmp_path.iterdir())) == 1


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    made = compile_kernel(SMALL, (9, 0), tmp_path / "file" / "cache")
    assert made.cubin.startswith(b"\x7fELF")


def test_the_key_hangs_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache_key(SMALL, (9, 0)), cache_key(SMALL, (8, 0))}
    keys |= {cache_key(source, (9, 0)) for source in KERNELS}
    assert len(keys) == 1 + len(KERNELS)
    before = cache_key(SMALL, (9, 0))
    for name in compiling.TOOLS:
        versions = {**compiling.tool_versions(), name: "another"}
        monkeypatch.setattr(compiling, "tool_versions", lambda found=versions: found)
        assert cache_key(SMALL, (9, 0)) != before
        monkeypatch.undo()
    read = Path.read_bytes
    for name in (*compiling.SHARED_SOURCES, "cuda_move.py"):
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, n=name: read(path) + b"#" * (path.name == n)
        )
        assert cache_key(SMALL, (9, 0)) != before, name
        monkeypatch.undo()
    assert cache_key(SMALL, (9, 0)) == before


def test_the_key_hangs_on_all_kernels_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes functions from its neighbours; the launching side is no part of it."""
    source, read = next(iter(attention.KERNELS.values())), Path.read_bytes
    before = cache_key(source, (9, 0))
    for name in ("cuda_parts.py", "cuda_merge.py", "cuda_call.py"):
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, n=name: read(path) + b"#" * (path.name == n)
        )
        assert (cache_key(source, (9, 0)) == before) == (name == "cuda_call.py"), name
        monkeypatch.undo()
    bound = dataclasses.replace(source, blocks=3)
    assert cache_key(bound, (9, 0)) != before


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVMEM_CUDA_CACHE_DIR", str(tmp_path))
    assert compiling.cache_folder() == tmp_path
    monkeypatch.delenv("KVMEM_CUDA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiling.cache_folder() == tmp_path / "kvmem" / "cuda"


# -- what is missing ------------------------------------------------------------------------------


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        if name == "numba-cuda":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(
        MissingLibrary, match=r"numba-cuda is not installed.*kvmem\[cuda13\].*kvmem\[cuda12\]"
    ):
        compile_kernel(SMALL, (9, 0), tmp_path)
    assert not list(tmp_path.iterdir())


def test_tools_of_cuda_12_are_told_by_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else kernels of two releases would share a name in the cache."""
    installed = {"nvidia-cuda-nvcc-cu12": "12.9.86", "nvidia-nvjitlink-cu12": "12.9.1"}

    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = compiling.tool_versions()
    assert found["nvidia-nvvm"] == "12.9.86"
    assert found["nvidia-nvjitlink"] == "12.9.1"
    assert found["numba"] == "none"
    key = cache_key(SMALL, (9, 0))
    installed["nvidia-cuda-nvcc-cu12"] = "12.8.93"
    assert cache_key(SMALL, (9, 0)) != key


@needs_compiler
@pytest.mark.parametrize(
    ("library", "distribution"),
    [("nvvm", "nvidia-nvvm"), ("nvrtc", "nvidia-cuda-nvrtc"), ("nvJitLink", "nvidia-nvjitlink")],
)
def test_a_missing_library_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, distribution: str
) -> None:
    from cuda import pathfinder

    load = pathfinder.load_nvidia_dynamic_lib

    def refuse(name: str) -> object:
        if name == library:
            raise pathfinder.DynamicLibNotFoundError(name)
        return load(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", refuse)
    with pytest.raises(MissingLibrary, match=f"{distribution} brings it"):
        compile_kernel(SMALL, (9, 0), tmp_path)


def test_the_environment_pointer_may_not_be_used() -> None:
    line = ".common .global .align 8 .u64 _ZN08NumbaEnv1k;\n"
    text = f"{line}.visible .entry mangled() {{ bra mangled_1; }}"
    assert stable_names(text, "k") == ".visible .entry k() { bra k_1; }"
    shared = "_cudapy_smem_9[4]; _cudapy_smem_10[8]; [_cudapy_smem_9+4] _cudapy_smem_10"
    renamed = "_cudapy_smem_1[4]; _cudapy_smem_2[8]; [_cudapy_smem_1+4] _cudapy_smem_2"
    assert stable_names(f".entry mangled {shared}", "k") == f".entry k {renamed}"
    with pytest.raises(RuntimeError, match="environment"):
        stable_names(text + " ld.global.u64 %rd1, [_ZN08NumbaEnv1k];", "k")
    with pytest.raises(RuntimeError, match="2 kernels"):
        stable_names(text + ".visible .entry other() { ret; }", "k")
