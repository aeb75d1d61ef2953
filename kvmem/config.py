"""What a Manager is made of: geometry of the model, sizes of the tiers, policies.

A Config is checked whole when it is made and holds no resource; ``plan()`` tells what it takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kvmem.budget import free_gpu_bytes, free_host_bytes
from kvmem.checks import boolean, choice, integer, shown
from kvmem.errors import ConfigError
from kvmem.geometry import (
    ELEMENT_BYTES,
    MAX_BLOCKS,
    FrameGeometry,
    metadata_bytes,
    uniform_frame,
)
from kvmem.numa import checked_node
from kvmem.sim_options import SimOptions
from kvmem.size_plan import SizePlan
from kvmem.sizes import SIZE_FORMS, parse_size, with_unit
from kvmem.storage_dtype import (
    Scales,
    checked_dtype,
    checked_kv_dtype,
    checked_scales,
    storage_name,
)
from kvmem.tier_policy import checked_policy, checked_watermarks, useless_host_tier

MAX_LAYERS = 4096
MAX_KV_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_WINDOW = 2**31 - 1
BLOCK_SIZES = tuple(2**n for n in range(11))

DEVICES = ("cpu", "sim", "cuda")
_GPU = re.compile(r"cuda(:(0|[1-9]\d{0,3}))?")

EVICTIONS = ("lru",)
_PLANNED_EVICTIONS = ("lfu", "fifo", "s3fifo", "arc", "cost")

ZERO_ON_FREE = ("never", "cross_namespace", "always")

_MAX_MEMORY = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer stores and sees: heads and head sizes of its K and V, its window.

    ``v_head_dim=None`` means ``head_dim``; ``window=None`` means the whole sequence, else only the
    last ``window`` positions, the token's own included. Raises ConfigError, TypeError.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        heads = _ranged("num_kv_heads", self.num_kv_heads, MAX_KV_HEADS)
        head_dim = _ranged("head_dim", self.head_dim, MAX_HEAD_DIM)
        object.__setattr__(self, "num_kv_heads", heads)
        object.__setattr__(self, "head_dim", head_dim)
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", head_dim)
        else:
            width = _ranged("v_head_dim", self.v_head_dim, MAX_HEAD_DIM)
            object.__setattr__(self, "v_head_dim", width)
        if self.window is not None:
            object.__setattr__(self, "window", _ranged("window", self.window, MAX_WINDOW))


@dataclass(frozen=True, slots=True, init=False)
class Config:
    """All settings of a Manager; immutable, checked when made, comparable and hashable.

    Geometry: ``num_layers`` layers with K ``[num_kv_heads, head_dim]`` and V
    ``[num_kv_heads, v_head_dim]`` a token (``v_head_dim=None``: the same), computed in ``dtype``
    (float32, float16 or bfloat16, a torch dtype or its name). ``layers`` gives one LayerSpec a
    layer; in this version all are equal. ``window``: each layer sees the last ``window`` positions.

    Storage: ``kv_dtype=None`` is ``dtype``; "fp8_e4m3" (torch.float8_e4m3fn) takes a byte a number.
    Stored then is k / ``k_scale`` and v / ``v_scale``, rounded to nearest, ties to even; what is
    above 448, infinity too, saturates, NaN stays NaN. A scale is a number (default 1), or numbers
    that broadcast to ``[num_layers, num_kv_heads]``; reading multiplies by it, so it never changes.

    Sizes: ``block_size`` tokens a block, a power of two up to 1024. Each tier in blocks, or as
    memory: bytes (int), a str such as "8GiB", or a share 0 < x < 1 (float) of the memory that is
    free now, the GPU's for the device tier of one. Memory is turned into blocks at once;
    ``device_blocks`` and ``host_blocks`` always hold numbers. There is no host tier (0) unless
    given.

    Policies: ``tier_policy`` "write_back" (evicted blocks go to the host tier; the default where
    there is one), "write_through" (full blocks are copied there while no other copy is on the way,
    so that eviction is free), "exclusive" (as "write_back", but what comes back gives up its host
    copy) or "none"; ``watermarks=(low, high)``, shares of the device tier, lets "write_back" copy
    ahead too; ``eviction`` "lru"; ``sync=True`` runs each transfer at once, ``debug=True`` poisons
    vacated frames, adds guards and checksums. ``zero_on_free`` (R12) zeroes device frames: "never",
    "cross_namespace" (when a new block of another namespace takes one over) or "always" (when one
    is vacated).

    Watermarks: when fewer than ``low`` of the device's blocks are free or saved already, the oldest
    evictable ones are copied until ``high`` are. Off (None) unless given.

    Device "cpu"; "cuda" (torch's current GPU) or "cuda:1", with ``numa_node`` for its host tier,
    "gpu" or a number; "sim" is for tests: its streams run as ``sim`` (SimOptions) says, races raise
    RaceError.

    Raises ConfigError for a value or a combination that cannot be, TypeError for a wrong type;
    values planned for later raise ConfigError "not in this version". Nothing is allocated.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    k_scale: Scales | None = field(repr=False)  # by layer and head; None: no fp8_e4m3
    v_scale: Scales | None = field(repr=False)
    device: str
    block_size: int
    device_blocks: int
    host_blocks: int
    layers: tuple[LayerSpec, ...] = field(repr=False)  # one a layer: long, and all equal
    window: int | None
    tier_policy: str
    watermarks: tuple[float, float] | None
    eviction: str
    sync: bool
    debug: bool
    zero_on_free: str
    sim: SimOptions | None
    numa_node: int | str | None

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        kv_dtype: torch.dtype | str | None = None,
        k_scale: object = None,
        v_scale: object = None,
        device: str = "cpu",
        block_size: int = 64,
        device_blocks: int | None = None,
        device_memory: int | float | str | None = None,
        host_blocks: int | None = None,
        host_memory: int | float | str | None = None,
        layers: Sequence[LayerSpec] | None = None,
        window: int | None = None,
        tier_policy: str | None = None,
        watermarks: tuple[float, float] | None = None,
        eviction: str = "lru",
        sync: bool = False,
        debug: bool = False,
        zero_on_free: str = "never",
        sim: SimOptions | None = None,
        numa_node: int | str | None = None,
    ) -> None:
        num_layers = _ranged("num_layers", num_layers, MAX_LAYERS)
        spec = LayerSpec(
            num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, window=window
        )
        specs = _layers(layers, num_layers, spec, window_given=window is not None)
        self._set(
            num_layers=num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            layers=specs,
            window=specs[0].window,
            dtype=checked_dtype(dtype),
            device=_device(device),
            block_size=_block_size(block_size),
            eviction=_policy("eviction", eviction, EVICTIONS, _PLANNED_EVICTIONS),
            zero_on_free=_policy("zero_on_free", zero_on_free, ZERO_ON_FREE, ()),
            sync=boolean("sync", sync),
            debug=boolean("debug", debug),
        )
        self._set(sim=_sim(sim, self.device), numa_node=checked_node(numa_node, self.device))
        self._set(kv_dtype=checked_kv_dtype(kv_dtype, self.dtype))
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            sizes = (self.num_layers, self.num_kv_heads)
            self._set(**{name: checked_scales(name, scale, self.kv_dtype, *sizes)})
        self._set(device_blocks=self._blocks("device", 1, device_blocks, device_memory))
        self._set(host_blocks=self._blocks("host", 0, host_blocks, host_memory))
        self._set(tier_policy=checked_policy(tier_policy, self.host_blocks))
        self._set(watermarks=checked_watermarks(watermarks, self.tier_policy))

    def _set(self, **values: object) -> None:
        """Write fields of this frozen object; only the constructor does."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _blocks(self, tier: str, low: int, blocks: object, memory: object) -> int:
        """The blocks of ``tier``, given as such or as memory."""
        if blocks is not None and memory is not None:
            raise ConfigError(
                f"{tier}_blocks={shown(blocks)} and {tier}_memory={shown(memory)} say the same "
                f"thing twice: give one of the two"
            )
        if memory is not None:
            on_gpu = tier == "device" and self.on_gpu
            free = partial(free_gpu_bytes, self.device) if on_gpu else free_host_bytes
            return self._blocks_in(f"{tier}_memory", memory, free)
        if blocks is None and low > 0:
            raise ConfigError(
                f"the size of the {tier} tier is missing: give {tier}_blocks (an integer >= 1) or "
                f'{tier}_memory ("8GiB", bytes, or a share 0 < x < 1)'
            )
        value = 0 if blocks is None else blocks
        return integer(f"{tier}_blocks", value, low=low, high=MAX_BLOCKS, error=ConfigError)

    def _blocks_in(self, name: str, memory: object, free: Callable[[], int]) -> int:
        """The largest number of blocks whose arena fits ``memory``; at least one must. ``free``
        says what a share is of."""
        asked = _memory_bytes(name, memory, free)
        blocks = self.geometry.blocks_in(asked, debug=self.debug)
        if blocks < 1:
            least = self.geometry.arena_bytes(1, debug=self.debug)
            raise ConfigError(
                f"{name}={shown(memory)} ({with_unit(asked)}) holds no block: one block takes "
                f"{with_unit(self.geometry.frame_bytes)} and the smallest tier {least} bytes"
            )
        if blocks > MAX_BLOCKS:
            raise ConfigError(
                f"{name}={shown(memory)} holds {blocks} blocks, at most {MAX_BLOCKS} can be "
                f"numbered: raise block_size"
            )
        return blocks

    @property
    def geometry(self) -> FrameGeometry:
        """The planes and bytes of a frame."""
        return uniform_frame(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.v_head_dim,
            block_size=self.block_size,
            element_bytes=ELEMENT_BYTES[self.kv_dtype_name],
        )

    @property
    def on_gpu(self) -> bool:
        """Whether the device tier is the memory of a GPU."""
        return self.device.startswith("cuda")

    @property
    def dtype_name(self) -> str:
        """ "float32", "float16" or "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_dtype_name(self) -> str:
        """What K and V are stored as: `dtype_name`, or "fp8_e4m3"."""
        return storage_name(self.kv_dtype)

    def plan(self) -> SizePlan:
        """Bytes a token, a block and a tier, and the stuck-free bound. Nothing is allocated."""
        frame = self.geometry
        return SizePlan(
            block_size=self.block_size,
            token_bytes=frame.token_bytes,
            block_bytes=frame.frame_bytes,
            device_blocks=self.device_blocks,
            device_tokens=self.device_blocks * self.block_size,
            device_bytes=frame.arena_bytes(self.device_blocks, debug=self.debug),
            host_blocks=self.host_blocks,
            host_tokens=self.host_blocks * self.block_size,
            host_bytes=frame.arena_bytes(self.host_blocks, debug=self.debug),
            metadata_bytes=metadata_bytes(self.device_blocks + self.host_blocks, self.block_size),
            warnings=useless_host_tier(self.tier_policy, self.device_blocks, self.host_blocks),
        )


