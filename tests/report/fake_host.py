"""Control groups of a machine that is not this one, as folders of files."""

from __future__ import annotations

from pathlib import Path

import proclimits
import pytest

MIB = 2**20
SENTINEL = 2**63 - 4096  # how version 1 writes "no limit"
MACHINE = 16 * 2**30  # memory of the fake machine


class FakeGroups:
    """One or both versions of control groups below ``root``; this process is in ``own``."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, *, machine: int = MACHINE) -> None:
        self.root = root
        self._mounts: list[str] = []
        self._members: list[str] = []
        files = {"_PROC_SELF_CGROUP": "cgroup", "_PROC_SELF_MOUNTINFO": "mountinfo"}
        for name, file in files.items():
            (root / file).write_text("")
            patch.setattr(f"proclimits._cgroup.{name}", root / file)
        (root / "meminfo").write_text(f"MemTotal: {machine // 1024} kB\n")
        patch.setattr("proclimits._cgroup._PROC_MEMINFO", root / "meminfo")
        proclimits.clear_cache()

    def mount(self, version: int, own: str, *, controllers: str = "memory") -> None:
        """Mount a hierarchy and put this process into ``own``."""
        point = self.root / f"v{version}"
        point.mkdir(exist_ok=True)
        number = len(self._mounts) + 30
        if version == 2:
            (point / "cgroup.controllers").write_text(f"{controllers}\n")
            self._mounts.append(f"{number} 1 0:{number} / {point} rw - cgroup2 cgroup2 rw")
            self._members.append(f"0::{own}")
        else:
            self._mounts.append(
                f"{number} 1 0:{number} / {point} rw - cgroup cgroup rw,{controllers}"
            )
            self._members.append(f"{number}:{controllers}:{own}")
        (self.root / "mountinfo").write_text("\n".join(self._mounts) + "\n")
        (self.root / "cgroup").write_text("\n".join(self._members) + "\n")

    def group(
        self,
        version: int,
        path: str,
        *,
        limit: int | str | None = None,
        used: int | str | None = 0,
        inactive_file: int = 0,
    ) -> Path:
        """The files of one group. ``limit=None``: a group without a limit file (the root)."""
        folder = self.root / f"v{version}" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        if limit is not None:
            (folder / names[0]).write_text(f"{limit}\n")
        if used is not None:
            (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive_file}\n")
        return folder
