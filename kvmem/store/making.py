"""Which device a config means; the others are not even imported."""

from __future__ import annotations

from dataclasses import replace

from kvmem.sim_options import SimOptions
from kvmem.store.device import Device
from kvmem.store.layout import StoreConfig


def make_device(config: StoreConfig) -> Device:
    """The device of ``config.device``. ``sync=True`` makes a simulated one run everything at once.

    Raises ``ValueError`` for a name that Config would not have let through.
    """
    if config.device == "cpu":
        from kvmem.store.cpu import CpuDevice

        return CpuDevice(sync=config.sync)
    if config.device == "sim":
        from kvmem.store.sim import SimDevice

        options = config.sim if config.sim is not None else SimOptions()
        if config.sync:
            options = replace(options, mode="eager", starve=None, not_yet=0.0)
        return SimDevice(options)
    raise ValueError(f"device {config.device!r} is unknown; known: 'cpu', 'sim'")
