"""`Step`: one batch, from its plan to its end. Made by `Manager.step`.

    with manager.step(seqs) as step:      # planned; entering waits for arrivals and copies on write
        step.write(layer, k, v)           # K/V of this step's tokens into their slots
        out = step.attend(layer, q)       # attention of each token over its sequence so far
                                          # leaving: tokens count as computed, full blocks published

An exception in the body restores tokens, tables, counts and trie as they were (R8). So does a copy
in that failed: entering or leaving raises TransferError, and its rows have more to compute.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
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
    from kvmem.sampled import Patch
    from kvmem.sequence import Sequence
    from kvmem.store.cuda.step_tensors import StepTensors
    from kvmem.store.transfer import Slice


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

    Its tensors are used again by the second step planned after its end: clone what is to be kept
    longer. Asking the old step for them raises RuntimeError from then on.
    """

    def __init__(
        self,
        runtime: Runtime,
        asked: list[Sequence],
        ids: tuple[int, ...],
        plan: Plan,
        arrays: StepArrays,
    ) -> None:
        self._runtime = runtime
        self._plan = plan
        self._arrays = arrays
        self._epoch = arrays.epoch
        self._ids = ids
        self._entered = self._ended = False
        self._arriving: list[Slice] = []  # layers under way when the step began
        self._uploaded: StepTensors | None = None  # on a GPU, from their first use on
        self._written: set[int] | None = set() if runtime.config.debug else None
        self._seqs = asked  # shared by all steps of these handles, never written
        self._own_seqs: list[Sequence] | None = None
        self.left_out: list[tuple[Sequence, str]] = []
        if arrays.num_rows < len(asked):  # else all are planned, the usual case of decoding
            self._leave_out(arrays.rows["reason"])
        self.num_tokens = len(arrays.tokens)
        self.max_query_len = arrays.max_query_len
        self.max_seq_len = arrays.max_seq_len

    def _leave_out(self, reasons: NDArray[np.int32]) -> None:
        """Keep the planned rows and say why the others are not."""
        asked = self._seqs
        planned = (reasons == codes.PLANNED).tolist()
        self._seqs = list(compress(asked, planned))
        self._ids = tuple(compress(self._ids, planned))
        others = zip(asked, reasons.tolist(), strict=True)
        self.left_out = [(seq, REASONS[r]) for seq, r in others if r != codes.PLANNED]

    # --- what is computed -----------------------------------------------------------------------

    @property
    def host(self) -> StepArrays:
        """The same arrays as NumPy, for planning on the host. Not to be written."""
        return self._own_arrays()

    @property
    def seqs(self) -> list[Sequence]:
        """The planned sequences, one a row. A list of the step's own."""
        if self._own_seqs is None:
            self._own_seqs = list(self._seqs)
        return self._own_seqs

    @property
    def ready(self) -> list[Sequence]:
        """The sequences whose last pending token is in this step. O(rows)."""
        return list(compress(self._seqs, self._own_arrays().is_ready.tolist()))

    @property
    def tokens(self) -> torch.Tensor:
        """int64 `[num_tokens]`."""
        return self._tensor("tokens")

    @property
    def positions(self) -> torch.Tensor:
        """int64 `[num_tokens]`: each token's index in its sequence."""
        return self._tensor("positions")

    @property
    def slot_mapping(self) -> torch.Tensor:
        """int64 `[num_tokens]`: frame_id * block_size + offset; -1: already stored, not written."""
        return self._tensor("slot_mapping")

    @property
    def seq_lens(self) -> torch.Tensor:
        """int32 `[num_seqs]`: tokens a row attends to at its last token."""
        return self._tensor("seq_lens")

    @property
    def query_start(self) -> torch.Tensor:
        """int32 `[num_seqs + 1]`: row i has tokens `query_start[i]` to `query_start[i + 1]`."""
        return self._tensor("query_start")

    @property
    def last(self) -> torch.Tensor:
        """int64 `[len(ready)]`: the token of each ready sequence whose logits are sampled."""
        return self._tensor("last")

    @property
    def block_table(self) -> torch.Tensor:
        """int32 `[num_seqs, max_blocks]` of frame ids, unused columns 0; rows are not adjacent
        (`stride(0) >= max_blocks`). O(rows + entries that changed since an earlier step of the same
        rows). Raises RuntimeError when it is first read after the step's end."""
        self._update_table()
        if self._runtime.store.step_tensors is not None:
            return self._on_gpu().table(self._arrays.block_table)
        return self._tensor("block_table")

    def _update_table(self) -> None:
        """Bring the dense table in line with this step."""
        arrays = self._own_arrays()
        if arrays.table_epoch != self._epoch:
            if self._ended:
                raise RuntimeError("this step has ended; read its block_table inside it")
            with self._runtime.lock:
                self._runtime.ledger.update_table(arrays)

    def _tensor(self, name: str) -> torch.Tensor:
        """A view of one of the step's arrays, kept with it."""
        if self._runtime.store.step_tensors is not None:
            return self._on_gpu().tensor(name)
        derived = self._own_arrays().derived
        tensor = derived.get(name)
        if tensor is None:
            tensor = derived[name] = torch.from_numpy(getattr(self._arrays, name))
        return tensor

    def _on_gpu(self) -> StepTensors:
        """The step's tensors on the GPU; the first call uploads them."""
        arrays = self._own_arrays()
        if self._uploaded is None:
            if self._ended:
                raise RuntimeError("this step has ended; read its tensors inside it")
            self._uploaded = self._runtime.store.upload(arrays)
        return self._uploaded

    def _patch(self, patches: list[Patch]) -> None:
        """Take tokens that only the GPU knows, now: who holds them lets them go soon."""
        for patch in patches:
            self._on_gpu().patch(*patch)

    def _operands(self) -> dict[str, Any]:
        """On a GPU, what `Store.write` and `attend` take beside the arrays of the host."""
        if self._runtime.store.step_tensors is None:
            return {}
        self._update_table()
        return {"on_device": self._on_gpu().operands(self._arrays.block_table)}

    def _own_arrays(self) -> StepArrays:
        """The arrays, unless a later step has them by now."""
        if self._arrays.epoch != self._epoch:
            raise RuntimeError(
                "this step ended some steps ago and its arrays are used again; clone what you keep"
            )
        return self._arrays

    def group(self, layer: int) -> StepGroup:
        """The tables of the group that a layer belongs to. Raises ValueError for no such layer."""
        self._arrive(self._layer(layer))
        return StepGroup(self.block_table, self.slot_mapping)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K `[num_tokens, num_kv_heads, head_dim]` and V (`v_head_dim`) of the tokens, of the
        config's `dtype`; as its `kv_dtype`.

        Slots -1 are skipped. Raises ShapeError, TypeError or ValueError with nothing written,
        RuntimeError outside the step's body. O(bytes).
        """
        self._check_running()
        number = self._layer(layer)
        self._arrive(number)
        self._runtime.store.write(number, k, v, self._arrays.slot_mapping, **self._operands())
        if self._written is not None:
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
        self._arrive(number)
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
            **self._operands(),
        )

    # --- begin and end --------------------------------------------------------------------------

    def __enter__(self) -> Step:
        if self._ended:
            raise RuntimeError("this step has ended; plan a new one with Manager.step")
        if self._entered:
            raise RuntimeError("this step is open already; leave its `with` block first")
        self._entered = True
        runtime = self._runtime
        try:
            self._arriving = runtime.store.begin(self._plan)  # waits here, under no lock (R6)
        except BaseException:
            self._end(commit=False)
            raise
        if runtime.failed or runtime.ledger.spoiled:
            with runtime.lock:
                runtime.recover()
                spoiled = self._epoch in runtime.ledger.spoiled
            if spoiled:
                self._end(commit=False)
                raise runtime.losses.step_error(self._ids)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        missing = self._missing_layers() if kind is None and self._written is not None else []
        spoiled = self._end(commit=kind is None and not missing)
        if kind is None and not self._runtime.closed:
            self._runtime.store.check_usable()  # a device that failed in the body: R8
        if spoiled and (kind is None or issubclass(kind, Exception)):
            # what the body raised over wrong bytes (NaN, say) is a consequence
            raise self._runtime.losses.step_error(self._ids) from error
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

    def _end(self, *, commit: bool) -> bool:
        """End the step; True when a copy it needed failed, so that nothing of it counts."""
        runtime, epoch = self._runtime, self._epoch
        if runtime.fork.in_child:  # the step is the parent's
            self._ended = True
            return False
        with runtime.lock:
            self._ended = True
            if runtime.closed:
                return False
            failed = runtime.store.error is not None
            runtime.store.end(epoch)
            if not failed and (runtime.failed or self._plan.step_after_in):
                runtime.poll()  # what is published now has arrived, as far as can be told (R5)
            spoiled = epoch in runtime.ledger.spoiled
            commit = commit and not failed and not spoiled
            plan = runtime.ledger.end_step(epoch, commit=commit)
            if not failed:
                runtime.submit(plan)
            blocks = self._plan.num_out, self._plan.num_in
            runtime.events.add("step" if commit else "abort", self._ids, *blocks)
            return spoiled

    def _missing_layers(self) -> list[int]:
        assert self._written is not None
        if not (self._arrays.slot_mapping >= 0).any():
            return []
        layers = range(self._runtime.config.num_layers)
        return [layer for layer in layers if layer not in self._written]

    def _check_running(self) -> None:
        if self._ended:
            raise RuntimeError("this step has ended; plan a new one with Manager.step")
        if not self._entered:
            raise RuntimeError("enter the step first: with manager.step(...) as step")

    def _arrive(self, layer: int) -> None:
        """Let the compute stream wait for a layer that was swapped in by layers (R6)."""
        if self._arriving:
            self._runtime.store.arrive(self._arriving, layer)

    def _layer(self, layer: Any) -> int:
        num_layers = self._runtime.config.num_layers
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
            raise TypeError(f"layer must be an int, not {type(layer).__name__}")
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer={layer} does not exist; allowed: 0 to {num_layers - 1}")
        return int(layer)

    def __repr__(self) -> str:
        state = "ended" if self._ended else "open" if self._entered else "planned"
        return f"<Step {self._epoch} {state} {len(self._seqs)} rows {self.num_tokens} tokens>"

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and not self._runtime.closed:
            self._runtime.abandoned.append(self._epoch)
            warnings.warn(
                f"step {self._epoch} was dropped without `with` or cancel()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
