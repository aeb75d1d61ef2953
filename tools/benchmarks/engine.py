"""The example engine on a real model beside transformers' own ways to generate; alone:

PYTHONPATH=.:tools:docs/examples python -m benchmarks.engine

transformers' continuous batching (`generate_batch`) is no peer here: on a CPU it did not come to an
end (5.24, four prompts, two minutes).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from demo.llama import PagedLlama
from demo.model import find_gguf, load_smollm2, tiny_llama
from demo.prompts import make_prompts, random_prompts
from engine import Engine

import kvmem
from benchmarks.figure import Figure, figure

os.environ.setdefault("TQDM_DISABLE", "1")  # of the model's loading
REQUESTS, NEW_TOKENS = 16, 32
Answers = list[list[int]]


def ours(paged: PagedLlama, prompts: Answers) -> Answers:
    """All requests through the engine, with room for all of them."""
    tokens = sum(map(len, prompts)) + len(prompts) * NEW_TOKENS
    config = paged.config(block_size=16, device_blocks=tokens // 16 + 2 * len(prompts))
    with kvmem.Manager(config) as manager:
        engine = Engine(manager, paged, max_tokens=512)
        requests = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts]
        while engine.busy:
            engine.step()
    return [request.output for request in requests]


def one_by_one(model: Any, prompts: Answers) -> Answers:
    """`generate` for each prompt alone, as long as asked."""
    answers = []
    for prompt in prompts:
        row = torch.tensor([prompt])
        out = model.generate(row, attention_mask=torch.ones_like(row), **_greedy())
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def as_one_batch(model: Any, prompts: Answers) -> Answers:
    """`generate` for all prompts at once, padded on the left."""
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(rows, attention_mask=mask, **_greedy())
    return [row[longest:].tolist() for row in out]


def _greedy() -> dict[str, Any]:
    """The likeliest token each time, and no token ends an answer."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    config.eos_token_id = None
    return {"generation_config": config}


@torch.inference_mode()
def bench_engine(repeats: int) -> list[Figure]:
    """Time a new token of 16 requests, 32 new tokens each; the ways in turns."""
    if find_gguf() is None:
        name, model = "tiny random Llama", tiny_llama(1)
        prompts = random_prompts(model.config.vocab_size, REQUESTS, 1)
    else:
        name = "SmolLM2-135M, float32"
        tokenizer, model = load_smollm2()
        prompts = make_prompts(tokenizer, REQUESTS, 1)
    paged = PagedLlama(model)
    ways: dict[str, Callable[[], Answers]] = {
        "ours": lambda: ours(paged, prompts),
        "generate(), one by one": lambda: one_by_one(model, prompts),
        "generate(), one padded batch": lambda: as_one_batch(model, prompts),
    }
    wanted = ways["ours"]()
    for way, run in ways.items():
        same = sum(a == b for a, b in zip(run(), wanted, strict=True))
        print(f"engine: {way}: {same} of {REQUESTS} answers as ours", file=sys.stderr)
    tokens = REQUESTS * NEW_TOKENS
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(max(3, repeats // 100)):
        for way, run in ways.items():
            begin = time.perf_counter()
            run()
            seconds[way].append((time.perf_counter() - begin) / tokens)
    prompt_tokens = sum(map(len, prompts))
    label = f"{name}, {REQUESTS} requests, {prompt_tokens} prompt tokens, a new token"
    return [
        figure("engine", label, "ms", 1e3, seconds["ours"], way, times)
        for way, times in seconds.items()
        if way != "ours"
    ]


if __name__ == "__main__":
    print(*bench_engine(200), sep="\n")
