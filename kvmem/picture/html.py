"""The block map as one self-contained HTML page: point at a frame to see whose it is."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem.picture.timeline import STATES, Timeline, colour_of, name_of


def write_html(
    samples: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "kvmem: block map"
) -> Path:
    """Write `samples` (of `Manager.snapshot()`) as a page to `path`; return the path.

    The page needs no network and no library. Raises ValueError for samples that don't fit
    together. Size and time grow with the number of changes, not of samples.
    """
    timeline = Timeline.from_samples(samples)
    data = {
        "steps": timeline.steps.tolist(),
        "seconds": [round(second, 4) for second in timeline.seconds.tolist()],
        "owners": [
            {"id": owner, "name": name_of(owner), "colour": colour_of(owner)}
            for owner in (*STATES, *timeline.sequence_ids)
        ],
        "tiers": [
            {"name": tier, "frames": [_runs(frame) for frame in owner]}
            for tier, owner in timeline.owner.items()
        ],
    }
    page = resources.files("kvmem.picture").joinpath("page.html").read_text(encoding="utf-8")
    # "</" would end the script early, whatever stands in a name.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    parts = {"@DATA@": text, "@TITLE@": html.escape(title)}
    page = re.sub("@DATA@|@TITLE@", lambda match: parts[match[0]], page)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _runs(frame: NDArray[np.int32]) -> list[int]:
    """Return one frame's history as [sample, owner, sample, owner, ...], one pair a change."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(frame)) + 1))
    runs = np.stack((starts, frame[starts]), axis=1)
    return [int(value) for value in runs.ravel()]
