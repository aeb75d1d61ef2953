"""From a kernel's Python source to machine code: Numba to PTX, cuda.core's linker to a cubin.

Both are kept on disk, in one file a kernel, named by a hash of everything they hang on: the
sources, the constants, the compute capability, the versions of the tools. Whoever finds the file
needs neither NVVM nor Numba. No driver and no GPU are needed to compile.

The PTX is made the same in every process: Numba's mangled name, which counts the functions compiled
before, is replaced by the kernel's own, its unused environment pointer is left out, and shared
arrays, counted likewise, are numbered from 1.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_kernels.cuda.kernel import KernelSource

_FORMAT = "kvmem.kernel/2"
#: Who turns Python into machine code; their versions are part of the name of a cached kernel.
TOOLS = ("numba", "llvmlite", "numba-cuda", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")
#: What kernels are made of besides the kernels of their own folder: files of this folder.
SHARED_SOURCES = ("compile.py", "copying.py", "prims.py")
#: Beside the kernels of a folder, but no part of them: it makes their launches.
HOST_SOURCE = "cuda_call.py"
#: What brings a tool in packages of CUDA 12, where its name is another.
CUDA12_NAMES = {
    "nvidia-cuda-nvrtc": "nvidia-cuda-nvrtc-cu12",
    "nvidia-nvvm": "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink": "nvidia-nvjitlink-cu12",
}
#: Library by cuda.pathfinder's name -> the distribution that brings it, and what it does.
_LIBRARIES = {
    "nvrtc": ("nvidia-cuda-nvrtc", "lists the architectures that PTX can be made for"),
    "nvvm": ("nvidia-nvvm", "turns LLVM's code into PTX"),
    "nvJitLink": ("nvidia-nvjitlink", "turns PTX into machine code"),
}
_ADVICE = "pip install 'kvmem[cuda13]', or 'kvmem[cuda12]' for a driver of CUDA 12"


class MissingLibrary(ImportError):
    """A package or library that compiling or launching needs isn't installed; says which."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's PTX and the machine code assembled from exactly these bytes."""

    name: str
    ptx: bytes
    cubin: bytes
    log: str  # the assembler's: registers, stack, spills
    from_cache: bool

    def hashes(self) -> tuple[str, str]:
        """SHA-256 of the PTX and of the machine code."""
        return _sha256(self.ptx), _sha256(self.cubin)


def compile_kernel(
    source: KernelSource, capability: tuple[int, int], folder: Path | None = None
) -> Compiled:
    """The kernel for a compute capability such as (9, 0), from the cache or made now.

    ``folder`` is the cache's (None: `cache_folder`). Raises MissingLibrary if something has to be
    compiled and a library is missing. Cost: 0.3 ms from the cache; else 0.1 to 9 s, and 1 s more
    at the first of a process.
    """
    return compile_for_each(source, [capability], folder)[0]


def compile_for_each(
    source: KernelSource, capabilities: Sequence[tuple[int, int]], folder: Path | None = None
) -> list[Compiled]:
    """As `compile_kernel` for each of several compute capabilities.

    Cost: about 1 s for each after the first, which takes Numba's part of the work.
    """
    where = folder or cache_folder()
    places = {c: where / f"{source.name}-{cache_key(source, c)}.kernel" for c in capabilities}
    made = {c: found for c, place in places.items() if (found := _read(place)) is not None}
    absent = [c for c in places if c not in made]
    for capability, ptx in zip(absent, make_ptx(source, absent), strict=True):
        one = Compiled(source.name, ptx, *assemble(ptx, capability), from_cache=False)
        _write(places[capability], one, capability)
        made[capability] = one
    return [made[c] for c in capabilities]


# -- making ----------------------------------------------------------------------------------------


def make_ptx(source: KernelSource, capabilities: Sequence[tuple[int, int]]) -> list[bytes]:
    """Compile for each compute capability with Numba; no driver, no cache.

    Numba's part is done once: its code for LLVM is the same for all, but of a kernel that is made
    by the capability.
    """
    if not capabilities:
        return []
    require_distribution("numba-cuda")
    for library in ("nvrtc", "nvvm"):
        require_library(library)
    maker = getattr(importlib.import_module(source.module), source.maker)
    constants: dict[str, Any] = dict(source.constants)
    from numba.cuda import compiler

    with compiler.global_compiler_lock:
        if source.by_capability:
            each = {
                c: _translate(maker(**constants, capability=c), source, c) for c in capabilities
            }
        else:
            shared = _translate(maker(**constants), source, min(capabilities))
            each = dict.fromkeys(capabilities, shared)
        texts = [each[c].get_asm_str(cc=c) for c in capabilities]
    return [stable_names(text, source.name).encode() for text in texts]


def _translate(
    kernel: Callable[..., Any], source: KernelSource, capability: tuple[int, int]
) -> Any:
    """Numba's part: a library of code for LLVM.

    The inside of ``numba.cuda.compile``, which keeps that code to itself and would do the slow part
    anew for each capability. Nearly all the time goes here.
    """
    from numba import types
    from numba.cuda import compiler

    parameters = [getattr(types, name) for name in source.parameters]
    library, _ = compiler._compile_pyfunc_with_fixup(
        kernel,
        types.void(*parameters),
        device=False,
        cc=capability,
        abi="numba",
        # At least one block a processor: without it ptxas 13.0 spills to fit in more of them.
        launch_bounds=(source.threads, source.blocks),
    )
    return library


def stable_names(text: str, name: str) -> str:
    """Rename the one kernel of a module and its shared arrays; drop Numba's environment pointer."""
    kernels = re.findall(r"\.entry\s+(\w+)", text)
    if len(kernels) != 1:
        raise RuntimeError(f"the PTX of {name} has {len(kernels)} kernels, expected one")
    environment = r"^\.common \.global \.align 8 \.u64 (\w*NumbaEnv\w*);\n"
    for unused in re.findall(environment, text, re.MULTILINE):
        if len(re.findall(rf"\b{unused}\b", text)) != 1:
            raise RuntimeError(f"the PTX of {name} uses Numba's environment")
    text = re.sub(environment, "", text, flags=re.MULTILINE)
    arrays: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        return arrays.setdefault(found[0], f"_cudapy_smem_{len(arrays) + 1}")

    text = re.sub(r"\b_cudapy_smem_\d+\b", numbered, text)
    return text.replace(kernels[0], name)


