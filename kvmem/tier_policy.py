"""Tier policies by name, their settings, and sizes under which the host tier caches nothing more.

With G blocks on the device and C on the host, a cache of least recently used blocks holds

    none           G
    write_back     up to G + C: what comes back from the host is in both tiers
    write_through  max(G, C): what is on the device is on the host too
    exclusive      G + C: a block is in one of the two
"""

from __future__ import annotations

from kvmem.checks import choice, shown
from kvmem.errors import ConfigError

TIER_POLICIES = ("write_back", "write_through", "exclusive", "none")

SMALLEST_SHARE = 20  # a host tier below a 20th of the device tier is not worth its copies


def checked_policy(value: object, host_blocks: int) -> str:
    """The policy asked for, or the one that is meant by None. Raises ConfigError, TypeError."""
    if value is None:
        return "write_back" if host_blocks else "none"
    policy = choice("tier_policy", value, TIER_POLICIES, error=ConfigError)
    if policy != "none" and not host_blocks:
        raise ConfigError(
            f"tier_policy={policy!r} needs a host tier: host_blocks (>= 1) or host_memory "
            "enables it; or say tier_policy='none'"
        )
    return policy


def checked_watermarks(value: object, policy: str) -> tuple[float, float] | None:
    """The two shares as floats. Raises ConfigError, TypeError."""
    if value is None:
        return None
    allowed = "allowed: None or a pair of shares (low, high), 0 < low <= high <= 1"
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"watermarks is {shown(value)}; {allowed}")
    for share in value:
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise TypeError(f"watermarks={shown(value)}: {shown(share)} is no number; {allowed}")
    low, high = value
    if not 0 < low <= high <= 1:
        raise ConfigError(f"watermarks={shown(value)} are out of range; {allowed}")
    if policy != "write_back":
        raise ConfigError(
            f"watermarks={shown(value)} say when tier_policy='write_back' copies ahead, and "
            f"tier_policy is {policy!r}: leave them out"
        )
    return float(low), float(high)


def useless_host_tier(policy: str, device_blocks: int, host_blocks: int) -> tuple[str, ...]:
    """What to tell of sizes that make the host tier useless as a cache; swapping works with any."""
    if policy == "write_through" and host_blocks <= device_blocks:
        return (
            f"tier_policy='write_through' caches the larger tier, not the sum: "
            f"host_blocks={host_blocks} add nothing to device_blocks={device_blocks}; give more "
            f"than {device_blocks} host blocks, or tier_policy='exclusive'",
        )
    if policy in ("write_back", "exclusive") and host_blocks * SMALLEST_SHARE < device_blocks:
        return (
            f"tier_policy={policy!r} caches at most device_blocks + host_blocks: "
            f"host_blocks={host_blocks} add less than 1/{SMALLEST_SHARE} to "
            f"device_blocks={device_blocks}; give more, or tier_policy='none'",
        )
    return ()
