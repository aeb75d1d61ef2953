"""The host: its memory, the limits of this process, locked and shared memory, pages, NUMA nodes.

Files are read below ``Roots``, so that tests can give a machine that is not this one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvmem.budget import ControlGroup, Limit, host_budget
from kvmem.report.reasons import Reasons

NO_LIMIT = "no limit"


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel describes itself."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")


@dataclass(slots=True, kw_only=True)
class NumaNode:
    """One node, in bytes; some virtual machines make these up."""

    node: int
    total_bytes: int | None = None
    free_bytes: int | None = None
    cpus: str | None = None  # "0-7,16-23"
    reasons: Reasons = field(default_factory=Reasons)


@dataclass(slots=True, kw_only=True)
class Process:
    """One process, in bytes."""

    pid: int
    name: str | None = None
    resident_bytes: int | None = None
    virtual_bytes: int | None = None
    swapped_bytes: int | None = None
    locked_bytes: int | None = None  # mlock
    pinned_bytes: int | None = None  # held in place by drivers, e.g. registered with CUDA
    memlock_limit_bytes: int | None = None
    reasons: Reasons = field(default_factory=Reasons)


@dataclass(slots=True, kw_only=True)
class Host:
    """Memory of the machine and what of it this process may still take, in bytes."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    may_take_bytes: int | None = None  # the tightest limit: what a Manager is checked against
    bound_by: str | None = None
    limits: list[Limit] = field(default_factory=list)
    cgroup: ControlGroup | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    huge_pages_total: int | None = None
    huge_pages_free: int | None = None
    huge_page_bytes: int | None = None
    transparent_huge_pages: str | None = None  # "always", "madvise", "never"
    numa_nodes: list[NumaNode] = field(default_factory=list)
    process: Process | None = None
    reasons: Reasons = field(default_factory=Reasons)


def read_host(*, pid: int | None = None, roots: Roots | None = None) -> Host:
    """The host and the process ``pid`` (default: this one). Never raises. Limits are those of this
    process. Cost: some milliseconds."""
    places = roots or Roots()
    host = Host()
    reasons = host.reasons
    memory = reasons.get_or_say("total_bytes", psutil.virtual_memory)
    if memory is None:
        reasons["available_bytes"] = reasons["total_bytes"]
    else:
        host.total_bytes, host.available_bytes = int(memory.total), int(memory.available)
    swap = reasons.get_or_say("swap_total_bytes", psutil.swap_memory)
    if swap is None:
        reasons["swap_used_bytes"] = reasons["swap_total_bytes"]
    else:
        host.swap_total_bytes, host.swap_used_bytes = int(swap.total), int(swap.used)
    budget = reasons.get_or_say("may_take_bytes", host_budget)
    if budget is None:
        reasons["bound_by"] = reasons["cgroup"] = reasons["may_take_bytes"]
    else:
        host.may_take_bytes, host.bound_by = budget.free_bytes, budget.bound_by
        host.limits, host.cgroup = list(budget.limits), budget.cgroup
        reasons.update({f"limit {name}": text for name, text in budget.reasons.items()})
    _shared_memory(host, places)
    _pages(host, places)
    host.numa_nodes = reasons.get_or_say("numa_nodes", lambda: numa_nodes(places)) or []
    host.process = read_process(os.getpid() if pid is None else pid, places)
    return host


def _shared_memory(host: Host, roots: Roots) -> None:
    found = host.reasons.get_or_say("shm_total_bytes", lambda: os.statvfs(roots.shm))
    if found is None:
        host.reasons["shm_free_bytes"] = host.reasons["shm_total_bytes"]
        return
    host.shm_total_bytes = found.f_blocks * found.f_frsize
    host.shm_free_bytes = found.f_bavail * found.f_frsize


def _pages(host: Host, roots: Roots) -> None:
    reasons = host.reasons
    names = {
        "huge_pages_total": "HugePages_Total",
        "huge_pages_free": "HugePages_Free",
        "huge_page_bytes": "Hugepagesize",
    }
    fields = reasons.get_or_say("huge_pages_total", lambda: keyed(roots.proc / "meminfo"))
    for name, key in names.items():
        value = (fields or {}).get(key)
        if value is None:
            reasons.setdefault(name, reasons.get("huge_pages_total", f"no {key} in meminfo"))
        setattr(host, name, value)
    switch = roots.sys / "kernel/mm/transparent_hugepage/enabled"
    host.transparent_huge_pages = reasons.get_or_say(
        "transparent_huge_pages", lambda: _chosen(switch.read_text())
    )


def _chosen(text: str) -> str:
    """The word in brackets: ``always [madvise] never``."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else text.strip()


def numa_nodes(roots: Roots) -> list[NumaNode]:
    """The nodes that the kernel shows, in order."""
    folder = roots.sys / "devices/system/node"
    numbers = sorted(
        int(path.name[4:]) for path in folder.iterdir() if re.fullmatch(r"node\d+", path.name)
    )
    return [_numa_node(folder / f"node{number}", number) for number in numbers]


def _numa_node(folder: Path, number: int) -> NumaNode:
    node = NumaNode(node=number)
    fields = node.reasons.get_or_say("total_bytes", lambda: keyed(folder / "meminfo"))
    if fields is None:
        node.reasons["free_bytes"] = node.reasons["total_bytes"]
    else:
        node.total_bytes, node.free_bytes = fields.get("MemTotal"), fields.get("MemFree")
    cpus = folder / "cpulist"
    node.cpus = node.reasons.get_or_say("cpus", lambda: cpus.read_text().strip() or None)
    return node


def read_process(pid: int, roots: Roots) -> Process:
    """One process by its number; each field that can't be read is None."""
    process = Process(pid=pid)
    reasons = process.reasons
    handle = reasons.get_or_say("name", lambda: psutil.Process(pid))
    if handle is None:
        for name in ("resident_bytes", "virtual_bytes"):
            reasons[name] = reasons["name"]
    else:
        process.name = reasons.get_or_say("name", handle.name)
        memory = reasons.get_or_say("resident_bytes", handle.memory_info)
        if memory is None:
            reasons["virtual_bytes"] = reasons["resident_bytes"]
        else:
            process.resident_bytes, process.virtual_bytes = int(memory.rss), int(memory.vms)
    status = roots.proc / str(pid) / "status"
    fields = reasons.get_or_say("swapped_bytes", lambda: keyed(status)) or {}
    keys = {"swapped_bytes": "VmSwap", "locked_bytes": "VmLck", "pinned_bytes": "VmPin"}
    for name, key in keys.items():
        setattr(process, name, fields.get(key))
        if key not in fields:
            reasons.setdefault(name, reasons.get("swapped_bytes", f"the kernel tells no {key}"))
    limit = reasons.get_or_say("memlock_limit_bytes", lambda: memlock(roots, pid))
    if limit == -1:
        reasons["memlock_limit_bytes"] = NO_LIMIT
    else:
        process.memlock_limit_bytes = limit
    return process


def memlock(roots: Roots, pid: int) -> int:
    """Bytes that a process may lock (the soft limit); -1: no limit. Raises OSError, ValueError."""
    for line in (roots.proc / str(pid) / "limits").read_text().splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return -1 if soft == "unlimited" else int(soft)
    raise ValueError("the kernel tells no limit of locked memory")


def keyed(path: Path) -> dict[str, int]:
    """``Name:  123 kB`` lines as bytes, and those without a unit as numbers. Raises OSError."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        match = re.fullmatch(r"(?:Node \d+ )?(\w+):\s+(\d+)( kB)?", line.strip())
        if match:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found
