"""Error codes of the compiled ledger as exceptions (R8). The Manager words them for the user."""

from __future__ import annotations

from dataclasses import dataclass

from . import decide
from .state import State

REASONS = {
    decide.PLANNED: "planned",
    decide.IDLE: "idle",
    decide.BUDGET: "budget",
    decide.ROOM: "room",
    decide.ARRIVING: "arriving",
    decide.NEVER: "never",
}


@dataclass
class Refusal(Exception):
    """A batch operation refused and changed nothing. `row` is the index in the call's list,
    `needed` and `available` were counted up to there, `short` is what the whole call lacks."""

    code: int
    row: int
    needed: int
    available: int
    short: int = 0


def refuse(state: State, code: int) -> Refusal:
    """The refusal for a code, with the detail the compiled function left."""
    ledger = state.ledger[0]
    needed, available = int(ledger["error_needed"]), int(ledger["error_available"])
    return Refusal(code, int(ledger["error_row"]), needed, available, needed - available)
