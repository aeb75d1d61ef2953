"""What a command prints: JSON with a schema, or tables; live views and progress on stderr.

Tables go through rich where it is installed (the extra ``cli``) and stdout is a terminal; else
they are plain columns, which a pipe or a file can use. Nothing is coloured under NO_COLOR, on a
dumb terminal, or off a terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from kvmem.sizes import with_unit

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Table:
    """Rows of text under a title. ``styles`` colours whole rows on a terminal, by their index."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    styles: dict[int, str] = field(default_factory=dict)
    right: tuple[int, ...] = ()  # columns of numbers


def print_json(command: str, payload: dict[str, Any], *, lines: bool = False) -> None:
    """One JSON object on stdout, first its ``schema``. ``lines``: on one line, for a stream."""
    whole = {"schema": f"kvmem.{command}/{SCHEMA_VERSION}", **payload}
    print(json.dumps(whole, indent=None if lines else 2, allow_nan=False), flush=lines)


def print_tables(tables: Sequence[Table], stream: TextIO | None = None) -> None:
    """Tables one below the other, on ``stream`` (default: stdout)."""
    out = sys.stdout if stream is None else stream
    console = rich_console(out)
    if console is None:
        print(plain(tables), file=out, end="")
        return
    for table in tables:
        console.print(_rich_table(table))


def plain(tables: Sequence[Table]) -> str:
    """Tables as aligned columns: each title on a line of its own, its rows indented."""
    blocks = []
    for table in tables:
        rows = [table.columns, *table.rows] if any(table.columns) else list(table.rows)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [table.title]
        for row in rows:
            cells = [
                cell.rjust(width) if i in table.right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def rich_console(stream: TextIO) -> Console | None:
    """A rich console for a terminal, or None: no terminal, a dumb one, or no rich."""
    if not is_terminal(stream):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False, no_color=bool(os.environ.get("NO_COLOR")))


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is looking, and the terminal understands more than text."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def note(text: str) -> None:
    """A line of progress: on stderr, and only when it is a terminal."""
    if is_terminal(sys.stderr):
        print(f"kvmem: {text}", file=sys.stderr, flush=True)


class ProgressLine:
    """One line of progress on stderr, each written over the last; nothing off a terminal."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, text: str) -> None:
        """Write ``text`` in place of what is there, cut to the width of the terminal."""
        if is_terminal(sys.stderr):
            width = shutil.get_terminal_size().columns
            sys.stderr.write("\r\x1b[K" + f"kvmem: {text}"[: width - 1])
            sys.stderr.flush()
            self._shown = True

    def end(self) -> None:
        """Clear the line, so that the next output begins where it began."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


def watched(seconds: float, count: int | None) -> Iterator[int]:
    """0, 1, 2, ...: ``count`` numbers (None: without end), ``seconds`` apart."""
    number = 0
    while count is None or number < count:
        if number:
            time.sleep(seconds)
        yield number
        number += 1


def live_view(make: Callable[[], Sequence[Table]], ticks: Iterator[int]) -> None:
    """Redraw tables in place at each tick. On stderr if it is a terminal; the last one is then
    printed to stdout. Else each is printed to stdout, an empty line between two."""
    console = rich_console(sys.stderr)
    tables: Sequence[Table] = ()
    if console is not None:
        from rich.console import Group
        from rich.live import Live

        with Live(console=console, transient=True, auto_refresh=False) as live:
            for _ in ticks:
                tables = make()
                live.update(Group(*map(_rich_table, tables)), refresh=True)
        print_tables(tables)
        return
    in_place = is_terminal(sys.stderr)
    for number in ticks:
        tables = make()
        if in_place:
            sys.stderr.write("\x1b[H\x1b[J" + plain(tables))
            sys.stderr.flush()
        else:
            print(("\n" if number else "") + plain(tables), end="", flush=True)
    if in_place:
        print_tables(tables)


def size_text(num_bytes: int | None) -> str:
    """Bytes for a person, ``-`` for None."""
    return "-" if num_bytes is None else with_unit(num_bytes)


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        show_header=any(table.columns),
        pad_edge=False,
    )
    for index, name in enumerate(table.columns):
        made.add_column(name, justify="right" if index in table.right else "left", overflow="fold")
    for index, row in enumerate(table.rows):
        # Text, not str: a bracket in a name of a GPU or process is no markup.
        made.add_row(*map(Text, row), style=table.styles.get(index))
    return made