def assemble(ptx: bytes, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Machine code of PTX for a compute capability, and what the assembler tells of it."""
    require_distribution("cuda-core")
    require_library("nvJitLink")
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=f"sm_{capability[0]}{capability[1]}", verbose=True)
    linker = Linker(ObjectCode.from_ptx(ptx), options=options)
    return bytes(linker.link("cubin").code), linker.get_info_log()


def require_distribution(name: str) -> str:
    """The version of an installed distribution; MissingLibrary names it and the extras."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise MissingLibrary(
            f"{name} is not installed, and CUDA kernels need it: {_ADVICE}"
        ) from None


def require_library(name: str) -> None:
    """Load one of CUDA's libraries; MissingLibrary names it and the package that brings it."""
    require_distribution("cuda-pathfinder")
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    distribution, purpose = _LIBRARIES[name]
    try:
        load_nvidia_dynamic_lib(name)
    except DynamicLibNotFoundError as error:
        raise MissingLibrary(
            f"CUDA's library {name}, which {purpose}, was not found; {distribution} brings it, or "
            f"{CUDA12_NAMES[distribution]} of CUDA 12: {_ADVICE}"
        ) from error


# -- cache -----------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """$KVMEM_CUDA_CACHE_DIR, else kvmem/cuda in the user's cache folder."""
    named = os.environ.get("KVMEM_CUDA_CACHE_DIR")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvmem" / "cuda"


def tool_versions() -> dict[str, str]:
    """The version of each tool, "none" for those that aren't installed as packages.

    A tool may come in CUDA 12's package, whose version says so.
    """
    found = {}
    for name in TOOLS:
        found[name] = "none"
        for package in filter(None, (name, CUDA12_NAMES.get(name))):
            try:
                found[name] = importlib.metadata.version(package)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def cache_key(source: KernelSource, capability: tuple[int, int]) -> str:
    """A hash of all that the machine code hangs on. Reads sources, imports none of them."""
    digest = hashlib.sha256(_FORMAT.encode())
    spec = importlib.util.find_spec(source.module)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"no source of {source.module}")
    shared = (Path(__file__).with_name(name) for name in SHARED_SOURCES)
    own = Path(spec.origin)
    beside = {own, *own.parent.glob("cuda_*.py")} - {own.with_name(HOST_SOURCE)}
    for path in (*sorted(beside), *shared):
        digest.update(path.read_bytes())
    facts = [
        source.module, source.maker, source.parameters, source.threads, source.constants,
        source.blocks, source.by_capability, capability, tool_versions(),
    ]  # fmt: skip
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _read(place: Path) -> Compiled | None:
    """A cached kernel, or None: not there, cut short, or not what was written."""
    try:
        data = place.read_bytes()
    except OSError:
        return None
    line, _, body = data.partition(b"\n")
    try:
        head: dict[str, Any] = json.loads(line)
        size = int(head["ptx_bytes"])
        name, log = str(head["name"]), str(head["log"])
        made = Compiled(name, body[:size], body[size:], log, from_cache=True)
        intact = [head["ptx_sha256"], head["cubin_sha256"]] == [*made.hashes()]
    except (ValueError, KeyError, TypeError):
        return None
    return made if intact else None


def _write(place: Path, made: Compiled, capability: tuple[int, int]) -> None:
    """Whole or not at all, whoever else writes; a folder that can't be written is no error."""
    ptx_sha256, cubin_sha256 = made.hashes()
    head = {
        "format": _FORMAT, "name": made.name, "capability": capability, "tools": tool_versions(),
        "ptx_bytes": len(made.ptx), "ptx_sha256": ptx_sha256, "cubin_sha256": cubin_sha256,
        "log": made.log,
    }  # fmt: skip
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(json.dumps(head).encode() + b"\n" + made.ptx + made.cubin)
        os.replace(file.name, place)
    except OSError:
        return


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
