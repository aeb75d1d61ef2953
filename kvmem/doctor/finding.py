"""One finding, and the removal of what must not be published."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: "error": kvmem would not start or not work. "warning": it works, but worse than it could.
#: "info": worth knowing. "ok": as it should be.
SEVERITIES = ("ok", "info", "warning", "error")

_HOMES = re.compile(r"(?<![\w.])(/(?:home|Users)/)[^/\s'\"]+")
_PASSWORD = re.compile(r"(\w+://)[^/\s@]+@")
#: User and host names that are words of the language or of every machine.
_PUBLIC_NAMES = {"root", "user", "admin", "localhost", "ubuntu", "debian", "runner", "python"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found."""

    check: str  # what was looked at, e.g. "torch"
    severity: str  # one of SEVERITIES
    message: str
    advice: str = ""  # what to do; empty where nothing is to be done


def published(finding: Finding) -> Finding:
    """The finding without user names, host names, home folders and passwords."""
    return Finding(
        finding.check, finding.severity, cleaned(finding.message), cleaned(finding.advice)
    )


def cleaned(text: str, names: Sequence[str] | None = None) -> str:
    """``text`` without what tells whose machine this is. ``names``: instead of the own ones."""
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    text = _HOMES.sub(r"\1<user>", text)
    text = _PASSWORD.sub(r"\1<secret>@", text)
    for name in _own_names() if names is None else names:
        if len(name) > 2 and name.lower() not in _PUBLIC_NAMES:
            text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def _own_names() -> list[str]:
    """Names of this user and this host, as far as they can be had."""
    found = [os.environ.get(key, "") for key in ("USER", "LOGNAME", "SUDO_USER")]
    with suppress(OSError):
        found.append(socket.gethostname())
    return found
