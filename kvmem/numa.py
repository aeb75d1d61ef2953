"""On which NUMA node the host tier of a GPU shall lie."""

from __future__ import annotations

from kvmem.checks import integer, shown
from kvmem.errors import ConfigError

#: The node that the GPU hangs on.
OF_GPU = "gpu"
MAX_NODE = 1023


def checked_node(value: object, device: str) -> int | str | None:
    """A node's number, "gpu" or None (the system's choice). Raises ConfigError, TypeError."""
    if value is None:
        return None
    if not device.startswith("cuda"):
        raise ConfigError(
            f"numa_node={shown(value)} needs device='cuda', not {device!r}: leave it out, or start "
            "the process with numactl"
        )
    if isinstance(value, str):
        if value != OF_GPU:
            raise ConfigError(f"numa_node={shown(value)} is unknown; allowed: 'gpu', a number")
        return value
    return integer("numa_node", value, low=0, high=MAX_NODE, error=ConfigError)
