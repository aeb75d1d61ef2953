"""A config as small as the store needs, and short names for what its tests write often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvmem.sim_options import SimOptions
from kvmem.store import DEVICE, Store


@dataclass(frozen=True)
class FakeConfig:
    num_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    k_scale: tuple[tuple[float, ...], ...] | None = None
    v_scale: tuple[tuple[float, ...], ...] | None = None
    block_size: int = 4
    device_blocks: int = 6
    host_blocks: int = 8
    device: str = "cpu"
    sim: SimOptions | None = None
    sync: bool = False
    debug: bool = True
    zero_on_free: str = "never"
    numa_node: int | str | None = None


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def arena_bytes(store: Store, tier: int) -> NDArray[np.uint8]:
    """The bytes of a tier, behind the store's back."""
    arena = store._device_arena if tier == DEVICE else store._host_arena
    assert arena is not None
    return arena.bytes


def stamp(store: Store, frame: int, value: float) -> None:
    """Write one number to every slot of a device frame, through the public path."""
    layout = store.layout
    size = layout.block_size
    slots = np.arange(frame * size, (frame + 1) * size, dtype=np.int64)
    key = torch.full((size, layout.num_kv_heads, layout.head_dim), value, dtype=layout.dtype)
    val = torch.full((size, layout.num_kv_heads, layout.value_dim), -value, dtype=layout.dtype)
    for layer in range(layout.num_layers):
        store.write(layer, key + layer, val - layer, slots)


def holds(store: Store, tier: int, frame: int, value: float, tokens: int | None = None) -> bool:
    """Whether the first slots of a frame hold what ``stamp`` wrote, in each layer."""
    for layer in range(store.layout.num_layers):
        key, val = store.block_view(tier, frame, layer)
        if not bool((key[:tokens] == value + layer).all()):
            return False
        if not bool((val[:tokens] == -value - layer).all()):
            return False
    return True


def out_plan(transfer_id: int, device: Any, host: Any, **more: Any) -> dict[str, Any]:
    """The fields of an out transfer of full frames."""
    tokens = np.full(len(device), 4, np.int32)
    return {
        "out_id": transfer_id,
        "out_device": ids(*device),
        "out_host": ids(*host),
        "out_tokens": tokens,
        **more,
    }


def in_plan(transfer_id: int, host: Any, device: Any, **more: Any) -> dict[str, Any]:
    """The fields of an in transfer of full frames."""
    tokens = np.full(len(device), 4, np.int32)
    return {
        "in_id": transfer_id,
        "in_host": ids(*host),
        "in_device": ids(*device),
        "in_tokens": tokens,
        **more,
    }
