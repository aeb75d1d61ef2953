"""Several threads on one Manager, fork, and the end of the process (rule: one lock, no hang)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvmem
from kvmem.sim_options import MODES
from tests.driver import Driver

ROOT = Path(__file__).resolve().parents[1]


def engine(d: Driver, seed: int, rounds: int) -> None:
    """Continuous batching over own sequences; others may take their room at any moment."""
    rng = random.Random(seed)
    for _ in range(rounds):
        if len(d.live) < 3:
            start = rng.randrange(3)
            d.create([start, *(rng.randrange(2) for _ in range(rng.randint(0, 13)))])
        d.manager.make_room(d.live, max_tokens=8)
        step = d.step(d.live, max_tokens=8, fit="some")
        if step.ready and rng.random() < 0.8:
            d.manager.append(step.ready, [rng.randrange(2) for _ in step.ready])
        act = rng.random()
        if act < 0.15:
            d.manager.swap_out([rng.choice(d.live)], how="auto")
        elif act < 0.25:
            d.manager.truncate([rng.choice(d.live)], 1)
        for seq in [s for s in d.live if s.num_tokens > 20]:
            d.free(seq)
    d.free(*d.live)


def watcher(d: Driver, done: threading.Event) -> None:
    """What a monitor does, while others work."""
    while not done.wait(0.001):  # else it would hardly ever let go of the lock
        d.manager.verify()
        stats = d.manager.stats()
        assert stats.device.free + stats.device.held == stats.device.total
        d.manager.snapshot()
        d.manager.events()
        d.manager.match([0, 1, 1, 0])
        d.manager.evict(1)


def poller(d: Driver, done: threading.Event) -> None:
    """An engine's thread that does nothing but note which transfers have ended."""
    while not done.wait(0.0005):
        d.manager.poll()


def together(seed: int, rounds: int = 60, **settings: object) -> None:
    """Two engines, a watcher and a thread that polls on one Manager; raises what any of them
    raised."""
    errors: list[BaseException] = []
    done = threading.Event()

    def guarded(function: object, *arguments: object) -> None:
        try:
            function(*arguments)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    with Driver(device_blocks=12, host_blocks=12, **settings) as d:
        engine(d, seed + 2, 4)  # compiles, if need be: no thread shall wait for that
        second = d.beside()
        threads = [
            threading.Thread(target=guarded, args=(engine, d, seed, rounds)),
            threading.Thread(target=guarded, args=(engine, second, seed + 1, rounds)),
        ]
        beside = [
            threading.Thread(target=guarded, args=(function, d, done))
            for function in (watcher, poller)
        ]
        for thread in [*threads, *beside]:
            thread.start()
        for thread in threads:
            thread.join(200)
            assert not thread.is_alive(), "a thread hangs"
        done.set()
        for thread in beside:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
        d.live += second.live
        if errors:
            raise errors[0]


def test_two_engines_and_a_watcher_on_one_manager(seed: int) -> None:
    together(seed)


@pytest.mark.parametrize("mode", MODES)
def test_two_engines_and_a_watcher_on_a_simulated_device(mode: str, seed: int) -> None:
    """Whichever thread comes next is the one in whose call the streams go on."""
    together(seed, 20, device="sim", sim=kvmem.SimOptions(mode=mode, seed=seed))


