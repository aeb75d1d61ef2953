"""NVML (the package ``nvidia-ml-py``, imported as pynvml): one session, and its calls by name.

Not every driver has every call, and each may fail at any time: no library, no right (a partition
in a container), not supported (unified memory, WDDM), the driver gone. Callers wrap each call in
``Reasons.get_or_say``; this module only words the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvmem.report.reasons import in_words

#: What to say instead of NVML's own words, by the name of its error class.
_WORDS = {
    "NVMLError_LibraryNotFound": "NVML library not found: no NVIDIA driver here",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded",
    "NVMLError_NoPermission": "no permission (usual for the parent of a MIG instance in a "
    "container)",
    "NVMLError_NotSupported": "not supported by this device or driver",
    "NVMLError_FunctionNotFound": "the driver is too old for this call",
    "NVMLError_GpuIsLost": "the GPU is lost: it fell off the bus or was reset",
    "NVMLError_LibRmVersionMismatch": "the driver was replaced while in use: reboot, or reload it",
    "NVMLError_Uninitialized": "NVML was shut down meanwhile",
}


class NvmlUnavailable(Exception):
    """There is no NVML to ask; the message says why."""


class Nvml:
    """The calls of pynvml. Each raises ``NvmlFailed`` in words."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """The result of ``pynvml.<name>``; text comes as str whatever the binding's age."""
        try:
            function: Callable[..., Any] = getattr(self._library, name)
            found = function(*arguments, **keywords)
        except Exception as error:
            raise NvmlFailed(worded(error)) from error
        return found.decode(errors="replace") if isinstance(found, bytes) else found

    def constant(self, name: str) -> Any:
        """A constant of pynvml, None where the binding lacks it."""
        return getattr(self._library, name, None)


class NvmlFailed(Exception):
    """One call failed; the message says why."""


@contextmanager
def session() -> Iterator[Nvml]:
    """An initialised NVML, shut down at the end. Raises ``NvmlUnavailable``."""
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(f"nvidia-ml-py is not installed ({in_words(error)})") from error
    nvml = Nvml(pynvml)
    try:
        nvml.call("nvmlInit")
    except NvmlFailed as error:
        raise NvmlUnavailable(str(error)) from error
    try:
        yield nvml
    finally:
        # Where the driver went away meanwhile there is nothing left to end.
        with suppress(NvmlFailed):
            nvml.call("nvmlShutdown")


def worded(error: Exception) -> str:
    """An error of NVML (or of its binding) as one line."""
    return _WORDS.get(type(error).__name__, f"{type(error).__name__}: {in_words(error)}")
