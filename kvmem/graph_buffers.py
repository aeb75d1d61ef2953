"""`GraphBuffers`: where the tensors of steps lie for a CUDA graph, captured once and replayed.

    buffers = manager.graph_buffers(max_seqs=256, max_tokens=256, max_context=8192)
    with manager.step(seqs, into=buffers) as step:    # entering puts the step's arrays there
        if graph is None:
            run(step)                                 # warm-up: kernels are loaded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(step)                       # step.write, step.attend, the model's own
        graph.replay()                                # reads what the buffers hold

Tensors of such a step have the shapes and addresses of the buffers in every step. What the step has
not is padding: tokens 0 at position 0 with slot -1, which write nothing and for which attention
gives zeros; rows of length 0 that name the null frame. What hangs on a step's own sizes lies in the
host's integers and in `step.host`. The same runs without a GPU, eagerly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from kvmem.checks import integer
from kvmem.runtime import Ids, Runtime
from kvmem.step import Step
from kvmem.store.fixed import MOST_ENTRIES, Fixed, FixedSizes, bytes_of

MOST = 2**31 - 1


class GraphBuffers:
    """Tensors of steps at fixed addresses. Made by `Manager.graph_buffers`; one step at a time is
    open in it. It has to live as long as the graphs captured with it."""

    def __init__(self, runtime: Runtime, max_seqs: int, max_tokens: int, max_context: int) -> None:
        config = runtime.config
        size, blocks = config.block_size, config.device_blocks
        seqs = integer("max_seqs", max_seqs, low=1, high=MOST)
        tokens = integer("max_tokens", max_tokens, low=1, high=MOST)
        self._max_context = integer("max_context", max_context, low=1, high=MOST)
        # No row of a step is longer than the device tier.
        columns = min(-(-self._max_context // size), blocks)
        if seqs * columns > MOST_ENTRIES:
            raise ValueError(
                f"max_seqs={seqs} times the {columns} blocks of max_context={self._max_context} "
                f"make {seqs * columns} table entries; allowed: at most {MOST_ENTRIES}"
            )
        self._sizes = FixedSizes(seqs, tokens, min(self._max_context, columns * size), columns)
        self._runtime = runtime
        self._fixed: Fixed | None = runtime.store.fixed(self._sizes)
        self._open: weakref.ref[Step] | None = None
        self._epoch = 0  # of the step whose arrays it holds

    @property
    def max_seqs(self) -> int:
        """Sequences of a step, at most."""
        return self._sizes.max_seqs

    @property
    def max_tokens(self) -> int:
        """Tokens of a step, at most."""
        return self._sizes.max_tokens

    @property
    def max_context(self) -> int:
        """Tokens of a sequence, at most."""
        return self._max_context

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return bytes_of(self._sizes)

    @property
    def in_use(self) -> bool:
        """Whether a step is open in it, planned and not ended."""
        step = None if self._open is None else self._open()
        return step is not None and not step.ended and not self._runtime.closed

    @property
    def released(self) -> bool:
        """True after `release`."""
        return self._fixed is None

    def release(self) -> None:
        """Give the memory back; graphs captured with it must not be replayed any more. A second
        call: no-op. Raises RuntimeError while a step is open in it."""
        with self._runtime.lock:
            if self.in_use:
                raise RuntimeError("a step is open in these buffers; end it before release()")
            self._fixed = None

    def __repr__(self) -> str:
        state = "released" if self.released else "in use" if self.in_use else "free"
        sizes = f"{self.max_seqs} seqs {self.max_tokens} tokens {self.max_context} context"
        return f"<GraphBuffers {sizes} {state}>"

    # --- inside ---------------------------------------------------------------------------------

    def _taken(self, *arguments: Any) -> GraphStep:
        """The step just planned, open in these buffers."""
        step = GraphStep(self, *arguments)
        self._open = weakref.ref(step)
        return step


def admitted(
    into: object, runtime: Runtime, records: Ids, max_tokens: int | None
) -> tuple[int, Callable[..., Step]]:
    """The budget of a step that goes into buffers, and what makes it. The caller holds the lock.

    Raises TypeError, ValueError, RuntimeError; nothing is changed then.
    """
    if not isinstance(into, GraphBuffers):
        raise TypeError(f"into must be a kvmem.GraphBuffers, not {type(into).__name__}")
    if into._runtime is not runtime:
        raise ValueError("into belongs to another Manager; use buffers of this one")
    if into.released:
        raise RuntimeError("into was released; make new ones with graph_buffers")
    if into.in_use:
        raise RuntimeError("into is in use by an open step; end that step first, or make a second")
    if len(records) > into.max_seqs:
        raise ValueError(
            f"seqs has {len(records)} sequences; allowed: max_seqs={into.max_seqs} of into"
        )
    lengths = runtime.ledger.state.sequences["num_tokens"][records]
    over = np.flatnonzero(lengths > into.max_context)
    if len(over):
        row = int(over[0])
        raise ValueError(
            f"seqs[{row}] has {int(lengths[row])} tokens; allowed: max_context={into.max_context} "
            "of into"
        )
    if max_tokens is not None and max_tokens > into.max_tokens:
        raise ValueError(f"max_tokens={max_tokens}; allowed: max_tokens={into.max_tokens} of into")
    return into.max_tokens if max_tokens is None else max_tokens, into._taken


class GraphStep(Step):
    """A step whose tensors lie in `GraphBuffers`, from entering it on.

    `write` and `attend` take padded tensors, of `max_tokens` tokens. Inside a capture they launch
    kernels and nothing else. That every layer is written is not checked: a replay tells nobody.
    """

    def __init__(self, buffers: GraphBuffers, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._buffers = buffers
        assert buffers._fixed is not None
        self._fixed: Fixed = buffers._fixed
        self._written = None

    def __enter__(self) -> Step:
        self._fixed.check_outside_capture()
        super().__enter__()
        try:
            runtime = self._runtime
            if self._arriving:  # no graph could wait for the layers of this one step
                runtime.store.arrive(self._arriving, runtime.config.num_layers - 1)
            self._update_table()
            self._fixed.fill(self._arrays, self._arrays.block_table)
            if self._uploaded is not None:  # tokens that only the GPU knows were put there
                tokens = self._uploaded.tensor("tokens")
                self._fixed.tensor("tokens")[: len(tokens)].copy_(tokens)
            self._buffers._epoch = self._epoch
        except BaseException:
            self._end(commit=False)
            raise
        return self

    @property
    def block_table(self) -> torch.Tensor:
        """int32 `[max_seqs, ceil(max_context / block_size)]` of frame ids, 0 where there is none;
        no more columns than the device has blocks."""
        return self._tensor("block_table")

    def _tensor(self, name: str) -> torch.Tensor:
        if self._buffers._epoch != self._epoch:
            if not self._entered:
                raise RuntimeError("enter the step first: its arrays are put into the buffers then")
            raise RuntimeError("this step has ended, and its buffers hold another step's arrays")
        return self._fixed.tensor(name)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """As `Step.write`, with K and V of `max_tokens` tokens; the padding is skipped."""
        self._check_running()
        number, fixed = self._layer(layer), self._fixed
        self._runtime.store.write(number, k, v, fixed.arrays.slot_mapping, **fixed.operands())

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
        """As `Step.attend`, with q of `max_tokens` tokens. Padded ones give zeros and a log-sum-exp
        of -inf; the others have the bits of a plain step. Grids and splits hang on the buffers'
        sizes alone. In a capture, `alibi` and `sinks` must have been given to an earlier call, or
        be contiguous float32 tensors of the GPU, whose numbers are trusted."""
        self._check_running()
        number, fixed = self._layer(layer), self._fixed
        arrays = fixed.arrays
        return self._runtime.store.attend(
            number,
            q,
            table=arrays.table,
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
            **fixed.operands(),
        )
