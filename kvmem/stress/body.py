"""The body of a step: stamps are written, attended to, and every row of its sequences is read.

Attention over random K and V tells which rows it read, and their order: one wrong row moves the
result by about one part in the length of the sequence. The rows themselves are then compared bit by
bit, which also tells where. Both see the frames of an open step only: others may move the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from cuda_kernels.dtypes import bits_to_float
from kvmem.manager import Manager
from kvmem.sequence import Sequence as Handle
from kvmem.step import Step
from kvmem.storage_dtype import FP8, FP8_NAME
from kvmem.stress.breach import Breach, Mismatch
from kvmem.stress.stamps import KEY, QUERY, VALUE, Chain, Rows, Stamps, attended

#: Largest error of an attention output, of numbers below 2 and rounded to the dtype; a wrong row
#: in 2,000 is off by more in float32. The comparison of the rows has no tolerance.
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


@dataclass(eq=False, slots=True)
class Tracked:
    """A live sequence and what is known of it."""

    seq: Handle
    namespace: str | None
    tokens: NDArray[np.int32]
    chain: Chain
    target: int  # tokens at which it ends

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.seq.num_computed


@dataclass(slots=True)
class Checked:
    """How much was compared."""

    rows: int = 0  # K and V of one token in one layer
    attentions: int = 0  # queries of one token in one layer


@dataclass(slots=True)
class Batch:
    """The rows of one step, flat: for each the tokens it attends to."""

    tracked: Sequence[Tracked]
    lengths: NDArray[np.int64]  # tokens of each row up to its last in this step
    starts: NDArray[np.int64]  # of each row in the step's tokens, and the end
    row_of: NDArray[np.int64] = field(init=False)  # one entry an attended token, as all below
    position: NDArray[np.int64] = field(init=False)
    chain: Chain = field(init=False)
    asking: NDArray[np.int64] = field(init=False)  # for each of the step's tokens its place there

    def __post_init__(self) -> None:
        count = len(self.tracked)
        self.row_of = np.repeat(np.arange(count), self.lengths)
        ends = np.cumsum(self.lengths)
        self.position = np.arange(len(self.row_of)) - np.repeat(ends - self.lengths, self.lengths)
        pieces = [t.chain[:n] for t, n in zip(self.tracked, self.lengths, strict=True)]
        self.chain = np.concatenate(pieces) if pieces else np.zeros(0, np.uint64)
        asked = np.diff(self.starts)
        first = np.repeat(ends - asked - self.starts[:-1], asked)
        self.asking = np.arange(self.starts[-1]) + first


class Body:
    """What a step's body does, on one Manager. One a thread."""

    def __init__(self, manager: Manager, stamps: Stamps, thread: int | None) -> None:
        self.manager = manager
        self.stamps = stamps
        self.thread = thread
        config = manager.config
        self.block_size, self.num_layers = config.block_size, config.num_layers
        self.dtype, self.tolerance = config.dtype, TOLERANCE[config.dtype_name]
        self.in_fp8 = config.kv_dtype == FP8
        self._device = torch.device("cpu")  # of the step's tensors
        self.checked = Checked()

    def run(self, step: Step, known: dict[int, Tracked], *, num_layers: int | None = None) -> None:
        """Compute and check the layers, or the first ``num_layers``. Raises Mismatch, and whatever
        the Manager raises. O(tokens of the sequences)."""
        tracked = [known[seq.id] for seq in step.seqs]
        self._device = step.tokens.device
        lengths = step.seq_lens.cpu().numpy().astype(np.int64)
        batch = Batch(tracked, lengths, step.query_start.cpu().numpy().astype(np.int64))
        self._check_tokens(step, batch)
        for layer in range(self.num_layers if num_layers is None else num_layers):
            self._layer(step, layer, batch)

    def _check_tokens(self, step: Step, batch: Batch) -> None:
        """The step computes the tokens and positions that are next."""
        position = batch.position[batch.asking]
        rows = batch.row_of[batch.asking]
        wrong = np.flatnonzero(step.positions.cpu().numpy() != position)
        if not len(wrong):
            each = [t.tokens for t in batch.tracked]
            starts = np.concatenate(([0], np.cumsum([len(x) for x in each])))[:-1]
            expected = np.concatenate(each)[starts[rows] + position] if each else position
            wrong = np.flatnonzero(step.tokens.cpu().numpy() != expected)
        if len(wrong):
            i = int(wrong[0])
            raise self._mismatch(batch, int(batch.asking[i]), None, "the step's token", "", "")

    def _layer(self, step: Step, layer: int, batch: Batch) -> None:
        new = batch.chain[batch.asking]
        step.write(layer, self._tensor(KEY, layer, new), self._tensor(VALUE, layer, new))
        query = self._tensor(QUERY, layer, new)
        out = step.attend(layer, query)
        assert isinstance(out, torch.Tensor)
        key, value = self._stored(KEY, layer, batch.chain), self._stored(VALUE, layer, batch.chain)
        found = out.float().cpu().numpy()
        error = np.abs(found - self._expected(query.float().cpu().numpy(), key, value, batch))
        self._check_rows(step, layer, batch, key, value)
        good = error.max((1, 2), initial=0) <= self.tolerance  # NaN is not
        self.checked.attentions += len(new)
        if not good.all():
            i = int(np.flatnonzero(~good)[0])
            raise self._mismatch(
                batch, int(batch.asking[i]), layer, "attention (its rows are as written)",
                f"within {self.tolerance}", f"off by {error[i].max():.4g}",
            )  # fmt: skip

    def _expected(self, query: Rows, key: Rows, value: Rows, batch: Batch) -> NDArray[np.float64]:
        outs = [np.zeros((0, *query.shape[1:]))]
        end = 0
        for row, length in enumerate(batch.lengths.tolist()):
            start, end = end, end + length
            asked = query[batch.starts[row] : batch.starts[row + 1]]
            outs.append(attended(asked, key[start:end], value[start:end]))
        return np.concatenate(outs)

    def _check_rows(self, step: Step, layer: int, batch: Batch, key: Rows, value: Rows) -> None:
        """K and V of each token of the batch lie where the table says, bit by bit."""
        table = step.block_table.cpu().numpy()
        frames = table[batch.row_of, batch.position // self.block_size].astype(np.int64)
        where = frames, batch.position % self.block_size
        for name, view, expected in zip("KV", self.manager.kv(layer), (key, value), strict=True):
            found = _picked(view, where)
            wrong = np.flatnonzero((found != expected).any((1, 2)))
            if len(wrong):
                i = int(wrong[0])
                raise self._mismatch(
                    batch, i, layer, name, *_differing(expected[i].ravel(), found[i].ravel())
                )
        self.checked.rows += len(frames)

    def _stored(self, kind: int, layer: int, chain: Chain) -> Rows:
        """What the arena holds of the rows; by torch's rounding, not by that of the kernel."""
        rows = self.stamps.rows(kind, layer, chain)
        return torch.from_numpy(rows).to(FP8).float().numpy() if self.in_fp8 else rows

    def _tensor(self, kind: int, layer: int, chain: Chain) -> torch.Tensor:
        rows = torch.from_numpy(self.stamps.rows(kind, layer, chain))
        return rows.to(self._device, self.dtype)

    def _mismatch(
        self, batch: Batch, i: int, layer: int | None, what: str, expected: str, found: str
    ) -> Mismatch:
        """The breach at the ``i``-th attended token of the batch."""
        sequence = batch.tracked[int(batch.row_of[i])].seq.id
        position = int(batch.position[i])
        place = "" if layer is None else f" layer {layer}"
        values = f" (expected {expected}, found {found})" if expected else ""
        message = (
            f"{what} of sequence {sequence} position {position}{place} is not its stamp{values}"
        )
        return Mismatch(
            Breach(
                "content", message, sequence, position, layer, expected or None, found or None,
                self.thread,
            )
        )  # fmt: skip


def _picked(view: torch.Tensor, where: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Rows:
    """Some rows of an arena as float32. By NumPy: torch would wake its threads for a few rows."""
    if view.is_cuda:  # these rows alone cross the bus
        bytes_or_numbers = view.view(torch.uint8) if view.dtype == FP8 else view
        frames, places = (torch.from_numpy(index).to(view.device) for index in where)
        rows = bytes_or_numbers[frames, places].cpu()
        return (rows.view(FP8) if view.dtype == FP8 else rows).float().numpy()
    if view.dtype == FP8:
        return bits_to_float(view.view(torch.uint8).numpy()[where], FP8_NAME)
    if view.dtype != torch.bfloat16:
        return view.numpy()[where].astype(np.float32)
    bits = view.view(torch.uint16).numpy()[where].astype(np.uint32)
    return (bits << 16).view(np.float32)


def _differing(expected: Rows, found: Rows) -> tuple[str, str]:
    """The first few numbers of two rows, from the first that differs."""
    first = int(np.flatnonzero(expected != found)[0])
    shown = slice(first, first + 3)
    return tuple(  # type: ignore[return-value]
        f"[{first}]: " + " ".join(f"{x:.6g}" for x in row[shown].tolist())
        for row in (expected, found)
    )
