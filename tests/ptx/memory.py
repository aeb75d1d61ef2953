"""Memory with a shadow: bounds, alignment, permission, initialisation and races.

One `Memory` is a set of mapped buffers (global memory), or the shared memory of each block of a
wave. For each byte (or cell as wide as the kernel's narrowest access) the shadow keeps who wrote it
last and when, and who has read it since. Two accesses of different threads, one of them a store,
are a race unless a barrier that both threads took part in lies between them. Time is the number of
instructions run.

A load through the read-only path (`ld.global.nc`) must never meet a store of the same launch. Bytes
that an asynchronous copy is going to store are nobody's until the thread that began it has waited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.errors import Misaligned, OutOfBounds, Race, ReadOnly, Uninitialised

NOBODY = -1
_NEVER_ORDERED = 2**62  # the time of a read through the read-only path
_LINE = 256  # buffers start at multiples of it, so alignment in here is alignment there


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of an access, by number over the whole grid, and what orders them.

    A thread comes after everything that happened before ``block_time`` in its block and before
    ``warp_time`` in its warp.
    """

    number: NDArray[np.int64]
    block_time: NDArray[np.int64]
    warp_time: NDArray[np.int64]
    block_size: int


class Memory:
    """Mapped buffers in one flat array of bytes."""

    def __init__(self, kind: str, grain: int = 1) -> None:
        self.kind = kind
        self.grain = grain  # bytes of the narrowest access: what the shadow tells apart
        self.flat = np.zeros(0, np.uint8)
        self.start = np.zeros(0, np.int64)  # addresses, ascending
        self.size = np.zeros(0, np.int64)
        self.place = np.zeros(0, np.int64)  # of the buffer in `flat`
        self.writable = np.zeros(0, np.bool_)
        self.names: list[str] = []

    def map(self, buffers: list[tuple[str, int, NDArray[np.uint8], bool, bool]]) -> None:
        """Map buffers: name, address, bytes, may be written, is initialised."""
        buffers = sorted(buffers, key=lambda buffer: buffer[1])
        end = 0
        places, known = [], []
        for name, address, data, _, initialised in buffers:
            place = -(-end // _LINE) * _LINE + _LINE + address % _LINE
            places.append(place)
            end = place + data.size
            known.append((place, data, initialised))
            self.names.append(name)
        self.flat = np.zeros(-(-end // _LINE) * _LINE + _LINE, np.uint8)
        self.known = np.zeros(self.flat.size, np.bool_)
        for place, data, initialised in known:
            self.flat[place : place + data.size] = data
            self.known[place : place + data.size] = initialised
        self.all_known = all(buffer[4] for buffer in buffers)
        self.start = np.array([buffer[1] for buffer in buffers], np.int64)
        self.size = np.array([buffer[2].size for buffer in buffers], np.int64)
        self.place = np.array(places, np.int64)
        self.writable = np.array([buffer[3] for buffer in buffers], np.bool_)
        overlap = self.start[1:] < (self.start + self.size)[:-1]
        assert not overlap.any(), "buffers overlap"
        self.forget_accesses()

    def forget_accesses(self) -> None:
        """A new launch: what ended before it is ordered before it."""
        size = self.flat.size // self.grain
        self.writer = np.full(size, NOBODY, np.int64)
        self.write_time = np.zeros(size, np.int64)
        self.low_reader = np.full(size, NOBODY, np.int64)  # lowest and highest since the last write
        self.high_reader = np.full(size, NOBODY, np.int64)
        self.read_time = np.zeros(size, np.int64)
        self.pending = np.zeros(size, np.bool_)  # an asynchronous copy will store there

    def bytes_of(self, index: int) -> NDArray[np.uint8]:
        """The bytes of buffer `index`, counted by ascending address, as they are now."""
        place = int(self.place[index])
        return self.flat[place : place + int(self.size[index])]

    def known_of(self, index: int) -> NDArray[np.bool_]:
        """Of each byte of buffer `index`, whether something wrote it."""
        place = int(self.place[index])
        return self.known[place : place + int(self.size[index])]

    def set_known(self, index: int, known: NDArray[np.bool_]) -> None:
        """What earlier launches have written of buffer `index`."""
        self.known_of(index)[:] = known
        self.all_known = False

    # -- accesses ----------------------------------------------------------------------------------

    def locate(
        self, address: NDArray[np.uint64], width: int, write: bool
    ) -> tuple[NDArray[np.int64], bool]:
        """Places in `flat`, and whether a store may go there too.

        Each access must lie in one buffer, aligned to its own width.
        """
        at = address.astype(np.int64)
        if (at % width).any():
            wrong = int(at[(at % width) != 0][0])
            raise Misaligned(f"{self.kind} address {wrong:#x} for {width} bytes")
        index = np.searchsorted(self.start, at, side="right") - 1
        inside = index >= 0
        inside &= at + width <= self.start[index] + self.size[index]
        if not inside.all():
            raise OutOfBounds(self._where(int(at[~inside][0]), width))
        writable = self.writable[index]
        if write and not writable.all():
            wrong = int(np.argmin(writable))
            raise ReadOnly(f"a store to {self.names[index[wrong]]}, which is only read")
        return at - self.start[index] + self.place[index], bool(writable.any())

    def _where(self, address: int, width: int) -> str:
        text = f"{width} bytes at {self.kind} address {address:#x}"
        index = int(np.searchsorted(self.start, address, side="right")) - 1
        if index >= 0:
            past = address - int(self.start[index])
            text += f": {past} bytes into {self.names[index]} of {int(self.size[index])}"
        return text + ", inside no buffer"

    def load(
        self,
        address: NDArray[np.uint64],
        dtype: np.dtype[Any],
        count: int,
        threads: Threads,
        time: int,
        *,
        constant: bool = False,
    ) -> NDArray[Any]:
        """Load `count` elements a thread: ``[threads, count]``. `constant`: the read-only path."""
        width = dtype.itemsize * count
        place, shared_with_stores = self.locate(address, width, write=False)
        cells = place // width
        self._refuse_pending(cells, width)
        if not self.all_known and not self.known.reshape(-1, width)[cells].all():
            wrong = np.argmin(self.known.reshape(-1, width)[cells].all(axis=1))
            raise Uninitialised(
                f"{self.kind} address {int(address[wrong]):#x} is read, but was never written"
            )
        if shared_with_stores:
            self._note_reads(cells, width, threads, time, constant)
        return self.flat.view(f"V{width}")[cells].view(dtype).reshape(-1, count)

    def store(
        self,
        address: NDArray[np.uint64],
        values: NDArray[Any],
        threads: Threads,
        time: int,
    ) -> None:
        """Store ``[threads, count]`` elements."""
        width = values.itemsize * values.shape[1]
        place, _ = self.locate(address, width, write=True)
        cells = place // width
        self._refuse_pending(cells, width)
        self._note_writes(cells, width, threads, time)
        self.flat.view(f"V{width}")[cells] = (
            np.ascontiguousarray(values).view(f"V{width}").reshape(-1)
        )

    def update(
        self, address: NDArray[np.uint64], dtype: np.dtype[Any], threads: Threads, time: int
    ) -> NDArray[np.int64]:
        """Places of an atomic access, in elements of `dtype`; it is ordered with other atomics."""
        place, _ = self.locate(address, dtype.itemsize, write=True)
        cells = place // dtype.itemsize
        if not self.known.reshape(-1, dtype.itemsize)[cells].all():
            raise Uninitialised(f"an atomic operation on {self.kind} memory never written")
        self._note_writes(cells, dtype.itemsize, threads, time, atomic=True)
        return cells

    def begin_copy(
        self, address: NDArray[np.uint64], width: int, threads: Threads, time: int
    ) -> None:
        """An asynchronous copy to these places begins: what is there is lost."""
        place, _ = self.locate(address, width, write=True)
        cells = place // width
        self._refuse_pending(cells, width)
        self._note_writes(cells, width, threads, time)
        self.pending.reshape(-1, width // self.grain)[cells] = True
        self.known.reshape(-1, width)[cells] = False
        self.all_known = False

    def end_copy(self, address: NDArray[np.uint64], values: NDArray[Any], time: int) -> None:
        """It has arrived, ``[threads, count]``: a store at this time of the threads that began."""
        width = values.itemsize * values.shape[1]
        place, _ = self.locate(address, width, write=True)
        cells, wide = place // width, width // self.grain
        self.pending.reshape(-1, wide)[cells] = False
        self.known.reshape(-1, width)[cells] = True
        self.write_time.reshape(-1, wide)[cells] = time
        self.flat.view(f"V{width}")[cells] = (
            np.ascontiguousarray(values).view(f"V{width}").reshape(-1)
        )

    def _refuse_pending(self, cells: NDArray[np.int64], width: int) -> None:
        if self.kind == "shared" and self.pending.reshape(-1, width // self.grain)[cells].any():
            raise Race("a byte of shared memory is used while a copy to it is under way")

    # -- races -------------------------------------------------------------------------------------

    def _note_reads(
        self,
        cells: NDArray[np.int64],
        width: int,
        threads: Threads,
        time: int,
        constant: bool,
    ) -> None:
        me, wide = threads.number[:, None], width // self.grain
        writer = self.writer.reshape(-1, wide)[cells]
        written = writer != NOBODY
        if written.any():
            atomic = writer < NOBODY
            when = self.write_time.reshape(-1, wide)[cells]
            ordered = _ordered(writer, writer, when, threads) & ~atomic
            ordered |= atomic & self._after_atomics(when, threads)
            if constant:
                ordered[:] = False
            bad = written & ~ordered
            if bad.any():
                row = int(np.argmax(bad.any(axis=1)))
                other = int(writer[row][bad[row]][0])
                raise Race(self._conflict("read", int(me[row, 0]), other))
        low, high = self.low_reader.reshape(-1, wide), self.high_reader.reshape(-1, wide)
        when = self.read_time.reshape(-1, wide)
        before = _ordered(low[cells], high[cells], when[cells], threads)
        before |= low[cells] == NOBODY
        new_low = np.where(before, me, np.minimum(low[cells], me))
        new_high = np.where(before, me, np.maximum(high[cells], me))
        # Lanes ascend: of lanes that read one byte, the last assignment wins; so once each way.
        low[cells[::-1]] = new_low[::-1]
        high[cells] = new_high
        when[cells] = _NEVER_ORDERED if constant else time

    def _note_writes(
        self,
        cells: NDArray[np.int64],
        width: int,
        threads: Threads,
        time: int,
        atomic: bool = False,
    ) -> None:
        me, wide = threads.number[:, None], width // self.grain
        writers = self.writer.reshape(-1, wide)
        if not atomic and np.unique(cells).size != cells.size:
            raise Race(f"two threads store to one place of {self.kind} memory in one instruction")
        writer = writers[cells]
        when = self.write_time.reshape(-1, wide)[cells]
        bad = (writer != NOBODY) & ~_ordered(writer, writer, when, threads)
        bad &= ~((writer < NOBODY) & self._after_atomics(when, threads))
        if atomic:
            bad &= writer > NOBODY
        low = self.low_reader.reshape(-1, wide)[cells]
        high = self.high_reader.reshape(-1, wide)[cells]
        read = self.read_time.reshape(-1, wide)[cells]
        bad_read = (low != NOBODY) & ~_ordered(low, high, read, threads)
        for wrong, others in ((bad, writer), (bad_read, low)):
            if wrong.any():
                row = int(np.argmax(wrong.any(axis=1)))
                other = int(others[row][wrong[row]][0])
                raise Race(self._conflict("written", int(me[row, 0]), other))
        writers[cells] = NOBODY - 1 if atomic else me
        self.write_time.reshape(-1, wide)[cells] = time
        self.low_reader.reshape(-1, wide)[cells] = NOBODY
        self.high_reader.reshape(-1, wide)[cells] = NOBODY
        if not self.all_known:
            self.known.reshape(-1, width)[cells] = True

    def _after_atomics(self, when: NDArray[np.int64], threads: Threads) -> NDArray[np.bool_]:
        """Whether a plain access comes after atomics; whose they were, isn't kept.

        In shared memory a barrier of the block orders them. In global memory other blocks may
        have taken part, which no barrier reaches.
        """
        return (when < threads.block_time[:, None]) & (self.kind == "shared")

    def _conflict(self, verb: str, me: int, other: int) -> str:
        who = "an atomic operation" if other < NOBODY else f"thread {other}"
        return (
            f"a byte of {self.kind} memory is {verb} by thread {me} and used by {who}, "
            "and no barrier is between them"
        )


def _ordered(
    low: NDArray[np.int64], high: NDArray[np.int64], when: NDArray[np.int64], threads: Threads
) -> NDArray[np.bool_]:
    """Whether accesses by the threads low to high, the last at `when`, come before each thread."""
    me = threads.number[:, None]
    found = (low == me) & (high == me) & (when < _NEVER_ORDERED)
    inside = me % threads.block_size
    block = me - inside
    mine = (low >= block) & (high < block + threads.block_size)
    found |= mine & (when < threads.block_time[:, None])
    if (threads.warp_time > threads.block_time).any():
        warp = block + inside // 32 * 32
        in_warp = (low >= warp) & (high < warp + 32)
        found |= in_warp & (when < threads.warp_time[:, None])
    return found
