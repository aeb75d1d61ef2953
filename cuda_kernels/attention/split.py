"""One query tile against one split of a row's positions, tile of keys by tile of keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuda_kernels.attention.partial import Partial, clear
from cuda_kernels.attention.tasks import SPLIT_TOKENS, first_read
from cuda_kernels.attention.tiles import (
    PANEL,
    TILE_KEYS,
    add_values,
    add_values_in_range,
    bend_scores,
    dot_keys,
    pack_keys,
    pack_values,
    row_maximum,
    row_sum,
    row_weights,
    scale_row,
    tile_code,
)
from cuda_kernels.dtypes import Bits, Float32s, Int32s
from cuda_kernels.numeric import exp

_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0)


class Geometry(NamedTuple):
    """Where K and V of the layer lie in a frame, in elements; see `request.Plane`."""

    kind: int  # of K and V
    key_offset: int
    key_head: int
    key_token: int
    head_dim: int
    value_offset: int
    value_head: int
    value_token: int
    value_dim: int
    block_size: int
    padded_dim: int  # head_dim up to a multiple of 8
    panels: int  # of 32 values


class Rules(NamedTuple):
    """What bends the scores; 0 or zeros or -inf where a feature is off."""

    window: int
    softcap: np.float32
    slopes: Float32s
    sinks: Float32s


@tile_code
def weigh_tile(
    scores: Float32s,
    part: Partial,
    slopes: Float32s,
    rows: int,
    panels: int,
    position: int,
    base: int,
    rules: Rules,
) -> None:
    """Turn a tile's scores into weights, row by row; rescale what the row gathered so far.

    `position` is that of the tile's first query row; the rows of a token are neighbours.
    """
    group = slopes.shape[0]
    for row in range(rows):
        weights = scores[row * TILE_KEYS : (row + 1) * TILE_KEYS]
        here = position + row // group
        first = first_read(here, rules.window) - base
        last = here - base
        if last < 0 or first >= TILE_KEYS:
            weights[:] = _ZERO
            continue
        bend_scores(weights, last, rules.softcap, slopes[row % group])
        for j in range(first):
            weights[j] = _MINUS_INFINITY
        for j in range(last + 1, TILE_KEYS):
            weights[j] = _MINUS_INFINITY
        top = row_maximum(weights)
        if top > part.peaks[row]:
            factor = exp(part.peaks[row] - top)
            part.totals[row] *= factor
            scale_row(part.sums, rows, panels, row, factor)
            part.peaks[row] = top
        row_weights(weights, part.peaks[row])
        part.totals[row] += row_sum(weights)


@tile_code
def gather_values(
    scores: Float32s,
    part: Partial,
    value_tile: Float32s,
    rows: int,
    panels: int,
    group: int,
    position: int,
    base: int,
    window: int,
    finite: bool,
) -> None:
    """Add weights times values; where the tile holds Inf or NaN, only what a row may see."""
    if finite:
        add_values(part.sums, scores, value_tile, rows, panels)
        return
    for row in range(rows):
        here = position + row // group
        first = max(0, first_read(here, window) - base)
        last = min(TILE_KEYS - 1, here - base)
        add_values_in_range(part.sums, scores, value_tile, rows, panels, row, first, last)


@tile_code
def attend_split(
    part: Partial,
    query: Float32s,
    rows: int,
    num_tokens: int,
    position: int,
    head: int,
    split: int,
    scratch: Float32s,
    arena: Bits,
    values: Bits,
    table: Int32s,
    geometry: Geometry,
    rules: Rules,
    slopes: Float32s,
) -> None:
    """One query tile against one split: fills `part`. `table` is the row's own."""
    clear(part)
    group = slopes.shape[0]
    size = geometry.padded_dim * TILE_KEYS
    key_tile = scratch[:size]
    value_tile = scratch[size : size + geometry.panels * TILE_KEYS * PANEL]
    size += geometry.panels * TILE_KEYS * PANEL
    scores = scratch[size : size + rows * TILE_KEYS]
    # The padding of both tiles stays zero from here on; packing writes beside it.
    key_tile[:] = _ZERO
    value_tile[:] = _ZERO
    key_plane = geometry.key_offset + head * geometry.key_head
    value_plane = geometry.value_offset + head * geometry.value_head
    low = max(split * SPLIT_TOKENS, first_read(position, rules.window))
    high = min((split + 1) * SPLIT_TOKENS, position + num_tokens) - 1
    base = low // TILE_KEYS * TILE_KEYS
    while base <= high:
        first = max(low, base)
        last = min(high, base + TILE_KEYS - 1)
        pack_keys(
            key_tile,
            arena,
            geometry.kind,
            key_plane,
            geometry.key_token,
            geometry.block_size,
            geometry.head_dim,
            table,
            base,
            first,
            last,
        )
        dot_keys(scores, query, key_tile, rows, geometry.padded_dim)
        weigh_tile(scores, part, slopes, rows, geometry.panels, position, base, rules)
        finite = pack_values(
            value_tile,
            values,
            geometry.kind,
            value_plane,
            geometry.value_token,
            geometry.block_size,
            geometry.value_dim,
            table,
            base,
            first,
            last,
        )
        gather_values(
            scores,
            part,
            value_tile,
            rows,
            geometry.panels,
            group,
            position,
            base,
            rules.window,
            finite,
        )
        base += TILE_KEYS
