"""Host memory that this process may still take: the tightest of the machine and its control groups.

A container's limit is invisible to ``psutil``, and a pool sized by the machine behind it gets the
process killed, not refused. So both versions of control groups are asked too.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")

#: A limit at or above this is how control groups of version 1 write "none".
_UNLIMITED = 2**60


def free_host_bytes(*, cgroup_root: Path = _CGROUP_ROOT, self_cgroup: Path = _SELF_CGROUP) -> int:
    """Bytes that can still be allocated. Cost: a few small files are read.

    The arguments name the places where control groups are described; tests give their own.
    """
    free = int(psutil.virtual_memory().available)
    for limit_file, usage_file, stat_key in _cgroup_files(cgroup_root, self_cgroup):
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        # Clean file pages count as used, but are given back before anything fails.
        reclaimable = _stat(limit_file.parent / "memory.stat", stat_key)
        free = min(free, max(0, limit - usage + reclaimable))
    return free


def _cgroup_files(root: Path, self_cgroup: Path) -> list[tuple[Path, Path, str]]:
    """Limit and usage files of the groups of this process and of all groups above them."""
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return []
    files: list[tuple[Path, Path, str]] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2: one tree
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            group = base.joinpath(*parts[:depth])
            files.append((group / names[0], group / names[1], names[2]))
    return files


def _number(path: Path) -> int | None:
    """The integer in ``path``; None where there is none ("max", no such file, no right)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    """The value of ``key`` in a file of ``key value`` lines; 0 where it cannot be read."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
