"""Drive every fault over its seeds and print one JSON line each: `python -m tests.faults.run`.

Needs NUMBA_DISABLE_JIT=1. `--find N` looks for seeds below N instead of taking the recorded ones.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from types import FrameType
from typing import Any

from kvmem.ledger.jit import JIT_DISABLED
from tests.faults.driver import Setup, drive
from tests.faults.plant import Fault, replaced, weak
from tests.faults.seeded import FAULTS

HANG_SECONDS = 30  # a fault may make a loop endless: that is found too


class Hangs(BaseException):
    """The driver did not come back."""


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise Hangs(f"no end within {HANG_SECONDS} s")


def outcome(seed: int, setup: Setup) -> str | None:
    """What the driver found with this seed, None when nothing."""
    signal.alarm(HANG_SECONDS)
    try:
        drive(seed, setup)
    except (Exception, Hangs) as error:
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.alarm(0)
    return None


def try_fault(fault: Fault, seeds: tuple[int, ...], enough: int) -> dict[str, Any]:
    """Whether the fault was reached, by which seeds it was killed, and how it showed first."""
    reached = 0
    killers: list[int] = []
    shown = ""

    def hit() -> None:
        nonlocal reached
        reached += 1

    def patched(seed: int) -> str | None:
        with replaced(fault.target, lambda original: fault.patch(original, hit)):
            return outcome(seed, fault.setup)

    for seed in seeds:
        if fault.weak_hash:
            with replaced("hash_row", weak):
                found = patched(seed)
        else:
            found = patched(seed)
        if found is not None and reached:
            killers.append(seed)
            shown = shown or found
        if len(killers) == enough:
            break
    return {"reached": reached, "killers": killers, "found": shown}


def baseline(seed: int, setup: Setup, weak_hash: bool) -> str | None:
    """The same seed without a fault."""
    if weak_hash:
        with replaced("hash_row", weak):
            return outcome(seed, setup)
    return outcome(seed, setup)


def main() -> None:
    """One line for each fault and for each seed of the unpatched driver."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--find", type=int, default=0, metavar="N")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if not JIT_DISABLED:
        sys.exit("patches do not reach compiled code: set NUMBA_DISABLE_JIT=1")
    warnings.simplefilter("ignore", ResourceWarning)  # a driver that failed drops its handles
    signal.signal(signal.SIGALRM, _on_alarm)
    for name in options.names or FAULTS:
        one = FAULTS[name]
        seeds = tuple(range(options.find)) or one.seeds
        result = try_fault(one, seeds, 2 if options.find else 1)
        print(json.dumps({"fault": name, **result}), flush=True)
    bases = {(seed, f.setup, f.weak_hash) for f in FAULTS.values() for seed in f.seeds}
    for seed, setup, weak_hash in sorted(bases, key=repr):
        found = baseline(seed, setup, weak_hash)
        print(json.dumps({"baseline": [seed, repr(setup), weak_hash], "found": found}), flush=True)


if __name__ == "__main__":
    main()
