"""Mistakes planted in the ledger and the swapper, one function each, and the seeds that find them.

Python patches only reach uncompiled code, so all this runs under NUMBA_DISABLE_JIT=1. A patch
calls `hit()` when it does something else than the original would have: a fault that was never
reached has proved nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.driver import Setup

Function = Callable[..., Any]
Patch = Callable[[Function, Callable[[], None]], Function]

ROOT = Path(__file__).resolve().parents[2]

TIGHT = Setup(device_blocks=6, host_blocks=4)
WIDE_BLOCKS = Setup(device_blocks=5, host_blocks=8, block_size=4)
HELD_OUT = Setup(hold_out=True)
DEFAULT = Setup()


@dataclass(frozen=True)
class Fault:
    """One mistake: which function, what it does instead, and where it is found."""

    target: str  # function of the ledger, or Class.method of the swapper
    patch: Patch
    setup: Setup
    seeds: tuple[int, ...]
    weak_hash: bool = False  # every row hash collides, as only luck or an attacker would have it


FAULTS: dict[str, Fault] = {}


def fault(
    target: str, *seeds: int, setup: Setup = DEFAULT, weak_hash: bool = False
) -> Callable[[Patch], Patch]:
    """Register a patch under its own name."""

    def add(patch: Patch) -> Patch:
        FAULTS[patch.__name__] = Fault(target, patch, setup, seeds, weak_hash)
        return patch

    return add


@contextmanager
def replaced(target: str, make: Callable[[Function], Function]) -> Iterator[None]:
    """Exchange a function wherever a module of kvmem names it, or a method in its class."""
    if "." in target:
        from kvmem import swapper

        owner, name = getattr(swapper, target.split(".")[0]), target.split(".")[1]
        places = [(owner, name)]
    else:
        name = target
        modules = [m for n, m in sys.modules.items() if n.startswith("kvmem.") and m]
        places = [(m, name) for m in modules if callable(getattr(m, name, None))]
    assert places, f"nothing is called {target} any more"
    original = getattr(places[0][0], name)
    assert all(getattr(place, name) is original for place, _ in places), f"two are called {target}"
    replacement = make(original)
    for place, _ in places:
        setattr(place, name, replacement)
    try:
        yield
    finally:
        for place, _ in places:
            setattr(place, name, original)


def weak(hash_row: Function) -> Function:
    """Two bits of the row hash: nearly all rows collide."""
    return lambda *a: hash_row(*a) & 0xC0000000


def printed_by(module: str) -> list[dict[str, Any]]:
    """The JSON lines of a module that plants mistakes, run as plain Python in a process of its
    own: patches do not reach compiled code."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
