"""Tokens that were sampled on a GPU: appended at once, their values learnt when they arrive.

The values go two ways: on the GPU into the next step's `tokens`, and to the host, where blocks are
published once their tokens are known (R5). No call waits for them, but those that have to compare,
copy or show them (`await_tokens`).
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvmem.ledger import Refusal
from kvmem.ledger.decide import PLANNED
from kvmem.tokens import MAX_TOKEN, count_array

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvmem.ledger import StepArrays
    from kvmem.runtime import Ids, Runtime
    from kvmem.store.cuda.sampled import Sampled

LOG = logging.getLogger("kvmem")
_DTYPES = (torch.int32, torch.int64)


class Patch(NamedTuple):
    """Tokens of a step that only the GPU knows: ``tokens[places[i]] = values[sources[i]]``."""

    places: NDArray[np.int64]
    sources: NDArray[np.int64]
    values: torch.Tensor


class _Batch(NamedTuple):
    """What one `append` took: ``counts[i]`` values of a record, from ``offsets[i]`` on, which are
    its tokens from ``firsts[i]`` on."""

    sampled: Sampled
    records: Ids
    arrivals: NDArray[np.int64]  # records are used again: whose values these are
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    offsets: NDArray[np.int64]


class SampledTokens:
    """The tokens of one Manager whose values are under way, oldest first. Guarded by its lock."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._batches: deque[_Batch] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    def append(self, records: Ids, sampled: Sampled, counts: NDArray[np.int64]) -> None:
        """Append tokens by what `Store.sample` made of them. Raises Refusal with nothing done."""
        sequences = self._runtime.ledger.state.sequences
        firsts = sequences["num_tokens"][records].astype(np.int64)
        arrivals = sequences["arrival"][records].copy()
        self._runtime.ledger.append_unknown(records, counts)
        offsets = np.cumsum(counts) - counts
        self._batches.append(_Batch(sampled, records, arrivals, counts, firsts, offsets))

    def arrive(self) -> None:
        """Learn what has arrived. Never waits. O(tokens arrived)."""
        while self._batches and self._batches[0].sampled.arrived():
            self._learn(self._batches.popleft())

    def await_tokens(self, seqs: Iterable[Any]) -> None:
        """Wait until all tokens of these handles are known; under no lock. Others are ignored."""
        while True:
            with self._runtime.lock:
                self.arrive()
                records = [getattr(seq, "_record", 0) for seq in seqs]
                unknown = self._runtime.ledger.num_unknown(np.array(records, np.int32))
                if not unknown.any() or not self._batches:
                    return
                oldest = self._batches[0].sampled
            oldest.wait()

    def patches(self, arrays: StepArrays) -> list[Patch]:
        """What a step just planned has to take from the GPU. O(rows) a batch under way."""
        rows = arrays.rows
        planned = rows["sequence"][rows["reason"] == PLANNED]
        begins = arrays.query_start[:-1].astype(np.int64)
        lengths = np.diff(arrays.query_start)
        some = lengths > 0
        planned, begins, lengths = planned[some], begins[some], lengths[some]
        positions = arrays.positions[begins]
        found = []
        for batch in self._batches:
            number = np.full(len(self._runtime.ledger.state.sequences), -1, np.int64)
            number[batch.records] = np.arange(len(batch.records))
            index = number[planned]
            row = np.flatnonzero(index >= 0)
            index = index[row]
            low = np.maximum(positions[row], batch.firsts[index])
            high = positions[row] + lengths[row]
            high = np.minimum(high, batch.firsts[index] + batch.counts[index])
            counts = np.maximum(high - low, 0)
            counts[self._gone(batch)[index]] = 0
            if not counts.any():
                continue
            ramp = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            places = np.repeat(begins[row] + low - positions[row], counts) + ramp
            sources = np.repeat(batch.offsets[index] + low - batch.firsts[index], counts) + ramp
            found.append(Patch(places, sources, batch.sampled.values))
        return found

    def _gone(self, batch: _Batch) -> NDArray[np.bool_]:
        """Which sequences of a batch were freed since."""
        sequences = self._runtime.ledger.state.sequences[batch.records]
        gone: NDArray[np.bool_] = np.asarray(sequences["arrival"] != batch.arrivals)
        gone |= np.asarray(sequences["state"] == 0)
        return gone

    def _learn(self, batch: _Batch) -> None:
        """Give the ledger the values of a batch that has arrived."""
        values = batch.sampled.on_host()
        batch.sampled.release()
        wrong = (values < 0) | (values > MAX_TOKEN)
        kept = ~self._gone(batch)
        if wrong.any():
            owners = np.repeat(batch.records, batch.counts)[wrong & np.repeat(kept, batch.counts)]
            LOG.error(
                "%d tokens sampled on the GPU are outside [0, 2**31), the first is %d; their "
                "sequences are not published",
                int(wrong.sum()), int(values[wrong][0]),
            )  # fmt: skip
            self._runtime.ledger.state.sequences["publish"][owners] = 0
            values[wrong] = 0
        kept_values = values[np.repeat(kept, batch.counts)].astype(np.int32)
        ledger = self._runtime.ledger
        plan = ledger.learn(batch.records[kept], batch.counts[kept], kept_values)
        self._runtime.submit(plan)


def append_sampled(runtime: Runtime, seqs: Any, tokens: object, counts: object) -> bool:
    """`Manager.append` of tokens that lie on the Manager's GPU; False for other tokens, of which
    nothing was done. Raises as that."""
    sample = runtime.store.sample
    if not isinstance(tokens, torch.Tensor) or sample is None:
        return False
    if tokens.dim() != 1 or tokens.dtype not in _DTYPES:
        if tokens.device.type == "cpu":
            return False  # refused by whoever looks at tokens of the host
        raise TypeError(
            f"tokens is a {tokens.dim()}-D tensor of {tokens.dtype} on {tokens.device}; allowed "
            "there: 1-D, torch.int32 or torch.int64"
        )
    with runtime.entered():
        records = runtime.records(seqs)
        runtime.losses.check_samples(records)
        each = np.ones(len(records), np.int64)
        if counts is not None:
            each = count_array("counts", counts, len(records), "sequence")
        if each.sum() != len(tokens):
            raise ValueError(
                f"tokens has {len(tokens)} entries, counts ask for {each.sum()} over "
                f"{len(records)} sequences; give one token a sequence, or counts"
            )
        sampled = sample(tokens.detach())
        if sampled is None:
            return False
        assert runtime.sampled is not None
        try:
            runtime.sampled.append(records, sampled, each)
        except Refusal as refusal:
            sampled.release()
            raise runtime.explain(refusal, seqs, "append") from None
        return True
