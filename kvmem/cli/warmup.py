"""``kvmem warmup``: compile what a Manager calls, ahead of its first request."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict

import kvmem
from kvmem.cli.output import Table, note, print_json, print_tables
from kvmem.cli.parser import add_kv_dtype, whole

EXAMPLE = (
    "  kvmem warmup --dtype bfloat16\n"
    "  NUMBA_CACHE_DIR=/opt/kvmem-cache kvmem warmup    # in the build of a container image\n"
    "  kvmem warmup --dtype bfloat16 --head-dim 128 --compute-capability 9.0    # its CUDA kernels"
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
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu (default), or cuda: its kernels too"
    )
    parser.add_argument(
        "--compute-capability",
        type=capability,
        metavar="X.Y",
        help="CUDA kernels for such a GPU (9.0: H100 and H200), made without one",
    )


def capability(text: str) -> tuple[int, int]:
    """ "9.0" as (9, 0)."""
    from kvmem.warming import checked_capability

    match = re.fullmatch(r"(\d{1,2})\.(\d)", text, re.ASCII)
    try:
        found = checked_capability((int(match[1]), int(match[2])) if match else None)
    except ValueError:
        found = None
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is none; allowed: 8.0 and later, as in 9.0")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Compile and print what it took. Raises ConfigError."""
    config = kvmem.Config(
        num_layers=1,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        v_head_dim=arguments.v_head_dim,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        device=arguments.device,
        device_blocks=1,
    )
    report = kvmem.warmup(
        config,
        progress=lambda done, total, what: note(f"{done}/{total} {what}"),
        compute_capability=arguments.compute_capability,
    )
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
    if report.kernel_cache_folder:
        made, loaded = report.num_kernels_compiled, report.num_kernels_loaded
        rows.append(("CUDA kernels", f"{made} compiled, {loaded} were there"))
        rows.append(("their cache", report.kernel_cache_folder))
    print_tables([Table("warmup", ("", ""), rows)])
    return 0
