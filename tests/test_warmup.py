"""`kvmem.warmup`: afterwards nothing is left to compile. Seen in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvmem

ROOT = Path(__file__).resolve().parent.parent

REHEARSED = """
import json, sys
import numpy as np, torch
import kvmem
from kvmem.warming import _functions

def known():
    return {(f.py_func.__qualname__, str(s)) for f in _functions() for s in f.signatures}

def entry_points():
    return [f for f in _functions() if f.py_func.__module__.startswith("kvmem.ledger")
            and not f.targetoptions.get("no_cpython_wrapper")]

SETTINGS = (("float32", False, None), ("bfloat16", True, None), ("float16", False, "fp8_e4m3"))
calls, reports = [], []
for dtype, debug, kv_dtype in SETTINGS:
    config = kvmem.Config(num_layers=1, num_kv_heads=2, head_dim=32, v_head_dim=24, dtype=dtype,
                          kv_dtype=kv_dtype, block_size=8, device_blocks=1400, host_blocks=1400,
                          debug=debug)
    for _ in range(2):
        report = kvmem.warmup(config, progress=lambda *what: calls.append(what))
        reports.append([report.seconds, report.num_compiled, report.num_loaded,
                        report.cache_folder])
cold = [f.py_func.__name__ for f in entry_points() if not f.signatures]
before = known()

def run(step, heads, **options):
    def rows(*shape):
        return torch.zeros(step.num_tokens, *shape, dtype=m.config.dtype)
    step.write(0, rows(2, 32), rows(2, 24))
    step.attend(0, rows(heads, 32), **options)

def work(m, tokens):
    fixed = tokens.copy()
    fixed.flags.writeable = False
    seqs = [m.create(fixed), m.create(tokens.tolist()), m.create(torch.from_numpy(tokens[::2])),
            m.create(tokens, extras=[(3, 5, bytes(16))], namespace="a", priority=3)]
    while any(seq.num_computed < seq.num_tokens for seq in seqs):
        m.make_room(seqs, max_tokens=700)
        with m.step(seqs, max_tokens=700, fit="some") as step:
            run(step, 4, alibi=np.ones(4), sinks=torch.ones(4), softcap=3.0)
    m.append(seqs, [1, 2, 3, 4, 5], counts=[1, 1, 1, 2], draft=True)
    with m.step(seqs, num_tokens=[1, 1, 1, 2]) as step:
        run(step, 2, return_lse=True)
    m.accept(seqs, [1, 0, 1, 1], torch.tensor([4, 4, 4, 4]))
    m.truncate(seqs, [9, 5, 9, 9])
    forks = m.fork(seqs[0], 5)
    m.append(forks, np.arange(5))
    with m.step(forks) as step:
        run(step, 2)
    m.swap_out(forks, how="auto").wait()
    m.evict(3); m.evict(3, tier="host")
    with m.step(forks + seqs) as step:
        run(step, 2)
    m.swap_out(seqs).wait(); m.swap_in(seqs).wait(); m.swap_out(seqs, how="recompute")
    try:
        m.swap_out(seqs + forks); m.step(seqs, reserve_blocks=1400)
    except kvmem.SequenceTooLong:
        pass
    m.can_fit(tokens=tokens, seqs=seqs); m.match(tokens); m.verify()
    m.free(seqs + forks); m.reset(); m.reset("a"); m.stats(); m.snapshot()

for dtype, debug, kv_dtype in SETTINGS:
    scale = None if kv_dtype is None else [0.5, 2.0]
    config = kvmem.Config(num_layers=1, num_kv_heads=2, head_dim=32, v_head_dim=24, dtype=dtype,
                          kv_dtype=kv_dtype, k_scale=scale, block_size=8, device_blocks=1400,
                          host_blocks=1400, debug=debug)
    with kvmem.Manager(config) as m:
        work(m, np.arange(2600 if dtype == "float32" else 300, dtype=np.int32))
print(json.dumps({"calls": calls, "reports": reports, "cold": cold,
                  "entry_points": len(entry_points()), "late": sorted(known() - before)}))
"""


def fresh(code: str, **environment: str) -> dict[str, Any]:
    """What a program prints as JSON in a process of its own, and what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"stderr": done.stderr}


def test_nothing_is_left_to_compile() -> None:
    """A workload of other sizes and options meets only functions that are there already."""
    found = fresh(REHEARSED)
    assert found["cold"] == []
    assert found["entry_points"] >= 15
    assert found["late"] == []
    first, again = found["reports"][:2]
    assert first[1] + first[2] > 0
    assert again[1:3] == [0, 0]
    assert Path(first[3]).is_relative_to(os.environ["NUMBA_CACHE_DIR"])
    stages = len(found["calls"]) // len(found["reports"]) - 1
    assert stages >= 4
    assert found["calls"][: stages + 1] == [
        [done, stages, what] for done, (_, _, what) in enumerate(found["calls"][: stages + 1])
    ]
    assert found["calls"][stages][2] == "ready"
    assert found["stderr"] == ""


def test_a_plain_python_ledger_has_nothing_to_compile() -> None:
    code = """
import json, kvmem
report = kvmem.warmup(kvmem.Config(num_layers=1, num_kv_heads=1, head_dim=8, device_blocks=1,
                                   block_size=1024))
print(json.dumps([report.num_compiled, report.cache_folder]).join(['{"r":', "}"]))
"""
    assert fresh(code, NUMBA_DISABLE_JIT="1")["r"] == [0, ""]


class Terminal:
    """A stderr that says it is one, or not."""

    def __init__(self, tty: bool) -> None:
        self.tty, self.text = tty, ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("tty", [True, False])
def test_a_line_on_a_terminal_only(tty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(tty)
    monkeypatch.setattr(sys, "stderr", terminal)
    kvmem.warmup(kvmem.Config(num_layers=1, num_kv_heads=1, head_dim=8, device_blocks=1))
    assert terminal.text.endswith("ready\n") if tty else terminal.text == ""
    assert terminal.text.count("\r") == (5 if tty else 0)


def test_bad_arguments() -> None:
    config = kvmem.Config(num_layers=1, num_kv_heads=1, head_dim=8, device_blocks=1)
    with pytest.raises(TypeError, match=r"config must be a kvmem\.Config, not dict"):
        kvmem.warmup({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="progress must be callable or None, not int"):
        kvmem.warmup(config, progress=3)  # type: ignore[arg-type]


def test_what_progress_raises_ends_it_and_leaves_nothing_open() -> None:
    config = kvmem.Config(num_layers=1, num_kv_heads=1, head_dim=8, device_blocks=1)

    def stop(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvmem.warmup(config, progress=stop)
