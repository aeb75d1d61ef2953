"""What a run of the main job says at its end: figures, claims, and whether they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from demo.check import Reference, Verdict
from demo.serving import Served
from kvmem.picture.timeline import CACHED, FREE
from kvmem.stats import Stats


@dataclass
class Report:
    """Figures by name, and claims: a run passes when each claim holds."""

    figures: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, bool] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(self.claims.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "claims": self.claims,
            "faults": self.faults,
            "ties": self.ties,
            "figures": self.figures,
        }

    def lines(self) -> list[str]:
        """The report as text, one figure or claim a line."""
        width = max(len(name) for name in self.figures)
        lines = [f"  {name:<{width}}  {_text(value)}" for name, value in self.figures.items()]
        lines += [f"  tie: {tie}" for tie in self.ties]
        lines += [f"  FAULT: {fault}" for fault in self.faults]
        lines += [
            f"  {'ok  ' if holds else 'FAIL'}  {claim}" for claim, holds in self.claims.items()
        ]
        return lines


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 0.01 else f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value)


def add_verdicts(
    report: Report, label: str, verdicts: Sequence[Verdict], wanted: Sequence[Reference]
) -> None:
    """Enter the comparison of one run with the reference."""
    for index, verdict in enumerate(verdicts):
        if verdict.fault:
            report.faults.append(f"{label}, request {index}: {verdict.fault}")
        if verdict.tie_at is not None:
            margin = wanted[index].margin[verdict.tie_at]
            report.ties.append(f"{label}, request {index}, row {verdict.tie_at}: {margin:.2g}")
    rows = sum(verdict.num_rows for verdict in verdicts)
    report.figures[f"{label}: rows compared"] = rows
    report.figures[f"{label}: largest difference of logits"] = max(
        verdict.max_difference for verdict in verdicts
    )
    claim = f"{label}: every row of logits is the reference's (within 1e-3)"
    report.claims[claim] = not any(verdict.fault for verdict in verdicts)


def add_run(report: Report, label: str, run: Served) -> None:
    """Enter what one run of the engine did to the memory."""
    figures = report.figures
    figures[f"{label}: steps"] = run.num_steps
    figures[f"{label}: tokens/s"] = run.tokens_per_second
    for name, value in traffic(run.stats).items():
        figures[f"{label}: {name}"] = value
    done = (run.stats.bytes_out_done, run.stats.bytes_in_done)
    claim = f"{label}: bytes planned are the bytes counted at the device"
    report.claims[claim] = done == (run.stats.bytes_out, run.stats.bytes_in)
    for tier, (live, full, size) in peaks(run).items():
        text = f"{live} blocks live, {full} with cached ones, of {size}"
        figures[f"{label}: {tier} tier at its peak"] = text


def add_swaps(report: Report, run: Served, *, demanded: bool) -> None:
    """Enter how often each request was swapped out; `demanded` makes the minimum a claim."""
    swaps = [request.num_swap_outs for request in run.requests]
    in_prefill = sum(request.num_swap_outs_in_prefill > 0 for request in run.requests)
    report.figures["swap-outs of each request"] = swaps
    report.figures["requests swapped out in mid-prefill"] = in_prefill
    if demanded:
        report.claims["each request was swapped out at least twice"] = min(swaps) >= 2
        report.claims["one request was swapped out in mid-prefill"] = in_prefill >= 1


def traffic(stats: Stats) -> dict[str, int]:
    """Pick the figures of prefix hits and swaps from `Manager.stats()`."""
    return {
        "prefix-hit tokens": stats.prefix_hit_tokens,
        "swap-outs of sequences": stats.swap_outs,
        "blocks copied out": stats.blocks_out,
        "bytes copied out": stats.bytes_out,
        "blocks copied in": stats.blocks_in,
        "bytes copied in": stats.bytes_in,
        "clean (free) swap-outs of blocks": stats.clean_swap_outs,
        "sequences computed again": stats.recomputes,
    }


def peaks(run: Served) -> dict[str, tuple[int, int, int]]:
    """Return, for each tier, the most frames live after a step, the most held at any moment
    (cached content included), and how many there are.
    """
    result = {}
    for tier, stats in (("device", run.stats.device), ("host", run.stats.host)):
        if stats.total:
            owners = np.array([sample["tiers"][tier]["owner"] for sample in run.samples])
            live = int(((owners != FREE) & (owners != CACHED)).sum(axis=1).max())
            result[tier] = (live, stats.peak, stats.total)
    return result
