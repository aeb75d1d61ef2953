"""What device="cuda" needs besides a driver: a torch with CUDA, packages, libraries that fit it."""

from __future__ import annotations

import ctypes.util
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Any

from kvmem.doctor.finding import Finding
from kvmem.doctor.versions import VersionOf, numbers_of
from kvmem.report.gpu import Gpus

_PACKAGES = ("numba-cuda", "cuda-core", "cuda-bindings")
#: Library -> (its file's name, beginnings of the distributions that bring it).
_LIBRARIES = {
    "NVVM": ("nvvm", ("nvidia-nvvm", "nvidia-cuda-nvcc")),
    "NVRTC": ("nvrtc", ("nvidia-cuda-nvrtc",)),
    "nvJitLink": ("nvJitLink", ("nvidia-nvjitlink",)),
}
_INSTALL = "pip install 'kvmem[cuda13]'; with a driver of CUDA 12 'kvmem[cuda12]'"


def check_cuda(
    gpus: Gpus, version_of: VersionOf = version, load: Callable[[str], Any] = import_module
) -> list[Finding]:
    """Where there is a GPU, a warning for each thing that device="cuda" would miss; else they are
    told only. No finding is an error: device="cpu" needs none of it."""
    has_gpu = bool(gpus.devices)
    found = [_torch(load("torch"), gpus)] if has_gpu else []
    found += [_package(name, version_of, has_gpu=has_gpu) for name in _PACKAGES]
    installed = {str(d.metadata["Name"] or "").lower(): str(d.version) for d in distributions()}
    found += [_library(label, installed, has_gpu=has_gpu) for label in _LIBRARIES]
    return found


def _torch(torch: Any, gpus: Gpus) -> Finding:
    built = getattr(torch.version, "cuda", None)
    if not built:
        return Finding(
            "device='cuda'",
            "warning",
            "this torch has no CUDA, so the GPU can't be used",
            "install a CUDA build of torch, of the major version that the driver runs",
        )
    runs = numbers_of(gpus.cuda_driver or "")
    if runs and numbers_of(built)[:1] > runs[:1]:
        return Finding(
            "device='cuda'",
            "warning",
            f"torch is built for CUDA {built}; this driver runs CUDA up to {gpus.cuda_driver}",
            f"a newer driver, or a torch for CUDA {runs[0]} and kvmem[cuda{runs[0]}]",
        )
    return Finding("device='cuda'", "ok", f"torch for CUDA {built}")


def _package(name: str, version_of: VersionOf, *, has_gpu: bool) -> Finding:
    try:
        return Finding(name, "ok", version_of(name))
    except PackageNotFoundError:
        return _missing(name, "not installed", has_gpu=has_gpu)


def _library(label: str, installed: dict[str, str], *, has_gpu: bool) -> Finding:
    """A library that compiles kernels; not needed where all of them are in the cache."""
    library, beginnings = _LIBRARIES[label]
    by = sorted(f"{n} {v}" for n, v in installed.items() if n.startswith(beginnings))
    if by:
        return Finding(label, "ok", f"from {', '.join(by)}")
    if path := ctypes.util.find_library(library):
        return Finding(label, "ok", f"of the system: {path}")
    return _missing(label, f"not found; {beginnings[0]} brings it", has_gpu=has_gpu)


def _missing(check: str, words: str, *, has_gpu: bool) -> Finding:
    if has_gpu:
        return Finding(check, "warning", f"{words}; device='cuda' needs it", _INSTALL)
    return Finding(check, "info", f"{words}; only device='cuda' needs it (kvmem[cuda13])")
