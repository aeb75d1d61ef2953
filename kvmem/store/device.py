"""The interface of a device: streams, fences, copies, launches, and what was moved.

Nothing above this line calls torch streams, threads or events. ``cpu.py`` implements it with worker
threads; a CUDA device does it with CUDA streams, a simulated one with a seeded scheduler.

Ordering (R6) has two sources only: one stream is a FIFO, and ``wait`` orders a stream after a
fence of another. The host is ordered by ``synchronize`` or by a ``query`` that said yes.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvmem.errors import KVMemError
from kvmem.store.arena import ArenaBase

FrameIds = NDArray[np.int32]


class Named(Protocol):
    """What can be accessed: an arena, or a buffer that has a name of its own."""

    name: str


class Memory(Named, Protocol):
    """What can be copied: an arena, or the pieces of one."""

    num_frames: int
    frame_bytes: int
    num_pieces: int

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """uint8 ``[frames, frame_bytes]``, where the host can read them."""


class Fills(Protocol):
    """What fills vacated frames, in a launch on the OUT stream."""

    def fill(self, frames: FrameIds) -> None: ...


#: Frames of an arena that a launch reads or writes, for a device that checks orderings.
Access = tuple[Named, FrameIds]


class Stream(enum.IntEnum):
    """The three streams of a device. Each is a FIFO."""

    COMPUTE = 0
    OUT = 1  # device -> host
    IN = 2  # host -> device


class Fence(ABC):  # noqa: B024 - a name for what each device makes in its own way
    """The event that ends a transfer or a step; opaque, belongs to the device that made it."""

    __slots__ = ("label",)

    def __init__(self, label: str) -> None:
        self.label = label


def is_survivable(error: BaseException) -> bool:
    """Whether an error of a copy leaves the device usable: what the system refuses. A ValueError,
    say, is a mistake of kvmem's own, which recovering would hide."""
    refused = isinstance(error, OSError | MemoryError | RuntimeError)
    return refused and not isinstance(error, KVMemError)


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer's copy, to learn what became of it. ``error`` is set before the fence of the
    transfer is reached, and stays None when the bytes moved."""

    stream: Stream
    transfer_id: int
    error: Exception | None = None

    def fail(self, error: Exception, failed: list[Ticket]) -> None:
        """Note why, and list the ticket; once for all copies of a transfer."""
        if self.error is None:
            self.error = error.with_traceback(None)  # it would keep its callers' frames alive
            failed.append(self)


@dataclass(frozen=True, slots=True)
class Moved:
    """What one stream has finished moving since the device was made; failed copies don't count."""

    frames: int
    num_bytes: int
    runs: int  # contiguous in both arenas: a device with a copy engine copies each in one go

    @classmethod
    def whole(cls, target: Memory, target_ids: FrameIds, source_ids: FrameIds) -> Moved:
        """What a copy of whole frames counts as."""
        count = len(target_ids)
        return cls(count, count * target.frame_bytes, num_runs(target_ids, source_ids))

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.frames + other.frames, self.num_bytes + other.num_bytes, self.runs + other.runs
        )


def num_runs(target_ids: FrameIds, source_ids: FrameIds) -> int:
    """How many runs of pairs follow each other in both arenas. O(pairs)."""
    return len(run_starts(target_ids, source_ids))


def run_starts(target_ids: FrameIds, source_ids: FrameIds) -> NDArray[np.intp]:
    """Where runs of pairs begin that follow each other in both arenas. O(pairs)."""
    begins = np.ones(len(target_ids), np.bool_)
    begins[1:] = (np.diff(target_ids) != 1) | (np.diff(source_ids) != 1)
    return np.flatnonzero(begins)


NOTHING_MOVED = Moved(0, 0, 0)


