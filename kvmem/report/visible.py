"""Which devices CUDA shows a process: the forms of ``CUDA_VISIBLE_DEVICES``, as CUDA reads them.

=========================  =====================================================================
not set                    all devices
``""``, ``-1``, a word     none (also what some schedulers write: ``NoDevFiles``)
``0,2``                    those, in this order; the first entry that is no device ends the list
``GPU-8932f937``           by UUID, or the beginning of one if only one device has it
``MIG-<uuid>``             one instance of a partitioned device
``MIG-GPU-<uuid>/1/0``     the same, as older drivers name it
=========================  =====================================================================

A device named twice means none. Numbers count in CUDA's order, which is that of the bus (and of
NVML) only under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; by default the fastest comes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"\+?(\d+)", re.ASCII)
_TWICE = "a device is named twice, so CUDA shows none"


@dataclass(frozen=True, slots=True)
class Visible:
    """The UUIDs of the devices that CUDA shows, first is ``cuda:0``.

    ``is_sure`` is False where numbers were resolved though the two orders may differ.
    """

    uuids: tuple[str, ...]
    is_sure: bool = True
    note: str = ""


def visible_devices(
    text: str | None,
    gpu_uuids: Sequence[str],
    mig_uuids: Sequence[str] = (),
    *,
    bus_order: bool = False,
) -> Visible:
    """The devices named by ``text`` (None: not set), among those of this machine in bus order.

    ``bus_order``: whether CUDA counts in that order, too. Pure; never raises.
    """
    sure = bus_order or len(gpu_uuids) < 2
    unsure = "" if sure else "numbers count in CUDA's own order; that of the bus is assumed"
    if text is None:
        return Visible(tuple(gpu_uuids), sure, unsure)
    entries = [entry.strip() for entry in text.split(",")]
    for kind, known in (("MIG-", mig_uuids), ("GPU-", gpu_uuids)):
        if entries[0].startswith(kind):
            return _by_prefix(entries, known, kind)
    numbers: list[int] = []
    for entry in entries:
        number = _NUMBER.match(entry)  # as strtoul: "1gpu" is 1
        if number is None:
            break
        if int(number[1][:9]) in numbers:
            return Visible((), True, _TWICE)
        numbers.append(int(number[1][:9]))
    found: list[str] = []
    for index in numbers:
        if index >= len(gpu_uuids):
            break
        found.append(gpu_uuids[index])
    if not found:
        return Visible((), True, f"CUDA_VISIBLE_DEVICES={text[:40]!r} names no device here")
    return Visible(tuple(found), sure, unsure)


def _by_prefix(entries: Sequence[str], known: Sequence[str], kind: str) -> Visible:
    """Devices by UUID or the beginning of one; the list ends at the first entry that is none."""
    found: list[str] = []
    for entry in entries:
        if not entry.startswith(kind):
            break
        matching = [uuid for uuid in known if uuid.lower().startswith(entry.lower())]
        if len(matching) != 1:
            break
        if matching[0] in found:
            return Visible((), True, _TWICE)
        found.append(matching[0])
    note = f"CUDA_VISIBLE_DEVICES={entries[0][:40]!r} names no single device here"
    return Visible(tuple(found), True, "" if found else note)
