"""The spec of `copy_blocks`: how planes are described, byte-exact reference, input maker.

A frame is a list of planes; plane ``p`` is ``[plane_rows[p], block_size, plane_width[p]]``
elements at ``plane_offset[p]``. For K/V: a plane each for K and V of each layer, rows = KV heads,
width = head_dim or value_dim, all in elements of the arena (bytes if it is uint8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.spec import Spec


def reference(arguments: dict[str, Any]) -> NDArray[Any]:
    """What the arena holds afterwards; all sources are read before a target is written."""
    a = arguments
    arena: NDArray[Any] = a["arena"].copy()
    size = a["block_size"]
    for source, target, count in zip(a["source"], a["target"], a["num_tokens"], strict=True):
        for offset, rows, width in zip(
            a["plane_offset"], a["plane_rows"], a["plane_width"], strict=True
        ):
            end = offset + rows * size * width
            old = a["arena"][source, offset:end].reshape(rows, size, width)
            arena[target, offset:end].reshape(rows, size, width)[:, :count] = old[:, :count]
    return arena


def make_inputs(
    rng: np.random.Generator,
    *,
    element: str = "uint8",
    num_frames: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    num_pairs: int,
) -> dict[str, Any]:
    """Draw arguments of `copy_blocks`: disjoint sources and targets, gaps between planes."""
    widths = np.array([head_dim, value_dim] * num_layers)
    sizes = num_kv_heads * block_size * widths
    offsets = np.cumsum([0, *(sizes + 3)])[:-1] + 1
    elements = int(offsets[-1] + sizes[-1] + 2)
    bits = rng.integers(0, 256, (num_frames, elements * np.dtype(element).itemsize), np.uint8)
    targets = rng.permutation(num_frames)[:num_pairs]
    others = np.setdiff1d(np.arange(num_frames), targets)
    return {
        "arena": bits.view(element),
        "source": rng.choice(others, num_pairs).astype(np.int32),
        "target": targets.astype(np.int32),
        "num_tokens": rng.integers(0, block_size + 1, num_pairs).astype(np.int32),
        "block_size": block_size,
        "plane_offset": offsets,
        "plane_rows": np.full(2 * num_layers, num_kv_heads),
        "plane_width": widths,
    }


SPEC = Spec(
    name="copy_blocks",
    axes={
        "num_pairs": "frames to copy",
        "num_planes": "planes of a frame",
        "block_size": "slots of a frame, any",
    },
    tensors={
        "arena": "[frames, frame_elements], any dtype",
        "source": "[num_pairs], int32 or int64",
        "target": "[num_pairs], int32 or int64",
        "num_tokens": "[num_pairs], int32 or int64; slots 0 .. n - 1 are copied",
        "plane_offset": "[num_planes], int32 or int64, in elements",
        "plane_rows": "[num_planes], int32 or int64",
        "plane_width": "[num_planes], int32 or int64, in elements",
    },
    tolerance={"any": 0},
    relative_to="bits",
    reference=reference,
    make_inputs=make_inputs,
)
