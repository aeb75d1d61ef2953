"""What fits: blocks, sequences at a context, what is lost and what a swap takes. Arithmetic only.

``Config.plan()`` answers for a Config, whose layers are equal in this version. ``capacity`` also
answers for models whose layers differ, and for questions about sequences; where both answer, the
figures are the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass, field

from kvmem.geometry import (
    ELEMENT_BYTES,
    FrameGeometry,
    LayerGeometry,
    blocks_for,
    metadata_bytes,
)
from kvmem.model_shapes import LayerShape, ModelShape
from kvmem.size_plan import SizePlan

TABLE_ENTRY_BYTES = 4  # a block id in the table of a sequence (int32)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that store and see the same."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    token_bytes: int  # K and V of one token over these layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Sizes of a model's blocks and tiers, and what they hold. None: not asked, see ``reasons``."""

    model: str
    dtype: str  # that K and V are stored as
    block_size: int  # tokens
    num_layers: int
    groups: tuple[LayerGroup, ...]
    token_bytes: int  # K and V of one token over all layers
    block_bytes: int  # one frame, padding of planes included
    device_blocks: int
    device_tokens: int
    device_bytes: int  # the arena, reserved frames included
    host_blocks: int
    host_tokens: int
    host_bytes: int
    metadata_bytes: int  # of the ledger over both tiers, an upper bound
    bound: str | None  # when the two tiers can never both be too full to go on
    context: int | None
    sequence_blocks: int | None  # blocks of one sequence at this context
    sequence_bytes: int | None  # its frames, partial block included
    sequence_windowed_bytes: int | None  # if blocks behind a window went; this version keeps them
    table_bytes: int | None  # block tables of the sequences asked for, or of one
    lost_tokens: int | None  # empty slots of its last block
    lost_share: float | None  # of its frames, at exactly this context
    lost_share_mean: float | None  # if sequences end anywhere in their last block
    sequences_on_device: int | None  # at this context, all resident at once
    sequences_never_stuck: int | None  # live at once, swapping never gets stuck
    sequences: int | None
    verdict: str | None  # "resident", "swapping", "too many", "never"
    bandwidth: int | None  # bytes per second
    swap_seconds: float | None  # one sequence, one way
    manager: str  # "supported", or why this version's Config refuses the model
    notes: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)  # why a figure is None

    def to_dict(self) -> dict[str, object]:
        """All figures, ready for JSON."""
        return asdict(self)


def capacity(
    shape: ModelShape,
    *,
    dtype: str,
    block_size: int,
    device_blocks: int = 0,
    host_blocks: int = 0,
    context: int | None = None,
    sequences: int | None = None,
    bandwidth: int | None = None,
) -> Capacity:
    """The figures of ``shape``. The arguments are taken as checked. Cost: microseconds."""
    frame = frame_of(shape, dtype, block_size)
    bound = None
    if device_blocks:
        bound = _size_plan(frame, device_blocks, host_blocks).bound
    reasons: dict[str, str] = {}
    if context is None:
        reasons["context"] = "give a context to learn about sequences"
    if not device_blocks:
        reasons["device_blocks"] = "no device tier given: its blocks or memory"
    if bandwidth is None:
        reasons["swap_seconds"] = "give a bandwidth, or measure it"
    return Capacity(
        model=shape.model_type,
        dtype=dtype,
        block_size=block_size,
        num_layers=len(shape.layers),
        groups=_groups(shape, dtype),
        token_bytes=frame.token_bytes,
        block_bytes=frame.frame_bytes,
        device_blocks=device_blocks,
        device_tokens=device_blocks * block_size,
        device_bytes=frame.arena_bytes(device_blocks),
        host_blocks=host_blocks,
        host_tokens=host_blocks * block_size,
        host_bytes=frame.arena_bytes(host_blocks),
        metadata_bytes=metadata_bytes(device_blocks + host_blocks, block_size),
        bound=bound,
        context=context,
        sequences=sequences,
        bandwidth=bandwidth,
        manager=_manager(shape),
        notes=_notes(shape, context),
        reasons=reasons,
        **_sequence_figures(
            shape, frame, device_blocks, host_blocks, context, sequences, bandwidth
        ),  # type: ignore[arg-type]
    )


def frame_of(shape: ModelShape, dtype: str, block_size: int) -> FrameGeometry:
    """The frame of a block over all layers of ``shape``."""
    layers = tuple(layer.stored for layer in shape.layers)
    return FrameGeometry(layers, block_size, ELEMENT_BYTES[dtype])


