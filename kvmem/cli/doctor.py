"""``kvmem doctor``: what would stop kvmem on this machine, and what to do."""

from __future__ import annotations

import argparse

from kvmem.cli.output import Table, note, print_json, print_tables
from kvmem.cli.parser import size
from kvmem.doctor import Diagnosis, diagnose
from kvmem.doctor.devices import DEFAULT_PIN_BYTES
from kvmem.sizes import with_unit

EXAMPLE = "  kvmem doctor                  # text to paste into an issue report\n" + (
    "  kvmem doctor --json           # exit status 1 when something would stop kvmem"
)

_STYLES = {"warning": "yellow", "error": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``kvmem doctor``."""
    parser.add_argument(
        "--pin",
        type=size,
        default=DEFAULT_PIN_BYTES,
        metavar="SIZE",
        help=f"pinned memory to try where there is CUDA, default {with_unit(DEFAULT_PIN_BYTES)}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 when one is an error."""
    found = diagnose(pin_bytes=arguments.pin, progress=lambda name: note(f"checking {name}"))
    if arguments.json:
        print_json("doctor", found.to_dict())
    else:
        print_tables(tables(found))
    return 1 if found.worst == "error" else 0


def tables(found: Diagnosis) -> list[Table]:
    """The findings for a person, then what to do."""
    rows = [(f.severity, f.check, f.message) for f in found.findings]
    styles = {i: _STYLES[f.severity] for i, f in enumerate(found.findings) if f.severity in _STYLES}
    made = [Table(f"kvmem {found.version}", ("", "", ""), rows, styles)]
    advice = [(f.severity, f.check, f.advice) for f in found.findings if f.advice]
    if advice:
        made.append(Table("what to do", ("", "", ""), advice))
    errors, warnings = found.count("error"), found.count("warning")
    verdict = "kvmem would not work here" if errors else "nothing would stop kvmem"
    made.append(Table("result", ("", ""), [(verdict, f"{errors} errors, {warnings} warnings")]))
    return made
