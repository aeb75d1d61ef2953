"""Where the rows of K or V of one layer lie in a frame.

Twins take strides, so a plane may be head-major, "HND" ``[heads, block, dims]``, or token-major,
"NHD" ``[block, heads, dims]``.
"""

from __future__ import annotations

from typing import NamedTuple


class Plane(NamedTuple):
    """A plane, in elements; a row of `dims` is contiguous."""

    offset: int
    head_stride: int
    token_stride: int
    dims: int


def plane_of(layout: str, offset: int, num_heads: int, block_size: int, dims: int) -> Plane:
    """The plane at ``offset`` of a frame in a layout."""
    if layout == "HND":
        return Plane(offset, block_size * dims, dims, dims)
    return Plane(offset, dims, num_heads * dims, dims)
