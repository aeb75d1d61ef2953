"""The host side of a report, on fake proc and sys folders and beside the truth of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import kvmem
from kvmem.budget import free_host_bytes
from kvmem.cli import report as cli_report
from kvmem.report import MemoryReport, memory_report
from kvmem.report.host import Roots, read_host
from kvmem.report.manager_memory import present_bytes, read_manager
from kvmem.report.report import build_report

GIB = 2**30


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """A machine with two nodes, huge pages, and a process with pinned memory."""
    own = tmp_path / "proc" / str(os.getpid())
    own.mkdir(parents=True)
    (own / "status").write_text("Name:\tx\nVmLck:\t 64 kB\nVmPin:\t 2048 kB\nVmSwap:\t 8 kB\n")
    (own / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         65536                unlimited            bytes\n"
    )
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal: 1024 kB\nHugePages_Total:       8\nHugePages_Free:        3\n"
        "Hugepagesize:       2048 kB\n"
    )
    for node in (0, 1):
        folder = tmp_path / "sys" / "devices/system/node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(
            f"Node {node} MemTotal: 2048 kB\nNode {node} MemFree: 1024 kB\n"
        )
        (folder / "cpulist").write_text(f"{node * 8}-{node * 8 + 7}\n")
    (tmp_path / "sys" / "devices/system/node/possible").write_text("0-1\n")
    switch = tmp_path / "sys" / "kernel/mm/transparent_hugepage"
    switch.mkdir(parents=True)
    (switch / "enabled").write_text("[always] madvise never\n")
    return Roots(proc=tmp_path / "proc", sys=tmp_path / "sys", shm=tmp_path)


def test_a_machine_of_files(roots: Roots) -> None:
    host = read_host(roots=roots)
    assert (host.huge_pages_total, host.huge_pages_free) == (8, 3)
    assert (host.huge_page_bytes, host.transparent_huge_pages) == (2 << 20, "always")
    nodes = [(node.node, node.total_bytes, node.free_bytes, node.cpus) for node in host.numa_nodes]
    assert nodes == [(0, 2 << 20, 1 << 20, "0-7"), (1, 2 << 20, 1 << 20, "8-15")]
    process = host.process
    assert process is not None
    assert (process.locked_bytes, process.pinned_bytes, process.swapped_bytes) == (
        64 << 10, 2 << 20, 8 << 10,
    )  # fmt: skip
    assert process.memlock_limit_bytes == 65536
    assert host.shm_total_bytes
    limits = roots.proc / str(os.getpid()) / "limits"
    limits.write_text(limits.read_text().replace("65536    ", "unlimited"))
    process = read_host(roots=roots).process
    assert process is not None
    assert process.memlock_limit_bytes is None
    assert process.reasons["memlock_limit_bytes"] == "no limit"


def none_without_reason(record: Any, where: str = "") -> list[str]:
    """Paths of fields that are None while no reason stands beside them, anywhere in a report."""
    found: list[str] = []
    if isinstance(record, list):
        for index, entry in enumerate(record):
            found += none_without_reason(entry, f"{where}[{index}]")
    elif isinstance(record, dict):
        reasons = record.get("reasons")
        for name, value in record.items():
            if value is None and isinstance(reasons, dict) and name not in reasons:
                found.append(f"{where}.{name}")
            elif name != "cgroup":  # its one reason covers the whole record
                found += none_without_reason(value, f"{where}.{name}")
    return found


def test_an_empty_machine_gives_reasons(tmp_path: Path) -> None:
    nothing = Roots(proc=tmp_path / "a", sys=tmp_path / "b", shm=tmp_path / "c")
    report = build_report(None, None, nothing)
    assert none_without_reason(report.to_dict()) == []
    host = report.host
    assert "No such file" in host.reasons["numa_nodes"]
    assert "No such file" in host.reasons["shm_total_bytes"]
    assert host.process is not None
    assert "No such file" in host.process.reasons["memlock_limit_bytes"]
    text = str(cli_report.tables(report))
    assert "No such file" in text


def test_junk_gives_reasons(roots: Roots) -> None:
    for path in [*roots.proc.rglob("*"), *roots.sys.rglob("*")]:
        if path.is_file():
            path.write_bytes(b"\xff\x00junk: : 1 kB\n")
    report = build_report(None, None, roots)
    assert none_without_reason(report.to_dict()) == []
    cli_report.tables(report)


@pytest.mark.parametrize("call", ["virtual_memory", "swap_memory", "Process"])
def test_psutil_failing_in_each_call(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def failed(*_: object) -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, call, failed)
    report = memory_report()
    assert none_without_reason(report.to_dict()) == []
    cli_report.tables(report)


def test_beside_the_truth_of_this_machine() -> None:
    host = memory_report().host
    memory = psutil.virtual_memory()
    assert host.total_bytes == memory.total
    assert host.available_bytes == pytest.approx(memory.available, rel=0.1)
    assert host.may_take_bytes == pytest.approx(free_host_bytes(), rel=0.1)
    assert host.process is not None
    assert host.process.pid == os.getpid()


def test_a_report_needs_no_torch() -> None:
    code = (
        "import sys; from kvmem.cli.main import main; s = main(['report', '--json']); "
        "print(s, [m for m in ('torch', 'numba') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "0 []\n"
    assert json.loads(done.stdout)["schema"] == "kvmem.report/1"


# --- a Manager ------------------------------------------------------------------------------------


def small(**changes: Any) -> kvmem.Config:
    settings: dict[str, Any] = {
        "num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "block_size": 16,
        "device_blocks": 16, "host_blocks": 8,
    }  # fmt: skip
    return kvmem.Config(**{**settings, **changes})


def test_a_gib_in_the_manager_is_seen_within_one_percent() -> None:
    """The arena of 1 GiB is address space until it is written; then the report shows it as held,
    and the kernel's own figure for this process grows by as much."""
    if free_host_bytes() < 4 * GIB:
        pytest.skip("less than 4 GiB free")
    config = small(
        num_layers=16, num_kv_heads=8, device_blocks=None, host_blocks=0, device_memory=GIB
    )
    with kvmem.Manager(config) as manager:
        before = memory_report(manager)
        assert before.manager is not None and before.host.process is not None
        assert before.manager.requested_bytes == pytest.approx(GIB, rel=0.01)
        assert before.manager.held_bytes is not None
        assert before.manager.held_bytes < GIB // 100
        for layer in range(config.num_layers):
            for plane in manager.kv(layer):
                plane.fill_(1.0)
        after = memory_report(manager)
        assert after.manager is not None and after.host.process is not None
        assert after.manager.held_bytes == pytest.approx(GIB, rel=0.01)
        assert after.manager.tiers[0].held_bytes == after.manager.held_bytes
        grown = (after.host.process.resident_bytes or 0) - (before.host.process.resident_bytes or 0)
        assert grown == pytest.approx(GIB, rel=0.01)
    assert "closed" in memory_report(manager).reasons["manager"]


