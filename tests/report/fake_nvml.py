"""A pynvml without a driver: two devices, one of them partitioned, and failures on demand."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml as real

GIB = 2**30
UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932aaaa-0000-4106-c12f-20bd9faed9f7")
MIG_UUIDS = ("MIG-1111f937-d72c-4106-c12f-20bd9faed9f6", "MIG-2222f937-d72c-4106-c12f-20bd9faed9f6")

#: Every call that a report makes.
CALLS = (
    "nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion",
    "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo", "nvmlDeviceGetNumaNodeId",
    "nvmlDeviceGetMigMode", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)  # fmt: skip

ERRORS = {
    name: getattr(real, f"NVML_ERROR_{name}")
    for name in ("NO_PERMISSION", "NOT_SUPPORTED", "GPU_IS_LOST", "FUNCTION_NOT_FOUND", "UNKNOWN",
                 "LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH",
                 "UNINITIALIZED")
}  # fmt: skip


@dataclass
class FakeDevice:
    """One device or instance, with memory of version 2."""

    name: str
    uuid: str
    total: int = 80 * GIB
    used: int = 10 * GIB
    reserved: int = GIB
    mig: list[FakeDevice] | None = None
    pids: list[tuple[int, int | None]] = field(default_factory=list)


class FakeNvml:
    """Stands in ``sys.modules['pynvml']``."""

    nvmlMemory_v2 = real.nvmlMemory_v2

    def __init__(self, devices: list[FakeDevice] | None = None) -> None:
        own = (os.getpid(), 3 * GIB)
        self.devices = devices or [
            FakeDevice("NVIDIA H100", UUIDS[0], pids=[own, (1, None)]),
            FakeDevice(
                "NVIDIA A100", UUIDS[1], total=40 * GIB,
                mig=[FakeDevice("MIG 1g.10gb", uuid, total=10 * GIB) for uuid in MIG_UUIDS],
            ),
        ]  # fmt: skip
        self.fails: dict[str, Exception] = {}
        self.lost_after: int | None = None  # calls until the driver is gone
        self.calls: list[str] = []

    def fail(self, name: str, error: str | Exception) -> None:
        """Make one call fail, with an NVML error by name or with any exception."""
        raised = real.NVMLError(ERRORS[error]) if isinstance(error, str) else error
        self.fails[name] = raised

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            if self.lost_after is not None and len(self.calls) > self.lost_after:
                raise real.NVMLError(real.NVML_ERROR_GPU_IS_LOST)
            if name in self.fails:
                raise self.fails[name]
            return getattr(self, "_" + name.removeprefix("nvml"))(*arguments, **keywords)

        return call

    def _Init(self) -> None: ...
    def _Shutdown(self) -> None: ...

    def _SystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"  # older bindings return bytes

    def _SystemGetCudaDriverVersion(self) -> int:
        return 13010

    def _DeviceGetCount(self) -> int:
        return len(self.devices)

    def _DeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        return self.devices[index]

    def _DeviceGetName(self, device: FakeDevice) -> str:
        return device.name

    def _DeviceGetUUID(self, device: FakeDevice) -> str:
        return device.uuid

    def _DeviceGetMemoryInfo(self, device: FakeDevice, version: int | None = None) -> Any:
        if version is None and "nvmlDeviceGetMemoryInfo v1" in self.fails:
            raise self.fails["nvmlDeviceGetMemoryInfo v1"]
        if version is not None and "nvmlDeviceGetMemoryInfo v2" in self.fails:
            raise self.fails["nvmlDeviceGetMemoryInfo v2"]
        free = device.total - device.used - device.reserved
        if version is None:
            used = device.used + device.reserved
            return SimpleNamespace(total=device.total, used=used, free=free)
        return SimpleNamespace(
            total=device.total, used=device.used, free=free, reserved=device.reserved
        )

    def _DeviceGetPciInfo(self, device: FakeDevice) -> Any:
        return SimpleNamespace(busId=b"00000000:65:00.0")

    def _DeviceGetNumaNodeId(self, device: FakeDevice) -> int:
        return 1

    def _DeviceGetMigMode(self, device: FakeDevice) -> list[int]:
        return [int(device.mig is not None)] * 2

    def _DeviceGetUtilizationRates(self, device: FakeDevice) -> Any:
        return SimpleNamespace(gpu=37, memory=5)

    def _DeviceGetMaxMigDeviceCount(self, device: FakeDevice) -> int:
        return 7

    def _DeviceGetMigDeviceHandleByIndex(self, device: FakeDevice, index: int) -> FakeDevice:
        assert device.mig is not None
        if index >= len(device.mig):
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return device.mig[index]

    def _DeviceGetComputeRunningProcesses(self, device: FakeDevice) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in device.pids]

    def _DeviceGetGraphicsRunningProcesses(self, device: FakeDevice) -> list[Any]:
        return []