def _size_plan(frame: FrameGeometry, device_blocks: int, host_blocks: int) -> SizePlan:
    """The plan of a Config of this frame, for its words about the bound."""
    size = frame.block_size
    return SizePlan(
        block_size=size,
        token_bytes=frame.token_bytes,
        block_bytes=frame.frame_bytes,
        device_blocks=device_blocks,
        device_tokens=device_blocks * size,
        device_bytes=frame.arena_bytes(device_blocks),
        host_blocks=host_blocks,
        host_tokens=host_blocks * size,
        host_bytes=frame.arena_bytes(host_blocks),
        metadata_bytes=metadata_bytes(device_blocks + host_blocks, size),
    )


def _sequence_figures(
    shape: ModelShape,
    frame: FrameGeometry,
    device_blocks: int,
    host_blocks: int,
    context: int | None,
    sequences: int | None,
    bandwidth: int | None,
) -> dict[str, object]:
    """What is asked about sequences; all None without a context."""
    figures: dict[str, object] = dict.fromkeys(
        ("sequence_blocks", "sequence_bytes", "sequence_windowed_bytes", "table_bytes",
         "lost_tokens", "lost_share", "lost_share_mean", "sequences_on_device",
         "sequences_never_stuck", "verdict", "swap_seconds")
    )  # fmt: skip
    if context is None:
        return figures
    size = frame.block_size
    blocks = blocks_for(context, size)
    num_bytes = blocks * frame.frame_bytes
    lost = blocks * size - context
    figures |= {
        "sequence_blocks": blocks,
        "sequence_bytes": num_bytes,
        "sequence_windowed_bytes": _windowed_bytes(shape, frame, context),
        "table_bytes": blocks * TABLE_ENTRY_BYTES * (sequences or 1),
        "lost_tokens": lost,
        "lost_share": lost / (blocks * size),
        "lost_share_mean": (size - 1) / 2 / (context + (size - 1) / 2),
    }
    if bandwidth is not None:
        figures["swap_seconds"] = num_bytes / bandwidth
    if device_blocks:
        resident = device_blocks // blocks
        # Sum of final blocks <= host + those of the longest; or all fit the device, and none swaps.
        live = max(resident, host_blocks // blocks + 1) if resident else 0
        figures |= {"sequences_on_device": resident, "sequences_never_stuck": live}
        if sequences is not None:
            figures["verdict"] = _verdict(sequences, resident, live)
    return figures


def _verdict(sequences: int, resident: int, live: int) -> str:
    if not resident:
        return "never"
    if sequences <= resident:
        return "resident"
    return "swapping" if sequences <= live else "too many"


def _windowed_bytes(shape: ModelShape, frame: FrameGeometry, context: int) -> int:
    """Bytes of a sequence if each layer kept only the blocks its window can reach."""
    size = frame.block_size
    total = 0
    for layer, planes in zip(shape.layers, _layer_bytes(frame), strict=True):
        blocks = blocks_for(context, size)
        if layer.window is not None:
            blocks = min(blocks, blocks_for(layer.window - 1, size) + 1)
        total += blocks * planes
    return total


def _layer_bytes(frame: FrameGeometry) -> list[int]:
    """Bytes of the two planes of each layer in a frame, padding included."""
    offsets = [plane.offset_bytes for plane in frame.planes[::2]] + [frame.frame_bytes]
    return [after - before for before, after in itertools.pairwise(offsets)]


def _groups(shape: ModelShape, dtype: str) -> tuple[LayerGroup, ...]:
    """Equal layers together, in order of their first."""
    counted: Counter[LayerShape] = Counter(shape.layers)
    return tuple(
        LayerGroup(
            num_layers=count,
            num_kv_heads=layer.stored.num_kv_heads,
            head_dim=layer.stored.head_dim,
            value_dim=layer.stored.value_dim,
            window=layer.window,
            token_bytes=count * _token_bytes(layer.stored, dtype),
        )
        for layer, count in counted.items()
    )


def _token_bytes(stored: LayerGeometry, dtype: str) -> int:
    return stored.num_kv_heads * (stored.head_dim + stored.value_dim) * ELEMENT_BYTES[dtype]


def _notes(shape: ModelShape, context: int | None) -> tuple[str, ...]:
    """What the reader of the figures should know."""
    if context is None or shape.max_context is None or context <= shape.max_context:
        return shape.notes
    return (*shape.notes, f"the model was made for at most {shape.max_context} positions")


def _manager(shape: ModelShape) -> str:
    if shape.is_uniform:
        return "supported"
    return (
        "not in this version: layers of unequal geometry or window are refused by Config; the "
        "figures are those of one frame over all layers, each keeping the whole sequence"
    )
