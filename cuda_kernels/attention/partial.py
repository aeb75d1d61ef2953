"""Partial results of attention: the softmax of some positions, mergeable with that of others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuda_kernels.attention.tiles import PANEL, tile_code
from cuda_kernels.dtypes import Float32s
from cuda_kernels.numeric import exp

_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0)


class Partial(NamedTuple):
    """Result of some positions: weighted sums [panel][row][32], maximum and weight by row."""

    sums: Float32s
    peaks: Float32s
    totals: Float32s


@tile_code
def partial_in(buffer: Float32s, rows: int, panels: int) -> Partial:
    """A Partial that lies in a flat buffer."""
    size = rows * panels * PANEL
    return Partial(buffer[:size], buffer[size : size + rows], buffer[size + rows : size + 2 * rows])


@tile_code
def clear(part: Partial) -> None:
    """The result of no positions."""
    part.sums[:] = _ZERO
    part.peaks[:] = _MINUS_INFINITY
    part.totals[:] = _ZERO


@tile_code
def fold(total: Partial, part: Partial, rows: int, panels: int) -> None:
    """Fold a split's result into the total, row by row (log-sum-exp merge)."""
    for row in range(rows):
        if part.totals[row] == 0:
            continue
        peak = part.peaks[row] if part.peaks[row] > total.peaks[row] else total.peaks[row]
        old = exp(total.peaks[row] - peak) if total.totals[row] != 0 else _ZERO
        new = exp(part.peaks[row] - peak)
        total.totals[row] = total.totals[row] * old + part.totals[row] * new
        total.peaks[row] = peak
        for panel in range(panels):
            at = (panel * rows + row) * PANEL
            into = total.sums[at : at + PANEL]
            more = part.sums[at : at + PANEL]
            for d in range(PANEL):
                into[d] = into[d] * old + more[d] * new


@tile_code
def finish(
    result: Float32s,
    lse: Float32s,
    part: Partial,
    sinks: Float32s,
    rows: int,
    num_tokens: int,
    group: int,
    token: int,
    head: int,
    panels: int,
    value_dim: int,
) -> None:
    """Divide by the denominator, sink included, and store a tile's rows and log-sum-exps."""
    for row in range(num_tokens * group):
        at = token + row // group
        query_head = head * group + row % group
        sink = sinks[query_head]
        peak = sink if sink > part.peaks[row] else part.peaks[row]
        factor = exp(part.peaks[row] - peak)
        total = part.totals[row] * factor + exp(sink - peak)
        lse[at, query_head] = peak + np.float32(np.log(total))
        scale = factor / total
        into = result[at, query_head]
        for panel in range(panels):
            width = min(PANEL, value_dim - panel * PANEL)
            start = (panel * rows + row) * PANEL
            for d in range(width):
                into[panel * PANEL + d] = part.sums[start + d] * scale
