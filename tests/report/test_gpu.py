"""GPUs by a stub of NVML that can fail in each call: never an exception, always a reason."""

from __future__ import annotations

import json
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvmem.report import memory_report
from kvmem.report.gpu import Gpu, read_gpus
from kvmem.report.visible import visible_devices
from tests.cli.commands import run
from tests.report import fake_nvml
from tests.report.fake_nvml import CALLS, ERRORS, GIB, MIG_UUIDS, UUIDS, FakeNvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return fake


def test_what_a_healthy_driver_tells(nvml: FakeNvml) -> None:
    found = memory_report()
    assert (found.gpus.driver, found.gpus.cuda_driver) == ("580.95.05", "13.1")
    whole, split = found.gpus.devices
    assert (whole.total_bytes, whole.used_bytes, whole.reserved_bytes) == (80 * GIB, 10 * GIB, GIB)
    assert whole.free_bytes == 69 * GIB
    assert (whole.memory_source, whole.is_unified, whole.numa_node) == ("nvml v2", False, 1)
    assert (whole.bus_id, whole.utilization, whole.mig_mode) == ("00000000:65:00.0", 37, False)
    own, hidden = whole.processes
    assert (own.is_own, own.used_bytes, own.pid) == (True, 3 * GIB, os.getpid())
    assert (hidden.is_own, hidden.used_bytes) == (False, None)
    assert "WDDM" in hidden.reasons["used_bytes"]
    assert [g.uuid for g in split.instances] == list(MIG_UUIDS)
    assert [g.total_bytes for g in split.instances] == [10 * GIB] * 2
    assert found.totals.device_bytes == 120 * GIB
    assert nvml.calls[-1] == "nvmlShutdown"
    json.dumps(found.to_dict(), allow_nan=False)


def missing(record: Any) -> list[str]:
    """Fields of a record that are None or empty without a reason."""
    return [
        name
        for name in Gpu.__dataclass_fields__
        if getattr(record, name) is None and name not in record.reasons
    ]


