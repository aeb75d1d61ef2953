"""One HTML page of a run's record: what ran where, and bars beside measured limits and peers.

It needs no library and no network, and it says what was not measured. `python -m tools.gpu.report
FILE.json PAGE.html` makes the page of an earlier run.
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

from tools.gpu.record import SCHEMA

_COLOURS = ("#2458a6", "#c2702b", "#4b8b5c", "#8a5a9e", "#7a7d84", "#b04a5a")
_WIDTH, _LABEL, _BAR = 920, 330, 11
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #22252b; background: #fff;
       margin: 1.5rem auto; max-width: 960px; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .2rem; }
p { margin: .2rem 0 .6rem; max-width: 80ch; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid #ddd; padding: .15rem .6rem .15rem 0; text-align: left;
         vertical-align: top; }
.wrong { color: #a01525; font-weight: 600; } .wide { overflow-x: auto; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
"""
TITLES = {
    "bandwidth": "What the device copies and reads",
    "decode": "Decode, bfloat16: share of the rate of reading, and times beside others",
    "fp8": "Decode, K and V in fp8_e4m3",
    "prompt": "A chunk of a prompt over cached tokens",
    "moves": "Moves: share of the rate of copying",
    "launch": "What a call costs the host",
    "swap": "Swaps of a Manager: share of the link",
    "beside": "A decode step beside swaps: share of the speed alone",
    "layers": "Layers that arrive while others compute: share of the limit",
    "graph": "A decode step as a CUDA graph",
    "engine": "The example engine under pressure",
    "stress": "Stress: each byte checked",
}


