"""The block map as a PNG: a map a tier, and below them how full each tier is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem.picture.timeline import CACHED, FREE, STATES, Timeline, colour_of, name_of

MAX_LEGEND = 32  # sequences named in the legend
MAX_COLUMNS = 4000  # samples drawn; of more, every n-th
DPI = 110  # pixels an inch
WIDTH = 15  # inches
LABEL = (14, 22)  # pixels high and wide: what a sequence's number needs


def write_png(
    samples: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "kvmem: block map"
) -> Path:
    """Draw `samples` (of `Manager.snapshot()`) to the PNG file `path`; return the path.

    Raises ImportError when matplotlib is missing, ValueError for samples that don't fit together.
    Takes about a second.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "write_png needs matplotlib: pip install 'kvmem[demo]'; write_html needs nothing"
        ) from error
    timeline = Timeline.from_samples(samples[:: len(samples) // MAX_COLUMNS + 1])
    heights = [max(2.6, min(5.0, len(owner) / 40)) for owner in timeline.owner.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 4.4), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    axes = figure.subplots(
        len(heights) + 1, 1, sharex=True, gridspec_kw={"height_ratios": [*heights, 1.9]}
    )
    edges = _edges(timeline.steps)
    for axis, height, (tier, owner) in zip(axes, heights, timeline.owner.items()):
        _draw_map(axis, tier, owner, edges)
        _separate(axis, height * DPI / len(owner), len(owner))
        _label(axis, owner, edges, height * DPI / len(owner))
    _draw_fill(axes[-1], timeline)
    axes[-1].set_xlabel("step of the engine")
    _draw_legend(figure, timeline)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _edges(steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the borders of the columns: each sample lasts until the next one."""
    width = 1.0 if len(steps) < 2 else max(1.0, float(steps[-1] - steps[-2]))
    return np.append(steps.astype(np.float64), steps[-1] + width)


def _draw_map(axis: Any, tier: str, owner: NDArray[np.int32], edges: NDArray[np.float64]) -> None:
    values, inverse = np.unique(owner, return_inverse=True)
    colours = [[int(colour_of(int(value))[i : i + 2], 16) for i in (1, 3, 5)] for value in values]
    pixels = np.array(colours, np.uint8)[inverse.reshape(owner.shape)]
    if np.all(np.diff(edges) == edges[1] - edges[0]):
        extent = (edges[0], edges[-1], 0.5, len(owner) + 0.5)
        axis.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest", origin="lower")
    else:
        axis.pcolormesh(edges, np.arange(len(owner) + 1) + 0.5, pixels)
    axis.set_ylabel("frame")
    axis.set_title(f"{tier} tier: {len(owner)} frames", loc="left", fontsize=11)


def _separate(axis: Any, frame_pixels: float, num_frames: int) -> None:
    """Thin lines between frames, where a frame is high enough to leave its colour visible."""
    if frame_pixels >= 4:
        borders = np.arange(1, num_frames) + 0.5
        axis.hlines(borders, *axis.get_xlim(), colors="white", linewidths=0.35, alpha=0.6)


def _label(
    axis: Any, owner: NDArray[np.int32], edges: NDArray[np.float64], frame_pixels: float
) -> None:
    """Write a sequence's number where it alone holds neighbouring frames for long enough."""
    step_pixels = WIDTH * DPI * 0.9 / (edges[-1] - edges[0])
    labelled: dict[int, list[tuple[float, float]]] = {}  # sequence -> where its numbers stand
    for row, num_rows, first, last in _rectangles(owner):
        left, right = edges[first], edges[last]
        if num_rows * frame_pixels < LABEL[0] or (right - left) * step_pixels < LABEL[1]:
            continue
        sequence = int(owner[row, first])
        red, green, blue = (int(colour_of(sequence)[i : i + 2], 16) for i in (1, 3, 5))
        ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 130 else "white"
        middle = ((left + right) / 2, row + 0.5 + num_rows / 2)
        if any(  # one number for a staircase of short runs
            abs(middle[0] - x) * step_pixels < 2 * LABEL[1]
            and abs(middle[1] - y) * frame_pixels < 3 * LABEL[0]
            for x, y in labelled.get(sequence, ())
        ):
            continue
        labelled.setdefault(sequence, []).append(middle)
        axis.text(*middle, str(sequence), color=ink, fontsize=8, ha="center", va="center")


def _rectangles(owner: NDArray[np.int32]) -> list[tuple[int, int, int, int]]:
    """Return (row, rows, first column, end column) of what one sequence holds: the runs of
    neighbouring rows that begin and end alike, together."""
    found: list[tuple[int, int, int, int]] = []
    open_runs: dict[tuple[int, int, int], int] = {}  # (first, end, sequence) -> its lowest row
    for row in range(len(owner) + 1):
        runs = set(_runs_of_sequences(owner[row])) if row < len(owner) else set()
        for run in [run for run in open_runs if run not in runs]:
            start = open_runs.pop(run)
            found.append((start, row - start, run[0], run[1]))
        for run in runs:
            open_runs.setdefault(run, row)
    return found


def _runs_of_sequences(frame: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Return (first column, end column, sequence) of one frame's owners, states left out."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(frame)) + 1))
    ends = np.append(starts[1:], len(frame))
    return [
        (int(start), int(end), int(frame[start]))
        for start, end in zip(starts, ends)
        if frame[start] > 0
    ]


def _draw_fill(axis: Any, timeline: Timeline) -> None:
    """Lines: the share of each tier that live sequences hold, and with cached content added."""
    for (tier, owner), colour in zip(timeline.owner.items(), ("#1f5fa8", "#c25a00", "#3c7d2f")):
        used = ((owner != FREE) & (owner != CACHED)).mean(axis=0) * 100
        full = (owner != FREE).mean(axis=0) * 100
        axis.plot(timeline.steps, used, color=colour, lw=1.8, label=f"{tier}: live")
        axis.plot(
            timeline.steps, full, color=colour, lw=1.2, ls=":", label=f"{tier}: live + cached"
        )
    axis.set_ylim(0, 104)
    axis.set_ylabel("% of frames")
    axis.set_title("how full each tier is", loc="left", fontsize=11)
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=6, fontsize=9, frameon=False)


def _draw_legend(figure: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    shown = [*STATES, *timeline.sequence_ids[:MAX_LEGEND]]
    patches = [
        Patch(facecolor=colour_of(owner), edgecolor="#888888", lw=0.5, label=name_of(owner))
        for owner in shown
    ]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=min(8, len(patches)),
        fontsize=9,
        frameon=False,
    )
