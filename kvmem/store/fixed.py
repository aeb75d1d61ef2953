"""The arrays of a step at fixed addresses and of fixed shapes, padded: what a CUDA graph reads.

    tokens, positions   0 past the step's own
    slot_mapping        -1 past them: nothing is written
    seq_lens            0 for rows that the step has not
    query_start         such rows have no tokens
    block_table         frame 0, the null frame, where a row has no block
    last                0 past the sequences that are ready

The kernels see one row more: of length 0, it has the padded tokens, so attention gives zeros for
them. All lies in one piece of memory, the table behind the rest, so that one copy takes it to a
GPU, up to the last row of the table that isn't zeros there already.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 64
#: Entries of a table, at most: its rows begin at int32 indices.
MOST_ENTRIES = 2**31 - 1
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


class FixedSizes(NamedTuple):
    """What a step may have at most."""

    max_seqs: int
    max_tokens: int
    max_context: int  # tokens of a sequence
    num_columns: int  # blocks of a sequence


class Place(NamedTuple):
    """An array in the memory: first byte, dtype, shape as kernels see it, length shown to users."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    shown: int


def places_of(sizes: FixedSizes) -> dict[str, Place]:
    """Where each array lies; `block_table` last."""
    rows, tokens = sizes.max_seqs, sizes.max_tokens
    shapes: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int], ...] = (
        *((name, _INT64, (tokens,), tokens) for name in ("tokens", "positions", "slot_mapping")),
        ("last", _INT64, (rows,), rows),
        ("seq_lens", _INT32, (rows + 1,), rows),
        ("query_start", _INT32, (rows + 2,), rows + 1),
        ("table_start", _INT32, (rows + 1,), rows),
        ("block_table", _INT32, (rows, sizes.num_columns), rows),
    )
    found, start = {}, 0
    for name, dtype, shape, shown in shapes:
        found[name] = Place(start, dtype, shape, shown)
        start += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return found


def bytes_of(sizes: FixedSizes) -> int:
    """Bytes of the memory."""
    place = places_of(sizes)["block_table"]
    return place.start + int(np.prod(place.shape)) * place.dtype.itemsize


class FixedArrays:
    """The arrays in host memory; ``memory`` is uint8, `bytes_of` the sizes long."""

    def __init__(self, sizes: FixedSizes, memory: NDArray[np.uint8]) -> None:
        self.sizes, self.memory = sizes, memory
        memory[:] = 0
        places = places_of(sizes)
        made: dict[str, NDArray[Any]] = {}
        for name, (start, dtype, shape, _) in places.items():
            stop = start + int(np.prod(shape)) * dtype.itemsize
            made[name] = memory[start:stop].view(dtype).reshape(shape)
        self.tokens, self.positions = made["tokens"], made["positions"]
        self.slot_mapping, self.last = made["slot_mapping"], made["last"]
        self.seq_lens, self.query_start = made["seq_lens"], made["query_start"]
        self.table_start, self.block_table = made["table_start"], made["block_table"]
        self.table = self.block_table.reshape(-1)
        self.table_start[:-1] = np.arange(sizes.max_seqs) * sizes.num_columns
        self.query_start[-1] = sizes.max_tokens
        self.slot_mapping[:] = -1
        self._filled = (0, 0)  # rows and columns of the table that may hold frames
        self._by_name = {name: array[: places[name].shown] for name, array in made.items()}

    def shown(self, name: str) -> NDArray[Any]:
        """An array as users see it, without the row of the padding."""
        return self._by_name[name]

    def fill(self, arrays: Any, table: NDArray[np.int32]) -> int:
        """Take a step's arrays and its dense table; returns its rows.

        The step fits. O(max_seqs + max_tokens + entries of the table)."""
        count = len(arrays.tokens)
        for target, source, rest in (
            (self.tokens, arrays.tokens, 0),
            (self.positions, arrays.positions, 0),
            (self.slot_mapping, arrays.slot_mapping, -1),
            (self.last, arrays.last, 0),
        ):
            target[: len(source)] = source
            target[len(source) :] = rest
        rows, columns = table.shape
        self.seq_lens[:rows] = arrays.seq_lens
        self.seq_lens[rows:] = 0
        self.query_start[: rows + 1] = arrays.query_start
        self.query_start[rows + 1 : -1] = count
        columns = min(columns, self.sizes.num_columns)  # columns past a row's end hold 0
        rows_before, columns_before = self._filled
        self.block_table[:rows, :columns] = table[:, :columns]
        self.block_table[:rows, columns:columns_before] = 0
        self.block_table[rows:rows_before] = 0
        self._filled = rows, columns
        return rows


class Fixed(Protocol):
    """The arrays where a device reads them."""

    @property
    def arrays(self) -> FixedArrays:
        """The last ones filled, on the host."""

    def fill(self, arrays: Any, table: NDArray[np.int32]) -> None:
        """Have a step's arrays there, in the order of COMPUTE."""

    def tensor(self, name: str) -> torch.Tensor:
        """One of them, always the same memory."""

    def operands(self) -> dict[str, Any]:
        """What `Store.write` and `attend` take beside the arrays of the host."""

    def check_outside_capture(self) -> None:
        """Raise RuntimeError while a graph is captured."""


class FixedOnHost:
    """`Fixed` where kernels read host memory."""

    def __init__(self, sizes: FixedSizes) -> None:
        self.arrays = FixedArrays(sizes, np.zeros(bytes_of(sizes), np.uint8))
        self._made: dict[str, torch.Tensor] = {}

    def fill(self, arrays: Any, table: NDArray[np.int32]) -> None:
        """At once."""
        self.arrays.fill(arrays, table)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the memory."""
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = torch.from_numpy(self.arrays.shown(name))
        return found

    def operands(self) -> dict[str, Any]:
        """None: the host's arrays are what kernels read."""
        return {}

    def check_outside_capture(self) -> None:
        """Nothing is captured here."""
