"""Compiled code: numba's threading layer, and the folder where it keeps what it compiled."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from kvmem.doctor.finding import Finding
from kvmem.sizes import with_unit

#: Numba's own order of preference; value: the module that is its C extension.
LAYERS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}
_CACHED = (".nbi", ".nbc")


def check_threads(load: Callable[[str], Any] = import_module) -> list[Finding]:
    """The threading layers that can be loaded, and the one that parallel kernels will use."""
    numba: Any = import_module("numba")
    usable = []
    for layer, module in LAYERS.items():
        try:
            load(f"numba.np.ufunc.{module}")
        except Exception:  # not built, or its library is missing
            continue
        usable.append(layer)
    threads = numba.config.NUMBA_NUM_THREADS
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not usable:
        advice = "reinstall numba; a bare image may lack libgomp1"
        return [Finding("threading layer", "error", "none can be loaded", advice)]
    asked = str(numba.config.THREADING_LAYER)
    chosen = asked if asked in usable else usable[0]
    text = f"{chosen} (usable: {', '.join(usable)}), {threads} threads on {cpus} cpus"
    found = []
    if asked in LAYERS and asked not in usable:
        found.append(
            Finding(
                "threading layer",
                "error",
                f"NUMBA_THREADING_LAYER={asked} cannot be loaded; usable: {', '.join(usable)}",
                "unset NUMBA_THREADING_LAYER, or install that layer",
            )
        )
    elif chosen == "workqueue":
        advice = "install libgomp (or tbb) to let threads run kernels side by side"
        words = f"{text}; it is not thread-safe, so kernels run one at a time"
        found.append(Finding("threading layer", "info", words, advice))
    else:
        found.append(Finding("threading layer", "ok", text))
    if cpus and threads > cpus:
        found.append(
            Finding(
                "threads",
                "warning",
                f"{threads} threads for {cpus} cpus this process may use",
                f"set NUMBA_NUM_THREADS={cpus}",
            )
        )
    return found


def check_cache(folder: Path | None = None) -> list[Finding]:
    """The folder of compiled code: there, writable, and its size. ``folder`` replaces it."""
    place = compile_cache() if folder is None else folder
    files = []
    if place.is_dir():
        files = [path for path in place.rglob("*") if path.suffix in _CACHED]
    size = sum(_size(path) for path in files)
    text = f"{place}: {len(files)} files, {with_unit(size)}"
    if not is_writable(place):
        advice = "set NUMBA_CACHE_DIR to a folder that can be written"
        words = f"{text}; not writable, so each start compiles anew (about a minute)"
        return [Finding("compile cache", "warning", words, advice)]
    return [Finding("compile cache", "ok", text)]


def compile_cache() -> Path:
    """Where numba keeps compiled functions of kvmem: NUMBA_CACHE_DIR, else beside the sources,
    else (sources of another user) a folder of this user's."""
    import kvmem

    numba: Any = import_module("numba")
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR)
    assert kvmem.__file__ is not None
    beside = Path(kvmem.__file__).parent
    if is_writable(beside):
        return beside
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "numba"


def is_writable(folder: Path) -> bool:
    """Whether a file can be made in ``folder``, or where it does not exist, above it. Tried, not
    asked: a read-only mount and a full quota look writable."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # gone meanwhile: another process cleans up
        return 0
