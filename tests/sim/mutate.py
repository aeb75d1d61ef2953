"""Does the simulator notice? `python -m tests.sim.mutate` plants each mistake and prints a line.

Needs NUMBA_DISABLE_JIT=1. Takes the recorded seeds of mutant_seeds.json; `--find N` looks among
the first N seeds instead, and `--write` records what was found.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from kvmem.ledger.jit import JIT_DISABLED
from tests.sim import mutants_ledger, mutants_recovery
from tests.sim.driver import drawn_setup, drive
from tests.sim.mutants import MUTANTS, planted

assert mutants_ledger and mutants_recovery  # they register their own
SEEDS = Path(__file__).with_name("mutant_seeds.json")
NUM_OPS = 160
ENOUGH = 3  # seeds to record
HANG_SECONDS = 30


class Hangs(BaseException):
    """The driver did not come back."""


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise Hangs(f"no end within {HANG_SECONDS} s")


def outcome(seed: int, faults: bool) -> str | None:
    """What the driver found with this seed."""
    signal.alarm(HANG_SECONDS)
    try:
        drive(seed, drawn_setup(seed, NUM_OPS, faults=faults), looks=0.3)
    except (Exception, Hangs) as error:
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.alarm(0)
    return None


def try_mutant(name: str, seeds: list[int], enough: int) -> dict[str, Any]:
    """Whether it was reached, which seeds found it, how it showed first."""
    reached = 0
    killers: list[int] = []
    shown = ""

    def hit() -> None:
        nonlocal reached
        reached += 1

    tried = 0
    for seed in seeds:
        tried += 1
        before = reached
        with planted(MUTANTS[name], hit):
            found = outcome(seed, MUTANTS[name].faults)
        if found is not None and reached > before:
            killers.append(seed)
            shown = shown or found
        if len(killers) == enough:
            break
    return {"mutant": name, "reached": reached, "tried": tried, "killers": killers, "found": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--find", type=int, default=0, metavar="N")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if not JIT_DISABLED:
        sys.exit("patches do not reach compiled code: set NUMBA_DISABLE_JIT=1")
    warnings.simplefilter("ignore", ResourceWarning)
    signal.signal(signal.SIGALRM, _on_alarm)
    recorded: dict[str, list[int]] = json.loads(SEEDS.read_text()) if SEEDS.exists() else {}
    used: set[tuple[int, bool]] = set()
    for name in options.names or MUTANTS:
        seeds = list(range(options.find)) or recorded.get(name, [])
        line = try_mutant(name, seeds, ENOUGH if options.find else 1)
        print(json.dumps(line), flush=True)
        recorded[name] = line["killers"] if options.find else seeds
        used.update((seed, MUTANTS[name].faults) for seed in recorded[name])
    if options.write:
        rows = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in sorted(recorded)]
        SEEDS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    for seed, faults in sorted(used):
        line = {"baseline": seed, "faults": faults, "found": outcome(seed, faults)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
