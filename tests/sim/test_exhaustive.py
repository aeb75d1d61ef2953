"""All interleavings of a small script: two sequences of three blocks, three streams.

The script swaps out and in, reuses frames that are departing, aborts a step, frees what is on its
way and forks. At any moment the host may do its next call, or any stream that can may take its next
turn; every order of these is run, on the simulator's own code, states that are equal only once.
Copies have two fragments here, and the kernels of a step between two fences count as one turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

import kvmem
from kvmem.sim_options import SimOptions
from kvmem.store.device import Stream
from kvmem.store.sim import scheduler as scheduler_module
from tests.faults.world import Known, Setup
from tests.sim.driver import SimDriver

HOST_MOVE = -1
MOST_STATES = 20_000


class Script(SimDriver):
    """A driver that does what it is told, its streams all held."""

    def __init__(self, poison: bool) -> None:
        sim = SimOptions(mode="late", late_results=True, not_yet=0.0, poison=poison)
        setup = Setup(device_blocks=4, host_blocks=6, block_size=2, racing=True, sim=sim)
        super().__init__(1, setup, looks=1.0)
        for stream in Stream:
            self.device.hold(stream)

    def attend(self, step: kvmem.Step, every: dict[int, Known]) -> None:
        """Slots are compared; attention adds nothing to the order."""

    def let_arrive(self, plan: Any) -> None:
        """Nothing runs unless the search says so."""

    def add(self, name: int, tokens: list[int]) -> None:
        seq = self.m.create(tokens)
        self.known[seq.id] = Known(seq, None, tokens)
        assert seq.id == name

    def step(self, name: int, *, abort: bool = False) -> None:
        opened = self.plan([self.known[name].seq], "all", None, None, 0)
        assert opened is not None
        self.run_step(opened, abort=abort, at_once=True)

    def more(self, name: int) -> None:
        self.m.append([self.known[name].seq], [1])
        self.known[name].tokens.append(1)

    def out(self, name: int) -> None:
        assert self.swap_out([self.known[name]], "swap") is not None

    def into(self, name: int) -> None:
        self.m.swap_in([self.known[name].seq])

    def end(self, name: int) -> None:
        self.m.free([self.known.pop(name).seq])

    def move(self, move: int, calls: list[Callable[[Script], None]], at: int) -> None:
        """The next call of the host, or one turn of a stream."""
        if move == HOST_MOVE:
            return calls[at](self)
        queue = self.device.scheduler.queues[Stream(move)]
        self.device.run(Stream(move), 1)
        while queue and queue[0].kind == "launch" and self.device.error is None:
            if Stream(move) is not Stream.COMPUTE:
                break
            self.device.run(Stream(move), 1)
        return None

    def key(self, at: int) -> bytes:
        """What the future hangs on: records, bytes, queues, what the host knows."""
        digest = hashlib.blake2b(digest_size=16)
        arrays = self.arrays()
        del arrays["failed"]  # no copy fails here
        retired = [int(self.state.ledger[n][0]) for n in ("retired_out", "retired_in")]
        queues = [
            (s, len(q), q[0].done if q else 0) for s, q in self.device.scheduler.queues.items()
        ]
        clocks = (self.device.clocks.host[1:], sorted(self.device.clocks.streams.items()))
        digest.update(repr((at, retired, queues, clocks, arrays.pop("ledger"))).encode())
        for array in arrays.values():
            digest.update(array.tobytes())
        for arena in (self.store._device_arena, self.store._host_arena):
            digest.update(arena.bytes)
        return digest.digest()


SWAP_AND_REUSE: list[Callable[[Script], None]] = [
    lambda w: (w.add(1, [0, 1, 0, 1, 0]), w.add(2, [1, 1, 1, 0, 0]), w.step(1))[-1],
    lambda w: w.out(1),
    lambda w: w.step(2),  # into frames that depart
    lambda w: w.out(2),
    lambda w: w.into(1),  # behind its own copies out
    lambda w: w.end(2),  # while its copies are on their way (case 43)
    lambda w: (w.more(1), w.step(1))[-1],
]
ABORT_IN_FLIGHT: list[Callable[[Script], None]] = [
    lambda w: (w.add(1, [0, 1, 0, 1, 0]), w.step(1))[-1],
    lambda w: (w.out(1), w.m.evict(9))[0],
    lambda w: (w.add(2, [1, 1, 1]), w.step(2))[-1],
    lambda w: (w.end(2), w.m.evict(9))[0],
    lambda w: (w.more(1), w.step(1, abort=True))[-1],  # while it comes in
    lambda w: w.out(1),  # at once (case 45)
    lambda w: w.step(1),
]


def explore(calls: list[Callable[[Script], None]], poison: bool) -> tuple[int, int]:
    """Depth first over all moves; (states, ends). Each state is reached anew from the start."""
    seen: set[bytes] = set()
    todo: list[tuple[int, ...]] = [()]
    ends = 0
    while todo:
        path = todo.pop()
        world = Script(poison)
        try:
            at = 0
            for move in path:
                world.move(move, calls, at)
                at += move == HOST_MOVE
                if world.device.error is not None:
                    raise world.device.error
            key = world.key(at)
            if key in seen:
                continue
            seen.add(key)
            moves = [int(s) for s in Stream if world.device.scheduler.ready(s)]
            moves += [HOST_MOVE] if at < len(calls) else []
            if not moves:
                assert not any(world.device.scheduler.queues.values()), "stuck (R9)"
                for stream in Stream:
                    world.device.release(stream)
                world.wait_for_copies()
                world.check_content()
                world.m.verify()
                ends += 1
            todo += [(*path, move) for move in moves]
            assert len(seen) < MOST_STATES, "more states than the bound"
        except BaseException as error:
            error.add_note(f"moves {path}")
            raise
        finally:
            world.known.clear()
            world.close()
    return len(seen), ends


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # each state abandons a Manager
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("name", ["SWAP_AND_REUSE", "ABORT_IN_FLIGHT"])
def test_every_interleaving_is_sound(
    name: str, poison: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "FRAGMENTS", (2, 2))
    states, ends = explore(globals()[name], poison)
    print(f"{name}, poison {poison}: {states} states, {ends} ends")
    assert states > 200
    assert ends >= 1
