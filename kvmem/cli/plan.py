"""``kvmem plan``: what a configuration takes, without allocating any of it."""

from __future__ import annotations

import argparse
import json
import re

import kvmem

#: Flag of each setting, for errors: the Config speaks of ``num_kv_heads``, the user of --kv-heads.
FLAGS = {
    "num_layers": "--layers",
    "num_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "v_head_dim": "--v-head-dim",
    "dtype": "--dtype",
    "block_size": "--block-size",
    "device_blocks": "--device-blocks",
    "device_memory": "--device-memory",
    "host_blocks": "--host-blocks",
    "host_memory": "--host-memory",
}


#: Those without which nothing can be said. Asked for after unknown flags were named, not before.
NEEDED = ("num_layers", "num_kv_heads", "head_dim")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvmem plan``, one for each setting that has a size."""
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=whole, metavar="N", dest="num_layers")
    model.add_argument("--kv-heads", type=whole, metavar="N", dest="num_kv_heads")
    model.add_argument("--head-dim", type=whole, metavar="N", dest="head_dim")
    model.add_argument(
        "--v-head-dim", type=whole, metavar="N", dest="v_head_dim", help="default: --head-dim"
    )
    model.add_argument(
        "--dtype", default="float32", metavar="NAME", help="float32 (default), float16, bfloat16"
    )
    tiers = parser.add_argument_group("tiers (each in blocks, or as memory)")
    tiers.add_argument(
        "--block-size", type=whole, default=64, metavar="N", help="tokens a block, default 64"
    )
    tiers.add_argument("--device-blocks", type=whole, metavar="N")
    tiers.add_argument(
        "--device-memory", type=memory, metavar="SIZE", help='"8GiB", bytes, or a share 0 < x < 1'
    )
    tiers.add_argument("--host-blocks", type=whole, metavar="N", help="default: no host tier")
    tiers.add_argument("--host-memory", type=memory, metavar="SIZE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def missing(arguments: argparse.Namespace) -> list[str]:
    """The needed flags that were not given."""
    return [FLAGS[name] for name in NEEDED if getattr(arguments, name) is None]


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of the configuration the flags describe. Raises ConfigError."""
    settings = {name: getattr(arguments, name) for name in FLAGS}
    plan = kvmem.Config(**settings).plan()
    print(json.dumps(plan.to_dict(), indent=2) if arguments.json else plan)
    return 0


def in_flags(message: str) -> str:
    """``message`` with the names of settings turned into the flags that set them."""
    return re.sub(r"\b[a-z]+(?:_[a-z]+)*\b", lambda m: FLAGS.get(m[0], m[0]), message)


def whole(text: str) -> int:
    """The int in ``text``, for argparse."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None


def memory(text: str) -> int | float | str:
    """Bytes as int, a share as float, anything else as it came: the Config judges it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
