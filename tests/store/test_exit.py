"""Ends of processes: exit and fork with copies in flight, each in a process of its own.

The limit of ``run`` is there to end a hang; that exit takes less than the promised 5 s follows from
``JOIN_SECONDS``, the only place where it waits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import os, sys, threading, time
from kvmem.plan import Plan
from kvmem.store import Store
from kvmem.store.device import Stream
from tests.store.fakes import FakeConfig, ids, in_plan, out_plan

store = Store(FakeConfig())
"""


def run(body: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert not {"Traceback", "Fatal"} & set(done.stderr.split()), done.stderr
    return done.stdout


WAITING = """
store.device.hold(Stream.OUT)
store.submit(Plan(**out_plan(1, [1], [1]), **in_plan(1, [1], [2], in_after_out=1)))
"""


def test_exit_with_waiting_copies() -> None:
    assert run(WAITING + "print('leaving')") == "leaving\n"


def test_exit_with_a_stuck_copy() -> None:
    run(
        """
started = threading.Event()
def stuck(*_):
    started.set()
    time.sleep(1000)
store.device.hook = stuck
store.submit(Plan(**out_plan(1, [1], [1])))
started.wait()
"""
    )


def test_close_with_waiting_copies() -> None:
    body = WAITING + "store.close(); store.close(); print([t.name for t in threading.enumerate()])"
    assert run(body) == "['MainThread']\n"


def test_exit_by_an_error_keeps_its_code() -> None:
    run(WAITING + "sys.exit(3)", code=3)


def test_a_dropped_store_ends_its_threads() -> None:
    body = WAITING + "del store; print([t.name for t in threading.enumerate()])"
    assert run(body) == "['MainThread']\n"


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
def test_a_forked_child_is_refused_and_leaves_the_parent_alone(leave: str) -> None:
    out = run(
        WAITING
        + f"""
import warnings
from kvmem.errors import ManagerClosed
warnings.simplefilter("ignore")
sys.stdout.flush()
child = os.fork()
if child == 0:
    for act in (lambda: store.submit(Plan()), lambda: store.begin(Plan()), lambda: store.kv(0),
                lambda: store.wait("out", 1), store.counters):
        try:
            act()
            print("not refused")
        except ManagerClosed as error:
            assert "process" in str(error), error
    store.close()
    sys.stdout.flush()
    {leave}
assert os.waitpid(child, 0)[1] == 0
store.device.release(Stream.OUT)
print(store.wait("in", 1, 30), store.retired())
"""
    )
    assert out == "True (1, 1)\n"