def test_blocks_by_tier_are_those_of_the_stats() -> None:
    with kvmem.Manager(small()) as manager:
        seqs = [manager.create(list(range(start, start + 40))) for start in (0, 100)]
        with manager.step(seqs):
            pass
        pin = manager.pin(seqs[0])
        manager.swap_out([seqs[1]]).wait()
        found = read_manager(manager)
        stats = manager.stats().to_dict()
        for tier in found.tiers:
            expected = dict(stats[tier.tier])  # type: ignore[call-overload]
            assert expected.pop("arena_bytes") == tier.requested_bytes
            assert tier.blocks == expected
        device, host = found.tiers
        assert (device.blocks["pinned"], device.blocks["used"], device.blocks["free"]) == (2, 6, 10)
        assert (device.blocks["evictable"], host.blocks["used"]) == (3, 3)
        assert (device.pinned_bytes, device.memory) == (0, "pageable host memory")
        assert found.metadata_bytes > 0
        report = memory_report(manager)
        text = str(cli_report.tables(report))
        assert "evictable" in text and "kvmem Manager (device cpu" in text
        assert none_without_reason(report.to_dict()) == []
        pin.release()
        manager.free(seqs)


def test_a_manager_whose_pages_cannot_be_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = tmp_path / "pagemap"
    short.write_bytes(b"1234")
    with pytest.raises(OSError, match="shorter"):
        present_bytes(0, 4096, short)

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvmem.report.manager_memory.present_bytes", refused)
    with kvmem.Manager(small()) as manager:
        report: MemoryReport = memory_report(manager)
    assert report.manager is not None
    assert report.manager.held_bytes is None
    assert report.manager.reasons["held_bytes"] == "Permission denied"
    assert none_without_reason(report.to_dict()) == []
    assert "Permission denied" in str(cli_report.tables(report))


@pytest.mark.parametrize("other", [7, "manager", small()])
def test_no_manager(other: Any) -> None:
    with pytest.raises(TypeError, match=r"manager must be a kvmem\.Manager or None, not"):
        memory_report(other)
