"""``kvmem stress``: swap pressure on a Manager for seconds to hours, each byte checked."""

from __future__ import annotations

import argparse
import random
import re
import sys

from kvmem.cli.output import ProgressLine, Table, note, print_json, print_tables
from kvmem.cli.parser import add_kv_dtype, counted, number, one_line, seconds, whole
from kvmem.stress import StressOptions, StressProgress, StressReport, run_stress
from kvmem.stress.options import FLAGS

DEFAULT_SECONDS = 10.0

EXAMPLE = (
    "  kvmem stress --seconds 60 --threads 4 --switch-interval 1e-6\n"
    "  kvmem stress --device sim --seed 7 --ops 5000 --faults 0.01    # repeatable"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvmem stress``."""
    run = parser.add_argument_group("run")
    run.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu (default), sim, cuda or cuda:1"
    )
    run.add_argument(
        "--seconds", type=seconds, metavar="S", help="how long; default 10, without --ops"
    )
    run.add_argument("--ops", type=counted, metavar="N", help="end after so many operations")
    run.add_argument("--seed", type=whole, metavar="N", help="default: drawn, and printed")
    run.add_argument(
        "--threads", type=whole, default=1, metavar="N", help="on one Manager; default 1"
    )
    run.add_argument(
        "--switch-interval", type=number, metavar="S", help="of Python's threads, e.g. 1e-6"
    )
    run.add_argument(
        "--faults", type=number, default=0.0, metavar="SHARE",
        help="share of copies that fail, --device sim only",
    )  # fmt: skip
    run.add_argument(
        "--config-debug", action="store_true", dest="debug_config",
        help="Config(debug=True): poison, guards, checksums",
    )  # fmt: skip
    load = parser.add_argument_group("load")
    load.add_argument(
        "--sequences", type=whole, default=16, metavar="N", help="live at once; default 16"
    )
    load.add_argument(
        "--sequence-blocks", type=whole, default=8, metavar="N", help="of the longest; default 8"
    )
    load.add_argument(
        "--pressure", type=number, default=2.0, metavar="X",
        help="blocks of the live sequences per block of the device tier; default 2",
    )  # fmt: skip
    model = parser.add_argument_group("model")
    model.add_argument("--block-size", type=whole, default=16, metavar="N", help="default 16")
    model.add_argument("--layers", type=whole, default=2, metavar="N", help="default 2")
    model.add_argument("--kv-heads", type=whole, default=2, metavar="N", help="default 2")
    model.add_argument("--head-dim", type=whole, default=16, metavar="N", help="default 16")
    model.add_argument(
        "--dtype", default="float32", metavar="NAME", help="float32 (default), float16, bfloat16"
    )
    add_kv_dtype(model)


def run(arguments: argparse.Namespace) -> int:
    """Run and print; 1 on a breach or a leak, told in one line on stderr too. Raises ConfigError,
    KeyboardInterrupt when all has ended."""
    options = _options(arguments)
    note(f"seed {options.seed}")  # before anything can go wrong
    line = ProgressLine()
    try:
        report = run_stress(options, progress=lambda now: line.show(_progress(now)))
    finally:
        line.end()
    if arguments.json:
        print_json("stress", report.to_dict())
    else:
        print_tables(tables(report))
    for text in findings(report)[:1]:
        replay = f"; replay: {report.replay}"
        print(f"kvmem stress: {one_line(text)}{replay}", file=sys.stderr)
    return 0 if report.ok else 1


def _options(arguments: argparse.Namespace) -> StressOptions:
    """The options of the flags; a message names the flag, not the option."""
    limit = arguments.seconds
    if limit is None and arguments.ops is None:
        limit = DEFAULT_SECONDS
    seed = arguments.seed
    try:
        return StressOptions(
            device=arguments.device,
            seconds=limit,
            ops=arguments.ops,
            sequences=arguments.sequences,
            sequence_blocks=arguments.sequence_blocks,
            pressure=arguments.pressure,
            block_size=arguments.block_size,
            num_layers=arguments.layers,
            num_kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            dtype=arguments.dtype,
            kv_dtype=arguments.kv_dtype,
            faults=arguments.faults,
            seed=random.SystemRandom().randrange(2**31) if seed is None else seed,
            threads=arguments.threads,
            switch_interval=arguments.switch_interval,
            debug=arguments.debug_config,
        )
    except (ValueError, TypeError) as error:
        words = re.sub(r"\b[a-z_]+(?==)", lambda m: FLAGS.get(m[0], m[0]), str(error))
        raise type(error)(words) from error


def _progress(now: StressProgress) -> str:
    return (
        f"{now.seconds:.0f} s  {now.operations} operations ({now.operations_per_second:.0f}/s)  "
        f"{now.swaps} swaps  {now.gb_per_second_out:.3g} GB/s out  "
        f"{now.gb_per_second_in:.3g} GB/s in  {now.faults} faults  {now.breaches} breaches"
    )


def findings(report: StressReport) -> list[str]:
    """Each breach and each leak in words."""
    breaches = [f"{breach.kind}: {breach.message}" for breach in report.breaches]
    return breaches + [f"leak: {text}" for text in report.leaks.findings()]


def tables(report: StressReport) -> list[Table]:
    """The report for a person."""
    options, counted = report.options, report.counted
    refused = sum(report.refusals.values())
    rate = report.num_operations / max(report.seconds, 1e-9)
    faults = ", ".join(f"{count} {site}" for site, count in sorted(report.faults.items()))
    lost = f"; {report.sequences_lost} sequences computed again" if report.sequences_lost else ""
    rows = [
        ("run", f"device {options.device}, seed {options.seed}, {report.seconds:.1f} s, "
                f"{options.threads} {'thread' if options.threads == 1 else 'threads'}"),
        ("operations", f"{report.num_operations}, {rate:.0f} a second; {refused} of them refused "
                       f"for want of room"),
        ("sequences", f"{report.sequences} with {report.tokens} tokens; on average those live "
                      f"took {report.pressure:.2f} times the device tier"),
        ("swaps", f"{counted['swap_outs']} out, {counted['swap_ins']} in, "
                  f"{counted['recomputes']} given up"),
        ("bytes", f"{report.gb_per_second('out'):.3g} GB/s out, "
                  f"{report.gb_per_second('in'):.3g} GB/s in"),
        ("checked", f"{report.rows_checked} rows of K/V, {report.attentions_checked} attentions"),
        ("faults", f"{faults or 'none'}; {report.managers} Managers{lost}"),
        ("memory", _memory(report)),
    ]  # fmt: skip
    found = findings(report)
    made = [Table("stress", ("", ""), rows)]
    if not found:
        return [*made, Table("result", ("",), [("no breach, no leak",)])]
    lines = [(text,) for text in found] + [(f"replay: {report.replay}",)]
    made.append(Table("result", ("",), lines, dict.fromkeys(range(len(found)), "red")))
    details = [line for breach in report.breaches[:1] for line in breach.detail.splitlines()]
    if details:
        made.append(Table("detail", ("",), [(line,) for line in details]))
    return made


def _memory(report: StressReport) -> str:
    leaks = report.leaks
    text = f"{leaks.rss_mib:.0f} MiB resident at the end"
    if leaks.rss_slope_mib_per_minute is None:
        return text + "; a slope is judged from 60 s on"
    limit = leaks.rss_limit_mib_per_minute
    return text + f", {leaks.rss_slope_mib_per_minute:+.2f} MiB a minute (limit {limit:.2f})"
