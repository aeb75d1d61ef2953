"""kvmem: paged KV-cache memory with swapping, for custom LLM inference engines.

An engine embeds one object, ``kvmem.Manager``. The errors are imported at once, everything else
at its first use, so that ``import kvmem`` compiles nothing and costs little.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

import cuda_kernels
from kvmem.errors import (
    ConfigError,
    CorruptEntry,
    DeviceUnavailable,
    FormatError,
    Holder,
    KVMemError,
    ManagerClosed,
    NotResident,
    OutOfBlocks,
    PinError,
    RaceError,
    SequenceTooLong,
    ShapeError,
    TierError,
    TransferError,
    UnknownSequence,
)

if TYPE_CHECKING:
    from kvmem import ops, report
    from kvmem.block import Block
    from kvmem.cache import Match, Pin
    from kvmem.config import Config, LayerSpec
    from kvmem.events import Event
    from kvmem.graph_buffers import GraphBuffers
    from kvmem.manager import Manager
    from kvmem.sequence import Sequence
    from kvmem.sim_options import SimOptions
    from kvmem.size_plan import SizePlan
    from kvmem.stats import Stats
    from kvmem.step import Step
    from kvmem.swapper import Transfer
    from kvmem.warming import WarmupReport, warmup

    __version__: str

__all__ = [
    "Block",
    "Config",
    "ConfigError",
    "CorruptEntry",
    "DeviceUnavailable",
    "Event",
    "FormatError",
    "GraphBuffers",
    "Holder",
    "KVMemError",
    "LayerSpec",
    "Manager",
    "ManagerClosed",
    "Match",
    "NotResident",
    "OutOfBlocks",
    "Pin",
    "PinError",
    "RaceError",
    "Sequence",
    "SequenceTooLong",
    "ShapeError",
    "SimOptions",
    "SizePlan",
    "Stats",
    "Step",
    "TierError",
    "Transfer",
    "TransferError",
    "UnknownSequence",
    "WarmupReport",
    "ops",
    "report",
    "warmup",
]

_HOME = {
    "Block": "kvmem.block",
    "Config": "kvmem.config",
    "Event": "kvmem.events",
    "GraphBuffers": "kvmem.graph_buffers",
    "LayerSpec": "kvmem.config",
    "Manager": "kvmem.manager",
    "Match": "kvmem.cache",
    "Pin": "kvmem.cache",
    "Sequence": "kvmem.sequence",
    "SimOptions": "kvmem.sim_options",
    "SizePlan": "kvmem.size_plan",
    "Stats": "kvmem.stats",
    "Step": "kvmem.step",
    "Transfer": "kvmem.swapper",
    "WarmupReport": "kvmem.warming",
    "warmup": "kvmem.warming",
}

_MODULES = ("ops", "report")

logging.getLogger("kvmem").addHandler(logging.NullHandler())  # else warnings go to stderr

if getattr(cuda_kernels, "PROJECT", None) != "kvmem":
    # Another distribution installs a package of this name: running with its kernels would be worse.
    raise ImportError(
        f"the package cuda_kernels at {getattr(cuda_kernels, '__file__', '?')} is not the one of "
        f"kvmem: uninstall the distribution it came from, then reinstall kvmem"
    )


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("kvmem")
    elif name in _MODULES:
        value = importlib.import_module(f"kvmem.{name}")
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'kvmem' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
