"""Entry point of the ``kvmem`` command: parses, runs one command, turns errors into one line.

Exit status: 0 done, 1 failed or output not written, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import kvmem
from kvmem.cli.parser import LineParser

COMMANDS = ("plan",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process); returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        arguments = _parse([w for w in words if w != "--debug"])
        status = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left, which is its right; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        line = " ".join(str(error).split()) or type(error).__name__
        print(f"kvmem: {line[:300]}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, TypeError)) else 1


def _parse(words: list[str]) -> argparse.Namespace:
    parser = LineParser(prog="kvmem", description="KV-cache memory for LLM inference engines.")
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=LineParser)
    # torch comes with the module of a command: --version and --help should not wait for it.
    plan_parser = commands.add_parser("plan", help="what a configuration takes, before it does")
    if words[:1] == ["plan"]:
        from kvmem.cli import plan

        plan.add_arguments(plan_parser)
        arguments = plan_parser.parse_args(words[1:], argparse.Namespace(version=False))
        if missing := plan.missing(arguments):
            plan_parser.error(f"missing: {', '.join(missing)}")
        return arguments
    arguments = parser.parse_args(words)
    if arguments.version:
        return arguments
    if arguments.command is None:
        parser.error(f"no command given; commands: {', '.join(COMMANDS)}")
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    if arguments.version:
        print(f"kvmem {kvmem.__version__}")
        return 0
    from kvmem.cli import plan

    try:
        return plan.run(arguments)
    except (ValueError, TypeError) as error:
        raise type(error)(plan.in_flags(str(error))) from error
