"""Versions of Python and the packages."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvmem.doctor.finding import Finding

VersionOf = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Needed:
    """A package that kvmem imports: the least version, and the first one that is too new."""

    distribution: str
    module: str
    least: tuple[int, ...]
    below: tuple[int, ...] | None = None
    why: str = ""


#: As in pyproject.toml; a test compares the two.
NEEDED = (
    Needed("torch", "torch", (2, 6), why="tensors"),
    Needed("numpy", "numpy", (2, 1), why="arrays"),
    Needed("numba", "numba", (0, 68), (0, 69), why="compiled bookkeeping and kernels"),
    Needed("psutil", "psutil", (6,), why="memory of the host"),
    Needed("nvidia-ml-py", "pynvml", (12, 560), why="memory of GPUs"),
    Needed("proclimits", "proclimits", (0, 2), (0, 3), why="limits of containers"),
)
LEAST_PYTHON = (3, 11)


def check_python() -> list[Finding]:
    """The interpreter and the system."""
    text = f"{platform.python_implementation()} {platform.python_version()}"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    found = [Finding("system", "ok", system)]
    if sys.platform != "linux":
        found[0] = Finding("system", "error", f"{system} is not supported", "use Linux")
    if sys.version_info[:2] < LEAST_PYTHON:
        return [*found, Finding("python", "error", f"{text} is too old", "use Python >= 3.11")]
    return [*found, Finding("python", "ok", text)]


def check_packages(version_of: VersionOf = version) -> list[Finding]:
    """Each package that kvmem needs: there, new enough, importable."""
    return [_package(needed, version_of) for needed in NEEDED]


def _package(needed: Needed, version_of: VersionOf) -> Finding:
    name = needed.distribution
    allowed = f">={dotted(needed.least)}" + (f",<{dotted(needed.below)}" if needed.below else "")
    advice = f"pip install '{name}{allowed}'"
    try:
        text = version_of(name)
    except PackageNotFoundError:
        return Finding(name, "error", f"not installed ({needed.why})", advice)
    numbers = numbers_of(text)
    if numbers < needed.least or (needed.below and numbers >= needed.below):
        return Finding(name, "error", f"{text} is outside {allowed}", advice)
    try:
        module = import_module(needed.module)
    except Exception as error:  # a broken binary raises anything
        words = f"{text} cannot be imported: {type(error).__name__}: {str(error)[:120]}"
        return Finding(name, "error", words, f"reinstall it: {advice}")
    return Finding(name, "ok", text + _detail(name, module))


def _detail(name: str, module: Any) -> str:
    if name != "torch":
        return ""
    cuda = getattr(getattr(module, "version", None), "cuda", None)
    return f" (CUDA {cuda})" if cuda else " (no CUDA: a CPU build)"


def check_shim(version_of: VersionOf = version) -> list[Finding]:
    """The deprecated distribution "pynvml" overwrites files of nvidia-ml-py."""
    try:
        text = version_of("pynvml")
    except PackageNotFoundError:
        return []
    return [
        Finding(
            "pynvml",
            "warning",
            f"the deprecated distribution pynvml {text} is installed: it shares its import name "
            "with nvidia-ml-py, and torch warns of it",
            "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py",
        )
    ]


def numbers_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def dotted(numbers: tuple[int, ...]) -> str:
    """(2, 6) -> "2.6"."""
    return ".".join(map(str, numbers))