def make_page(data: dict[str, Any], banner: str = "") -> str:
    """The page of a record. Raises ValueError for another schema.

    ``banner`` stands above all else, for figures that are no measurement.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"data has schema {data.get('schema')!r}; allowed: {SCHEMA!r}")
    parts = [f"<p class=wrong>{_text(banner)}</p>" if banner else ""]
    parts += [_head(data), _checks(data.get("checks", []))]
    parts += [_section(name, entry) for name, entry in data["sections"].items()]
    not_run = [name for name in TITLES if name not in data["sections"]]
    if not_run:
        parts.append(f"<h2>Not run</h2><p>{_text(', '.join(not_run))}</p>")
    return (
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>kvmem on a GPU</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )


def _head(data: dict[str, Any]) -> str:
    """Date, commit, device, software."""
    device = data.get("device", {})
    mode = "short run (--quick)" if data.get("quick") else "whole run"
    state = ", with changes that are not committed" if data.get("changed") else ""
    rows = {
        "measured": f"{data.get('date', '?')} {data.get('time', '')}, {mode}",
        "commit": f"{data.get('commit', 'unknown')}{state}",
        "GPU": f"{device.get('name', '?')}, compute capability "
               f"{device.get('compute_capability', '?')}, {device.get('processors', '?')} "
               "processors",
        "memory": f"{device.get('memory_bytes', 0) / 2**30:.0f} GiB, "
                  f"{device.get('free_bytes', 0) / 2**30:.0f} free at the start; "
                  f"L2 {device.get('l2_bytes', 0) / 2**20:.0f} MiB",
        "driver": f"{device.get('driver', '?')} (up to CUDA {device.get('driver_cuda', '?')}); "
                  f"clocks {device.get('clocks_mhz', '?')}; power {device.get('power_limit', '?')}",
        "others on it": device.get("others", "?"),
        "host": device.get("host", "?"),
        "software": ", ".join(f"{k} {v}" for k, v in device.get("software", {}).items()),
    }  # fmt: skip
    table = "".join(f"<tr><th>{_text(k)}<td>{_text(v)}" for k, v in rows.items())
    return (
        f"<h1>kvmem on a GPU</h1><table>{table}</table>"
        "<p>Times are medians of turns, ours and the others' in the same turns, by CUDA events; in "
        "brackets the 10th and 90th percentile. Layers are taken in turn, so that none is in the "
        "L2 cache when it comes again. SDPA has its K and V contiguous, paged peers have their "
        "pages in order, ours lie scattered. In a figure marked * the device "
        "waited for the host. What a Manager does (from the section of swaps on) is timed on the "
        "host, from a call to the end of its work, as an engine has it.</p>"
    )


def _checks(checks: list[dict[str, Any]]) -> str:
    """What was run before anything was timed."""
    words = {True: "passed", False: "FAILED", None: "says nothing"}
    rows = "".join(
        f"<tr><td>{_text(c['name'])}<td{'' if c['passed'] is not False else ' class=wrong'}>"
        f"{words[c['passed']]}<td>{_text(c['summary'])}<td>{c['seconds']:.0f} s"
        for c in checks
    )
    return f"<h2>Correctness first</h2><table>{rows}</table>" if rows else ""


def _section(name: str, entry: dict[str, Any]) -> str:
    """A chart of the shares or times, the table of all figures, what was left out."""
    rows = entry["rows"]
    parts = [f"<h2>{_text(TITLES.get(name, name))}</h2>"]
    if entry["status"] != "done":
        parts.append(f"<p class=wrong>{_text(entry['status'])}</p>")
    if entry["note"]:
        parts.append(f"<p>{_text(entry['note'])}</p>")
    shares = [(r["name"], [(r["limit"], r["share"])]) for r in rows if r.get("share") is not None]
    if shares:
        parts.append(_bars(shares, "share of what was measured in this run", 1.0, "{:.0%}"))
    ratios = [(r["name"], _ratios(r)) for r in rows]
    ratios = [(label, found) for label, found in ratios if found]
    if ratios and name != "launch":
        most = min(4.0, max(value for _, found in ratios for _, value in found))
        parts.append(_bars(ratios, "times as fast as", most, "{:.2f}x", line=1.0))
    if rows:
        parts.append(_table(rows))
    if entry["left_out"]:
        lines = "".join(f"<li>{_text(line)}" for line in entry["left_out"])
        parts.append(f"<p>Left out:</p><ul>{lines}</ul>")
    return "".join(parts)


def _ratios(row: dict[str, Any]) -> list[tuple[str, float]]:
    """Times as fast as each other implementation that has a figure."""
    if isinstance(row["ours"], str):
        return []
    return [
        (name, other["median"] / row["ours"]["median"])
        for name, other in row["others"].items()
        if not isinstance(other, str)
    ]


def _bars(
    rows: list[tuple[str, list[tuple[str, float]]]],
    title: str,
    most: float,
    form: str,
    line: float | None = None,
) -> str:
    """Horizontal bars as SVG, a group a row; those above ``most`` are cut, their figures not."""
    names = list(dict.fromkeys(name for _, found in rows for name, _ in found))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    scale = (_WIDTH - _LABEL - 60) / max(most, 1e-9)
    shapes, y = [], 24
    for name in names:
        shapes.append(f"<rect x='{_LABEL}' y='{y}' width='10' height='10' fill='{colours[name]}'/>")
        shapes.append(f"<text x='{_LABEL + 14}' y='{y + 9}'>{_text(name)}</text>")
        y += 14
    top = y = y + 6
    for label, found in rows:
        middle = y + len(found) * _BAR / 2 + 3
        shapes.append(
            f"<text x='{_LABEL - 8}' y='{middle:.0f}' text-anchor='end'>{_text(label)}</text>"
        )
        for name, value in found:
            wide = max(1.0, min(value, most) * scale)
            shapes.append(
                f"<rect x='{_LABEL}' y='{y}' width='{wide:.1f}' height='{_BAR - 2}' "
                f"fill='{colours[name]}'/>"
                f"<text x='{_LABEL + wide + 4:.0f}' y='{y + _BAR - 2}'>{form.format(value)}</text>"
            )
            y += _BAR
        y += 6
    if line is not None and line <= most:
        x = _LABEL + line * scale
        shapes.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{top}' y2='{y}' stroke='#22252b'/>")
    caption = f"<text x='0' y='14' font-weight='600'>{_text(title)}</text>"
    return (
        f"<svg viewBox='0 0 {_WIDTH} {y}' role='img' aria-label='{_text(title)}'>"
        f"{caption}{''.join(shapes)}</svg>"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    """Every row with its spread, rate and peers."""
    body = []
    for row in rows:
        cells = [_text(row["name"]), _spread(row["ours"]), _rate(row)]
        cells.append("" if row["share"] is None else f"{row['share']:.0%} of {row['limit']}")
        cells.append("<br>".join(
            f"{_text(name)}: {_spread(other)}" for name, other in row["others"].items()
        ))  # fmt: skip
        error = ""
        if row["error"] is not None:
            error = f"{row['error']:.2g} (allowed {row['allowed_error']:.2g})"
        cells.append(f"<span class=wrong>WRONG {error}</span>" if row["failed"] else error)
        cells.append(_text(row.get("note", "")))
        body.append("<tr>" + "".join(f"<td>{cell}" for cell in cells))
    head = ("case", "ours", "rate", "share", "others", "wrong, or off by", "note")
    heads = "".join(f"<th>{name}" for name in head)
    return f"<div class=wide><table><tr>{heads}{''.join(body)}</table></div>"


def _spread(spread: dict[str, Any] | str) -> str:
    """Median and spread in a unit that suits."""
    if isinstance(spread, str):
        return _text(spread)
    unit, scale = ("ms", 1e3) if spread["median"] >= 1e-3 else ("us", 1e6)
    low, middle, high = (spread[key] * scale for key in ("p10", "median", "p90"))
    mark = "" if spread["ahead"] else "*"
    return f"{middle:.4g} {unit}{mark} ({low:.4g} to {high:.4g})"


def _rate(row: dict[str, Any]) -> str:
    """Bytes or operations a second."""
    if isinstance(row["ours"], str):
        return ""
    seconds = row["ours"]["median"]
    if row["operations"]:
        return f"{row['operations'] / seconds / 1e12:,.0f} TFLOP/s"
    return f"{row['moved_bytes'] / seconds / 1e9:,.0f} GB/s" if row["moved_bytes"] else ""


def _text(value: object) -> str:
    return html.escape(str(value))


def write_page(data: dict[str, Any], path: Path) -> None:
    """Write the page of a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make_page(data), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """From a record's file to a page's."""
    if len(arguments) != 2:
        print("usage: python -m tools.gpu.report FILE.json PAGE.html", file=sys.stderr)
        return 2
    write_page(json.loads(Path(arguments[0]).read_text(encoding="utf-8")), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
