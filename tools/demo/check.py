"""Proof that the served tokens are the model's: logits are compared row by row.

Equal tokens alone would miss most faults of the cache: a wrong slot moves the logits long before
it moves the argmax. So each row of logits is held against a separate, unmodified
`generate(do_sample=False, output_logits=True)` of the same run. Nothing expected is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_DIFFERENCE = 1e-3  # of logits, float32 on both sides; honest noise is below 1e-4
TIE_MARGIN = 2e-3  # top-two distance under which either token is right


@dataclass(frozen=True)
class Reference:
    """What the unmodified model answers: `tokens` [n], `logits` [n, vocab], `margin` [n]."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    margin: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one request: `fault` is empty when every compared row agrees."""

    fault: str
    max_difference: float
    num_rows: int
    tie_at: int | None  # index of the new token at which both answers are right


def reference(model: Any, prompt: Sequence[int], num_tokens: int) -> Reference:
    """Return what `model.generate` answers to `prompt` greedily, with the logits of each row."""
    result = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(result.logits).float()
    top = logits.topk(2).values
    return Reference(
        tokens=tuple(result.sequences[0, len(prompt) :].tolist()),
        logits=logits,
        margin=tuple((top[:, 0] - top[:, 1]).tolist()),
    )


def compare(wanted: Reference, tokens: Sequence[int], rows: Sequence[torch.Tensor]) -> Verdict:
    """Hold the served `tokens` and their logits `rows` against `wanted`.

    Rows are compared up to and including the first differing token: from there on the two
    continue different texts.
    """
    largest = 0.0
    for index, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        if index == len(wanted.tokens):
            return Verdict(f"goes on after {index} tokens", largest, index, None)
        difference = float((row.float() - wanted.logits[index]).abs().max())
        largest = max(largest, difference)
        if not difference <= MAX_DIFFERENCE:  # also catches NaN
            text = f"row {index}: logits differ by {difference:.3g} > {MAX_DIFFERENCE:g}"
            return Verdict(text, difference, index + 1, None)
        if token != wanted.tokens[index]:
            margin = wanted.margin[index]
            if margin > TIE_MARGIN:
                text = f"row {index}: another token at a margin of {margin:.3g}"
                return Verdict(text, largest, index + 1, None)
            return Verdict("", largest, index + 1, index)
    if len(tokens) < len(wanted.tokens):
        return Verdict(f"ends after {len(tokens)} tokens", largest, len(tokens), None)
    return Verdict("", largest, len(tokens), None)


class Recorder:
    """Wraps a model for an engine and keeps the logits it returned, per sequence id."""

    def __init__(self, model: Callable[[Any], torch.Tensor]) -> None:
        self.model = model
        self.rows: dict[int, list[torch.Tensor]] = {}

    def __call__(self, step: Any) -> torch.Tensor:
        logits = self.model(step)
        for sequence, row in zip(step.ready, logits, strict=True):
            self.rows.setdefault(sequence.id, []).append(row)
        return logits
