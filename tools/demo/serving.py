"""One run of the example engine over all prompts, with progress and samples of the block map."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from engine import Engine, Request

import kvmem
from demo.check import Recorder
from demo.faults import Faulty
from kvmem.stats import Stats


@dataclass(frozen=True)
class Options:
    """How the engine is driven: see `Engine`."""

    new_tokens: int
    max_tokens: int
    turn_steps: int
    stop_tokens: tuple[int, ...] = ()
    fault: str | None = None
    fault_after: int = 0


@dataclass(frozen=True)
class Served:
    """What one run did. `rows[i]` are the logits of request i, one row a token."""

    requests: list[Request]
    rows: list[list[torch.Tensor]]
    seconds: float
    num_steps: int
    stats: Stats
    samples: list[dict[str, Any]]
    fault_planted: bool

    @property
    def num_tokens(self) -> int:
        return sum(len(request.output) for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Progress:
    """A line on stderr, renewed in place on a terminal, now and then a new one elsewhere."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.live = sys.stderr.isatty()
        self.next = 0.0

    def show(self, text: str, *, end: bool = False) -> None:
        now = time.monotonic()
        if now < self.next and not end:
            return
        self.next = now + (0.2 if self.live else 5.0)
        line = f"{self.label}: {text}"
        print(f"\r{line:<78}" if self.live else line, end="", file=sys.stderr)
        if end or not self.live:
            print(file=sys.stderr)
        sys.stderr.flush()


def settled_stats(manager: kvmem.Manager, timeout: float = 10.0) -> Stats:
    """Return the stats once the copies in flight have ended, or after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        stats = manager.stats()
        done = (stats.bytes_out_done, stats.bytes_in_done) == (stats.bytes_out, stats.bytes_in)
        if done or time.monotonic() > end:
            return stats
        time.sleep(0.01)


def serve(
    config: kvmem.Config,
    model: Callable[[Any], torch.Tensor],
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    label: str = "serve",
) -> Served:
    """Serve `prompts` with the example engine on a new Manager; all arrive at once.

    Everything is freed and the Manager verified before it returns.
    """
    progress = Progress(label)
    with kvmem.Manager(config) as manager:
        faulty = None
        if options.fault is not None:
            model = faulty = Faulty(model, manager, options.fault, after=options.fault_after)
        recorder = Recorder(model)
        engine = Engine(
            manager,
            recorder,
            max_tokens=options.max_tokens,
            turn_steps=options.turn_steps,
            stop_tokens=options.stop_tokens,
        )
        started = time.perf_counter()
        requests = [engine.submit(p, max_new_tokens=options.new_tokens) for p in prompts]
        samples = [manager.snapshot()]
        num_steps = num_ended = num_tokens = 0
        while engine.busy:
            for request, _ in engine.step():
                num_tokens += 1
                num_ended += request.ended
            num_steps += 1
            samples.append(manager.snapshot())
            progress.show(
                f"step {num_steps}, {num_tokens} tokens, {num_ended}/{len(requests)} ended, "
                f"{len(engine.running)} running, {len(engine.waiting)} waiting"
            )
        seconds = time.perf_counter() - started
        progress.show(
            f"{num_steps} steps, {num_tokens} tokens, {num_ended} requests in {seconds:.1f} s",
            end=True,
        )
        manager.verify()
        stats = settled_stats(manager)
    return Served(
        requests=requests,
        rows=[recorder.rows[request.id] for request in requests],
        seconds=seconds,
        num_steps=num_steps,
        stats=stats,
        samples=samples,
        fault_planted=faulty is not None and faulty.planted,
    )
