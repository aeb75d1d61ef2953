"""Sizes of planes, frames and arenas: the one place where that arithmetic is done.

A frame holds one block for every layer of its group, layer after layer, the keys of a layer before
its values::

    frame  | K of layer 0 | V of layer 0 | K of layer 1 | V of layer 1 | ...
    plane  | [num_kv_heads, block_size, head_dim]       |  (value_dim in a V plane)

Every plane starts at a multiple of ``PLANE_ALIGNMENT`` bytes inside its frame, and so does every
frame inside its arena. Pure integers: no torch, no NumPy, nothing is allocated. ``Config.plan``
and ``store/layout.py`` both call this module, so that what is planned is what is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

#: Bytes. One cache line, and the width of the widest vector load or store.
PLANE_ALIGNMENT = 64

#: Bytes of one stored element, by the name of its dtype.
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}

#: Frame 0 of each tier: zeros on the device, never allocated.
RESERVED_FRAMES = 1

#: Upper bound of what the ledger keeps for one block, in bytes, beside the block's token row.
BLOCK_METADATA_BYTES = 96

#: Bytes of one token id in the ledger (int32).
TOKEN_ID_BYTES = 4

#: Frame and block ids are int32, and an arena holds up to two frames more than its blocks.
MAX_BLOCKS = 2**31 - 3


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer stores for one token: ``num_kv_heads`` keys and as many values."""

    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Plane:
    """The keys or the values of one layer inside a frame: ``[num_kv_heads, block_size, width]``."""

    layer: int
    is_value: bool
    num_kv_heads: int
    width: int  # head_dim of a K plane, value_dim of a V plane
    offset_bytes: int  # from the start of the frame, a multiple of PLANE_ALIGNMENT
    size_bytes: int  # without the padding up to the next plane


@dataclass(frozen=True)
class FrameGeometry:
    """The planes of one frame. Cheap to make; the planes are computed once, at first use."""

    layers: tuple[LayerGeometry, ...]
    block_size: int
    element_bytes: int

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """K then V of layer 0, K then V of layer 1, ...: ``2 * len(layers)`` planes."""
        planes: list[Plane] = []
        offset = 0
        for index, layer in enumerate(self.layers):
            for is_value, width in ((False, layer.head_dim), (True, layer.value_dim)):
                size = layer.num_kv_heads * self.block_size * width * self.element_bytes
                planes.append(Plane(index, is_value, layer.num_kv_heads, width, offset, size))
                offset += round_up(size, PLANE_ALIGNMENT)
        return tuple(planes)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers, without padding."""
        width = sum(x.num_kv_heads * (x.head_dim + x.value_dim) for x in self.layers)
        return width * self.element_bytes

    @property
    def frame_bytes(self) -> int:
        """Bytes from one frame to the next, padding included; a multiple of PLANE_ALIGNMENT."""
        last = self.planes[-1]
        return last.offset_bytes + round_up(last.size_bytes, PLANE_ALIGNMENT)

    def arena_bytes(self, num_blocks: int, *, debug: bool = False) -> int:
        """Bytes of the arena of a tier of ``num_blocks`` blocks; 0 where there is no tier."""
        return arena_frames(num_blocks, debug=debug) * self.frame_bytes

    def blocks_in(self, arena_bytes: int, *, debug: bool = False) -> int:
        """The largest number of blocks whose arena takes at most ``arena_bytes``; 0 if none."""
        return max(0, arena_bytes // self.frame_bytes - extra_frames(debug=debug))


def uniform_frame(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    element_bytes: int,
) -> FrameGeometry:
    """The frame of ``num_layers`` equal layers."""
    layer = LayerGeometry(num_kv_heads, head_dim, value_dim)
    return FrameGeometry((layer,) * num_layers, block_size, element_bytes)


def extra_frames(*, debug: bool = False) -> int:
    """Frames of an arena beside those for blocks: the reserved one, and in debug a guard."""
    return RESERVED_FRAMES + (1 if debug else 0)


def arena_frames(num_blocks: int, *, debug: bool = False) -> int:
    """Frames of the arena of a tier of ``num_blocks`` blocks; 0 where there is no tier."""
    return num_blocks + extra_frames(debug=debug) if num_blocks else 0


def metadata_bytes(num_blocks: int, block_size: int) -> int:
    """Upper bound of the ledger's bytes for ``num_blocks`` blocks, their token rows included."""
    return num_blocks * (BLOCK_METADATA_BYTES + TOKEN_ID_BYTES * block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` tokens take: the last one may be partly filled."""
    return -(-num_tokens // block_size)


def total_blocks(num_tokens: Sequence[int], block_size: int) -> int:
    """Blocks that sequences of these lengths take together when nothing is shared."""
    return sum(blocks_for(n, block_size) for n in num_tokens)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