class Device(ABC):
    """Memory and streams of one device. Every method is thread-safe."""

    name: str
    #: Kernels are queued as copies are, so operands are staged and each launch says what it
    #: touches; vacated frames are poisoned. Else the calling thread is the compute stream.
    simulated: bool = False

    def __init__(self) -> None:
        #: Tickets of copies that failed, in the order of failing; who handles them takes them out.
        self.failed: list[Ticket] = []

    @abstractmethod
    def new_arena(self, name: str, num_frames: int, frame_bytes: int, *, host: bool) -> ArenaBase:
        """Zeroed memory for frames, on the device or (``host=True``) on the host beside it."""

    @abstractmethod
    def new_fence(self, label: str) -> Fence:
        """A fence that is not reached until it is recorded and its stream came to that point."""

    @abstractmethod
    def record(self, stream: Stream, fence: Fence) -> None:
        """Make ``fence`` the end of all that ``stream`` was given up to now."""

    @abstractmethod
    def wait(self, stream: Stream, fence: Fence) -> None:
        """What ``stream`` is given from now on runs after ``fence``; the host does not wait.

        The CPU device's COMPUTE stream is the calling thread, so there this call does wait.
        """

    @abstractmethod
    def query(self, fence: Fence) -> bool:
        """Whether ``fence`` is reached; never waits. False for ever after a failure."""

    @abstractmethod
    def synchronize(self, fence: Fence, timeout: float | None = None) -> bool:
        """Wait on the host until ``fence`` is reached; False when ``timeout`` seconds passed first.

        Raises ``DeviceUnavailable`` (``CorruptEntry`` where that was the cause) when the device
        failed, ``ManagerClosed`` when it was closed in the meantime.
        """

    @abstractmethod
    def copy_async(
        self,
        stream: Stream,
        target: Memory,
        target_ids: FrameIds,
        source: Memory,
        source_ids: FrameIds,
        ticket: Ticket | None = None,
        moved: Moved | None = None,
    ) -> None:
        """Copy whole frames, ``source[source_ids[i]] -> target[target_ids[i]]``, on ``stream``.

        The id arrays belong to the device from here on: the caller must not write them again.
        A copy that fails leaves garbage in its targets. With a ``ticket``, and an error that the
        device survives (`is_survivable`), it is told there and in ``failed``, and the stream goes
        on; else it fails the device. ``moved`` is what it counts as, if that is not its frames.
        """

    @abstractmethod
    def launch(
        self,
        stream: Stream,
        function: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        moved: Moved | None = None,
    ) -> None:
        """Run ``function`` in the order of ``stream``; ``moved`` is counted when it has ended."""

    def timed(
        self, stream: Stream, queue: Callable[[], None], told: Callable[[float], None]
    ) -> None:
        """Call ``queue``, which gives ``stream`` work, and later ``told`` with the seconds that the
        work took there: what the stream waited for before it is left out.

        Here by notes on the stream itself; a device whose streams don't run on the host has to
        time by its own events.
        """
        begin = [0.0]

        def start() -> None:
            begin[0] = time.perf_counter()

        self.launch(stream, start)
        queue()
        self.launch(stream, lambda: told(time.perf_counter() - begin[0]))

    def settle(self, stream: Stream) -> None:  # noqa: B027 - nothing to do where work runs at once
        """See that what COMPUTE was given has run, for a result that has no fence; orders nothing.

        Nothing to do where the calling thread is that stream.
        """

    def read_back(self, arena: Named, frames: FrameIds) -> None:  # noqa: B027 - the same
        """The host is about to read frames. Raises ``RaceError`` on a device that can tell."""

    @abstractmethod
    def moved(self, stream: Stream) -> Moved:
        """Frames and bytes that ``stream`` has finished moving."""

    def transfer_counts(self) -> dict[str, int]:
        """What a device with several ways of a transfer did: ``transfers_copied``, ``_batched``,
        ``_staged``; and ``host_locked_bytes``, page-locked. Zeros elsewhere."""
        names = ("transfers_copied", "transfers_batched", "transfers_staged", "host_locked_bytes")
        return dict.fromkeys(names, 0)

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """What made the device fail, or None. A failed device stays failed."""

    @abstractmethod
    def close(self) -> None:
        """Drain or abandon what is queued and end the streams within 5 s; then a no-op."""
