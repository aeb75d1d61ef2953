"""The spec of `move_frames`: byte-exact reference and input maker."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.spec import Spec


def reference(arguments: dict[str, Any]) -> NDArray[np.uint8]:
    """What the target arena holds afterwards."""
    target: NDArray[np.uint8] = arguments["target_arena"].copy()
    target[arguments["target_ids"]] = arguments["source_arena"][arguments["source_ids"]]
    return target


def make_inputs(
    rng: np.random.Generator, *, num_frames: int, frame_bytes: int, num_moves: int
) -> dict[str, Any]:
    """Draw arguments of `move_frames`: distinct targets, any sources."""
    shape = (num_frames, frame_bytes)
    return {
        "target_arena": rng.integers(0, 256, shape, np.uint8),
        "target_ids": rng.permutation(num_frames)[:num_moves].astype(np.int32),
        "source_arena": rng.integers(0, 256, shape, np.uint8),
        "source_ids": rng.integers(0, num_frames, num_moves).astype(np.int32),
    }


SPEC = Spec(
    name="move_frames",
    axes={"num_moves": "frames to copy", "frame_bytes": "size of a frame, any"},
    tensors={
        "target_arena": "[frames, frame_bytes], uint8",
        "target_ids": "[num_moves], int32 or int64, distinct",
        "source_arena": "[frames, frame_bytes], uint8",
        "source_ids": "[num_moves], int32 or int64",
    },
    tolerance={"uint8": 0},
    relative_to="bits",
    reference=reference,
    make_inputs=make_inputs,
)
