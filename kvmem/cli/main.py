"""Entry point of the ``kvmem`` command: parses, runs one command, turns errors into one line.

Exit status: 0 done, 1 findings (or a failure of kvmem, or output that could not be written),
2 usage, 3 an input file that is missing or bad, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

import kvmem
from kvmem.cli.output import print_json
from kvmem.cli.parser import BadInputFile, LineParser, one_line

#: What a full, broken or closed place of output answers.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG)

#: Each command is a module of this package with ``add_arguments(parser)``, ``EXAMPLE`` and
#: ``run(arguments) -> int``. Imported when it is asked for: some need torch, --help should not.
COMMANDS = {
    "doctor": "what would stop kvmem on this machine, and what to do",
    "plan": "what a model and its tiers take, before they do",
    "report": "memory of GPUs, host and processes, with the limits that bind",
    "stress": "swap pressure on a Manager for seconds to hours, each byte checked",
    "warmup": "compile what a Manager calls, ahead of its first request",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process); returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    status = 0
    try:
        status = _dispatch([word for word in words if word != "--debug"])
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence_stdout()  # the reader left, which is its right
        return status
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            _say(error)
        if _is_output_error(error):
            _silence_stdout()
        return _status_of(error)


def _dispatch(words: list[str]) -> int:
    """Parse and run; argparse's own exits (help, usage) become their status."""
    try:
        at = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
        if at is None or words[at] not in COMMANDS:
            return _without_command(words, None if at is None else words[at])
        name = words.pop(at)
        module = importlib.import_module(f"kvmem.cli.{name}")
        parser = command_parser(name, module)
        arguments = parser.parse_args(words)
        arguments.usage_error = parser.error
        status: int = module.run(arguments)
        return status
    except SystemExit as stop:
        return int(stop.code or 0)


def command_parser(name: str, module: ModuleType) -> LineParser:
    """The parser of one command, with the flags that all have."""
    parser = LineParser(
        prog=f"kvmem {name}",
        description=COMMANDS[name] + ".",
        epilog=f"example:\n{module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with a field schema")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _without_command(words: list[str], unknown: str | None) -> int:
    listed = "\n".join(f"  {name:<8}  {text}" for name, text in COMMANDS.items())
    parser = LineParser(
        prog="kvmem",
        usage="kvmem command [flags]",
        description="KV-cache memory for LLM inference engines.",
        epilog=f"commands (kvmem command --help tells more):\n{listed}\n\nexample:\n  kvmem doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.add_argument("--json", action="store_true", help="with --version: print JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if unknown is not None:
        parser.error(f"unknown command {unknown!r}{parser.nearest(unknown, list(COMMANDS))}")
    arguments = parser.parse_args(words)
    if not arguments.version:
        parser.error(f"no command given; commands: {', '.join(COMMANDS)}")
    if arguments.json:
        print_json("version", {"version": kvmem.__version__})
    else:
        print(f"kvmem {kvmem.__version__}")
    return 0


def _status_of(error: Exception) -> int:
    if isinstance(error, BadInputFile | kvmem.FormatError):
        return 3
    return 2 if isinstance(error, ValueError | TypeError) else 1


def _say(error: Exception) -> None:
    """One line on stderr, of at most 300 characters."""
    text = one_line(str(error)) or type(error).__name__
    if _is_output_error(error):
        text = f"output could not be written: {text}"
    elif not isinstance(error, ValueError | TypeError | kvmem.KVMemError | BadInputFile):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    if sys.stderr is not None:
        print(f"kvmem: {text[:300]}", file=sys.stderr)


def _is_output_error(error: Exception) -> bool:
    """Whether stdout, not kvmem, is what failed."""
    return isinstance(error, OSError) and error.errno in _OUTPUT_ERRORS


def _silence_stdout() -> None:
    """Send what is still buffered nowhere, or Python would complain once more at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        return
