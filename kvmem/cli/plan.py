"""``kvmem plan``: what a model and its tiers take and hold, without allocating any of it."""

from __future__ import annotations

import argparse
import re
from typing import Any

import kvmem
from kvmem.capacity import Capacity, capacity, frame_of
from kvmem.cli.output import Table, note, print_json, print_tables, size_text
from kvmem.cli.parser import BadInputFile, add_kv_dtype, counted, memory, size, whole
from kvmem.model_shapes import ModelShape, read_hf_config, uniform_model

#: Flag of each setting, for errors: the Config speaks of ``num_kv_heads``, the user of --kv-heads.
FLAGS = {
    "num_layers": "--layers",
    "num_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "v_head_dim": "--v-head-dim",
    "dtype": "--dtype",
    "kv_dtype": "--kv-dtype",
    "block_size": "--block-size",
    "device_blocks": "--device-blocks",
    "device_memory": "--device-memory",
    "host_blocks": "--host-blocks",
    "host_memory": "--host-memory",
}
#: Those that describe a model, so that --hf-config excludes them.
_MODEL = ("num_layers", "num_kv_heads", "head_dim", "v_head_dim")
_NEEDED = _MODEL[:3]

EXAMPLE = (
    "  kvmem plan --layers 32 --kv-heads 8 --head-dim 128 --dtype bfloat16 "
    "--device-memory 40GiB --host-memory 128GiB --context 32768\n"
    "  kvmem plan --hf-config model/config.json --device-memory 40GiB --context 32768 "
    "--sequences 16 --bandwidth 25GB"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvmem plan``."""
    model = parser.add_argument_group("model (a file, or its numbers)")
    model.add_argument(
        "--hf-config", metavar="FILE", help="config.json of a Hugging Face model, or its folder"
    )
    model.add_argument("--layers", type=whole, metavar="N", dest="num_layers")
    model.add_argument("--kv-heads", type=whole, metavar="N", dest="num_kv_heads")
    model.add_argument("--head-dim", type=whole, metavar="N", dest="head_dim")
    model.add_argument(
        "--v-head-dim", type=whole, metavar="N", dest="v_head_dim", help="default: --head-dim"
    )
    model.add_argument(
        "--dtype",
        metavar="NAME",
        help="float32, float16, bfloat16; default: that of the file, else float32",
    )
    add_kv_dtype(model)
    tiers = parser.add_argument_group("tiers (each in blocks, or as memory)")
    tiers.add_argument(
        "--block-size", type=whole, default=64, metavar="N", help="tokens a block, default 64"
    )
    tiers.add_argument("--device-blocks", type=whole, metavar="N")
    tiers.add_argument(
        "--device-memory",
        type=memory,
        metavar="SIZE",
        help='"8GiB", bytes, or a share 0 < x < 1 of the free host memory (device="cpu")',
    )
    tiers.add_argument("--host-blocks", type=whole, metavar="N", help="default: no host tier")
    tiers.add_argument("--host-memory", type=memory, metavar="SIZE")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--context", type=counted, metavar="N", help="tokens of one sequence at its end"
    )
    load.add_argument(
        "--sequences", type=counted, metavar="N", help="live at once; exit 1 if too many"
    )
    speed = load.add_mutually_exclusive_group()
    speed.add_argument(
        "--bandwidth", type=size, metavar="SIZE", help='of a swap, a second: "25GB", one way'
    )
    speed.add_argument(
        "--measure", action="store_true", help="measure it: swap on this machine's CPU device"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 when the sequences asked for do not fit. Raises ConfigError,
    BadInputFile, FormatError."""
    _check_combination(arguments)
    shape = _shape(arguments)
    try:
        found = _capacity(arguments, shape)
    except (ValueError, TypeError) as error:
        raise type(error)(in_flags(str(error))) from error
    if arguments.json:
        print_json("plan", found.to_dict())
    else:
        print_tables(tables(found))
    return 1 if found.verdict in ("too many", "never") else 0


def _check_combination(arguments: argparse.Namespace) -> None:
    """Exit 2 for flags that contradict each other, or lack each other."""
    fail = arguments.usage_error
    given = [FLAGS[name] for name in _MODEL if getattr(arguments, name) is not None]
    if arguments.hf_config is not None and given:
        fail(f"--hf-config and {given[0]} both describe the model: give one of them")
    if arguments.hf_config is None:
        missing = [FLAGS[name] for name in _NEEDED if getattr(arguments, name) is None]
        if missing:
            fail(f"missing: {', '.join(missing)} (or --hf-config FILE)")
    if arguments.sequences is not None and arguments.context is None:
        fail("--sequences needs --context, the tokens of each")
    tiers = (arguments.device_blocks, arguments.device_memory)
    if tiers == (None, None):
        if arguments.sequences is not None:
            fail("--sequences needs --device-blocks or --device-memory")
        if arguments.host_blocks or arguments.host_memory is not None:
            fail("a host tier needs a device tier: give --device-blocks or --device-memory")


def _shape(arguments: argparse.Namespace) -> ModelShape:
    """The model of the flags, or of the file."""
    if arguments.hf_config is None:
        width = arguments.v_head_dim
        return uniform_model(
            min(max(arguments.num_layers, 1), 4096),  # what is out of range, the Config refuses
            arguments.num_kv_heads,
            arguments.head_dim,
            arguments.head_dim if width is None else width,
        )
    try:
        return read_hf_config(arguments.hf_config)
    except (OSError, ValueError) as error:
        if isinstance(error, kvmem.FormatError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        name = repr(arguments.hf_config[-80:])
        raise BadInputFile(f"--hf-config {name}: {reason}; give a config.json") from None


def _capacity(arguments: argparse.Namespace, shape: ModelShape) -> Capacity:
    """The figures, after a Config has judged the settings."""
    dtype = arguments.dtype or shape.dtype or "float32"
    first = shape.layers[0].stored
    settings: dict[str, Any] = {
        "num_layers": len(shape.layers) if arguments.hf_config else arguments.num_layers,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "v_head_dim": first.value_dim,
        "dtype": dtype,
        "kv_dtype": arguments.kv_dtype,
        "block_size": arguments.block_size,
    }
    has_device = (arguments.device_blocks, arguments.device_memory) != (None, None)
    tiers = {
        name: getattr(arguments, name)
        for name in ("device_blocks", "device_memory", "host_blocks", "host_memory")
    }
    config = kvmem.Config(**settings, **(tiers if has_device else {"device_blocks": 1}))
    # A frame's bytes hang on the sum of its layers; equal geometry makes the Config's figures ours.
    stored = config.kv_dtype_name
    assert config.geometry.frame_bytes == frame_of(shape, stored, config.block_size).frame_bytes
    bandwidth = arguments.bandwidth
    if arguments.measure:
        from kvmem.cli.bandwidth import swap_bandwidth

        note("measuring the bandwidth of a swap (the first time it also compiles, a minute)")
        bandwidth = swap_bandwidth(config)
    return capacity(
        shape,
        dtype=stored,
        block_size=config.block_size,
        device_blocks=config.device_blocks if has_device else 0,
        host_blocks=config.host_blocks,
        context=arguments.context,
        sequences=arguments.sequences,
        bandwidth=bandwidth,
    )


def in_flags(message: str) -> str:
    """``message`` with the names of settings turned into the flags that set them."""
    return re.sub(r"\b[a-z]+(?:_[a-z]+)*\b", lambda m: FLAGS.get(m[0], m[0]), message)


def tables(found: Capacity) -> list[Table]:
    """The plan for a person."""
    made = [Table("model", ("", ""), _model_rows(found)), Table("tiers", ("", ""), _tiers(found))]
    if found.context is not None:
        made.append(Table("sequences", ("", ""), _sequence_rows(found)))
    return made


def _model_rows(found: Capacity) -> list[tuple[str, str]]:
    rows = [("type", f"{found.model}, {found.num_layers} layers, {found.dtype}")]
    for group in found.groups:
        dims = f"{group.head_dim}" + (
            f" + {group.value_dim}" if group.value_dim != group.head_dim else ""
        )
        window = "" if group.window is None else f", window {group.window}"
        rows.append(
            (
                "layers",
                f"{group.num_layers} x {group.num_kv_heads} K/V heads of {dims}{window}: "
                f"{size_text(group.token_bytes)} a token",
            )
        )
    rows.append(("token", f"{size_text(found.token_bytes)} of K and V over all layers"))
    rows.append(("block", f"{size_text(found.block_bytes)} for {found.block_size} tokens"))
    if found.manager != "supported":
        rows.append(("Manager", found.manager))
    rows += [("note", text) for text in found.notes]
    return rows


def _tiers(found: Capacity) -> list[tuple[str, str]]:
    if not found.device_blocks:
        return [("device", "not given (--device-blocks or --device-memory)")]
    host = "none (--host-blocks or --host-memory enables it)"
    if found.host_blocks:
        host = _tier(found.host_blocks, found.host_tokens, found.host_bytes)
    return [
        ("device", _tier(found.device_blocks, found.device_tokens, found.device_bytes)),
        ("host", host),
        ("metadata", f"at most {size_text(found.metadata_bytes)} beside the block tables"),
        ("bound", str(found.bound)),
    ]


def _tier(blocks: int, tokens: int, num_bytes: int) -> str:
    return f"{blocks} blocks, {tokens} tokens, {size_text(num_bytes)}"


def _sequence_rows(found: Capacity) -> list[tuple[str, str]]:
    assert found.lost_share is not None and found.lost_share_mean is not None
    rows = [
        ("context", f"{found.context} tokens: {found.sequence_blocks} blocks, "
                    f"{size_text(found.sequence_bytes)}"),
        ("lost", f"{found.lost_share:.2%} of it in the partial block ({found.lost_tokens} slots); "
                 f"{found.lost_share_mean:.2%} on average over all ends"),
    ]  # fmt: skip
    if found.sequence_windowed_bytes != found.sequence_bytes:
        rows.append(
            ("windows", f"{size_text(found.sequence_windowed_bytes)} if blocks behind a window "
                        f"were given up; this version keeps them")
        )  # fmt: skip
    if found.device_blocks:
        rows.append(("resident", f"{found.sequences_on_device} at once on the device"))
        rows.append(("live", f"{found.sequences_never_stuck} at once, never stuck"))
    if found.verdict is not None:
        words = {
            "resident": "fit the device",
            "swapping": "fit with swapping",
            "too many": "are too many: swapping can get stuck; lower --sequences or --context, "
            "or raise --host-memory",
            "never": "never fit: one is longer than the device tier; raise --device-memory",
        }
        rows.append(("asked", f"{found.sequences} sequences {words[found.verdict]}"))
    rows.append(("tables", f"{size_text(found.table_bytes)} of block tables"))
    if found.swap_seconds is None:
        rows.append(("swap", "unknown: give --bandwidth SIZE (a second), or --measure"))
    else:
        rows.append(
            ("swap", f"{found.swap_seconds * 1e3:.1f} ms one way for one sequence at "
                     f"{size_text(found.bandwidth)}/s")
        )  # fmt: skip
    return rows
