"""The bandwidth of a swap on this machine, by swapping a sequence out and in with a Manager."""

from __future__ import annotations

import math
import time

import numpy as np

import kvmem
from kvmem.budget import free_host_bytes

_TARGET_BYTES = 128 << 20  # moved one way in a round: past the caches, short to wait for
_ROUNDS = 3


def swap_bandwidth(config: kvmem.Config) -> int:
    """Bytes a second, the slower of the two directions, best of three rounds.

    Frames have the size of ``config``'s. Raises ConfigError where not even two blocks a tier fit
    the free memory. Takes seconds; the first call of a fresh install also compiles the copy.
    """
    frame = config.geometry.frame_bytes
    room = min(_TARGET_BYTES, free_host_bytes() // 8)
    blocks = max(2, min(4096, room // frame))
    small = kvmem.Config(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        block_size=config.block_size,
        device_blocks=blocks,
        host_blocks=blocks,
    )
    tokens = np.arange(blocks * config.block_size, dtype=np.int32)
    best = {"out": math.inf, "in": math.inf}
    with kvmem.Manager(small) as manager:
        for _ in range(_ROUNDS + 1):  # the first one compiles and takes the pages
            sequence = manager.create(tokens, publish=False)
            with manager.step([sequence]):
                pass
            begin = time.perf_counter()
            manager.swap_out([sequence]).wait()
            middle = time.perf_counter()
            manager.evict(blocks)
            again = time.perf_counter()
            manager.swap_in([sequence]).wait()
            end = time.perf_counter()
            manager.free([sequence])
            best["out"] = min(best["out"], middle - begin)
            best["in"] = min(best["in"], end - again)
    return int(blocks * frame / max(best.values()))