@pytest.mark.parametrize("error", [*ERRORS, "a TypeError", "an OSError"])
@pytest.mark.parametrize("call", CALLS)
def test_each_call_failing_costs_its_field_only(
    nvml: FakeNvml, call: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: dict[str, Exception] = {"a TypeError": TypeError("odd"), "an OSError": OSError("odd")}
    nvml.fail(call, odd.get(error, error))
    status, out, err = run(capsys, "report", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    gpus = report["gpus"]
    if call in ("nvmlInit", "nvmlDeviceGetCount"):
        assert gpus["devices"] == []
        assert gpus["reasons"]["devices"]
    else:
        assert len(gpus["devices"]) == 2
    found = read_gpus()
    for device in found.devices:
        for gpu in (device, *device.instances):
            gpu.is_unified = bool(gpu.is_unified)  # memory_report fills it in
            assert missing(gpu) == []
    for name in ("driver", "cuda_driver"):
        assert getattr(found, name) is not None or found.reasons[name]
    status, out, err = run(capsys, "report")
    assert (status, err) == (0, "")
    assert "host" in out


def test_a_driver_that_goes_away_half_way(nvml: FakeNvml) -> None:
    read_gpus()
    needed = len(nvml.calls)
    for after in range(needed):
        nvml.calls.clear()
        nvml.lost_after = after
        found = memory_report()
        for device in found.gpus.devices:
            assert missing(device) == []
        if after < 2:
            assert "lost" in found.gpus.reasons["driver"]


@pytest.mark.parametrize(
    ("error", "words"),
    [("LIBRARY_NOT_FOUND", "no NVIDIA driver here"), ("DRIVER_NOT_LOADED", "not loaded"),
     ("LIB_RM_VERSION_MISMATCH", "replaced while in use")],
)  # fmt: skip
def test_no_driver_in_words(nvml: FakeNvml, error: str, words: str) -> None:
    nvml.fail("nvmlInit", error)
    found = memory_report()
    assert words in found.gpus.reasons["devices"]
    assert found.totals.device_bytes == 0


def test_no_binding_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in read_gpus().reasons["devices"]


def test_a_driver_without_version_2_of_memory_info(nvml: FakeNvml) -> None:
    nvml.fail("nvmlDeviceGetMemoryInfo v2", "FUNCTION_NOT_FOUND")
    gpu = memory_report().gpus.devices[0]
    assert (gpu.memory_source, gpu.used_bytes, gpu.reserved_bytes) == ("nvml v1", 11 * GIB, None)
    assert "too old" in gpu.reasons["reserved_bytes"]


def test_mig_in_a_container(nvml: FakeNvml) -> None:
    """The parent may not be asked, the instance may."""
    parent = nvml.devices[1]
    real = nvml._DeviceGetMemoryInfo

    def refused(device: Any, version: int | None = None) -> Any:
        if device is parent:
            raise fake_nvml.real.NVMLError(ERRORS["NO_PERMISSION"])
        return real(device, version)

    nvml._DeviceGetMemoryInfo = refused  # type: ignore[method-assign]
    nvml.fail("nvmlDeviceGetUtilizationRates", "NOT_SUPPORTED")
    gpu = memory_report().gpus.devices[1]
    assert gpu.total_bytes is None
    assert "no permission" in gpu.reasons["total_bytes"]
    assert (gpu.is_unified, gpu.reasons["is_unified"]) == (None, "its memory could not be read")
    assert [g.total_bytes for g in gpu.instances] == [10 * GIB] * 2
    assert "not supported" in gpu.instances[0].reasons["utilization"]


def test_unified_memory_is_counted_once(nvml: FakeNvml) -> None:
    nvml.devices = nvml.devices[:1]
    nvml.fail("nvmlDeviceGetMemoryInfo", "NOT_SUPPORTED")
    found = memory_report()
    gpu = found.gpus.devices[0]
    assert (gpu.is_unified, gpu.memory_source) == (True, "host")
    assert gpu.total_bytes == found.host.total_bytes == found.totals.host_bytes
    assert found.totals.device_bytes == 0
    assert found.totals.counted_once == [0]


class FakeTorch:
    """A torch whose CUDA runs, on the devices of the stub in the opposite order."""

    __version__ = "2.13.0"
    version = SimpleNamespace(cuda="13.0")

    def __init__(self, *, integrated: bool = False) -> None:
        self.fails: set[str] = set()
        self.integrated = integrated
        self.cuda = self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _check(self, name: str) -> None:
        if name in self.fails:
            raise RuntimeError(f"CUDA error in {name}")

    def is_initialized(self) -> bool:
        self._check("is_initialized")
        return True

    def device_count(self) -> int:
        self._check("device_count")
        return 2

    def get_device_properties(self, index: int) -> Any:
        self._check("get_device_properties")
        return SimpleNamespace(
            uuid=UUIDS[1 - index].removeprefix("GPU-"), is_integrated=int(self.integrated)
        )

    def memory_allocated(self, index: int) -> int:
        self._check("memory_allocated")
        return 5 * GIB

    def memory_reserved(self, index: int) -> int:
        self._check("memory_reserved")
        return 6 * GIB

    def max_memory_allocated(self, index: int) -> int:
        self._check("max_memory_allocated")
        return 7 * GIB

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self._check("mem_get_info")
        return 90 * GIB, 100 * GIB

    def host_memory_stats(self) -> dict[str, int]:
        self._check("host_memory_stats")
        return {"active_bytes.current": 3 * GIB, "allocated_bytes.current": 4 * GIB}


def test_torch_tells_the_order_and_its_allocators(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch())  # type: ignore[arg-type]
    found = memory_report()
    assert [gpu.cuda_index for gpu in found.gpus.devices] == [1, 0]
    assert "cuda_order" not in found.gpus.reasons
    device = found.torch.devices[0]
    assert (device.allocated_bytes, device.reserved_bytes) == (5 * GIB, 6 * GIB)
    assert found.torch.pinned_allocated_bytes == 3 * GIB
    status, out, _ = run(capsys, "report")
    assert status == 0
    assert "pinned host" in out


@pytest.mark.parametrize(
    "call",
    ["is_initialized", "device_count", "get_device_properties", "memory_allocated",
     "memory_reserved", "max_memory_allocated", "mem_get_info", "host_memory_stats"],
)  # fmt: skip
def test_torch_failing_in_each_call(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    torch = FakeTorch()
    torch.fails.add(call)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    found = memory_report()
    reasons = [found.torch.reasons, *(device.reasons for device in found.torch.devices)]
    assert any(call in text for one in reasons for text in one.values())
    json.dumps(found.to_dict())


def test_an_integrated_device_by_cuda(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.fail("nvmlDeviceGetMemoryInfo", "NOT_SUPPORTED")
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(integrated=True))  # type: ignore[arg-type]
    found = memory_report()
    gpu = found.gpus.devices[0]
    assert (gpu.memory_source, gpu.total_bytes, gpu.used_bytes) == ("cuda", 100 * GIB, 10 * GIB)
    assert gpu.is_unified
    assert found.totals.device_bytes == 0


def test_only_one_process(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "report", "--pid", str(os.getpid()), "--json")
    report = json.loads(out)
    assert status == 0
    assert [p["pid"] for p in report["gpus"]["devices"][0]["processes"]] == [os.getpid()]
    assert report["host"]["process"]["pid"] == os.getpid()


# --- CUDA_VISIBLE_DEVICES -------------------------------------------------------------------------

A, B = UUIDS
M, N = MIG_UUIDS
VISIBLE = [
    (None, [A, B]),
    ("", []),
    ("-1", []),
    ("NoDevFiles", []),
    ("void", []),
    ("all", []),
    ("0", [A]),
    ("1", [B]),
    ("0,1", [A, B]),
    ("1,0", [B, A]),
    (" 1 , 0 ", [B, A]),
    ("+1", [B]),
    ("0,-1,1", [A]),
    ("0,5,1", [A]),
    ("2", []),
    ("0,0", []),
    ("1,0,1", []),
    ("0,", [A]),
    ("0,x,1", [A]),
    ("1gpu2,0", [B, A]),
    ("99999999999999999999", []),
    (A, [A]),
    (f"{B},{A}", [B, A]),
    ("GPU-8932f", [A]),
    ("GPU-8932a", [B]),
    ("GPU-8932", []),  # two devices begin so
    ("GPU-8932F937", [A]),
    ("GPU-ffff", []),
    (f"{A},{A}", []),
    (f"{A},GPU-8932f", []),
    (f"{A},1", [A]),
    (f"GPU-ffff,{A}", []),
    (M, [M]),
    ("MIG-2222", [N]),
    (f"{N},{M}", [N, M]),
    ("MIG-9", []),
    (f"{M},0", [M]),
]


@pytest.mark.parametrize(("text", "expected"), VISIBLE, ids=lambda x: str(x)[:40])
def test_forms_of_cuda_visible_devices(text: str | None, expected: list[str]) -> None:
    found = visible_devices(text, [A, B], [M, N], bus_order=True)
    assert list(found.uuids) == expected
    assert found.is_sure
    assert bool(found.note) == (not expected)


#: Forms that torch reads itself, instead of leaving them to the driver.
OF_TORCH = [text for text, _ in VISIBLE if text is not None and not re.search("MIG|8932F| ", text)]


@pytest.mark.parametrize("text", OF_TORCH)
def test_torch_reads_the_forms_alike(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a reader of its own; where it knows a form, both say the same."""
    import torch.cuda as cuda

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    parsed = cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        numbers = cuda._transform_uuid_to_ordinals(parsed, [A, B])  # type: ignore[arg-type]
    else:
        numbers = []
        for number in parsed:
            if int(number) > 1:
                break
            numbers.append(int(number))
    found = visible_devices(text, [A, B], [M, N], bus_order=True)
    assert [[A, B][number] for number in numbers] == list(found.uuids)


def test_numbers_are_unsure_without_the_bus_order(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = memory_report()
    assert [gpu.cuda_index for gpu in found.gpus.devices] == [None, 0]
    assert "bus is assumed" in found.gpus.reasons["cuda_order"]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert "cuda_order" not in memory_report().gpus.reasons


def test_the_old_form_of_an_instance(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    old = f"MIG-{A}/1/0"
    assert visible_devices(old, [A, B], [old]).uuids == (old,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG_UUIDS[1])
    split = memory_report().gpus.devices[1]
    assert [g.cuda_index for g in split.instances] == [None, 0]
