"""``kvmem warmup``: compile what a Manager calls, ahead of its first request."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import kvmem
from kvmem.cli.output import Table, note, print_json, print_tables
from kvmem.cli.parser import add_kv_dtype, whole

EXAMPLE = (
    "  kvmem warmup --dtype bfloat16\n"
    "  NUMBA_CACHE_DIR=/opt/kvmem-cache kvmem warmup    # in the build of a container image"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvmem warmup``."""
    parser.add_argument(
        "--dtype",
        default="float32",
        metavar="NAME",
        help="float32 (default), float16, bfloat16: each has functions of its own",
    )
    add_kv_dtype(parser)
    parser.add_argument("--kv-heads", type=whole, default=2, metavar="N", help="default 2")
    parser.add_argument("--head-dim", type=whole, default=64, metavar="N", help="default 64")
    parser.add_argument("--v-head-dim", type=whole, metavar="N", help="default: --head-dim")


def run(arguments: argparse.Namespace) -> int:
    """Compile and print what it took. Raises ConfigError."""
    config = kvmem.Config(
        num_layers=1,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        v_head_dim=arguments.v_head_dim,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        device_blocks=1,
    )
    report = kvmem.warmup(config, progress=lambda done, total, what: note(f"{done}/{total} {what}"))
    dtypes = {"dtype": config.dtype_name, "kv_dtype": config.kv_dtype_name}
    if arguments.json:
        print_json("warmup", {**dtypes, **asdict(report)})
        return 0
    rows = [
        *dtypes.items(),
        ("time", f"{report.seconds:.1f} s"),
        ("compiled", f"{report.num_compiled} functions"),
        ("loaded", f"{report.num_loaded} functions"),
        ("cache", report.cache_folder or "none: nothing is compiled (NUMBA_DISABLE_JIT)"),
    ]
    print_tables([Table("warmup", ("", ""), rows)])
    return 0
