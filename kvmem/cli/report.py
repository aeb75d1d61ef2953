"""``kvmem report``: memory of GPUs, processes and the host, once or as a live view."""

from __future__ import annotations

import argparse

import psutil

from kvmem.cli.output import Table, live_view, print_json, print_tables, size_text, watched
from kvmem.cli.parser import counted, seconds, shown, whole
from kvmem.report import MemoryReport, memory_report
from kvmem.report.gpu import Gpu
from kvmem.report.manager_memory import ManagerMemory

EXAMPLE = (
    "  kvmem report\n"
    "  kvmem report --json | python -m json.tool\n"
    "  kvmem report --watch 2 --pid 4711"
)

_UNKNOWN = "?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvmem report``."""
    parser.add_argument(
        "--watch",
        type=seconds,
        metavar="SECONDS",
        help="again and again: in place on a terminal, else one after the other (with --json one "
        "object a line); Ctrl-C ends it",
    )
    parser.add_argument("--count", type=counted, metavar="N", help="with --watch: stop after N")
    parser.add_argument(
        "--pid", type=whole, metavar="PID", help="of this process instead of the command's own"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report. What can't be found out is shown as ``?`` with the reason below, and is
    no finding: the status is 0."""
    fail = arguments.usage_error
    if arguments.count is not None and arguments.watch is None:
        fail("--count needs --watch SECONDS")
    pid = arguments.pid
    if pid is not None and (pid < 1 or pid >= 2**31 or not psutil.pid_exists(pid)):
        fail(f"--pid={shown(str(pid))}: there is no such process")
    if arguments.watch is None:
        report = memory_report(pid=pid)
        if arguments.json:
            print_json("report", report.to_dict())
        else:
            print_tables(tables(report))
        return 0
    ticks = watched(arguments.watch, arguments.count)
    if arguments.json:
        for _ in ticks:
            print_json("report", memory_report(pid=pid).to_dict(), lines=True)
    else:
        live_view(lambda: tables(memory_report(pid=pid)), ticks)
    return 0


def tables(report: MemoryReport) -> list[Table]:
    """The report for a person."""
    made = [_gpu_table(report)]
    processes = _process_rows(report)
    if processes:
        made.append(
            Table("processes on GPUs", ("gpu", "pid", "kind", "used", "name"), processes,
                  right=(1, 3))
        )  # fmt: skip
    if report.torch.devices:
        made.append(_torch_table(report))
    if report.manager is not None:
        made.append(_manager_table(report.manager))
    made += [
        Table("host", ("", ""), _host_rows(report)),
        Table("process", ("", ""), _own_rows(report)),
    ]
    reasons = _reason_rows(report)
    if reasons:
        made.append(Table("not known, and why", ("", ""), reasons))
    return made


def _gpu_table(report: MemoryReport) -> Table:
    gpus = report.gpus
    if not gpus.devices:
        return Table("gpus", ("", ""), [("none", gpus.reasons.get("devices", "no device"))])
    rows: list[tuple[str, ...]] = []
    for device in gpus.devices:
        for gpu in (device, *device.instances):
            rows.append(_gpu_row(gpu))
    columns = ("gpu", "cuda", "total", "used", "free", "reserved", "busy", "name")
    title = f"gpus (driver {gpus.driver or _UNKNOWN}, CUDA {gpus.cuda_driver or _UNKNOWN})"
    return Table(title, columns, rows, right=(2, 3, 4, 5, 6))


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    label = f"  mig {gpu.index}" if gpu.kind == "mig" else str(gpu.index)
    unified = " (unified: this is host memory)" if gpu.is_unified else ""
    return (
        label,
        "-" if gpu.cuda_index is None else f"cuda:{gpu.cuda_index}",
        *(
            _size(size)
            for size in (gpu.total_bytes, gpu.used_bytes, gpu.free_bytes, gpu.reserved_bytes)
        ),
        _UNKNOWN if gpu.utilization is None else f"{gpu.utilization} %",
        f"{gpu.name or _UNKNOWN}{unified}",
    )


def _process_rows(report: MemoryReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for device in report.gpus.devices:
        for gpu in (device, *device.instances):
            label = f"{device.index}" + (f" mig {gpu.index}" if gpu.kind == "mig" else "")
            for process in gpu.processes:
                name = (process.name or _UNKNOWN) + (" (this one)" if process.is_own else "")
                used = _size(process.used_bytes)
                rows.append((label, str(process.pid), process.kind, used, name))
    return rows


def _torch_table(report: MemoryReport) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            f"cuda:{device.cuda_index}",
            _size(device.allocated_bytes),
            _size(device.reserved_bytes),
            _size(device.peak_allocated_bytes),
        )
        for device in report.torch.devices
    ]
    pinned = report.torch.pinned_allocated_bytes, report.torch.pinned_reserved_bytes
    rows.append(("pinned host", _size(pinned[0]), _size(pinned[1]), ""))
    title = f"torch {report.torch.version} (CUDA {report.torch.cuda})"
    return Table(title, ("allocator", "live", "taken", "peak"), rows, right=(1, 2, 3))


def _manager_table(manager: ManagerMemory) -> Table:
    rows = [
        (
            tier.tier,
            _size(tier.requested_bytes),
            _size(tier.held_bytes),
            _size(tier.pinned_bytes),
            *(str(tier.blocks[name]) for name in ("total", "free", "used", "pinned", "evictable")),
        )
        for tier in manager.tiers
    ]
    columns = ("tier", "requested", "held", "pinned memory", "blocks", "free", "used", "pinned",
               "evictable")  # fmt: skip
    title = f"kvmem Manager (device {manager.device}, records {size_text(manager.metadata_bytes)})"
    return Table(title, columns, rows, right=tuple(range(1, 9)))


def _host_rows(report: MemoryReport) -> list[tuple[str, str]]:
    host = report.host
    rows = [
        ("memory", f"{_size(host.total_bytes)}, {_size(host.available_bytes)} available"),
        ("may take", f"{_size(host.may_take_bytes)}, bound by: {host.bound_by or _UNKNOWN}"),
    ]
    for limit in host.limits:
        text = f"{size_text(limit.limit_bytes)}, leaves {size_text(limit.free_bytes)}"
        rows.append((f"limit {limit.name}", text))
    group = host.cgroup
    if group is not None:
        where = f"{group.interface or 'none'}, {group.num_levels} levels"
        if group.level is not None:
            where += f", bound by the {_ordinal(group.level)}"
        rows.append(("cgroup", where if group.reason is None else f"{where}: {group.reason}"))
    rows += [
        ("swap", f"{_size(host.swap_total_bytes)}, {_size(host.swap_used_bytes)} used"),
        ("/dev/shm", f"{_size(host.shm_total_bytes)}, {_size(host.shm_free_bytes)} free"),
        (
            "huge pages",
            f"{_number(host.huge_pages_free)} of {_number(host.huge_pages_total)} free, "
            f"{_size(host.huge_page_bytes)} each; transparent: "
            f"{host.transparent_huge_pages or _UNKNOWN}",
        ),
    ]
    for node in host.numa_nodes:
        rows.append(
            (f"NUMA node {node.node}", f"{_size(node.total_bytes)}, {_size(node.free_bytes)} free, "
                                       f"cpus {node.cpus or _UNKNOWN}")
        )  # fmt: skip
    return rows


def _ordinal(level: int) -> str:
    return "own group" if level == 0 else f"group {level} above"


def _own_rows(report: MemoryReport) -> list[tuple[str, str]]:
    process = report.host.process
    if process is None:
        return [("pid", _UNKNOWN)]
    unlimited = process.reasons.get("memlock_limit_bytes") == "no limit"
    memlock = "no limit" if unlimited else _size(process.memlock_limit_bytes)
    return [
        ("pid", f"{process.pid} {process.name or _UNKNOWN}"),
        ("resident", _size(process.resident_bytes)),
        ("address space", _size(process.virtual_bytes)),
        ("swapped out", _size(process.swapped_bytes)),
        ("locked", f"{_size(process.locked_bytes)} locked, {_size(process.pinned_bytes)} pinned; "
                   f"may lock {memlock}"),
    ]  # fmt: skip


def _reason_rows(report: MemoryReport) -> list[tuple[str, str]]:
    """Each reason once, with the fields it is for; what is plain from the tables is left out."""
    found: dict[str, list[str]] = {}

    def add(where: str, reasons: dict[str, str]) -> None:
        for name, text in reasons.items():
            found.setdefault(text, []).append(f"{where}{name}")

    for device in report.gpus.devices:
        for gpu in (device, *device.instances):
            label = f"gpu {device.index} " + (f"mig {gpu.index} " if gpu.kind == "mig" else "")
            hidden = {"cuda_index", "is_unified"}
            add(label, {k: v for k, v in gpu.reasons.items() if k not in hidden})
            for process in gpu.processes:
                add(f"{label}pid {process.pid} ", process.reasons)
    if report.gpus.devices:
        add("gpus ", {k: v for k, v in report.gpus.reasons.items() if k != "visible"})
    if report.torch.devices:
        add("torch ", report.torch.reasons)
    add("host ", {k: v for k, v in report.host.reasons.items() if k != "limit cgroup"})
    if report.host.process is not None:
        add("process ", {k: v for k, v in report.host.process.reasons.items() if v != "no limit"})
    if report.manager is not None:
        for tier in report.manager.tiers:
            add(f"{tier.tier} ", tier.reasons)
    return [(", ".join(names), text) for text, names in found.items()]


def _size(num_bytes: int | None) -> str:
    return _UNKNOWN if num_bytes is None else size_text(num_bytes)


def _number(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)
