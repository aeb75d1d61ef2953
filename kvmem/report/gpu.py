"""Memory of the GPUs by NVML: devices, their MIG instances, and the processes on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvmem.report.nvml import Nvml, NvmlFailed, NvmlUnavailable, session
from kvmem.report.reasons import Reasons
from kvmem.report.torch_memory import loaded_torch
from kvmem.report.visible import Visible, visible_devices


@dataclass(slots=True, kw_only=True)
class GpuProcess:
    """One process with memory on a device. ``used_bytes`` is None under WDDM and without rights."""

    pid: int
    kind: str  # "compute", "graphics"
    name: str | None = None
    used_bytes: int | None = None
    is_own: bool = False
    reasons: Reasons = field(default_factory=Reasons)


@dataclass(slots=True, kw_only=True)
class Gpu:
    """One device, or one MIG instance of it. Memory in bytes; ``reserved`` is the driver's own."""

    index: int  # NVML's, in the order of the bus; of an instance: its place in the parent
    kind: str = "gpu"  # "gpu", "mig"
    name: str | None = None
    uuid: str | None = None
    cuda_index: int | None = None  # n of cuda:n in this process
    bus_id: str | None = None
    numa_node: int | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    memory_source: str | None = None  # "nvml v2", "nvml v1", "cuda", "host"
    is_unified: bool | None = None  # True: its memory is the host's
    utilization: int | None = None  # percent of the time that kernels ran
    mig_mode: bool | None = None
    instances: list[Gpu] = field(default_factory=list)
    processes: list[GpuProcess] = field(default_factory=list)
    reasons: Reasons = field(default_factory=Reasons)


@dataclass(slots=True, kw_only=True)
class Gpus:
    """All devices of this machine that NVML shows."""

    driver: str | None = None
    cuda_driver: str | None = None  # newest CUDA the driver runs, e.g. "13.0"
    visible: str | None = None  # CUDA_VISIBLE_DEVICES as it is set
    devices: list[Gpu] = field(default_factory=list)
    reasons: Reasons = field(default_factory=Reasons)


def read_gpus(*, pid: int | None = None, environment: Mapping[str, str] | None = None) -> Gpus:
    """All GPUs; without NVML none, with the reason under "devices". Never raises.

    ``pid`` keeps only that process on each device. Creates no CUDA context. Cost: milliseconds a
    device.
    """
    env = os.environ if environment is None else environment
    found = Gpus(visible=env.get("CUDA_VISIBLE_DEVICES"))
    reasons = found.reasons
    if found.visible is None:
        reasons["visible"] = "CUDA_VISIBLE_DEVICES is not set"
    try:
        with session() as nvml:
            found.driver = reasons.get_or_say(
                "driver", partial(nvml.call, "nvmlSystemGetDriverVersion")
            )
            found.cuda_driver = reasons.get_or_say("cuda_driver", partial(_cuda_version, nvml))
            count = reasons.get_or_say("devices", partial(nvml.call, "nvmlDeviceGetCount"))
            for index in range(count or 0):
                found.devices.append(_device(nvml, index, pid))
    except NvmlUnavailable as error:
        for name in ("driver", "cuda_driver", "devices"):
            reasons[name] = str(error)
        return found
    _match_cuda(found, env)
    return found


def _cuda_version(nvml: Nvml) -> str:
    number = int(nvml.call("nvmlSystemGetCudaDriverVersion"))
    return f"{number // 1000}.{number % 1000 // 10}"


def _device(nvml: Nvml, index: int, pid: int | None) -> Gpu:
    """One device with its instances; a handle that can't be had leaves only its index."""
    gpu = Gpu(index=index)
    reasons = gpu.reasons
    handle = reasons.get_or_say("name", partial(nvml.call, "nvmlDeviceGetHandleByIndex", index))
    if handle is None:
        for name in _ALL_FIELDS:
            reasons[name] = reasons["name"]
        return gpu
    _describe(nvml, gpu, handle, pid)
    gpu.bus_id = reasons.get_or_say("bus_id", lambda: _bus_id(nvml, handle))
    gpu.numa_node = reasons.get_or_say("numa_node", lambda: _numa_node(nvml, handle))
    gpu.mig_mode = reasons.get_or_say("mig_mode", lambda: _mig_mode(nvml, handle))
    if gpu.mig_mode:
        _instances(nvml, gpu, handle, pid)
    return gpu


_ALL_FIELDS = (
    "name", "uuid", "bus_id", "numa_node", "total_bytes", "used_bytes", "free_bytes",
    "reserved_bytes", "memory_source", "utilization", "mig_mode", "processes", "is_unified",
)  # fmt: skip


def _describe(nvml: Nvml, gpu: Gpu, handle: Any, pid: int | None) -> None:
    """What a device and an instance have in common."""
    reasons = gpu.reasons
    gpu.name = reasons.get_or_say("name", partial(nvml.call, "nvmlDeviceGetName", handle))
    gpu.uuid = reasons.get_or_say("uuid", partial(nvml.call, "nvmlDeviceGetUUID", handle))
    _memory(nvml, gpu, handle)
    gpu.utilization = reasons.get_or_say("utilization", lambda: _utilization(nvml, handle))
    gpu.processes = reasons.get_or_say("processes", lambda: _processes(nvml, handle, pid)) or []


