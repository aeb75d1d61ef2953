"""`Step`: one batch, from its plan to its end. Made by `Manager.step`.

    with manager.step(seqs) as step:      # planned; entering waits for arrivals and copies on write
        step.write(layer, k, v)           # K/V of this step's tokens into their slots
        out = step.attend(layer, q)       # attention of each token over its sequence so far
                                          # leaving: tokens count as computed, full blocks published

An exception in the body restores tokens, tables, counts and trie as they were (R8).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvmem.ledger import StepArrays
from kvmem.ledger import decide as codes
from kvmem.ledger.raising import REASONS

if TYPE_CHECKING:
    from kvmem.plan import Plan
    from kvmem.runtime import Runtime
    from kvmem.sequence import Sequence


@dataclass(frozen=True)
class StepGroup:
    """The tables of one layer group, for engines with kernels of their own."""

    block_table: torch.Tensor  # int32 [num_seqs, max_blocks], frame ids, unused columns 0
    slot_mapping: torch.Tensor  # int64 [num_tokens]


class Step:
    """A planned batch. Rows are `seqs`, in the order given; tensors are on the device.

    `ready` are the sequences whose last pending token is in this step: `last` has one index into
    the tokens for each of them. `left_out` lists (sequence, reason) for the others asked for:
    "idle" (nothing pending), "budget" (max_tokens used up), "room" (no device blocks now),
    "arriving" (an earlier row computes the block it needs next), "never" (longer than the tier).
    """

    def __init__(
        self, runtime: Runtime, asked: list[Sequence], plan: Plan, arrays: StepArrays
    ) -> None:
        self._runtime = runtime
        self._plan = plan
        self._arrays = arrays
        self._entered = self._ended = False
        self._written: set[int] = set()
        reasons = arrays.rows["reason"]
        self.seqs: list[Sequence] = asked
        self.left_out: list[tuple[Sequence, str]] = []
        if reasons.any():  # else all are planned, the usual case of decoding
            planned = reasons == codes.PLANNED
            self.seqs = list(compress(asked, planned.tolist()))
            others = zip(asked, reasons.tolist(), strict=True)
            self.left_out = [(seq, REASONS[r]) for seq, r in others if r != codes.PLANNED]
        self.num_tokens = len(arrays.tokens)
        self.max_query_len = int(arrays.num_tokens.max(initial=0))
        self.max_seq_len = int(arrays.seq_lens.max(initial=0))
        self.ready: list[Sequence] = list(compress(self.seqs, arrays.is_ready.tolist()))

    # --- what is computed -----------------------------------------------------------------------

    @property
    def host(self) -> StepArrays:
        """The same arrays as NumPy, for planning on the host. Not to be written."""
        return self._arrays

    @cached_property
    def tokens(self) -> torch.Tensor:
        """int64 `[num_tokens]`."""
        return torch.from_numpy(self._arrays.tokens)

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 `[num_tokens]`: each token's index in its sequence."""
        return torch.from_numpy(self._arrays.positions)

    @cached_property
    def slot_mapping(self) -> torch.Tensor:
        """int64 `[num_tokens]`: frame_id * block_size + offset; -1: already stored, not written."""
        return torch.from_numpy(self._arrays.slot_mapping)

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """int32 `[num_seqs]`: tokens a row attends to at its last token."""
        return torch.from_numpy(self._arrays.seq_lens)

    @cached_property
    def query_start(self) -> torch.Tensor:
        """int32 `[num_seqs + 1]`: row i has tokens `query_start[i]` to `query_start[i + 1]`."""
        return torch.from_numpy(self._arrays.query_start)

    @cached_property
    def last(self) -> torch.Tensor:
        """int64 `[len(ready)]`: the token of each ready sequence whose logits are sampled."""
        return torch.from_numpy(self._arrays.last)

    @cached_property
    def block_table(self) -> torch.Tensor:
        """int32 `[num_seqs, max_blocks]` of frame ids, unused columns 0. O(entries), once: read it
        inside the step, the rows may be another's afterwards."""
        arrays, block_size = self._arrays, self._runtime.config.block_size
        lengths = -(-arrays.seq_lens // block_size)
        table = np.zeros((len(lengths), int(lengths.max(initial=0))), np.int32)
        for i, length in enumerate(lengths.tolist()):
            start = int(arrays.table_start[i])
            table[i, :length] = arrays.frame_table[start : start + length]
        return torch.from_numpy(table)

    def group(self, layer: int) -> StepGroup:
        """The tables of the group that a layer belongs to. Raises ValueError for no such layer."""
        self._layer(layer)
        return StepGroup(self.block_table, self.slot_mapping)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K `[num_tokens, num_kv_heads, head_dim]` and V (`v_head_dim`) of the tokens.

        Slots -1 are skipped. Raises ShapeError, TypeError or ValueError with nothing written,
        RuntimeError outside the step's body. O(bytes).
        """
        self._check_running()
        number = self._layer(layer)
        self._runtime.store.write(number, k, v, self._arrays.slot_mapping)
        self._written.add(number)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        alibi: ArrayLike | torch.Tensor | None = None,
        sinks: ArrayLike | torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of this step's tokens over their sequences' paged K/V.

        `q` `[num_tokens, num_heads, head_dim]`, num_heads a multiple of num_kv_heads. Scores
        are q.k * scale (default head_dim ** -0.5), then softcap `c * tanh(x / c)`, then ALiBi
        `- slope * (q_pos - k_pos)` with one slope a query head, then the mask (causal, and the
        config's window). `sinks` are logits a query head that enter the denominator only. Returns
        `[num_tokens, num_heads, v_head_dim]`, with `return_lse` also the natural log-sum-exp,
        float32 `[num_tokens, num_heads]`. Write the layer first: tokens attend to themselves.
        Raises ShapeError, TypeError or ValueError before computing, RuntimeError outside the body.
        """
        self._check_running()
        number = self._layer(layer)
        arrays = self._arrays
        return self._runtime.store.attend(
            number,
            q,
            table=arrays.frame_table,
            table_start=arrays.table_start,
            seq_lens=arrays.seq_lens,
            query_start=arrays.query_start,
            scale=scale,
            window=self._runtime.config.layers[number].window,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
            return_lse=return_lse,
            out=out,
        )

    # --- begin and end --------------------------------------------------------------------------

    def __enter__(self) -> Step:
        if self._ended:
            raise RuntimeError("this step has ended; plan a new one with Manager.step")
        if self._entered:
            raise RuntimeError("this step is open already; leave its `with` block first")
        self._entered = True
        try:
            self._runtime.store.begin(self._plan)  # waits here, under no lock (R6)
        except BaseException:
            self._end(commit=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        missing = self._missing_layers() if kind is None else []
        self._end(commit=kind is None and not missing)
        if kind is None and not self._runtime.closed:
            self._runtime.store.check_usable()  # a device that failed in the body: R8
        if missing:
            raise RuntimeError(
                f"the step wrote no K/V for layers {missing[:8]}; call step.write for each of the "
                f"{self._runtime.config.num_layers} layers (checked with debug=True)"
            )

    def cancel(self) -> None:
        """Give up a step, also one never entered: all is as before. A second call: no-op."""
        if not self._ended:
            self._end(commit=False)

    @property
    def ended(self) -> bool:
        """True after the `with` block, or after `cancel`."""
        return self._ended

    def _end(self, *, commit: bool) -> None:
        runtime, epoch = self._runtime, self._arrays.epoch
        if runtime.is_forked:  # the step is the parent's
            self._ended = True
            return
        with runtime.lock:
            self._ended = True
            if runtime.closed:
                return
            failed = runtime.store.error is not None
            runtime.store.end(epoch)
            plan = runtime.ledger.end_step(epoch, commit=commit and not failed)
            if not failed:
                runtime.submit(plan)
            ids = tuple([seq._id for seq in self.seqs])
            kind = "step" if commit and not failed else "abort"
            blocks = len(self._plan.out_device), len(self._plan.in_device)
            runtime.events.add(kind, ids, *blocks)

    def _missing_layers(self) -> list[int]:
        config = self._runtime.config
        if not config.debug or not (self._arrays.slot_mapping >= 0).any():
            return []
        return [layer for layer in range(config.num_layers) if layer not in self._written]

    def _check_running(self) -> None:
        if self._ended:
            raise RuntimeError("this step has ended; plan a new one with Manager.step")
        if not self._entered:
            raise RuntimeError("enter the step first: with manager.step(...) as step")

    def _layer(self, layer: Any) -> int:
        num_layers = self._runtime.config.num_layers
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
            raise TypeError(f"layer must be an int, not {type(layer).__name__}")
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer={layer} does not exist; allowed: 0 to {num_layers - 1}")
        return int(layer)

    def __repr__(self) -> str:
        state = "ended" if self._ended else "open" if self._entered else "planned"
        return f"<Step {self._arrays.epoch} {state} {len(self.seqs)} rows {self.num_tokens} tokens>"

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and not self._runtime.closed:
            self._runtime.abandoned.append(self._arrays.epoch)
            warnings.warn(
                f"step {self._arrays.epoch} was dropped without `with` or cancel()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def plan_step(
    runtime: Runtime,
    asked: list[Sequence],
    *,
    num_tokens: NDArray[np.int32] | None,
    max_tokens: int | None,
    reserve: int,
    need_all: bool,
) -> Step:
    """Plan a step over these handles; the caller holds the lock. Raises Refusal."""
    records = runtime.records(asked)
    plan, arrays = runtime.ledger.plan_step(
        records, num_tokens=num_tokens, max_tokens=max_tokens, reserve=reserve, need_all=need_all
    )
    runtime.submit(plan)
    return Step(runtime, asked, plan, arrays)
