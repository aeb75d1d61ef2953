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
    """A batch operation refused and changed nothing. `row` is the index in the call's list."""

    code: int
    row: int
    needed: int
    available: int


def refuse(state: State, code: int) -> Refusal:
    """The refusal for a code, with the detail the compiled function left."""
    ledger = state.ledger[0]
    return Refusal(
        code,
        int(ledger["error_row"]),
        int(ledger["error_needed"]),
        int(ledger["error_available"]),
    )