def _memory(nvml: Nvml, gpu: Gpu, handle: Any) -> None:
    """Version 2 tells the driver's reserve apart from what is used; older drivers have version 1
    only, where it counts as used."""
    reasons = gpu.reasons
    version = nvml.constant("nvmlMemory_v2")
    failed: list[str] = []
    for name, keywords in (("nvml v2", {"version": version}), ("nvml v1", {})):
        if name == "nvml v2" and version is None:
            continue
        try:
            info = nvml.call("nvmlDeviceGetMemoryInfo", handle, **keywords)
            sizes = [int(info.total), int(info.used), int(info.free)]
        except (NvmlFailed, AttributeError, TypeError, ValueError) as error:
            failed.append(str(error))
            continue
        gpu.total_bytes, gpu.used_bytes, gpu.free_bytes = sizes
        gpu.memory_source = name
        if name == "nvml v2":
            gpu.reserved_bytes = int(info.reserved)
        else:
            reasons["reserved_bytes"] = failed[-1] if failed else "version 1 counts it as used"
        return
    for name in ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "memory_source"):
        reasons[name] = failed[-1]


def _bus_id(nvml: Nvml, handle: Any) -> str:
    bus = nvml.call("nvmlDeviceGetPciInfo", handle).busId
    return bus.decode(errors="replace") if isinstance(bus, bytes) else str(bus)


def _numa_node(nvml: Nvml, handle: Any) -> int:
    return int(nvml.call("nvmlDeviceGetNumaNodeId", handle))


def _mig_mode(nvml: Nvml, handle: Any) -> bool:
    return bool(nvml.call("nvmlDeviceGetMigMode", handle)[0])


def _utilization(nvml: Nvml, handle: Any) -> int:
    return int(nvml.call("nvmlDeviceGetUtilizationRates", handle).gpu)


def _instances(nvml: Nvml, gpu: Gpu, parent: Any, pid: int | None) -> None:
    """The MIG instances of a device; places without one are skipped."""
    reasons = gpu.reasons
    count = reasons.get_or_say(
        "instances", partial(nvml.call, "nvmlDeviceGetMaxMigDeviceCount", parent)
    )
    for index in range(count or 0):
        try:
            handle = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", parent, index)
        except NvmlFailed as error:
            if type(error.__cause__).__name__ != "NVMLError_NotFound":
                reasons["instances"] = str(error)
            continue
        instance = Gpu(index=index, kind="mig", mig_mode=True)
        for name in ("bus_id", "numa_node"):
            setattr(instance, name, getattr(gpu, name))
            if name in reasons:
                instance.reasons[name] = reasons[name]
        _describe(nvml, instance, handle, pid)
        gpu.instances.append(instance)


def _processes(nvml: Nvml, handle: Any, pid: int | None) -> list[GpuProcess]:
    """Processes with memory on the device, the own one marked. In a container NVML may show none,
    or numbers that mean nothing in here."""
    found: dict[int, GpuProcess] = {}
    failures: list[NvmlFailed] = []
    for kind in ("Compute", "Graphics"):
        try:
            running = nvml.call(f"nvmlDeviceGet{kind}RunningProcesses", handle)
        except NvmlFailed as error:
            failures.append(error)
            continue
        for entry in running:
            number = int(entry.pid)
            if pid is not None and number != pid:
                continue
            process = found.setdefault(
                number, GpuProcess(pid=number, kind=kind.lower(), is_own=number == os.getpid())
            )
            _fill_process(process, entry)
    if len(failures) == 2:
        raise failures[0]
    return list(found.values())


def _fill_process(process: GpuProcess, entry: Any) -> None:
    import psutil

    reasons = process.reasons
    used = getattr(entry, "usedGpuMemory", None)
    if used is None:
        reasons["used_bytes"] = "not told by the driver (WDDM, or no permission)"
    else:
        process.used_bytes = int(used)
    process.name = reasons.get_or_say("name", lambda: str(psutil.Process(process.pid).name()))


# --- CUDA's numbers -------------------------------------------------------------------------------


def _match_cuda(found: Gpus, env: Mapping[str, str]) -> None:
    """Give each device the number it has in CUDA: by torch's UUIDs where CUDA runs already, else
    as CUDA will read CUDA_VISIBLE_DEVICES."""
    records = [gpu for device in found.devices for gpu in (device, *device.instances)]
    for gpu in records:
        gpu.reasons["cuda_index"] = "not visible to this process"
    by_torch = _torch_uuids()
    if by_torch is not None:
        visible = Visible(tuple(by_torch))
    else:
        visible = visible_devices(
            found.visible,
            [gpu.uuid or f"unknown-{gpu.index}" for gpu in found.devices],
            [gpu.uuid or "" for gpu in records if gpu.kind == "mig"],
            bus_order=env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
        )
    if visible.note and records:
        found.reasons["cuda_order"] = visible.note
    for number, uuid in enumerate(visible.uuids):
        for gpu in records:
            if bare(gpu.uuid or f"unknown-{gpu.index}") == bare(uuid):
                gpu.cuda_index = number
                gpu.reasons.pop("cuda_index", None)


def _torch_uuids() -> list[str] | None:
    """UUIDs in CUDA's order, None unless torch has CUDA running: asking would start it, which
    takes hundreds of megabytes on a device."""
    torch = loaded_torch()
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        count = torch.cuda.device_count()
        return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    except Exception:
        return None


def bare(uuid: str) -> str:
    """A UUID without its kind: torch says ``8932f937-...``, NVML ``GPU-8932f937-...``."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
