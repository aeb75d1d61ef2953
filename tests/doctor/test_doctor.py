"""``kvmem doctor``: each finding with a severity and an advice, on machines of all kinds."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmem.budget import ControlGroup
from kvmem.doctor import SEVERITIES, Finding, diagnose
from kvmem.doctor.compiled import check_cache, check_threads, compile_caches, is_writable
from kvmem.doctor.cuda import check_cuda
from kvmem.doctor.devices import (
    FIRST_CHUNK,
    check_gpus,
    check_pinning,
    pinning_findings,
    probe_pinning,
)
from kvmem.doctor.doctor import run_checks
from kvmem.doctor.finding import cleaned
from kvmem.doctor.memory import check_host
from kvmem.doctor.versions import (
    LEAST_PYTHON,
    NEEDED,
    check_packages,
    check_python,
    check_shim,
    numbers_of,
)
from kvmem.report.gpu import Gpu, Gpus
from kvmem.report.host import NO_LIMIT, Host, NumaNode, Process, read_host
from tests.cli.commands import ROOT, run
from tests.report.fake_nvml import FakeNvml

GIB = 2**30


def severity_of(findings: list[Finding], check: str) -> str:
    found = [f.severity for f in findings if f.check == check]
    assert found, f"no finding about {check}: {findings}"
    return max(found, key=SEVERITIES.index)


def advised(findings: list[Finding]) -> None:
    """Whatever is worse than info says what to do."""
    for finding in findings:
        assert finding.severity in SEVERITIES
        assert finding.message
        if finding.severity in ("warning", "error"):
            assert finding.advice or "could not be read" in finding.message, finding


def test_here_nothing_stops_kvmem(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "doctor", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "kvmem.doctor/1"
    assert found["worst"] in ("ok", "info", "warning")
    checks = {finding["check"] for finding in found["findings"]}
    assert {
        "python",
        "torch",
        "numba",
        "memory",
        "cgroup",
        "memlock",
        "huge pages",
        "numa",
    } <= checks
    assert {"pinned memory", "threading layer", "compile cache", "NVVM", "NVRTC"} <= checks
    advised([Finding(**finding) for finding in found["findings"]])


def test_as_text_with_advice_and_a_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMEM_HOST_LIMIT", "plenty")
    status, out, err = run(capsys, "doctor")
    assert (status, err) == (1, "")
    assert "KVMEM_HOST_LIMIT='plenty' is no size" in out
    assert "what to do" in out
    assert "kvmem would not work here" in out


# --- versions -------------------------------------------------------------------------------------


def test_needed_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {}
    for line in project["dependencies"]:
        name, least, below = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", line).groups()  # type: ignore[union-attr]
        declared[name] = (numbers_of(least), numbers_of(below) if below else None)
    assert {n.distribution: (n.least, n.below) for n in NEEDED} == declared
    assert project["requires-python"] == ">=" + ".".join(map(str, LEAST_PYTHON))


@pytest.mark.parametrize("needed", NEEDED, ids=lambda n: n.distribution)
@pytest.mark.parametrize("how", ["missing", "old", "new", "broken"])
def test_a_package_that_would_stop_kvmem(
    needed: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version_of(name: str) -> str:
        if name == needed.distribution:
            if how == "missing":
                raise PackageNotFoundError(name)
            if how == "old":
                return "0.0.1"
            if how == "new" and needed.below:
                return "99.0"
        return ".".join(map(str, next(n for n in NEEDED if n.distribution == name).least))

    if how == "broken":
        monkeypatch.setitem(sys.modules, needed.module, None)  # its import raises
    findings = check_packages(version_of)
    fine = how == "new" and not needed.below
    assert severity_of(findings, needed.distribution) == ("ok" if fine else "error")
    assert [f.severity for f in findings].count("error") == (0 if fine else 1)
    advised(findings)


def test_old_python_and_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert severity_of(check_python(), "python") == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    monkeypatch.setattr(sys, "platform", "win32")
    findings = check_python()
    assert severity_of(findings, "python") == severity_of(findings, "system") == "error"
    advised(findings)


def test_the_deprecated_shim_is_flagged() -> None:
    findings = check_shim(lambda name: "13.0.1")
    assert severity_of(findings, "pynvml") == "warning"
    assert "pip uninstall pynvml" in findings[0].advice
    assert check_shim() == []  # not in the project's own environment


def test_what_a_gpu_needs_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    bringing = [SimpleNamespace(metadata={"Name": "nvidia-nvvm"}, version="13.0.88")]
    monkeypatch.setattr("kvmem.doctor.cuda.distributions", lambda: bringing)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)

    def missing(name: str) -> str:
        if name == "cuda-core":
            raise PackageNotFoundError(name)
        return "0.30.4"

    def torch_of(cuda: str | None) -> Any:
        return lambda name: SimpleNamespace(version=SimpleNamespace(cuda=cuda))

    none, one = Gpus(), Gpus(devices=[Gpu(index=0, uuid="GPU-1")], cuda_driver="12.9")
    for gpus, severity in ((none, "info"), (one, "warning")):
        findings = check_cuda(gpus, missing, torch_of("12.8"))
        by_check = {f.check: f for f in findings}
        told = by_check["NVVM"].severity, by_check["NVVM"].message
        assert told == ("ok", "from nvidia-nvvm 13.0.88")
        assert by_check["NVRTC"].severity == by_check["cuda-core"].severity == severity
        assert "nvidia-cuda-nvrtc" in by_check["NVRTC"].message
        assert by_check["numba-cuda"].severity == "ok"
        advised(findings)
    assert severity_of(check_cuda(one, missing, torch_of("12.8")), "device='cuda'") == "ok"
    for built, words in ((None, "has no CUDA"), ("13.0", "driver runs CUDA up to 12.9")):
        found = check_cuda(one, missing, torch_of(built))[0]
        assert found.severity == "warning"
        assert words in found.message and "torch" in found.advice
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libnvrtc.so.13")
    assert "libnvrtc.so.13" in str(check_cuda(none))


# --- GPUs and pinning -----------------------------------------------------------------------------


def test_gpus_without_a_driver_and_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", None)
    findings = check_gpus()
    assert severity_of(findings, "driver") == "ok"
    assert "NVIDIA H100, 80.00 GiB" in str(findings)
    assert "GPU-" not in str(findings)  # no serials in what may be published
    fake.fail("nvmlDeviceGetMemoryInfo", "NO_PERMISSION")
    assert severity_of(check_gpus(), "gpu 1 mig 0") == "info"
    fake.fail("nvmlInit", "LIBRARY_NOT_FOUND")
    assert severity_of(check_gpus(), "gpu") == "info"
    fake.fail("nvmlInit", "LIB_RM_VERSION_MISMATCH")
    assert severity_of(check_gpus(), "gpu") == "warning"


class FakeDriver:
    """Pins up to ``room`` bytes, then refuses."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pinned: dict[int, int] = {}
        self.sizes: list[int] = []

    def register(self, address: int, size: int) -> None:
        self.sizes.append(size)
        if sum(self.pinned.values()) + size > self.room:
            raise RuntimeError("cudaHostRegister says 2")
        assert address % 4096 == 0
        assert address not in self.pinned
        self.pinned[address] = size

    def release(self, address: int) -> None:
        del self.pinned[address]