def test_one_lock_serialises_the_same_sequence() -> None:
    """Two threads append to one sequence: none is lost."""
    with Driver() as d:
        seq = d.create([0])

        def append() -> None:
            for _ in range(300):
                d.manager.append([seq], [1])

        threads = [threading.Thread(target=append) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert seq.num_tokens == 601


def test_close_wakes_a_thread_that_waits_for_a_copy() -> None:
    d = Driver()
    seq = d.create([1, 2, 3, 4, 5])
    d.step([seq])
    d.hold("out")
    transfer = d.manager.swap_out([seq])
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            transfer.wait()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    d.manager.close()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(caught[0], kvmem.ManagerClosed | kvmem.TransferError)
    assert len(str(caught[0])) <= 300


def test_close_within_a_step_that_waits() -> None:
    d = Driver()
    seq = d.create([1, 2, 3, 4, 5])
    d.step([seq])
    d.manager.swap_out([seq])
    d.wait()
    d.manager.evict(8)
    d.hold("in")
    d.manager.append([seq], [6])
    step = d.manager.step([seq])
    timer = threading.Timer(0.1, d.manager.close)
    timer.start()
    with pytest.raises(kvmem.ManagerClosed):
        step.__enter__()
    timer.join()


# --- processes --------------------------------------------------------------------------------

HEAD = """
import os, sys, threading, time, warnings
import kvmem
from tests.driver import Driver

d = Driver()
seq = d.create([1, 2, 3, 4, 5])
d.step([seq])
d.hold("out", "in")
transfer = d.manager.swap_out([seq])

def waits():
    try:
        transfer.wait()
    except kvmem.ManagerClosed:
        pass
"""


def run(body: str, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", body],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stderr[-2000:]
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "Fatal" not in done.stderr, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "d.manager.close(); d.manager.close()",
        "del d, seq, transfer",
        "threading.Thread(target=waits, daemon=True).start()",
    ],
)
def test_exit_with_copies_that_stand_still(end: str) -> None:
    """The only waits at exit are those of JOIN_SECONDS, 3 s; `run` ends a hang."""
    from kvmem.store.cpu import JOIN_SECONDS

    assert JOIN_SECONDS < 5
    assert run(f"{HEAD}\n{end}\nprint('leaving')") == "leaving\n"


def test_exit_inside_an_open_step_keeps_the_exit_code() -> None:
    run(HEAD + "with d.manager.step([d.create([9])]):\n    sys.exit(3)", code=3)


def test_use_after_fork_is_refused_and_the_parent_goes_on() -> None:
    out = run(
        HEAD
        + """
warnings.simplefilter("ignore")
sys.stdout.flush()
m = d.manager
child = os.fork()
if child == 0:
    calls = (
        lambda: m.create([1]), lambda: m.step([seq]), m.stats, m.verify, lambda: m.free([seq]),
        lambda: m.swap_in([seq]), lambda: m.kv(0), lambda: m.match([1]), m.poll, m.__enter__,
        lambda: seq.num_tokens,
    )
    for number, call in enumerate(calls):
        try:
            call()
            print("not refused", number)
        except kvmem.ManagerClosed as error:
            assert "fork" in str(error) or "process" in str(error), error
    m.close()
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
d.release()
transfer.wait(30)
d.check_content()
d.drain()
m.close()
print("parent done")
"""
    )
    assert out == "parent done\n"


def test_the_workqueue_threading_layer(seed: int) -> None:
    """It aborts the process when two threads are in parallel code at once, unless serialised."""
    out = run(
        f"import numba\nfrom tests.test_threads import together\ntogether({seed}, 30)\n"
        "print(numba.threading_layer())",
        NUMBA_THREADING_LAYER="workqueue",
    )
    assert out == "workqueue\n"


def test_case_13_hits_do_not_hang_on_the_hash_seed_of_a_process() -> None:
    """There are no keys outside a process in this version: blocks are found by their tokens, and
    None is another namespace than an empty name."""
    body = """
from tests.driver import Driver, tokens_of

with Driver(device_blocks=32) as d:
    names = (None, "", b"", "salt", b"salt")
    for i, name in enumerate(names):
        before = [d.manager.match(tokens_of(20), namespace=n).num_tokens for n in names]
        seq = d.create(tokens_of(20), namespace=name)
        print(i, before, seq.num_cached, d.step([seq]).num_tokens)
"""
    outs = {run(body, PYTHONHASHSEED=number) for number in ("0", "4711")}
    print(*outs)
    assert len(outs) == 1
    first = next(iter(outs)).splitlines()
    assert first[0] == "0 [0, 0, 0, 0, 0] 0 20"
    assert first[1].startswith("1 [20, 0,")
