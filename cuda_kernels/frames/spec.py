"""The specs of moves of frames: byte-exact references and input makers."""

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


def gather_reference(arguments: dict[str, Any]) -> NDArray[np.uint8]:
    """What staging holds afterwards."""
    a = arguments
    pieces: NDArray[np.uint8] = a["arena"][a["ids"], a["offset"] :][:, : a["staging"].shape[1]]
    return pieces


def scatter_reference(arguments: dict[str, Any]) -> NDArray[np.uint8]:
    """What the arena holds afterwards."""
    a = arguments
    arena: NDArray[np.uint8] = a["arena"].copy()
    arena[a["ids"], a["offset"] : a["offset"] + a["staging"].shape[1]] = a["staging"]
    return arena


def make_pieces(
    rng: np.random.Generator, *, num_frames: int, frame_bytes: int, num_pieces: int, unit: int = 1
) -> dict[str, Any]:
    """Draw arguments of `gather_frames` and `scatter_frames`: distinct ids, a piece in a frame.

    The piece's place and size are multiples of ``unit``.
    """
    size = int(rng.integers(0, frame_bytes // unit + 1)) * unit
    offset = int(rng.integers(0, (frame_bytes - size) // unit + 1)) * unit
    return {
        "staging": rng.integers(0, 256, (num_pieces, size), np.uint8),
        "arena": rng.integers(0, 256, (num_frames, frame_bytes), np.uint8),
        "ids": rng.permutation(num_frames)[:num_pieces].astype(np.int32),
        "offset": offset,
    }


_PIECES = {
    "staging": "[num_pieces, piece_bytes], uint8",
    "arena": "[frames, frame_bytes], uint8",
    "ids": "[num_pieces], int32 or int64; distinct where the arena is written",
}
GATHER = Spec(
    name="gather_frames",
    axes={"num_pieces": "frames that a piece is read of", "piece_bytes": "size of a piece, any"},
    tensors=_PIECES,
    tolerance={"uint8": 0},
    relative_to="bits",
    reference=gather_reference,
    make_inputs=make_pieces,
)
SCATTER = Spec(
    name="scatter_frames",
    axes={"num_pieces": "frames that a piece is written to", "piece_bytes": "size of a piece, any"},
    tensors=_PIECES,
    tolerance={"uint8": 0},
    relative_to="bits",
    reference=scatter_reference,
    make_inputs=make_pieces,
)


def fill_reference(arguments: dict[str, Any]) -> NDArray[Any]:
    """What the arena holds afterwards."""
    a = arguments
    arena: NDArray[Any] = a["arena"].copy()
    frames = arena.view(np.uint8).reshape(arena.shape[0], -1)
    row = np.resize(np.frombuffer(a["pattern"].tobytes(), np.uint8), frames.shape[1])
    frames[a["ids"]] = row
    return arena


def make_fill(
    rng: np.random.Generator, *, num_frames: int, frame_bytes: int, num_ids: int, element: str
) -> dict[str, Any]:
    """Draw arguments of `fill_frames`: distinct ids, a pattern whose size divides a frame's.

    ``element`` is the arena's dtype, whose size divides ``frame_bytes``.
    """
    sizes = [size for size in (1, 2, 4) if frame_bytes % size == 0]
    bits = rng.integers(0, 256, int(rng.choice(sizes)), np.uint8)
    return {
        "arena": rng.integers(0, 256, (num_frames, frame_bytes), np.uint8).view(element),
        "ids": rng.permutation(num_frames)[:num_ids].astype(np.int32),
        "pattern": bits.view(f"u{bits.size}")[0],
    }


FILL = Spec(
    name="fill_frames",
    axes={
        "num_ids": "frames to fill",
        "frame_bytes": "size of a frame, a multiple of the pattern's",
    },
    tensors={
        "arena": "[frames, frame_elements], any dtype",
        "ids": "[num_ids], int32 or int64",
        "pattern": "a NumPy scalar of 1, 2 or 4 bytes",
    },
    tolerance={"uint8": 0},
    relative_to="bits",
    reference=fill_reference,
    make_inputs=make_fill,
)
