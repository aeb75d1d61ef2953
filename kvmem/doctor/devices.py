"""GPUs as NVML and torch see them, and how much host memory can be pinned for them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvmem.budget import host_budget
from kvmem.doctor.finding import Finding
from kvmem.report.gpu import Gpus, read_gpus
from kvmem.sizes import with_unit

FIRST_CHUNK, LAST_CHUNK = 1 << 20, 256 << 20
DEFAULT_PIN_BYTES = 256 << 20


def check_gpus(gpus: Gpus | None = None) -> list[Finding]:
    """Driver and devices. None is no error: device="cpu" needs none."""
    found = read_gpus() if gpus is None else gpus
    if not found.devices:
        why = found.reasons.get("devices", "the driver shows no device")
        broken = "replaced while in use" in why or "fell off" in why
        severity, advice = ("warning", "mend the driver") if broken else ("info", "")
        return [Finding("gpu", severity, f"none: {why}; device='cpu' needs none", advice)]
    driver = f"{found.driver or '?'}, runs CUDA up to {found.cuda_driver or '?'}"
    findings = [
        Finding("driver", "ok", driver),
        Finding(
            "gpu", "info", "device='cuda' was tested without a GPU only: docs/cuda.md says how"
        ),
    ]
    for device in found.devices:
        for gpu in (device, *device.instances):
            label = f"gpu {device.index}" + (f" mig {gpu.index}" if gpu.kind == "mig" else "")
            if gpu.total_bytes is None:
                why = gpu.reasons.get("total_bytes", "unknown")
                findings.append(Finding(label, "info", f"{gpu.name or '?'}: memory unknown, {why}"))
                continue
            shared = ", unified with the host" if gpu.is_unified else ""
            findings.append(
                Finding(label, "ok", f"{gpu.name}, {with_unit(gpu.total_bytes)}{shared}")
            )
    if note := found.reasons.get("cuda_order"):
        findings.append(Finding("cuda order", "info", note, "set CUDA_DEVICE_ORDER=PCI_BUS_ID"))
    return findings


@dataclass(frozen=True, slots=True)
class PinProbe:
    """How much could be pinned, in bytes; ``error`` is what ended the growth, None: the limit."""

    pinned_bytes: int
    refused_bytes: int = 0
    error: str | None = None


#: Pins or releases a range (address, bytes); raises when it is refused.
Register = Callable[[int, int], None]
Release = Callable[[int], None]


def probe_pinning(register: Register, release: Release, limit_bytes: int) -> PinProbe:
    """Pin chunks of 1, 2, 4, ... 256 MiB until one is refused or ``limit_bytes`` are pinned; all
    is released again. Small chunks first: one call for everything would hold the driver's locks
    for minutes, and a refused large one says nothing about what would have been granted."""
    held: list[tuple[mmap.mmap, int]] = []
    pinned, chunk = 0, FIRST_CHUNK
    try:
        while pinned < limit_bytes:
            size = min(chunk, limit_bytes - pinned)
            size = max(mmap.PAGESIZE, size - size % mmap.PAGESIZE)
            memory = mmap.mmap(-1, size)
            address = int(np.frombuffer(memory, np.uint8).ctypes.data)
            try:
                register(address, size)
            except Exception as error:
                return PinProbe(pinned, size, " ".join(str(error).split())[:120])
            held.append((memory, address))
            pinned += size
            chunk = min(2 * chunk, LAST_CHUNK)
        return PinProbe(pinned)
    finally:
        for _, address in held:
            release(address)


def check_pinning(pin_bytes: int = DEFAULT_PIN_BYTES) -> list[Finding]:
    """Pin host memory through CUDA, up to ``pin_bytes`` and an eighth of what is free."""
    import torch

    if not torch.cuda.is_available():
        why = "no CUDA device to pin for" if torch.version.cuda else "this torch has no CUDA"
        return [Finding("pinned memory", "info", f"not probed: {why}; device='cpu' pins nothing")]
    register, release = _cudart(torch)
    return pinning_findings(
        probe_pinning(register, release, min(pin_bytes, host_budget().free_bytes // 8))
    )


def pinning_findings(probe: PinProbe) -> list[Finding]:
    """A probe in words."""
    if probe.error is None:
        text = f"{with_unit(probe.pinned_bytes)} could be pinned, as asked"
        return [Finding("pinned memory", "ok", text)]
    text = (
        f"{with_unit(probe.pinned_bytes)} could be pinned, then "
        f"{with_unit(probe.refused_bytes)} were refused: {probe.error}"
    )
    return [
        Finding(
            "pinned memory",
            "warning",
            text,
            "raise the limit of locked memory (see memlock); WSL2 pins only a part of the memory",
        )
    ]


def _cudart(torch: Any) -> tuple[Register, Release]:
    """Registering through torch's CUDA runtime. A refusal is cleared, or the next CUDA call of
    this process would report it."""
    cudart = torch.cuda.cudart()

    def register(address: int, size: int) -> None:
        code = int(cudart.cudaHostRegister(address, size, 0))
        if code:
            clear = getattr(cudart, "cudaGetLastError", None)
            if clear is not None:
                clear()
            raise RuntimeError(f"cudaHostRegister says {code}")

    def release(address: int) -> None:
        cudart.cudaHostUnregister(address)

    return register, release
