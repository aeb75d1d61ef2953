"""Whether what a Config asks for is there, before anything of it is taken."""

from __future__ import annotations

from kvmem.budget import usable_budget
from kvmem.config import Config
from kvmem.errors import ConfigError
from kvmem.geometry import extra_frames, metadata_bytes
from kvmem.sizes import with_unit


def check_memory(config: Config, *, free_bytes: int | None = None) -> None:
    """Raise ConfigError where the arenas and records of ``config`` exceed the free host memory.

    A Manager calls it before it allocates. Free is what the tightest limit leaves, as in
    ``kvmem report``; ``free_bytes`` replaces it. Both tiers are host memory, so their sum counts,
    but for the device tier of a GPU, which refuses what it has not.
    """
    bound_by = "given"
    if free_bytes is None:
        budget = usable_budget()
        free_bytes, bound_by = budget.free_bytes, budget.bound_by
    plan = config.plan()
    asked = plan.host_bytes + plan.metadata_bytes
    if not config.on_gpu:
        asked += plan.device_bytes
    if asked <= free_bytes:
        return
    a_block = plan.block_bytes + metadata_bytes(1, config.block_size)
    tiers = 2 if config.host_blocks else 1
    reserved = tiers * extra_frames(debug=config.debug) * plan.block_bytes
    largest = max(0, (free_bytes - reserved) // a_block)
    raise ConfigError(
        f"device_blocks={config.device_blocks} and host_blocks={config.host_blocks} ask for "
        f"{with_unit(asked)} ({asked} bytes), free are {with_unit(free_bytes)} ({free_bytes} "
        f"bytes, limit: {bound_by}): at most {largest} blocks in all tiers together fit; lower "
        f"them, or block_size"
    )
