"""Host memory that this process may still take: the tightest of all that limits it.

A container's limit is invisible to ``psutil``, and a pool sized by the machine behind it gets the
process killed, not refused. The other way round, a neighbour that eats the machine makes a generous
container limit worthless. So each limit is asked how much it leaves, and the least of them counts:
what the machine has available, the control groups of both versions with all levels above this
process (``proclimits``), the address space (``ulimit -v``), and a cap of the user's own
(``KVMEM_HOST_LIMIT``). ``kvmem report``, a share in a Config and the check of a Manager all call
``host_budget``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from kvmem.checks import shown
from kvmem.errors import ConfigError
from kvmem.sizes import SIZE_FORMS, parse_size

#: Environment variable with the most host memory that this process may use in all, e.g. "24GiB".
CAP_VARIABLE = "KVMEM_HOST_LIMIT"

AVAILABLE, CONTROL_GROUP, ADDRESS_SPACE, CAP = "available", "cgroup", "address space", CAP_VARIABLE


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that bounds the host memory of this process, in bytes."""

    name: str  # "available", "cgroup", "address space" or "KVMEM_HOST_LIMIT"
    limit_bytes: int
    free_bytes: int  # what it leaves; never negative


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The memory limit of the control groups around this process; None: there is none."""

    interface: str | None = None  # "cgroup-v1", "cgroup-v2"
    limit_bytes: int | None = None
    used_bytes: int | None = None  # charged against that limit, reclaimable file pages left out
    free_bytes: int | None = None
    level: int | None = None  # whose limit it is: 0 the own group, 1 the one above, ...
    num_levels: int = 0  # groups that were asked
    notes: tuple[str, ...] = ()  # codes of what was dropped or could not be read, and why
    reason: str | None = None  # why ``limit_bytes`` is None


@dataclass(frozen=True, slots=True)
class HostBudget:
    """What may still be allocated, and which limit says so."""

    free_bytes: int
    bound_by: str  # the name of the tightest limit
    limits: tuple[Limit, ...]
    cgroup: ControlGroup
    reasons: Mapping[str, str] = field(default_factory=dict)  # limits that could not be read


def free_host_bytes() -> int:
    """Bytes that can still be allocated. Raises and costs as ``usable_budget``."""
    return usable_budget().free_bytes


def free_gpu_bytes(device: str) -> int:
    """Bytes that a GPU ("cuda", "cuda:1") has free, for whoever asks first.

    Raises ConfigError where it can't be asked. Makes CUDA's context on it, if there is none.
    """
    import torch

    try:
        free, _ = torch.cuda.mem_get_info(torch.device(device))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"the free memory of device={device!r} can't be asked for here "
            f"({str(error).splitlines()[0][:100]}); give the tier in blocks or bytes"
        ) from error
    return int(free)


def usable_budget() -> HostBudget:
    """As ``host_budget``, but a cap that can't be read raises ConfigError: ignoring it could be
    fatal. Cost: about 1 ms, a few small files are read."""
    budget = host_budget()
    if CAP in budget.reasons:
        raise ConfigError(budget.reasons[CAP])
    return budget


def host_budget(environment: Mapping[str, str] | None = None) -> HostBudget:
    """All limits and the tightest. Never raises; what can't be read is in ``reasons``.

    ``environment`` replaces that of the process. Cost: as ``usable_budget``.
    """
    memory = psutil.virtual_memory()
    limits = [Limit(AVAILABLE, int(memory.total), int(memory.available))]
    reasons: dict[str, str] = {}
    group = control_group()
    if group.limit_bytes is not None and group.free_bytes is not None:
        limits.append(Limit(CONTROL_GROUP, group.limit_bytes, group.free_bytes))
    elif group.reason:
        reasons[CONTROL_GROUP] = group.reason
    try:
        own = psutil.Process().memory_info()
    except psutil.Error as error:
        reasons["process"] = f"own memory unreadable: {type(error).__name__}"
        own = None
    if own is not None and (space := _address_space()) is not None:
        limits.append(Limit(ADDRESS_SPACE, space, max(0, space - int(own.vms))))
    cap, reason = _cap(os.environ if environment is None else environment)
    if reason:
        reasons[CAP] = reason
    if cap is not None:
        limits.append(Limit(CAP, cap, max(0, cap - (int(own.rss) if own else 0))))
    tightest = min(limits, key=lambda limit: limit.free_bytes)
    return HostBudget(tightest.free_bytes, tightest.name, tuple(limits), group, reasons)


def control_group() -> ControlGroup:
    """The tightest memory limit on the way from this process's control group to the root."""
    try:
        import proclimits

        proclimits.clear_cache()  # a process may have been moved since the last look
        found = proclimits.describe()
    except Exception as error:  # psutil's figure then stands alone; the report says why
        return ControlGroup(reason=f"control groups unreadable: {type(error).__name__}: {error}")
    source = found.memory_source
    levels = source.levels if source else ()
    notes = tuple(str(notice.code) for notice in found.notices if "memory" in notice.code)
    budget = found.memory_budget
    limit, used, free = found.raw_memory_limit, None, None
    level = None
    if budget is not None:
        limit, used, free = budget.limit, budget.used, budget.available
    elif limit is not None and "memory-usage-unreadable" in notes:
        # The limit is enforced though nobody says how much of it is taken: what this process
        # holds is the least it can be.
        used = int(psutil.Process().memory_info().rss)
        free = max(0, limit - used)
    else:
        limit = None
    if limit is not None and found.memory_limit_level in levels:
        level = levels.index(found.memory_limit_level)
    return ControlGroup(
        interface=str(source.interface) if source else None,
        limit_bytes=limit,
        used_bytes=used,
        free_bytes=free,
        level=level,
        num_levels=len(levels),
        notes=notes,
        reason=None if limit is not None else _no_limit(notes),
    )


def _no_limit(notes: tuple[str, ...]) -> str:
    """Why there is no limit of a control group, in words."""
    if "memory-metrics-unavailable" in notes:
        return "no control group with memory here"
    for note in ("memory-limit-unreadable", "machine-memory-unknown"):
        if note in notes:
            return f"a limit could not be judged ({note})"
    return "no level sets a limit below the machine's memory"


def _address_space() -> int | None:
    """Bytes of RLIMIT_AS, None for none (or on a system without it)."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def _cap(environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    """The user's cap in bytes, or why it can't be used."""
    text = environment.get(CAP_VARIABLE, "").strip()
    if not text:
        return None, None
    cap = parse_size(text)
    if not cap:
        return None, f"{CAP_VARIABLE}={shown(text)} is no size: give {SIZE_FORMS}, or unset it"
    return cap, None
