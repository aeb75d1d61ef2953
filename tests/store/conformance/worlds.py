"""One device of each kind, for tests that say the same of all: the CPU's, simulated ones, and a
GPU's over its double."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem.sim_options import SimOptions
from kvmem.store.arena import ArenaBase
from kvmem.store.cpu import CpuDevice
from kvmem.store.device import Fence, FrameIds, Stream, Ticket
from kvmem.store.sim import SimDevice
from tests.cuda_double.memory import bytes_at
from tests.cuda_double.opening import Double

KINDS = (
    "cpu", "cpu sync", "sim random", "sim late", "sim reverse",
    "cuda random", "cuda late", "cuda eager", "cuda sync",
)  # fmt: skip
#: Those whose copies can be held back.
QUEUED = tuple(kind for kind in KINDS if not kind.endswith("sync"))
FRAMES, FRAME_BYTES, PIECES = 12, 192, 3


@dataclass
class World:
    """A device with an arena a tier; every frame of the device one has bytes of its own."""

    kind: str
    device: Any
    double: Double | None
    arenas: list[ArenaBase] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.kind.split()[0]

    def bytes(self, arena: ArenaBase) -> NDArray[np.uint8]:
        """The memory of an arena, behind the device's back."""
        flat = bytes_at(arena.address, arena.num_bytes)
        return flat.reshape(arena.num_frames, arena.frame_bytes)

    def copy(self, stream: Stream, to: FrameIds, origin: FrameIds, **more: Any) -> None:
        """From one arena to the other, whichever way the stream goes."""
        here, there = self.arenas
        target, source = (there, here) if stream is Stream.OUT else (here, there)
        self.device.copy_async(stream, target, to, source, origin, **more)

    def fence(self, stream: Stream, label: str = "fence") -> Fence:
        """A fence behind all that a stream was given."""
        made: Fence = self.device.new_fence(label)
        self.device.record(stream, made)
        return made

    def finish(self) -> None:
        """Wait for both copy streams."""
        for stream in (Stream.OUT, Stream.IN):
            assert self.device.synchronize(self.fence(stream, "end"), 60)

    def fail_next(self, error: BaseException) -> None:
        """Let the next copy raise, where it runs or where it is queued."""

        def hook(*_: object) -> None:
            self.device.hook = None
            raise error

        self.device.hook = hook


def new_world(kind: str, seed: int) -> World:
    """Arenas of `FRAMES` frames; frame f of the device's holds bytes 16 * f + (byte % 16)."""
    name, _, mode = kind.partition(" ")
    double = None
    device: Any
    if name == "cpu":
        device = CpuDevice(sync=mode == "sync")
    elif name == "sim":
        device = SimDevice(SimOptions(mode=mode, seed=seed))
    else:
        double = Double.new(seed, "random" if mode == "sync" else mode)
        device = double.device(sync=mode == "sync")
    world = World(kind, device, double)
    for tier in ("device", "host"):
        world.arenas.append(device.new_arena(tier, FRAMES, FRAME_BYTES, host=tier == "host"))
    if name == "sim":
        for arena in world.arenas:
            arena.num_pieces = PIECES  # in which it tells accesses apart
    world.bytes(world.arenas[0])[:] = content(np.arange(FRAMES))
    return world


def content(frames: Any) -> NDArray[np.uint8]:
    """What frames of the device's arena hold at first."""
    wide = 16 * np.asarray(frames)[:, None] + np.arange(FRAME_BYTES)[None, :] % 16
    return wide.astype(np.uint8)


@contextmanager
def opened(kind: str, seed: int) -> Iterator[World]:
    """A world that is closed at the end, with nothing left behind."""
    world = new_world(kind, seed)
    try:
        yield world
    finally:
        for stream in (Stream.OUT, Stream.IN):
            world.device.release(stream)
        world.device.close()
        for arena in world.arenas:
            arena.close()
    if world.double is not None:
        assert not world.double.memory.registered, "memory stays page-locked"
        world.double.check()


def ticket(stream: Stream, number: int = 1) -> Ticket:
    return Ticket(stream, number)
