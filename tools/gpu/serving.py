"""Sections of whole runs: the example engine with and without pressure, and `kvmem stress`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tools.gpu.clock import Budget, Spread, Timing
from tools.gpu.managers import Shape, in_turns, open_manager, run_case
from tools.gpu.record import Bench, Row

if TYPE_CHECKING:
    import kvmem

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SEED = 1


class Work(NamedTuple):
    """Requests for a small model with random weights."""

    shape: Shape
    requests: int
    prompt: int  # tokens of the shortest; the longest has twice as many
    answer: int
    max_tokens: int = 512  # rows of a step
    vocabulary: int = 1000

    @property
    def blocks(self) -> int:
        """Of all requests together at their ends."""
        return sum(
            -(-(len(one) + self.answer) // self.shape.block) + 1 for one in self.prompts()
        )  # fmt: skip

    def prompts(self) -> list[list[int]]:
        """Some begin alike."""
        draw = np.random.default_rng(SEED)
        common = draw.integers(0, self.vocabulary, self.prompt // 2).tolist()
        found = []
        for row in range(self.requests):
            more = self.prompt + row * self.prompt // max(1, self.requests - 1)
            head = common if row % 2 else []
            rest = draw.integers(0, self.vocabulary, more - len(head)).tolist()
            found.append([*head, *rest])
        return found


def work(quick: bool) -> Work:
    """float32, so that batches of another size round too little to make another answer."""
    shape = Shape(layers=4, kv_heads=4, dims=64, heads=4, dtype="float32")
    return Work(shape, 16 if quick else 48, 256, 64 if quick else 192)


class Toy:
    """A small attention model with fixed random weights.

    Products are in float64: those of another batch then differ by less than a token can notice.
    """

    def __init__(self, bench: Bench, some: Work) -> None:
        torch, shape = bench.torch, some.shape
        assert shape.heads == shape.kv_heads
        width = shape.heads * shape.dims
        numbers = torch.Generator().manual_seed(SEED)
        kind = {"generator": numbers, "dtype": torch.float64}
        self.torch, self.heads, self.dims = torch, shape.heads, shape.dims
        self.embed = torch.randn(some.vocabulary, width, **kind).to(bench.place)
        mix = torch.randn(shape.layers, 3, width, width, **kind) / width**0.5
        self.mix = mix.to(bench.place)

    def __call__(self, step: kvmem.Step) -> Any:
        """Logits ``[ready, vocabulary]``."""
        torch = self.torch
        hidden = self.embed[step.tokens.long()] + torch.sin(step.positions[:, None].double() * 0.1)
        for layer, weights in enumerate(self.mix):
            query, key, value = (
                (hidden @ one).float().reshape(-1, self.heads, self.dims) for one in weights
            )
            step.write(layer, key, value)
            mixed: Any = step.attend(layer, query)
            added = hidden + mixed.reshape(len(hidden), -1).double()
            hidden = torch.nn.functional.normalize(added) * 4
        return hidden[step.last.long()] @ self.embed.T


def engine(bench: Bench, budget: Budget) -> str:
    """The example engine with room for all and under pressure; sampled tokens that stay there."""
    some = work(bench.quick)
    run_case(bench, budget, "the example engine", lambda: engine_case(bench, some))
    run_case(bench, budget, "sampled tokens", lambda: sampled_case(bench, some))
    return "seconds are those of a new token; answers must be equal, token for token"


def example_engine() -> Any:
    """docs/examples/engine.py as a module."""
    spec = importlib.util.spec_from_file_location("kvmem_example_engine", EXAMPLES / "engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def serve(
    bench: Bench, some: Work, device_blocks: int, host_blocks: int
) -> tuple[float, list[list[int]], kvmem.Stats]:
    """Seconds a token, answers, and what the Manager counted."""
    module = example_engine()
    with open_manager(some.shape, device_blocks, host_blocks) as manager:
        served = module.Engine(manager, Toy(bench, some), max_tokens=some.max_tokens)
        begin = bench.now()
        requests = [
            served.submit(prompt, max_new_tokens=some.answer) for prompt in some.prompts()
        ]  # fmt: skip
        while served.busy:
            served.step()
        spent = bench.now() - begin
        manager.verify()
        return (
            spent / (some.requests * some.answer),
            [one.output for one in requests],
            (manager.stats()),
        )


def engine_case(bench: Bench, some: Work) -> None:
    """Two rows; a request with another answer under pressure fails the second."""
    seen: dict[str, tuple[list[list[int]], kvmem.Stats]] = {}

    def side(name: str, device: int, host: int) -> float:
        seconds, *rest = serve(bench, some, device, host)
        seen[name] = (rest[0], rest[1])
        return seconds

    tight = max(some.blocks // 3, -(-(2 * some.prompt + some.answer) // some.shape.block) + 2)
    found = in_turns(
        bench,
        {
            "ample": lambda: side("ample", some.blocks + 8, 0),
            "pressure": lambda: side("pressure", tight, some.blocks + 8),
        },
        4 * bench.case_seconds, least_turns=1, most_turns=5,
    )  # fmt: skip
    ample, pressure = found["ample"], found["pressure"]
    bench.keep(Row("engine, room for all", {"requests": some.requests}, 0, ample,
                   note=_rate(ample)))  # fmt: skip
    row = Row(f"engine, {tight} of {some.blocks} blocks", {}, 0, pressure, {"room for all": ample})
    if len(seen) == 2:
        wanted, (answers, stats) = seen["ample"][0], seen["pressure"]
        wrong = [
            i for i, pair in enumerate(zip(wanted, answers, strict=True)) if pair[0] != pair[1]
        ]
        row.error, row.allowed_error = float(len(wrong)), 0.0
        row.facts = {"swap_outs": stats.swap_outs, "swap_ins": stats.swap_ins,
                     "recomputes": stats.recomputes, "other_answers": wrong}  # fmt: skip
        row.note = f"{_rate(pressure)}; {stats.swap_outs} swapped out; "
        row.note += f"other answers: requests {wrong}" if wrong else "the same answers"
        if not stats.swap_outs:
            row.error, row.note = 1.0, f"{row.note}; there was no pressure"
    if isinstance(ample, Spread) and isinstance(pressure, Spread):
        row.limit, row.share = "room for all", ample.median / pressure.median
    bench.keep(row)


def sampled_case(bench: Bench, some: Work) -> None:
    """Decode of one batch, sampled tokens appended as tensors of the GPU beside as a list."""
    model = Toy(bench, some)
    answers: dict[str, list[list[int]]] = {}
    prompts = some.prompts()

    def run(name: str) -> float:
        with open_manager(some.shape, some.blocks + 8) as manager:
            seqs = [manager.create(prompt) for prompt in prompts]
            with manager.step(seqs) as step:
                sampled = model(step).argmax(dim=-1)
            begin = bench.now()
            for _ in range(some.answer):
                manager.append(seqs, sampled if name == "tensor" else sampled.tolist())
                with manager.step(seqs) as step:
                    sampled = model(step).argmax(dim=-1)
            bench.clock.wait()
            spent = bench.now() - begin
            answers[name] = [seq.tokens.tolist() for seq in seqs]
        return spent / (some.answer * len(seqs))

    found = in_turns(
        bench, {"tensor": lambda: run("tensor"), "list": lambda: run("list")},
        2 * bench.case_seconds, least_turns=2, most_turns=7,
    )  # fmt: skip
    row = Row(
        f"sampled tokens stay on the GPU, {some.requests} rows", {"steps": some.answer}, 0,
        found["tensor"], {"as a list": found["list"]}, note=_rate(found["tensor"]),
    )  # fmt: skip
    if len(answers) == 2:
        pairs = zip(answers["tensor"], answers["list"], strict=True)
        row.error, row.allowed_error = float(sum(one != two for one, two in pairs)), 0.0
    bench.keep(row)


def _rate(spread: Spread | str) -> str:
    """Tokens a second."""
    return f"{1 / max(spread.median, 1e-12):,.0f} tokens/s" if isinstance(spread, Spread) else ""


# -- stress ----------------------------------------------------------------------------------------


class Done(NamedTuple):
    """A command that has ended. ``status`` is None when its time was up."""

    status: int | None
    out: str
    error: str


def run_command(words: list[str], environment: dict[str, str], seconds: float) -> Done:
    """Run it; when its time is up its processes are ended."""
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, error = process.communicate(timeout=seconds)
        return Done(process.returncode, out, error)
    except subprocess.TimeoutExpired:
        return Done(None, "", f"out of time after {seconds:.0f} s")
    finally:
        if process.poll() is None:  # out of time, or Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def stress(bench: Bench, budget: Budget) -> str:
    """`kvmem stress` on the GPU: every byte checked; then a short run under torch's sanitizer.

    In processes of their own, so that a GPU that fails there is told and not shared.
    """
    seconds = 20.0 if bench.quick else 120.0
    run_case(bench, budget, f"stress, {seconds:.0f} s", lambda: stress_case(bench, seconds, {}))
    if importlib.util.find_spec("torch.cuda._sanitizer") is None:
        return "this torch has no stream sanitizer"
    # It knows the streams of torch's own calls, not of kvmem's kernels and copies.
    note = "torch's stream sanitizer"
    run_case(
        bench, budget, note, lambda: stress_case(bench, 3.0, {"TORCH_CUDA_SANITIZER": "1"}, note)
    )
    return "torch's stream sanitizer sees the calls of torch, not kvmem's own kernels and copies"


def stress_case(
    bench: Bench, seconds: float, more: dict[str, str], under: str = "", grace: float = 60.0
) -> None:
    """Three rows: operations, bytes out, bytes in. A breach or a leak fails the first."""
    words = [
        sys.executable, "-m", "kvmem.cli", "stress", "--device", "cuda",
        "--seconds", f"{seconds:g}", "--threads", "2", "--sequences", "64", "--layers", "4",
        "--kv-heads", "4", "--head-dim", "64", "--seed", str(SEED), "--json",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run_command(words, os.environ | {"PYTHONPATH": path} | more, seconds + grace)
    name = f"stress{', under ' + under if under else ''}"
    replay = " ".join(["kvmem", *words[3:-1]])
    try:
        report = json.loads(done.out)
    except ValueError:
        last = " ".join(done.error.strip().splitlines()[-3:])[-300:]
        bench.keep(Row(name, {}, 0, f"failed: status {done.status}: {last}", note=replay))
        return
    found = [f"{one['kind']}: {one['message']}" for one in report["breaches"]]
    found += [f"leak: {text}" for text in report["leaks"]["findings"]]
    if done.status and not found:
        found = [f"status {done.status}: {done.error.strip()[-200:]}"]
    total = max(1, sum(report["operations"].values()))
    spent = report["seconds"]
    note = "; ".join(found)[:500] + f"; {report.get('replay') or replay}" if found else (
        f"{report['rows_checked']} rows of K/V and {report['attentions_checked']} attentions "
        f"checked, {report['swap_outs']} swaps out, {report['swap_ins']} in: no breach, no leak"
    )  # fmt: skip
    bench.keep(
        Row(f"{name}: an operation of {total:,}", report, 0, _once(spent / total),
            error=float(len(found)), allowed_error=0.0, note=note)
    )  # fmt: skip
    for way in ("out", "in"):
        moved = report[f"bytes_{way}_done"]
        bench.keep(Row(f"{name}: all bytes {way}", {}, moved, _once(spent)))


def _once(seconds: float) -> Spread:
    """Of one timing."""
    return Spread.of([Timing(seconds, True)])
