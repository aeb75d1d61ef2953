"""Samples as one array a tier, and the meaning and colour of their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FREE = 0
CACHED = -1
SHARED = -2
PINNED = -3
MOVING = -4

# What is not one sequence's own. Greys and signal colours; no sequence gets one of them.
STATES: dict[int, tuple[str, str]] = {
    FREE: ("free", "#f5f5f2"),
    CACHED: ("cached, evictable", "#cfcfc9"),
    SHARED: ("shared by several", "#3b3f4a"),
    PINNED: ("pinned", "#f5c400"),
    MOVING: ("arriving or departing", "#e02b20"),
}

# Found by spreading 16 colours in CIELAB as far as they go from each other and from STATES, then
# ordered so that neighbours, which often lie side by side in the map, differ most.
SEQUENCE_COLOURS = (
    "#108810",
    "#d810ec",
    "#ec9c60",
    "#2ee02e",
    "#10b0ec",
    "#ec1074",
    "#1010c4",
    "#746010",
    "#ec88ec",
    "#10ecc4",
    "#741024",
    "#3874ec",
    "#108874",
    "#741074",
    "#b0ec74",
    "#b07488",
)


@dataclass(frozen=True)
class Timeline:
    """What a list of samples says.

    `steps` [num_samples] int64 and `seconds` [num_samples] float64 since the first sample;
    `owner[tier]` [num_frames, num_samples] int32: a sequence id (> 0) or a key of `STATES`.
    """

    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]
    owner: dict[str, NDArray[np.int32]]

    @classmethod
    def from_samples(cls, samples: Sequence[Mapping[str, Any]]) -> Timeline:
        """Collect `samples` as `Manager.snapshot()` returns them; costs one copy.

        A tier without frames is left out. Raises ValueError when there is no
        sample, or when the samples are not of one Manager.
        """
        if not samples:
            raise ValueError("samples: got none, need at least one; take Manager.snapshot() a step")
        tiers = [name for name, tier in samples[0]["tiers"].items() if len(tier["owner"])]
        sizes = {name: len(samples[0]["tiers"][name]["owner"]) for name in tiers}
        for index, sample in enumerate(samples):
            for name in tiers:
                got = len(sample["tiers"].get(name, {"owner": ()})["owner"])
                if got != sizes[name]:
                    raise ValueError(
                        f"samples[{index}]: tier {name!r} has {got} frames, the first sample has "
                        f"{sizes[name]}; give the samples of one Manager"
                    )
        times = np.array([sample["time"] for sample in samples], np.float64)
        owner = {
            name: np.array([sample["tiers"][name]["owner"] for sample in samples], np.int32).T
            for name in tiers
        }
        steps = np.array([sample["step"] for sample in samples], np.int64)
        return cls(steps=steps, seconds=times - times[0], owner=owner)

    @property
    def sequence_ids(self) -> list[int]:
        """The ids of all sequences that ever held a frame of their own, ascending."""
        ids: set[int] = set()
        for frames in self.owner.values():
            ids.update(np.unique(frames[frames > 0]).tolist())
        return sorted(ids)


def colour_of(owner: int) -> str:
    """Return the colour ("#rrggbb") of a sequence id or a key of `STATES`."""
    if owner in STATES:
        return STATES[owner][1]
    return SEQUENCE_COLOURS[(owner - 1) % len(SEQUENCE_COLOURS)]


def name_of(owner: int) -> str:
    """Return what a legend calls a sequence id or a key of `STATES`."""
    return STATES[owner][0] if owner in STATES else f"sequence {owner}"