def test_pinning_grows_by_chunks_and_leaves_nothing() -> None:
    driver = FakeDriver(room=GIB)
    probe = probe_pinning(driver.register, driver.release, 20 << 20)
    assert driver.sizes == [FIRST_CHUNK << n for n in range(4)] + [5 << 20]
    assert (probe.pinned_bytes, probe.error, driver.pinned) == (20 << 20, None, {})
    assert pinning_findings(probe)[0].severity == "ok"


def test_pinning_that_is_refused_half_way() -> None:
    driver = FakeDriver(room=5 << 20)
    probe = probe_pinning(driver.register, driver.release, 1 << 30)
    assert (probe.pinned_bytes, probe.refused_bytes) == (3 << 20, 4 << 20)
    assert probe.error == "cudaHostRegister says 2"
    assert driver.pinned == {}
    findings = pinning_findings(probe)
    assert findings[0].severity == "warning"
    advised(findings)


def test_pinning_through_the_runtime_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is cleared, or the next call of the process would report it."""
    import torch

    driver, cleared = FakeDriver(room=3 << 20), []

    def register(address: int, size: int, flags: int) -> int:
        try:
            driver.register(address, size)
        except RuntimeError:
            return 2
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=driver.release,
        cudaGetLastError=lambda: cleared.append(1),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    findings = check_pinning(8 << 20)
    assert findings[0].severity == "warning"
    assert "3.00 MiB could be pinned" in findings[0].message
    assert (cleared, driver.pinned) == ([1], {})


# --- host -----------------------------------------------------------------------------------------


def host(**changes: Any) -> Host:
    settings: dict[str, Any] = {
        "total_bytes": 64 * GIB, "available_bytes": 32 * GIB, "may_take_bytes": 32 * GIB,
        "bound_by": "available", "cgroup": ControlGroup(reason="no level sets a limit"),
        "transparent_huge_pages": "madvise", "numa_nodes": [NumaNode(node=0)],
        "process": Process(pid=1, memlock_limit_bytes=65536),
        "shm_total_bytes": GIB, "shm_free_bytes": GIB,
    }  # fmt: skip
    return Host(**{**settings, **changes})


HOSTS: list[tuple[dict[str, Any], bool, str, str]] = [
    ({}, False, "memory", "ok"),
    ({"may_take_bytes": 100 << 20, "bound_by": "cgroup"}, False, "memory", "error"),
    ({"may_take_bytes": None}, False, "memory", "warning"),
    ({}, False, "cgroup", "ok"),
    ({"cgroup": ControlGroup(interface="cgroup-v2", limit_bytes=GIB, free_bytes=1, level=1)},
     False, "cgroup", "info"),
    ({"cgroup": ControlGroup(reason="control groups unreadable: no right")}, False, "cgroup",
     "warning"),
    ({}, False, "memlock", "info"),
    ({}, True, "memlock", "warning"),
    ({"process": None}, True, "memlock", "info"),
    ({"transparent_huge_pages": "never"}, False, "huge pages", "warning"),
    ({"transparent_huge_pages": None}, False, "huge pages", "info"),
    ({}, False, "huge pages", "ok"),
    ({"numa_nodes": []}, False, "numa", "info"),
    ({"numa_nodes": [NumaNode(node=0), NumaNode(node=1, total_bytes=GIB)]}, False, "numa", "info"),
    ({"shm_total_bytes": None}, False, "/dev/shm", "info"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "has_gpu", "check", "severity"), HOSTS)
def test_hosts(changes: dict[str, Any], has_gpu: bool, check: str, severity: str) -> None:
    findings = check_host(host(**changes), has_gpu=has_gpu)
    assert severity_of(findings, check) == severity
    advised(findings)


def test_no_limit_of_locked_memory() -> None:
    process = Process(pid=1)
    process.reasons["memlock_limit_bytes"] = NO_LIMIT
    assert severity_of(check_host(host(process=process), has_gpu=True), "memlock") == "ok"


def test_this_host() -> None:
    advised(check_host(read_host()))


# --- compiled code --------------------------------------------------------------------------------


def layers(*missing: str) -> Any:
    def load(name: str) -> None:
        if any(name.endswith(module) for module in missing):
            raise ImportError(name)

    return load


def test_threading_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    monkeypatch.setattr(numba.config, "THREADING_LAYER", "default")
    assert "tbb (usable: tbb, omp, workqueue)" in check_threads(layers())[0].message
    only = check_threads(layers("tbbpool", "omppool"))
    assert (only[0].severity, "one at a time" in only[0].message) == ("info", True)
    none = check_threads(layers("tbbpool", "omppool", "workqueue"))
    assert severity_of(none, "threading layer") == "error"
    monkeypatch.setattr(numba.config, "THREADING_LAYER", "tbb")
    asked = check_threads(layers("tbbpool"))
    assert severity_of(asked, "threading layer") == "error"
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 9999)
    many = check_threads(layers())
    assert severity_of(many, "threads") == "warning"
    for findings in (only, none, asked, many):
        advised(findings)


def test_the_folder_of_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f.nbi").write_bytes(b"x" * 1024)
    (tmp_path / "a" / "f.nbc").write_bytes(b"x" * 1024)
    (tmp_path / "other").write_bytes(b"x" * 4096)
    found = check_cache([tmp_path])
    assert found[0].severity == "ok"
    assert "2 files, 2.00 KiB" in found[0].message
    assert check_cache([tmp_path / "not" / "there"])[0].severity == "ok"

    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compile_caches() == [tmp_path]
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert [place.name for place in compile_caches()] == ["kvmem", "cuda_kernels"]

    def refused(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    assert not is_writable(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_caches() == [tmp_path / "numba"]
    findings = check_cache([tmp_path])
    assert findings[0].severity == "warning"
    advised(findings)


# --- what may be published ------------------------------------------------------------------------


def test_nothing_private_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/cassandra")
    monkeypatch.setenv("USER", "cassandra")
    monkeypatch.setattr("socket.gethostname", lambda: "tower-of-cassandra")

    def secret() -> list[Finding]:
        text = (
            "at /home/cassandra/x and /home/helenos/y on tower-of-cassandra by cassandra, "
            "redis://me:hunter2@host:1/0, /opt/home/kept"
        )
        return [Finding("x", "info", text, text)]

    finding = run_checks([("x", secret)])[0]
    for text in (finding.message, finding.advice):
        assert "hunter2" not in text
        assert "cassandra" not in text
        assert "helenos" not in text
        assert "~/x" in text
    assert cleaned("root of all", ["root"]) == "root of all"


def test_the_real_output_names_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "cassandra")
    text = json.dumps(diagnose().to_dict())
    assert str(tmp_path) not in text
    assert "cassandra" not in text
    assert os.uname().nodename not in text or len(os.uname().nodename) <= 2


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> list[Finding]:
        raise ZeroDivisionError("odd")

    seen: list[str] = []
    found = run_checks([("odd one", broken), ("next", list)], seen.append)
    assert seen == ["odd one", "next"]
    assert found[0].severity == "warning"
    assert "ZeroDivisionError: odd" in found[0].message
