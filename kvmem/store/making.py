"""What a store is made of, by its config; devices that nobody asks for are not even imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

import torch

from kvmem.errors import DeviceUnavailable, KVMemError
from kvmem.geometry import arena_frames
from kvmem.sim_options import SimOptions
from kvmem.store.arena import Arena, ArenaBase
from kvmem.store.checks import Checks, Filler, Poison
from kvmem.store.compute import Compute
from kvmem.store.device import Device, Fills, FrameIds
from kvmem.store.layout import Layout, StoreConfig
from kvmem.store.staged import StagedCompute

if TYPE_CHECKING:
    from kvmem.store.cuda.compute import CudaCompute
    from kvmem.store.cuda.sampled import Sampled
    from kvmem.store.cuda.step_tensors import StepTensors


Progress = Callable[[int, int], object]


class Guards(Protocol):
    """What debug looks for in the arenas, in words."""

    def breaches(self) -> list[str]: ...
    def written(self, frames: FrameIds) -> list[str]: ...


class Parts(NamedTuple):
    """A device with its memory, and what works on both."""

    device: Device
    device_arena: ArenaBase
    host_arena: ArenaBase | None
    compute: Compute | CudaCompute  # makes the launches of copies on write
    kernels: Compute | StagedCompute | CudaCompute  # writes and attends
    filler: Fills | None
    guards: Guards | None  # with debug
    checksums: Checks | None  # with debug, where the host can read the device's memory
    step_tensors: Callable[[Any], StepTensors] | None  # where a step's arrays have to be uploaded
    #: Takes token ids that lie on the GPU; None for a tensor that doesn't.
    sample: Callable[[torch.Tensor], Sampled | None] | None


def make_parts(
    config: StoreConfig, layout: Layout, device: Device | None, progress: Progress | None = None
) -> Parts:
    """Device, arenas and kernels of a config; ``progress`` hears of the page-locking of host memory
    for a GPU, (bytes done, bytes in all), and may raise to end it. Raises ``ConfigError``,
    ``DeviceUnavailable``; what was made before a refusal is given back."""
    made = make_device(config, progress) if device is None else device
    blocks = (config.device_blocks, config.host_blocks)
    frames = [arena_frames(count, debug=config.debug) for count in blocks]
    arenas: list[ArenaBase] = []
    try:
        for name, count in zip(("device", "host"), frames, strict=True):
            if count:
                host = name == "host"
                arenas.append(made.new_arena(name, count, layout.frame_bytes, host=host))
        host_arena = arenas[1] if len(arenas) > 1 else None
        if made.name == "cuda":
            return _cuda_parts(config, layout, made, arenas[0], host_arena)
        return _host_parts(
            config, layout, made, cast(Arena, arenas[0]), cast("Arena | None", host_arena)
        )
    except BaseException as error:
        made.close()
        for arena in arenas:
            arena.close()
        if made.name == "cuda" and isinstance(error, RuntimeError):
            _raise_unavailable(error)
        raise


def _host_parts(
    config: StoreConfig, layout: Layout, device: Device, arena: Arena, host: Arena | None
) -> Parts:
    """Both tiers in memory of the host."""
    if device.simulated and layout.is_even:
        for one in filter(None, (arena, host)):
            one.num_pieces = layout.num_layers  # copies by layers are told apart
    compute = Compute(
        layout, arena, check=config.debug, k_scale=config.k_scale, v_scale=config.v_scale
    )
    checks: Checks | None = None
    filler: Filler | None = None
    if config.debug:
        filler = checks = Checks(layout, arena, host)
    elif config.zero_on_free != "never":
        filler = Filler.of_zeros(layout, arena)
    elif device.simulated:
        filler = Poison(layout, arena, host)
    kernels: Compute | StagedCompute = compute
    if device.simulated:
        late = config.sim is not None and config.sim.late_results
        kernels = StagedCompute(compute, layout, device, arena, late_results=late)
    return Parts(device, arena, host, compute, kernels, filler, checks, checks, None, None)


def _cuda_parts(
    config: StoreConfig, layout: Layout, device: Any, arena: Any, host: ArenaBase | None
) -> Parts:
    """The device tier on a GPU."""
    from kvmem.store.cuda.compute import CudaCompute
    from kvmem.store.cuda.guards import ZERO, CudaFiller, CudaGuards
    from kvmem.store.cuda.sampled import Sampled
    from kvmem.store.cuda.step_tensors import StepTensors

    compute = CudaCompute(
        layout, arena, device, check=config.debug, k_scale=config.k_scale, v_scale=config.v_scale
    )
    filler: CudaFiller | None = None
    guards: CudaGuards | None = None
    if config.debug:
        filler = guards = CudaGuards(device, arena)
    elif config.zero_on_free != "never":
        filler = CudaFiller(device, arena, ZERO)

    def step_tensors(arrays: Any) -> StepTensors:
        return StepTensors(device, arrays)

    def sample(tensor: torch.Tensor) -> Sampled | None:
        return Sampled(device, tensor) if device.cuda.owns(tensor) else None

    return Parts(device, arena, host, compute, compute, filler, guards, None, step_tensors, sample)


def _raise_unavailable(error: RuntimeError) -> NoReturn:
    """What CUDA refuses at the start becomes ``DeviceUnavailable``; errors of kvmem's own stay."""
    if not isinstance(error, KVMemError):
        raise DeviceUnavailable(f"device cuda could not be set up: {str(error)[:200]}") from error
    raise error


def make_device(config: StoreConfig, progress: Progress | None = None) -> Device:
    """The device of ``config.device``. ``sync=True`` makes a simulated one run everything at once.

    Raises ``ValueError`` for a name that Config would not have let through, ``DeviceUnavailable``
    for a GPU that can't be used.
    """
    if config.device == "cpu":
        from kvmem.store.cpu import CpuDevice

        return CpuDevice(sync=config.sync)
    if config.device == "sim":
        from kvmem.store.sim import SimDevice

        options = config.sim if config.sim is not None else SimOptions()
        if config.sync:
            options = replace(options, mode="eager", starve=None, not_yet=0.0)
        return SimDevice(options)
    if config.device.partition(":")[0] == "cuda":
        from kvmem.store.cuda import api
        from kvmem.store.cuda.device import CudaDevice

        cuda = api.open_cuda(config.device)
        try:
            return CudaDevice(cuda, sync=config.sync, numa_node=config.numa_node, progress=progress)
        except RuntimeError as error:
            _raise_unavailable(error)
    raise ValueError(f"device {config.device!r} is unknown; known: 'cpu', 'sim', 'cuda'")
