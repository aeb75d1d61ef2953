"""What this machine has for CUDA kernels and what is missing, without importing what may be absent.

Only packages that are found are imported, and a driver is asked by its own library: so a machine
without any of them gets an answer, not a traceback.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VersionOf = Callable[[str], str]

#: Distribution -> (least version, first version that is too new, what it is for).
PACKAGES: dict[str, tuple[str, str, str]] = {
    "numpy": ("2.1", "", "arrays of the references"),
    "pytest": ("8.3", "", "runs the tests"),
    "numba": ("0.68", "0.69", "compiles kernels"),
    "numba-cuda": ("0.30.4", "0.31", "compiles kernels to PTX"),
    "cuda-core": ("1.0", "2", "assembles and launches kernels"),
    "cuda-pathfinder": ("", "", "finds CUDA's libraries"),
}
#: CUDA's libraries as cuda.pathfinder names them -> package by the driver's major version.
LIBRARIES: dict[str, dict[int, str]] = {
    "nvrtc": {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"},
    "nvvm": {12: "nvidia-cuda-nvcc-cu12", 13: "nvidia-nvvm"},
    "nvJitLink": {12: "nvidia-nvjitlink-cu12", 13: "nvidia-nvjitlink"},
}
#: What a Manager on a GPU needs beside: without it kernels can be measured, and it can't.
OF_A_MANAGER: dict[str, tuple[str, str]] = {
    "numba": PACKAGES["numba"][:2],
    "psutil": ("6", ""),
    "nvidia-ml-py": ("12.560", ""),
    "proclimits": ("0.2", "0.3"),
    "cuda-bindings": ("", ""),
}
_NO_DRIVER = "no NVIDIA driver: libcuda.so.1 can't be loaded; the machine's system brings it"


@dataclass(frozen=True, slots=True)
class Driver:
    """What the driver's own library says."""

    num_gpus: int = 0
    cuda_version: tuple[int, int] | None = None  # the newest CUDA that it runs
    problem: str = _NO_DRIVER


@dataclass(frozen=True, slots=True)
class Missing:
    """Why nothing can run here, a line each; ``no_gpu`` if that is because there is none."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    no_gpu: bool

    def __bool__(self) -> bool:
        return bool(self.lines)


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """Ask libcuda how many GPUs there are."""
    try:
        library = load("libcuda.so.1")
    except OSError:
        return Driver()
    code = library.cuInit(0)
    if code:
        return Driver(problem=f"the NVIDIA driver doesn't start: cuInit gives error {code}")
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    found = (version.value // 1000, version.value % 1000 // 10)
    problem = "" if count.value else "the NVIDIA driver runs, but it sees no GPU"
    return Driver(count.value, found, problem)


def find_missing(
    driver: Driver | None = None,
    version_of: VersionOf = importlib.metadata.version,
    torch_problem: Callable[[], str] | None = None,
    library_problem: Callable[[str], str] | None = None,
) -> Missing:
    """What the tests and the benchmark need and can't have; the parameters are for tests."""
    driver = read_driver() if driver is None else driver
    major = 12 if driver.cuda_version and driver.cuda_version[0] <= 12 else 13
    extra = f"pip install 'kvmem[cuda{major}]'"
    lines = [driver.problem] if driver.problem else []
    reason = (torch_problem or check_torch)()
    if reason:
        lines.append(reason)
    warnings = []
    for name, (least, below, purpose) in PACKAGES.items():
        advice = f"pip install {name}" if name in ("pytest", "numpy") else extra
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed ({purpose}): {advice}")
            continue
        wanted = outside(version, least, below)
        if wanted:
            warnings.append(f"{name} {version} is not {wanted}, what kvmem is tested with")
    for name, packages in LIBRARIES.items():
        problem = (library_problem or check_library)(name)
        if problem:
            toolkit = ", or CUDA_HOME has to name the toolkit that nvcc is of" if has_nvcc() else ""
            lines.append(
                f"CUDA's library {name} {problem}; {packages[major]} brings it: {extra}{toolkit}"
            )
    return Missing(tuple(lines), tuple(warnings), no_gpu=bool(driver.problem))


def manager_lacks(version_of: VersionOf = importlib.metadata.version) -> str:
    """Why no Manager can be measured here; empty if one can."""
    lines = []
    for name, (least, below) in OF_A_MANAGER.items():
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
            continue
        wanted = outside(version, least, below)
        if wanted:
            lines.append(f"{name} {version} is not {wanted}")
    return f"not measured, a Manager needs more: {'; '.join(lines)}" if lines else ""


def check_torch() -> str:
    """Why torch can't use a GPU here; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: a build with CUDA is needed (https://pytorch.org)"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA: a build with CUDA is needed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU"
    return ""


def check_library(name: str) -> str:
    """What is wrong with one of CUDA's libraries; empty if it loads."""
    if importlib.util.find_spec("cuda") is None:
        return "can't be looked for without cuda-pathfinder"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib(name)
    except ImportError:
        return "can't be looked for without cuda-pathfinder"
    except Exception as error:  # a broken library raises anything; its name and kind are told
        return f"was not found ({type(error).__name__})"
    return ""


def has_nvcc() -> bool:
    """Whether a toolkit is installed, which has the libraries somewhere."""
    return shutil.which("nvcc") is not None


def outside(version: str, least: str, below: str) -> str:
    """The allowed range if a version is outside it, else empty."""
    number = _numbers(version)
    if (least and number < _numbers(least)) or (below and number >= _numbers(below)):
        return ", ".join(
            filter(None, (f">={least}" if least else "", f"<{below}" if below else ""))
        )
    return ""


def _numbers(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", text.split("+")[0])[:3]]


# -- facts -----------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """The GPU and the software around it, as the record keeps them. Needs torch with a GPU."""
    import torch

    others = ask_smi("pid,used_memory", "compute-apps") or "none seen"  # before we are one of them
    properties = torch.cuda.get_device_properties(0)
    driver = read_driver()
    free, total = torch.cuda.mem_get_info()
    cuda = driver.cuda_version
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "l2_bytes": int(getattr(properties, "L2_cache_size", 0)),
        "num_gpus": driver.num_gpus,
        "driver": ask_smi("driver_version") or "unknown",
        "driver_cuda": f"{cuda[0]}.{cuda[1]}" if cuda else "unknown",
        "clocks_mhz": ask_smi("clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem") or "unknown",
        "power_limit": ask_smi("power.limit") or "unknown",
        "others": others,
        "host": f"{platform.machine()}, Python {platform.python_version()}",
        "software": {
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            **versions(
                ("numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvvm",
                 "nvidia-nvjitlink", "numpy", "flashinfer-python", "vllm")
            ),
        },
    }  # fmt: skip


def versions(names: Sequence[str]) -> dict[str, str]:
    """The version of each distribution, "absent" for those that aren't installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def ask_smi(fields: str, what: str = "gpu") -> str:
    """One line of nvidia-smi for the first GPU; empty where it isn't there or doesn't answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-{what}={fields}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().replace("\n", "; ") if done.returncode == 0 else ""