def _ranged(name: str, value: object, high: int) -> int:
    return integer(name, value, low=1, high=high, error=ConfigError)


def _policy(name: str, value: object, supported: Sequence[str], planned: Sequence[str]) -> str:
    return choice(name, value, supported, planned=planned, error=ConfigError)


def _layers(
    layers: object, num_layers: int, spec: LayerSpec, *, window_given: bool
) -> tuple[LayerSpec, ...]:
    """One LayerSpec a layer; all equal, and equal to what the plain keywords say."""
    if layers is None:
        return (spec,) * num_layers
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence):
        raise TypeError(
            f"layers must be a sequence of LayerSpec, one a layer, not {type(layers).__name__}"
        )
    for index, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec):
            raise TypeError(f"layers[{index}] must be a LayerSpec, not {shown(layer)}")
    if len(layers) != num_layers:
        raise ConfigError(
            f"layers has {len(layers)} specs and num_layers={num_layers}: give one spec a layer"
        )
    first = layers[0]
    for index, layer in enumerate(layers):
        if layer != first:
            raise ConfigError(
                f"layers[{index}] differs from layers[0]: layers of unequal geometry or window are "
                f"not in this version; supported: equal LayerSpecs"
            )
    heads = (first.num_kv_heads, first.head_dim, first.v_head_dim)
    same_heads = heads == (spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
    if not same_heads or (window_given and first.window != spec.window):
        raise ConfigError(
            "layers contradicts num_kv_heads, head_dim, v_head_dim or window: "
            f"{shown(heads + (first.window,))} against {shown(_numbers(spec))}; make them agree"
        )
    return tuple(layers)


def _numbers(spec: LayerSpec) -> tuple[int, int, int | None, int | None]:
    """The four numbers of ``spec`` in the order in which messages list them."""
    return (spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.window)


def _device(value: object) -> str:
    if isinstance(value, torch.device):
        value = str(value)
    if isinstance(value, str) and _GPU.fullmatch(value):
        return value
    if isinstance(value, str) and value not in DEVICES:
        raise ConfigError(
            f"device={shown(value)} is unknown; known: 'cpu', 'sim', 'cuda', or a GPU by its "
            "number as in 'cuda:1'"
        )
    return choice("device", value, DEVICES, error=ConfigError)


def _sim(value: object, device: str) -> SimOptions | None:
    if device != "sim":
        if value is not None:
            raise ConfigError(f"sim={shown(value)} needs device='sim', not {device!r}")
        return None
    if value is not None and not isinstance(value, SimOptions):
        raise TypeError(f"sim must be a kvmem.SimOptions, not {type(value).__name__}")
    return SimOptions() if value is None else value


def _block_size(value: object) -> int:
    try:
        size = integer("block_size", value, low=1, high=BLOCK_SIZES[-1], error=ConfigError)
    except ConfigError:
        size = 0
    if size not in BLOCK_SIZES:
        listed = ", ".join(str(x) for x in BLOCK_SIZES)
        raise ConfigError(f"block_size={shown(value)} must be a power of two: {listed} tokens")
    return size


def _memory_bytes(name: str, value: object, free: Callable[[], int]) -> int:
    """Bytes meant by an int, a str with a unit, or a share of the free memory."""
    if isinstance(value, float):
        if not (math.isfinite(value) and 0 < value < 1):
            raise ConfigError(
                f"{name}={value!r} is no share: give a float 0 < x < 1 of the free memory, an int "
                f'of bytes, or a str such as "8GiB"'
            )
        return int(free() * value)
    if isinstance(value, str):
        size = parse_size(value)
        if size is None:
            raise ConfigError(f"{name}={shown(value)} is no size: give {SIZE_FORMS}")
        value = size
    return integer(name, value, low=1, high=_MAX_MEMORY, error=ConfigError)
