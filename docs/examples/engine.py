"""A small LLM engine on kvmem: continuous batching, chunked prefill, greedy sampling, turns.

It is meant to be copied. All it knows of the cache is kvmem's public API; all it knows of the model
is one call, `model(step) -> logits [len(step.ready), vocab_size]`, which runs the layers with
`step.write` and `step.attend`.

Requests that don't fit the device take turns: while someone waits for room, every `turn_steps`
steps the one that has had memory for longest is swapped out. Nobody is while everyone fits.

    engine = Engine(manager, model)
    requests = [engine.submit(prompt, max_new_tokens=32) for prompt in prompts]
    while engine.busy:
        for request, token in engine.step():
            print(request.id, token)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

import kvmem


@dataclass(eq=False)
class Request:
    """One prompt and what has been answered so far."""

    id: int
    sequence: kvmem.Sequence
    max_new_tokens: int
    output: list[int] = field(default_factory=list)
    ended: bool = False
    num_swap_outs: int = 0
    num_swap_outs_in_prefill: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not computed: 1 while decoding, more while prefilling."""
        return self.sequence.num_tokens - self.sequence.num_computed


class Engine:
    """Serves requests from one `kvmem.Manager`.

    `max_tokens` bounds the rows of a step: long prompts are computed in chunks between the tokens
    of others. `max_running` bounds the sequences of a step.
    """

    def __init__(
        self,
        manager: kvmem.Manager,
        model: Callable[[kvmem.Step], torch.Tensor],
        *,
        max_tokens: int = 512,
        max_running: int = 64,
        turn_steps: int = 8,
        stop_tokens: Collection[int] = (),
    ) -> None:
        self.manager = manager
        self.model = model
        self.max_tokens = max_tokens
        self.max_running = max_running
        self.turn_steps = turn_steps
        self.stop_tokens = frozenset(stop_tokens)
        self.running: list[Request] = []  # those that have memory, for longest first
        self.waiting: deque[Request] = deque()  # those that have none, next one first
        self.turn = 0  # steps since someone had to go

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(
        self, prompt: Sequence[int], *, max_new_tokens: int, namespace: str | None = None
    ) -> Request:
        """Take in a prompt; it waits for its first turn. Refuses what could never be served."""
        if not len(prompt) or max_new_tokens < 1:
            raise ValueError("a request needs a prompt and at least one new token")
        if self.manager.can_fit(len(prompt) + max_new_tokens - 1) == "never":
            raise kvmem.SequenceTooLong("prompt and answer are longer than the device tier")
        sequence = self.manager.create(prompt, namespace=namespace)
        request = Request(sequence.id, sequence, max_new_tokens)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Forget a request and give back its memory, in whatever state it is."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.manager.free([request.sequence])

    def step(self) -> list[tuple[Request, int]]:
        """Run the model once; return each request that got a token, with that token."""
        if not self.busy:
            return []
        self._admit()
        # Decoding rows first, so that the chunks of long prompts get what they leave.
        rows = sorted(self.running, key=lambda request: request.num_pending > 1)
        sequences = [request.sequence for request in rows]
        try:
            with self.manager.step(sequences, max_tokens=self.max_tokens, fit="some") as step:
                if step.num_tokens:
                    sampled = self.model(step).argmax(dim=-1)
        except kvmem.TransferError:  # a copy failed: whose K/V it took computes that again
            return []
        if not step.num_tokens:
            self._relieve()
            return []
        self.turn += 1
        return self._deliver(*self._append(step.ready, sampled.tolist()))

    def _append(
        self, ready: Sequence[kvmem.Sequence], tokens: Sequence[int]
    ) -> tuple[list[kvmem.Sequence], list[int]]:
        """Append what was sampled, but for those whose step turns out to have read lost K/V."""
        try:
            self.manager.append(list(ready), list(tokens))
        except kvmem.TransferError as error:
            lost = {number for number, _ in error.lost}
            kept = [row for row, sequence in enumerate(ready) if sequence.id not in lost]
            return self._append([ready[row] for row in kept], [tokens[row] for row in kept])
        return list(ready), list(tokens)

    def _admit(self) -> None:
        """Bring in those who wait while there is room; when a turn is over, make some."""
        over = self.turn >= self.turn_steps
        while self.waiting and len(self.running) < self.max_running:
            head = self.waiting[0]
            wanted = [request.sequence for request in (*self.running, head)]
            if self.manager.can_fit(seqs=wanted) == "yes" or not self.running:
                self.running.append(self.waiting.popleft())
                if over:
                    self.turn, over = 0, False
            elif over:
                try:
                    self.waiting.append(self._swap_out(self.running[0], "swap"))
                except (kvmem.OutOfBlocks, kvmem.TierError):  # no room there: the turn goes on
                    return
            else:
                return

    def _relieve(self) -> None:
        """No row fitted: the last to come gives up its memory and is the next to get some."""
        if len(self.running) < 2:
            raise kvmem.OutOfBlocks("one request alone doesn't fit: enlarge device_blocks")
        self.waiting.appendleft(self._swap_out(self.running[-1], "auto"))

    def _swap_out(self, request: Request, how: str) -> Request:
        """Take a request's memory. "auto" computes again what the host has no room for."""
        sequence = request.sequence
        before = sequence.num_swaps
        self.manager.swap_out([sequence], how)
        self.running.remove(request)
        request.num_swap_outs = sequence.num_swaps
        request.num_swap_outs_in_prefill += sequence.num_swaps > before and not request.output
        return request

    def _deliver(
        self, ready: Sequence[kvmem.Sequence], tokens: Sequence[int]
    ) -> list[tuple[Request, int]]:
        """Hand out one token for each ready sequence; free those that ended."""
        owner = {id(request.sequence): request for request in self.running}
        delivered = []
        for sequence, token in zip(ready, tokens, strict=True):
            request = owner[id(sequence)]
            request.output.append(token)
            delivered.append((request, token))
            if token in self.stop_tokens or len(request.output) == request.max_new_tokens:
                request.ended = True
                self.running.remove(request)
                self.manager.free([sequence])
        return delivered
