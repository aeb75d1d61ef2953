"""Bad input, one row a case: type, message, nothing changed, good work afterwards, DRAIN.

Each case gets a fresh `World` (a Manager with a resident, a swapped, a waiting, a freed and a
foreign sequence, a pin, an open step over another one) and makes one bad call. The error is of the
type, matches the pattern, has at most 300 characters and shows no token; the state is the same
(SAME, R8); then 50 random good calls succeed and everything drains. Rows of bad input for Config
are in test_config.py, for the command in test_cli.py, for the raw kernels in tests/cuda_kernels
and test_ops.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvmem
from kvmem import KVMemError
from kvmem.store.device import Stream
from tests.bad_input import calls_on_sequences, calls_on_steps
from tests.bad_input.world import SECRET, SECRET_NAME, Bad, World
from tests.driver import Driver, assert_same, state_of

CASES = calls_on_sequences.CASES + calls_on_steps.CASES


def check_message(error: BaseException, text: str) -> None:
    message = str(error)
    assert len(message) <= 300, len(message)
    assert message
    assert str(SECRET) not in message
    assert SECRET_NAME not in message
    assert "'" not in message[:1]
    assert re.search(text, message, re.DOTALL), message


@pytest.mark.parametrize(
    ("call", "kind", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_bad_input(call: Bad, kind: type[Exception], text: str, seed: int) -> None:
    world = World()
    try:
        before = state_of(world.m)
        with pytest.raises(kind) as caught:
            call(world)
        check_message(caught.value, text)
        wanted = kind if isinstance(kind, tuple) else (kind,)
        plain = isinstance(caught.value, KVMemError) or type(caught.value) in wanted
        assert plain, f"{type(caught.value)} is more special than {kind}"
        assert_same(before, state_of(world.m))
        world.end(seed)
    finally:
        world.abandon()


def test_there_are_enough() -> None:
    assert len(CASES) >= 150
    assert len({case[0] for case in CASES}) == len(CASES)


# --- before there is a Manager, after it, and where there is no error -------------------------


@pytest.mark.parametrize("config", [None, {}, 5, "cpu", kvmem.Config])
def test_a_manager_wants_a_config(config: Any) -> None:
    with pytest.raises(TypeError, match=r"config must be a kvmem.Config, not \w+"):
        kvmem.Manager(config)


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    size = {"num_layers": 64, "num_kv_heads": 64, "head_dim": 256}
    config = kvmem.Config(**size, device_blocks=1 << 24)  # type: ignore[arg-type]
    with pytest.raises(
        kvmem.ConfigError, match=r"device_blocks=.*free are.*at most \d+ blocks"
    ) as e:
        kvmem.Manager(config)
    check_message(e.value, "lower them")


def closed_calls() -> dict[str, Callable[[kvmem.Manager, Any], object]]:
    return {
        "create": lambda m, s: m.create([1]),
        "append": lambda m, s: m.append([s], [1]),
        "accept": lambda m, s: m.accept([s], [0], [1]),
        "fork": lambda m, s: m.fork(s),
        "truncate": lambda m, s: m.truncate([s], 0),
        "free": lambda m, s: m.free([s]),
        "step": lambda m, s: m.step([s]),
        "can_fit": lambda m, s: m.can_fit(1),
        "swap_out": lambda m, s: m.swap_out([s]),
        "swap_in": lambda m, s: m.swap_in([s]),
        "prefetch": lambda m, s: m.prefetch([s]),
        "make_room": lambda m, s: m.make_room([s]),
        "evict": lambda m, s: m.evict(1),
        "poll": lambda m, s: m.poll(),
        "match": lambda m, s: m.match([1]),
        "pin": lambda m, s: m.pin(s),
        "reset": lambda m, s: m.reset(),
        "kv": lambda m, s: m.kv(0),
        "block": lambda m, s: m.block(1),
        "stats": lambda m, s: m.stats(),
        "snapshot": lambda m, s: m.snapshot(),
        "events": lambda m, s: m.events(),
        "verify": lambda m, s: m.verify(),
        "with": lambda m, s: m.__enter__(),
        "field": lambda m, s: s.num_tokens,
        "tokens": lambda m, s: s.tokens,
    }


@pytest.mark.parametrize("name", closed_calls())
def test_after_close(name: str) -> None:
    d = Driver()
    seq = d.create([1])
    block, pin_source = d.manager.block(1), d.create(list(range(4)))
    d.step([pin_source])
    pin = d.manager.pin(pin_source)
    with d.manager.step([seq]) as step:
        d.run(step)
        d.manager.close()
        with pytest.raises(kvmem.ManagerClosed):
            step.write(0, torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    with pytest.raises(kvmem.ManagerClosed) as caught:
        closed_calls()[name](d.manager, seq)
    check_message(caught.value, "closed")
    for act in (pin.release, lambda: block.ref_count):
        with pytest.raises(kvmem.ManagerClosed):
            act()
    d.manager.close()  # no error: a no-op


def test_a_failed_device_says_so_from_then_on(seed: int) -> None:
    d = Driver()
    seq, idle = d.create(list(range(6))), d.create([1])
    d.step([seq])
    d.store.device.launch(Stream.OUT, lambda: 1 / 0)
    with pytest.raises((kvmem.TransferError, kvmem.DeviceUnavailable)) as caught:
        d.manager.swap_out([seq]).wait(30)
    check_message(caught.value, "division by zero")
    for call in (
        lambda: d.manager.step([idle]),
        lambda: d.manager.swap_in([seq]),
        lambda: d.manager.create([1]),
        d.manager.stats,
    ):
        with pytest.raises(kvmem.DeviceUnavailable) as failed:
            call()
        check_message(failed.value, "close this Manager and make a new one")
    d.manager.close()


def test_a_device_that_fails_in_the_body_of_a_step() -> None:
    d = Driver()
    seq, idle = d.create(list(range(6))), d.create([1])
    d.step([seq])
    with pytest.raises(kvmem.DeviceUnavailable), d.manager.step([idle]) as step:
        d.run(step)
        d.store.device.launch(Stream.OUT, lambda: 1 / 0)
        with pytest.raises((kvmem.TransferError, kvmem.DeviceUnavailable)):
            d.manager.swap_out([seq]).wait(30)
    assert idle.num_computed == 0  # the step that could not end counts nothing
    with pytest.raises(kvmem.DeviceUnavailable):
        d.manager.poll()
    d.manager.close()


def test_wait_times_out_and_the_transfer_goes_on() -> None:
    with Driver() as d:
        seq = d.create(list(range(6)))
        d.step([seq])
        d.hold("out")
        transfer = d.manager.swap_out([seq])
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError) as caught:
                transfer.wait(timeout)
            check_message(caught.value, r"not done after \d.*goes on")
        assert not transfer.done
        assert "in flight" in repr(transfer)
        d.release("out")
        transfer.wait(30)
        assert transfer.done
        d.check_content()


NO_ERROR: dict[str, Bad] = {
    "create nothing": lambda w: w.d.create([]),
    "create an empty array": lambda w: w.d.create(np.zeros(0, np.int32)),
    "append nothing": lambda w: w.m.append([], []),
    "append 0 tokens": lambda w: w.m.append([w.seq], [], counts=[0]),
    "append to a waiting one": lambda w: w.m.append([w.waiting], [1]),
    "append to a swapped one": lambda w: w.m.append([w.swapped], [1]),
    "append in an open step": lambda w: w.m.append([w.busy], [1]),
    "a token of 2**31 - 1": lambda w: w.m.append([w.waiting], [2**31 - 1]),
    "create longer than fits": lambda w: w.d.create(np.zeros(1000, np.int32)),
    "step of what never fits": lambda w: w.d.step([w.huge], fit="some"),
    "step of nobody": lambda w: w.d.step([]),
    "step of idle ones": lambda w: w.d.step([w.seq]),
    "step of 0 tokens": lambda w: w.d.step([w.waiting], max_tokens=0, fit="some"),
    "step of 0 tokens, all": lambda w: w.d.step([w.waiting], max_tokens=0),
    "step of 0 tokens a row": lambda w: w.d.step([w.waiting], num_tokens=0),
    "free a swapped one": lambda w: w.d.free(w.swapped),
    "free a pinned one": lambda w: w.d.free(w.seq),
    "free nobody": lambda w: w.d.free(),
    "fork a swapped one": lambda w: w.d.fork(w.swapped, 2),
    "fork a waiting one": lambda w: w.d.fork(w.waiting),
    "truncate to the same": lambda w: w.m.truncate([w.seq], 7),
    "truncate to nothing": lambda w: w.m.truncate([w.seq, w.swapped], 0),
    "truncate nobody": lambda w: w.m.truncate([], []),
    "swap out a swapped one": lambda w: w.m.swap_out([w.swapped]).wait(0),
    "swap out a waiting one": lambda w: w.m.swap_out([w.waiting]).wait(0),
    "swap out nobody": lambda w: w.m.swap_out([]).wait(0),
    "swap out a pinned one": lambda w: w.m.swap_out([w.seq]).wait(30),
    "swap in a resident one": lambda w: w.m.swap_in([w.seq]).wait(0),
    "swap in a planned one": lambda w: w.m.swap_in([w.busy]).wait(0),
    "recompute a waiting one": lambda w: w.m.swap_out([w.waiting], how="recompute"),
    "prefetch what is there": lambda w: w.m.prefetch([w.seq, w.swapped, w.waiting]).wait(30),
    "make room for nobody": lambda w: w.m.make_room([]),
    "make room for what never fits": lambda w: w.m.make_room([w.huge]),
    "evict more than there is": lambda w: w.m.evict(10**6) + w.m.evict(10**6, "host"),
    "evict 0": lambda w: w.m.evict(0),
    "match nothing": lambda w: w.m.match([]),
    "match in a namespace never used": lambda w: w.m.match([1] * 9, "never used"),
    "wait without end": lambda w: w.transfer.wait(math.inf),
    "wait again": lambda w: (w.transfer.wait(), w.transfer.wait(0.0)),
    "can_fit a lot": lambda w: w.m.can_fit(2**31 - 1),
    "drop a released pin": lambda w: w.m.pin(w.seq).release(),
}


@pytest.mark.parametrize("name", NO_ERROR)
def test_no_error(name: str, seed: int) -> None:
    world = World()
    try:
        NO_ERROR[name](world)
        world.m.verify()
        world.end(seed)
    finally:
        world.abandon()
