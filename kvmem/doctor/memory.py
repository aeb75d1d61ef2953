"""Memory of the host: what may be taken, locked memory, shared memory, pages, NUMA."""

from __future__ import annotations

from kvmem.budget import CAP_VARIABLE
from kvmem.doctor.finding import Finding
from kvmem.report.host import Host, read_host
from kvmem.sizes import with_unit

LITTLE_BYTES = 256 << 20
_MEMLOCK_ADVICE = (
    "ulimit -l unlimited; for a service LimitMEMLOCK=infinity; for a container --ulimit memlock=-1"
)


def check_host(host: Host | None = None, *, has_gpu: bool = False) -> list[Finding]:
    """All findings about the host; ``host`` replaces what is measured."""
    found = read_host() if host is None else host
    return [
        *_budget(found),
        _cgroup(found),
        _memlock(found, has_gpu=has_gpu),
        _pages(found),
        *_numa(found),
        _shared(found),
    ]


def _budget(host: Host) -> list[Finding]:
    findings = []
    if text := host.reasons.get(f"limit {CAP_VARIABLE}"):
        findings.append(Finding("memory", "error", text, f"mend or unset {CAP_VARIABLE}"))
    if host.may_take_bytes is None:
        why = host.reasons.get("may_take_bytes", "unknown")
        return [*findings, Finding("memory", "warning", f"could not be read: {why}")]
    total = "?" if host.total_bytes is None else with_unit(host.total_bytes)
    text = f"{with_unit(host.may_take_bytes)} may be taken of {total}, bound by {host.bound_by}"
    if host.may_take_bytes < LITTLE_BYTES:
        advice = f"raise the limit '{host.bound_by}', or end other processes"
        return [*findings, Finding("memory", "error", text, advice)]
    return [*findings, Finding("memory", "ok", text)]


def _cgroup(host: Host) -> Finding:
    group = host.cgroup
    if group is None or group.limit_bytes is None:
        why = (group.reason if group else None) or host.reasons.get("cgroup", "unknown")
        broken = "unreadable" in why
        advice = "limits of a container are then not seen: set KVMEM_HOST_LIMIT" if broken else ""
        return Finding("cgroup", "warning" if broken else "ok", why, advice)
    free = with_unit(group.free_bytes or 0)
    where = "the own group" if group.level == 0 else f"a group {group.level} above"
    text = f"{group.interface} limits {where} to {with_unit(group.limit_bytes)}, {free} are left"
    return Finding("cgroup", "info", text)


def _memlock(host: Host, *, has_gpu: bool) -> Finding:
    process = host.process
    reason = "unknown" if process is None else process.reasons.get("memlock_limit_bytes")
    if reason == "no limit":
        return Finding("memlock", "ok", "no limit")
    if process is None or process.memlock_limit_bytes is None:
        return Finding("memlock", "info", f"could not be read: {reason}")
    text = f"{with_unit(process.memlock_limit_bytes)} may be locked"
    if has_gpu:
        return Finding("memlock", "warning", f"{text}: less than a host tier", _MEMLOCK_ADVICE)
    return Finding("memlock", "info", f"{text}; device='cpu' locks nothing")


def _pages(host: Host) -> Finding:
    switch = host.transparent_huge_pages
    if switch is None:
        why = host.reasons.get("transparent_huge_pages", "unknown")
        return Finding("huge pages", "info", f"transparent ones unknown: {why}")
    if switch == "never":
        return Finding(
            "huge pages",
            "warning",
            "transparent ones are off: paged attention touches many pages",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Finding("huge pages", "ok", f"transparent: {switch}")


def _numa(host: Host) -> list[Finding]:
    if not host.numa_nodes:
        why = host.reasons.get("numa_nodes", "no node")
        return [Finding("numa", "info", f"unknown: {why}")]
    if len(host.numa_nodes) == 1:
        return [Finding("numa", "ok", "one node")]
    sizes = ", ".join(
        f"{node.node}: {'?' if node.total_bytes is None else with_unit(node.total_bytes)}"
        for node in host.numa_nodes
    )
    return [
        Finding(
            "numa",
            "info",
            f"{len(host.numa_nodes)} nodes ({sizes}); memory of another node is slower",
            "numactl --cpunodebind=0 --membind=0 keeps a process on one",
        )
    ]


def _shared(host: Host) -> Finding:
    if host.shm_total_bytes is None or host.shm_free_bytes is None:
        why = host.reasons.get("shm_total_bytes", "unknown")
        return Finding("/dev/shm", "info", f"unknown: {why}")
    free, total = with_unit(host.shm_free_bytes), with_unit(host.shm_total_bytes)
    return Finding("/dev/shm", "ok", f"{free} of {total} free; kvmem uses none of it")
