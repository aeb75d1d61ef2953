"""Memory of torch's allocators in this process: on each CUDA device, and pinned on the host."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from kvmem.report.reasons import Reasons


@dataclass(slots=True, kw_only=True)
class TorchDevice:
    """What torch holds on one device, in bytes."""

    cuda_index: int
    allocated_bytes: int | None = None  # of live tensors
    reserved_bytes: int | None = None  # taken from the driver; the rest of it is cached
    peak_allocated_bytes: int | None = None
    free_bytes: int | None = None  # of the device, as CUDA says
    total_bytes: int | None = None
    is_unified: bool | None = None
    reasons: Reasons = field(default_factory=Reasons)


@dataclass(slots=True, kw_only=True)
class TorchMemory:
    """All allocators of torch. ``pinned_*``: its own caching host allocator, not kvmem's arenas."""

    version: str | None = None
    cuda: str | None = None  # CUDA this torch was built with
    devices: list[TorchDevice] = field(default_factory=list)
    pinned_allocated_bytes: int | None = None
    pinned_reserved_bytes: int | None = None
    reasons: Reasons = field(default_factory=Reasons)


def loaded_torch() -> Any:
    """torch if this process has imported it, else None: importing it for a report takes seconds."""
    return sys.modules.get("torch")


def read_torch() -> TorchMemory:
    """The allocators of this process. Never raises, imports nothing, starts no CUDA context."""
    found = TorchMemory()
    reasons = found.reasons
    torch = loaded_torch()
    names = ("version", "cuda", "devices", "pinned_allocated_bytes", "pinned_reserved_bytes")
    if torch is None:
        reasons.update(dict.fromkeys(names, "torch is not loaded in this process"))
        return found
    found.version = reasons.get_or_say("version", lambda: str(torch.__version__))
    found.cuda = reasons.get_or_say("cuda", lambda: torch.version.cuda)
    if found.cuda is None:
        reasons.update(dict.fromkeys(names[1:], "this torch has no CUDA"))
        return found
    started = reasons.get_or_say("devices", lambda: torch.cuda.is_initialized())
    if not started:
        why = reasons.get("devices", "torch has not started CUDA in this process")
        reasons.update(dict.fromkeys(names[2:], why))
        return found
    count = reasons.get_or_say("devices", lambda: int(torch.cuda.device_count()))
    found.devices = [_device(torch, index) for index in range(count or 0)]
    stats = reasons.get_or_say(
        "pinned_allocated_bytes", lambda: dict(torch.cuda.host_memory_stats())
    )
    if stats is None:
        reasons["pinned_reserved_bytes"] = reasons["pinned_allocated_bytes"]
        return found
    found.pinned_allocated_bytes = _count(stats, "active_bytes.current")
    found.pinned_reserved_bytes = _count(stats, "allocated_bytes.current")
    return found


def _count(stats: dict[str, Any], name: str) -> int | None:
    value = stats.get(name)
    return None if value is None else int(value)


def _device(torch: Any, index: int) -> TorchDevice:
    device = TorchDevice(cuda_index=index)
    reasons = device.reasons
    cuda = torch.cuda
    device.allocated_bytes = reasons.get_or_say(
        "allocated_bytes", lambda: int(cuda.memory_allocated(index))
    )
    device.reserved_bytes = reasons.get_or_say(
        "reserved_bytes", lambda: int(cuda.memory_reserved(index))
    )
    device.peak_allocated_bytes = reasons.get_or_say(
        "peak_allocated_bytes", lambda: int(cuda.max_memory_allocated(index))
    )
    sizes = reasons.get_or_say("free_bytes", lambda: tuple(map(int, cuda.mem_get_info(index))))
    if sizes is None:
        reasons["total_bytes"] = reasons["free_bytes"]
    else:
        device.free_bytes, device.total_bytes = sizes
    device.is_unified = reasons.get_or_say(
        "is_unified", lambda: bool(cuda.get_device_properties(index).is_integrated)
    )
    return device
