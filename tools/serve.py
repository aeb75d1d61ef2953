"""The main job: serve a real model from kvmem under swap pressure, then prove every row of it.

    python tools/serve.py                       # what `make run` does
    python tools/serve.py --device-blocks 72    # more room: the swaps fall, the tokens stay
    python tools/serve.py --fault lost-block    # plant a fault: the check has to fail

Progress goes to stderr, the report to stdout (`--json`: as JSON), pictures to out/.
Exit status: 0 all claims hold, 1 one doesn't, 2 it couldn't be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Torch and Numba each keep a pool of OpenMP threads; waiting ones that spin take the cores from
# those that work (measured on 2 busy cores: 46 s against 7 s). Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TQDM_DISABLE", "1")  # progress is shown here, in one form

ROOT = Path(__file__).resolve().parent.parent
for folder in ("tools", "docs/examples", "."):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

from demo import prompts as demo_prompts  # noqa: E402
from demo.check import TIE_MARGIN, Reference, compare, reference  # noqa: E402
from demo.faults import FAULTS  # noqa: E402
from demo.llama import PagedLlama  # noqa: E402
from demo.model import load_smollm2, tiny_llama  # noqa: E402
from demo.report import Report, add_run, add_swaps, add_verdicts  # noqa: E402
from demo.serving import Options, Progress, Served, serve  # noqa: E402

import kvmem  # noqa: E402
from kvmem import picture  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Serve a model from kvmem under swap pressure and check every row of logits."
    )
    add = parser.add_argument
    add("--model", choices=("smollm2", "tiny"), default="smollm2", help="tiny: random, no file")
    add("--requests", type=_positive, default=16, metavar="N")
    add("--new-tokens", type=_positive, default=32, metavar="N", help="tokens asked of each")
    add("--device-blocks", type=_positive, default=None, metavar="N", help="default 40 (tiny: 18)")
    add("--host-blocks", type=_positive, default=None, metavar="N", help="default: all fit")
    add("--block-size", type=_positive, default=16, metavar="N", help="tokens a block")
    add("--max-tokens", type=_positive, default=32, metavar="N", help="rows a step")
    add("--turn-steps", type=_positive, default=5, metavar="N", help="steps of a turn")
    add("--seed", type=int, default=1, metavar="N", help="draws the prompts")
    add("--fault", choices=sorted(FAULTS), help="plant a K/V fault; the check has to fail")
    add("--out", type=Path, default=ROOT / "out", metavar="DIR", help="where pictures go")
    add("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    usual = USUAL_BLOCKS[options.model]
    options.device_blocks = options.device_blocks or usual
    changed = {name for name, value in vars(options).items() if value != parser.get_default(name)}
    changed -= {"device_blocks"} if options.device_blocks == usual else set()
    # The minimum of swaps is a claim only for the sizes it was made for, the absence of ties only
    # for the prompts it was seen with.
    options.fixed_prompts = not changed & _PROMPTS
    options.fixed = not changed & (_PROMPTS | _SIZES)
    return options


USUAL_BLOCKS = {"smollm2": 40, "tiny": 18}
_PROMPTS = {"model", "requests", "new_tokens", "seed", "fault"}
_SIZES = {"device_blocks", "host_blocks", "block_size", "max_tokens", "turn_steps"}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed: give an integer >= 1")
    return value


@contextmanager
def timed(stages: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    stages[name] = round(time.perf_counter() - started, 1)


def load(options: argparse.Namespace) -> tuple[Any, list[list[int]], tuple[int, ...]]:
    """Return the model, the prompts and the tokens that end an answer."""
    if options.model == "tiny":
        model = tiny_llama(options.seed)
        vocab = model.config.vocab_size
        return model, demo_prompts.random_prompts(vocab, options.requests, options.seed), ()
    tokenizer, model = load_smollm2()
    prompts = demo_prompts.make_prompts(tokenizer, options.requests, options.seed)
    return model, prompts, (tokenizer.eos_token_id,)


def blocks_of_all(prompts: list[list[int]], options: argparse.Namespace) -> int:
    """Return how many blocks hold all requests at their ends, what they share counted once."""
    same = [len(set(column)) == 1 for column in zip(*prompts)]  # position by position
    shared = (same + [False]).index(False) // options.block_size if len(prompts) > 1 else 0
    ends = [-(-(len(prompt) + options.new_tokens) // options.block_size) for prompt in prompts]
    return sum(end - shared for end in ends) + shared


def answer_all(model: Any, prompts: list[list[int]], new_tokens: int) -> list[Reference]:
    """Run the unmodified model on each prompt, alone."""
    progress = Progress("reference: generate()")
    answers = []
    for index, prompt in enumerate(prompts):
        answers.append(reference(model, prompt, new_tokens))
        progress.show(f"{index + 1}/{len(prompts)} requests", end=index + 1 == len(prompts))
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    started = time.perf_counter()
    stages: dict[str, float] = {}
    progress = Progress("model")
    try:
        with timed(stages, "model"):
            progress.show(f"loading {options.model}")
            model, prompts, stop_tokens = load(options)
            progress.show(f"{options.model} loaded", end=True)
        paged = PagedLlama(model)
        all_fit = blocks_of_all(prompts, options)
        host_blocks = options.host_blocks or all_fit
        sizes = {"block_size": options.block_size, "host_blocks": host_blocks, "debug": True}
        config = paged.config(device_blocks=options.device_blocks, **sizes)
        # One block each beyond their ends: what two compute at once merges only afterwards.
        enough = max(all_fit + len(prompts), options.device_blocks)
        ample = paged.config(device_blocks=enough, **sizes)
        how = Options(
            new_tokens=options.new_tokens,
            max_tokens=options.max_tokens,
            turn_steps=options.turn_steps,
            stop_tokens=stop_tokens,
            fault=options.fault,
            fault_after=min(map(len, prompts)) + 2,
        )
        with timed(stages, "warm-up"):  # compiles the kernels, or loads them from the cache
            warm = Options(new_tokens=4, max_tokens=64, turn_steps=1)
            short = [prompts[0][: options.block_size * n + 1] for n in (2, 1)]
            serve(paged.config(device_blocks=4, **sizes), paged, short, warm, label="warm-up")
        with timed(stages, "pressure"):
            tight = serve(config, paged, prompts, how, label=f"{config.device_blocks} blocks")
        with timed(stages, "no pressure"):
            label = f"{ample.device_blocks} blocks"
            roomy = serve(ample, paged, prompts, how, label=label)
        with timed(stages, "reference"):
            wanted = answer_all(model, prompts, options.new_tokens)
    except (FileNotFoundError, kvmem.ConfigError, kvmem.OutOfBlocks) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    report = judge(options, prompts, tight, roomy, wanted)
    with timed(stages, "picture"):
        draw(options, tight, report)
    report.figures["seconds a stage"] = " ".join(f"{k}={v}" for k, v in stages.items())
    report.figures["seconds in all"] = round(time.perf_counter() - started, 1)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print("\n".join(report.lines()))
        print("PASSED" if report.passed else "FAILED")
    return 0 if report.passed else 1


def judge(
    options: argparse.Namespace,
    prompts: list[list[int]],
    tight: Served,
    roomy: Served,
    wanted: list[Reference],
) -> Report:
    """Hold both runs against the reference and collect the figures."""
    report = Report()
    report.figures["requests"] = len(prompts)
    report.figures["prompt tokens"] = sum(map(len, prompts))
    report.figures["new tokens"] = tight.num_tokens
    report.figures["reference: smallest top-two margin"] = min(min(r.margin) for r in wanted)
    for label, run in (("pressure", tight), ("no pressure", roomy)):
        add_run(report, label, run)
        verdicts = [
            compare(want, request.output, rows)
            for want, request, rows in zip(wanted, run.requests, run.rows, strict=True)
        ]
        add_verdicts(report, label, verdicts, wanted)
    add_swaps(report, tight, demanded=options.fixed)
    moved = roomy.stats.swap_outs + roomy.stats.blocks_out + roomy.stats.blocks_in
    report.claims["no pressure: nothing was swapped"] = moved == 0
    if options.fixed_prompts:
        report.claims["the fixed prompts have no tie"] = not report.ties and all(
            min(r.margin) > TIE_MARGIN for r in wanted
        )
    if options.fault:
        report.claims[f"the fault {options.fault} was planted (so this run must fail)"] = (
            tight.fault_planted
        )
    return report


def draw(options: argparse.Namespace, run: Served, report: Report) -> None:
    """Write the block map of the run under pressure; a missing matplotlib costs only the PNG."""
    title = (
        f"kvmem: {len(run.requests)} requests on {options.device_blocks} blocks of "
        f"{options.block_size} tokens"
    )
    report.figures["picture (page)"] = _shown(
        picture.write_html(run.samples, options.out / "block_map.html", title=title)
    )
    try:
        path = picture.write_png(run.samples, options.out / "block_map.png", title=title)
        report.figures["picture (PNG)"] = _shown(path)
    except ImportError as error:
        print(f"serve: no PNG: {error}", file=sys.stderr)


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    sys.exit(main())
