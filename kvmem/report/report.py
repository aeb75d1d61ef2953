"""``memory_report``: everything in one record."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvmem.report.gpu import Gpu, Gpus, read_gpus
from kvmem.report.host import Host, Roots, read_host
from kvmem.report.reasons import Reasons
from kvmem.report.torch_memory import TorchMemory, read_torch

if TYPE_CHECKING:
    from kvmem.manager import Manager
    from kvmem.report.manager_memory import ManagerMemory


@dataclass(slots=True, kw_only=True)
class Totals:
    """All memory of the machine once: unified devices share the host's, so only the host counts."""

    host_bytes: int | None
    device_bytes: int  # of devices with memory of their own
    counted_once: list[int] = field(default_factory=list)  # indices of unified devices


@dataclass(slots=True, kw_only=True)
class MemoryReport:
    """Memory of this machine as one process sees it. Bytes; None for a reason (``reasons``)."""

    time: float  # seconds since 1970
    gpus: Gpus
    torch: TorchMemory
    manager: ManagerMemory | None
    host: Host
    totals: Totals
    reasons: Reasons = field(default_factory=Reasons)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of plain values, for JSON."""
        return asdict(self)


def memory_report(manager: Manager | None = None, *, pid: int | None = None) -> MemoryReport:
    """Memory of GPUs, torch, ``manager``'s arenas and the host, now.

    ``manager``: one of this process; the arenas of another process can't be seen from here, only
    that process's memory (``pid``). Raises TypeError for something that is no Manager; all else
    that fails is None with a reason, also a Manager that was closed. Starts no CUDA context,
    imports no torch. Cost: some milliseconds, plus a Manager's pages (8 bytes read per 4 KiB).
    """
    return build_report(manager, pid, Roots())


def build_report(manager: Manager | None, pid: int | None, roots: Roots) -> MemoryReport:
    """As ``memory_report``, of the machine that ``roots`` describes."""
    found = MemoryReport(
        time=time.time(),
        gpus=read_gpus(pid=pid),
        torch=read_torch(),
        manager=None,
        host=read_host(pid=pid, roots=roots),
        totals=Totals(host_bytes=None, device_bytes=0),
    )
    if manager is None:
        found.reasons["manager"] = "none was given: memory_report(manager) in its own process"
    else:
        found.manager = _manager(found, manager)
    _unify(found)
    found.totals = _totals(found)
    return found


def _manager(found: MemoryReport, manager: Manager) -> ManagerMemory | None:
    from kvmem.manager import Manager as ManagerClass  # torch: only whoever has a Manager needs it
    from kvmem.report.manager_memory import read_manager

    if not isinstance(manager, ManagerClass):
        raise TypeError(f"manager must be a kvmem.Manager or None, not {type(manager).__name__}")
    return found.reasons.get_or_say("manager", lambda: read_manager(manager))


def _unify(found: MemoryReport) -> None:
    """Find devices whose memory is the host's, and fill in what NVML does not tell of them.

    NVML has no memory info there; CUDA has, where it runs; else the host's own figures stand.
    """
    by_cuda = {device.cuda_index: device for device in found.torch.devices}
    for gpu in [g for device in found.gpus.devices for g in (device, *device.instances)]:
        device = None if gpu.cuda_index is None else by_cuda.get(gpu.cuda_index)
        if device is not None and device.is_unified is not None:
            gpu.is_unified = device.is_unified
        elif gpu.total_bytes is not None:
            gpu.is_unified = False
        if gpu.total_bytes is None and device is not None and device.total_bytes is not None:
            gpu.total_bytes, gpu.free_bytes = device.total_bytes, device.free_bytes
            gpu.memory_source = "cuda"
            _told(gpu, "total_bytes", "free_bytes", "memory_source")
        if gpu.total_bytes is None and "not supported" in gpu.reasons.get("total_bytes", ""):
            gpu.is_unified = True if gpu.is_unified is None else gpu.is_unified
            if gpu.is_unified:
                gpu.total_bytes = found.host.total_bytes
                gpu.free_bytes = found.host.available_bytes
                gpu.memory_source = "host"
                _told(gpu, "total_bytes", "free_bytes", "memory_source")
        if gpu.total_bytes is not None and gpu.used_bytes is None and gpu.free_bytes is not None:
            gpu.used_bytes = gpu.total_bytes - gpu.free_bytes
            _told(gpu, "used_bytes")
        if gpu.is_unified is None:
            gpu.reasons.setdefault("is_unified", "its memory could not be read")


def _told(gpu: Gpu, *names: str) -> None:
    for name in names:
        gpu.reasons.pop(name, None)


def _totals(found: MemoryReport) -> Totals:
    devices = found.gpus.devices
    return Totals(
        host_bytes=found.host.total_bytes,
        device_bytes=sum(gpu.total_bytes or 0 for gpu in devices if not gpu.is_unified),
        counted_once=[gpu.index for gpu in devices if gpu.is_unified],
    )
