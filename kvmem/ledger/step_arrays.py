"""The arrays of a step: what kernels and engines read, kept and used again by later steps.

A decode step of 256 sequences needs about ten small arrays. Making them, and the views of them,
would cost as much as planning it, so a `StepArrays` is used again once its step has ended, and
keeps its views while their lengths stay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmem.plan import Plan

from .address import Layout, addresses_of, opener
from .state import COPIES, ROW, records

# Places in `Batch.report`.
NUM_ROWS = 0  # planned
NUM_TOKENS = 1
NUM_READY = 2
MAX_QUERY_LEN = 3
MAX_SEQ_LEN = 4
EPOCH = 5
IS_FILLED = 6  # 0: the arrays are too short for the tokens planned
HAS_PLAN = 7  # 1: the numbers that `seal` wrote say more than the epoch
WANTS_CLEANING = 8  # 1: `clean` would find something to look at
SEALED = 9  # where these begin
REPORT_LENGTH = SEALED + COPIES + 4

TABLE_MARK = np.dtype(  # what a row of the dense table was copied from
    [("sequence", "i4"), ("num_blocks", "i4"), ("clock", "i8")]
)
SMALLEST_ROWS = 16


class Batch(NamedTuple):
    """The arrays themselves, longer than a step needs; compiled code takes all of them."""

    seqs: NDArray[np.int32]  # records asked for
    rows: NDArray[Any]  # ROW, one a sequence asked for, planned or not
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    query_start: NDArray[np.int32]
    table_start: NDArray[np.int64]
    last: NDArray[np.int64]
    is_ready: NDArray[np.bool_]
    num_tokens: NDArray[np.int32]
    report: NDArray[np.int64]  # numbers for Python, see above
    dense: NDArray[np.int32]  # frame ids [rows, columns], made when it is asked for
    marks: NDArray[Any]  # TABLE_MARK [rows]


_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
LAYOUT: Layout = {
    "seqs": (_INT32, 1),
    "rows": (ROW, 1),
    "tokens": (_INT64, 1),
    "positions": (_INT64, 1),
    "slot_mapping": (_INT64, 1),
    "seq_lens": (_INT32, 1),
    "query_start": (_INT32, 1),
    "table_start": (_INT64, 1),
    "last": (_INT64, 1),
    "is_ready": (np.dtype(np.bool_), 1),
    "num_tokens": (_INT32, 1),
    "report": (_INT64, 1),
    "dense": (_INT32, 2),
    "marks": (TABLE_MARK, 1),
}
opened_batch = opener(Batch, LAYOUT)


class StepArrays:
    """The arrays of one planned step; rows are the planned sequences in the order given."""

    epoch: int
    rows: NDArray[Any]  # ROW, one a sequence asked for, planned or not
    tokens: NDArray[np.int64]  # [num_tokens]
    positions: NDArray[np.int64]  # [num_tokens]
    slot_mapping: NDArray[np.int64]  # [num_tokens]
    seq_lens: NDArray[np.int32]  # [num_rows]: context length, this step's tokens included
    query_start: NDArray[np.int32]  # [num_rows + 1]
    table_start: NDArray[np.int64]  # [num_rows]: of each row in `frame_table`
    frame_table: NDArray[np.int32]  # the flat table of device frames at planning
    last: NDArray[np.int64]  # [num_ready]: the token whose logits are sampled
    is_ready: NDArray[np.bool_]  # [num_rows]: the row's last pending token is in this step
    num_tokens: NDArray[np.int32]  # [num_rows]
    block_table: NDArray[np.int32]  # [num_rows, max_blocks]: as dense rows, when asked for
    max_query_len: int
    max_seq_len: int

    def __init__(self) -> None:
        self.epoch = 0
        self.table_epoch = 0  # of the step that `block_table` was made for
        self.block_table = np.zeros((0, 0), np.int32)
        #: What upper layers make of the views (tensors); emptied when the views change.
        self.derived: dict[str, Any] = {}
        #: What upper layers made for the step, kept until another step has the arrays.
        self.kept: Any = None
        self.plan = Plan()  # of a step that moves nothing: only its epoch changes
        self._asked: object = None
        self._num_asked = -1
        self._lengths = (-1, -1, -1)
        self._make(SMALLEST_ROWS, SMALLEST_ROWS)

    def _make(self, num_rows: int, num_tokens: int) -> None:
        """New arrays of these lengths; nothing of the old ones is kept."""
        self._asked, self._num_asked, self._lengths = None, -1, (-1, -1, -1)
        per_token = {name: np.zeros(num_tokens, np.int64) for name in _PER_TOKEN}
        self.whole = Batch(
            seqs=np.zeros(num_rows, np.int32),
            rows=records(num_rows, ROW),
            seq_lens=np.zeros(num_rows, np.int32),
            query_start=np.zeros(num_rows + 1, np.int32),
            table_start=np.zeros(num_rows, np.int64),
            last=np.zeros(num_rows, np.int64),
            is_ready=np.zeros(num_rows, np.bool_),
            num_tokens=np.zeros(num_rows, np.int32),
            report=np.zeros(REPORT_LENGTH, np.int64),
            dense=np.zeros((num_rows, 0), np.int32),
            marks=records(num_rows, TABLE_MARK),
            **per_token,
        )
        self.addresses = addresses_of(self.whole, LAYOUT)

    def ask(self, seqs: NDArray[np.int32], num_tokens: NDArray[np.int32] | None) -> None:
        """Note what a step is asked for. O(1) for the same array of records as the last time."""
        count = len(seqs)
        whole = self.whole
        if count > len(whole.seqs):
            self._make(2 * count, max(2 * count, len(whole.tokens)))
            whole = self.whole
        if seqs is not self._asked:
            whole.seqs[:count] = seqs
            self._asked = seqs
        if num_tokens is not None:
            whole.num_tokens[:count] = num_tokens
        if count != self._num_asked:
            self._num_asked = count
            self.rows = whole.rows[:count]

    def make_longer(self, num_tokens: int) -> None:
        """Let the arrays of tokens have room for a step; the rows stay."""
        length = max(num_tokens, 2 * len(self.whole.tokens))
        self._lengths = (-1, -1, -1)
        self.whole = self.whole._replace(
            **{name: np.zeros(length, np.int64) for name in _PER_TOKEN}
        )
        self.addresses = addresses_of(self.whole, LAYOUT)

    def show_table(self, num_columns: int) -> None:
        """Show the dense table of the step just planned, made wider if need be."""
        whole = self.whole
        if num_columns > whole.dense.shape[1]:
            width = max(num_columns, 2 * whole.dense.shape[1], SMALLEST_ROWS)
            self.whole = whole._replace(
                dense=np.zeros((len(whole.seqs), width), np.int32),
                marks=records(len(whole.seqs), TABLE_MARK),
            )
            self.addresses = addresses_of(self.whole, LAYOUT)
        self.table_epoch = self.epoch
        shown = self.whole.dense[: self.num_rows, :num_columns]
        if self.block_table.base is not self.whole.dense or self.block_table.shape != shown.shape:
            self.block_table = shown
            self.derived.pop("block_table", None)

    def take(self, report: list[int], frame_table: NDArray[np.int32]) -> None:
        """Show the step just planned: views of its lengths, unless they are there already."""
        self.epoch = report[EPOCH]
        self.frame_table = frame_table
        self.max_query_len, self.max_seq_len = report[MAX_QUERY_LEN], report[MAX_SEQ_LEN]
        lengths = num_rows, num_tokens, num_ready = tuple(report[NUM_ROWS : NUM_READY + 1])
        if lengths == self._lengths:
            return
        self._lengths = lengths
        self.derived.clear()
        whole = self.whole
        for name in _PER_TOKEN:
            setattr(self, name, getattr(whole, name)[:num_tokens])
        for name in ("seq_lens", "table_start", "is_ready", "num_tokens"):
            setattr(self, name, getattr(whole, name)[:num_rows])
        self.query_start = whole.query_start[: num_rows + 1]
        self.last = whole.last[:num_ready]

    @property
    def num_rows(self) -> int:
        """Planned rows."""
        return self._lengths[NUM_ROWS]

    @property
    def num_ready(self) -> int:
        """Rows whose last pending token is in the step."""
        return self._lengths[NUM_READY]


_PER_TOKEN = ("tokens", "positions", "slot_mapping")
