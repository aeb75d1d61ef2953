"""Tiers as a cache study sees them: ordered dictionaries, no frames, no copies, no ledger."""

from __future__ import annotations

import gzip
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

Prompts = Sequence[Sequence[int]]

SAMPLES = Path(__file__).parent
_BESIDE = Path(__file__).parents[3] / "shared" / "traces"
WHOLE = Path(os.environ.get("KVMEM_TRACES", _BESIDE))


def prompts_in(path: Path) -> list[list[int]]:
    """The hash ids of each request, read by other code than kvmem's."""
    with gzip.open(path) as file:
        return [json.loads(line)["hash_ids"] for line in file]


def lru_hits(prompts: Prompts, blocks: int) -> int:
    """Blocks served by one least-recently-used cache: each prompt is touched tail first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in prompts:
        hits += leading(ids, cache)
        for i in reversed(ids):
            cache.pop(i, None)
            cache[i] = None
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits


def leading(ids: Sequence[int], *caches: OrderedDict[int, None]) -> int:
    """Blocks of the longest cached run from the head."""
    for run, i in enumerate(ids):
        if not any(i in cache for cache in caches):
            return run
    return len(ids)


def two_tier_hits(prompts: Prompts, device: int, host: int) -> int:
    """Blocks served by two tiers under write_back: what leaves the device is the host's newest,
    and what is read from the host stays there too."""
    upper: OrderedDict[int, None] = OrderedDict()
    lower: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in prompts:
        run = leading(ids, upper, lower)
        hits += run
        read = [i for i in ids[:run] if i not in upper]
        held = set(ids)
        for _ in range(len(upper) + sum(i not in upper for i in ids) - device):
            victim = next(i for i in upper if i not in held)
            del upper[victim]
            copied = lower.pop(victim, 0) is None
            if not copied and len(lower) >= host:
                oldest = next((i for i in lower if i not in read), None)
                if oldest is None:
                    continue
                del lower[oldest]
            lower[victim] = None
        for i in read:
            lower.move_to_end(i)
        for i in reversed(ids):
            upper.pop(i, None)
            upper[i] = None
    return hits


def exclusive_hits(prompts: Prompts, device: int, host: int, rounds: int) -> int:
    """Blocks served by two tiers of which only one ever holds a block. What comes in from a full
    host tier trades places with what goes out, in so many rounds, each of which needs room to
    begin with: what new blocks drive out anyway, else a share of what is read."""
    upper: OrderedDict[int, None] = OrderedDict()
    lower: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in prompts:
        run = leading(ids, upper, lower)
        hits += run
        read = [i for i in ids[:run] if i in lower]
        room, free = device - len(upper), host - len(lower)
        new = len(ids) - run
        going = max(0, len(read) + new - room)
        dropped = max(0, going - free)
        if read:
            dropped = min(dropped, max(0, new - room - free, -(-len(read) // rounds) - free))
        for i in ids:
            upper.pop(i, None)
            lower.pop(i, None)
        for _ in range(going):
            lower[upper.popitem(last=False)[0]] = None
        for _ in range(dropped):
            lower.popitem(last=False)
        for i in reversed(ids):
            upper[i] = None
    return hits
