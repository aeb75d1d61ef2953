"""Transfers, steps and their order, on scripted plans; copies are held to make one exact order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvmem.errors import CorruptEntry, ManagerClosed
from kvmem.plan import Plan
from kvmem.store import DEVICE, HOST, Store
from kvmem.store.device import Stream
from tests.store.fakes import arena_bytes, holds, ids, in_plan, out_plan, stamp

OUT, IN = Stream.OUT, Stream.IN
MakeStore = Callable[..., Store]


def step(store: Store, epoch: int, **more: object) -> Plan:
    plan = Plan(step_epoch=epoch, **more)  # type: ignore[arg-type]
    store.submit(plan)
    store.begin(plan)
    return plan


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("debug", [False, True])
def test_bytes_come_back_as_they_went_out(make_store: MakeStore, sync: bool, debug: bool) -> None:
    store = make_store(sync=sync, debug=debug)
    step(store, 1)
    stamp(store, 1, 10.0)
    stamp(store, 2, 20.0)
    store.end(1)
    store.submit(Plan(**out_plan(1, [1, 2], [7, 3], out_after_step=1)))
    store.submit(Plan(**in_plan(1, [3, 7], [5, 6], in_after_out=1)))
    assert store.wait("in", 1, 60)
    assert holds(store, HOST, 7, 10.0)
    assert holds(store, HOST, 3, 20.0)
    assert holds(store, DEVICE, 5, 20.0)
    assert holds(store, DEVICE, 6, 10.0)
    assert store.retired() == (1, 1)
    counts = store.counters()
    assert counts["out_blocks"] == counts["in_blocks"] == 2
    assert counts["out_bytes"] == counts["in_bytes"] == 2 * store.layout.frame_bytes


def test_submit_returns_while_the_copy_is_held(make_store: MakeStore) -> None:
    store = make_store()
    store.device.hold(OUT)
    store.submit(Plan(**out_plan(1, [1], [1])))
    assert store.retired() == (0, 0)
    assert store.wait("out", 1, 0.01) is False
    assert store.wait("out", 0, 0) is True
    assert store.counters()["out_blocks"] == 0
    store.device.release(OUT)
    assert store.wait("out", 1, 60)
    assert store.retired() == (1, 0)


def test_the_ledger_may_reuse_its_arrays_at_once(make_store: MakeStore) -> None:
    """Case 41: what was queued is what runs, whatever the buffers hold by then."""
    store = make_store()
    stamp(store, 1, 1.0)
    stamp(store, 2, 2.0)
    fields = out_plan(1, [1], [4])
    store.device.hold(OUT)
    store.submit(Plan(**fields))
    fields["out_device"][0], fields["out_host"][0] = 2, 5
    store.device.release(OUT)
    assert store.wait("out", 1, 60)
    assert holds(store, HOST, 4, 1.0)


def test_a_copy_out_waits_for_the_step_that_writes(make_store: MakeStore) -> None:
    """Case 37: the store of a block must see the K/V written before it."""
    store = make_store()
    step(store, 1)
    store.submit(Plan(**out_plan(1, [1], [1], out_after_step=1)))
    assert store.wait("out", 1, 0.05) is False
    stamp(store, 1, 5.0)
    store.end(1)
    assert store.wait("out", 1, 60)
    assert holds(store, HOST, 1, 5.0)


def test_a_step_waits_only_for_its_own_epoch(make_store: MakeStore) -> None:
    """Two open steps on disjoint frames: the later may end, and be swapped out, first."""
    store = make_store()
    step(store, 1)
    step(store, 2)
    stamp(store, 2, 2.0)
    store.end(2)
    store.submit(Plan(**out_plan(1, [2], [1], out_after_step=2)))
    assert store.wait("out", 1, 60)
    step(store, 3, step_after_out=1)
    store.end(3)
    store.end(1)
    store.end(1)  # a second call changes nothing
    assert store._steps.open == {}


def test_a_departing_frame_is_handed_on_at_once_and_the_taker_waits(
    make_store: MakeStore,
) -> None:
    """The out copy of the victim is held: the taker's step must not begin before it (R3, R6)."""
    store = make_store()
    stamp(store, 1, 1.0)
    store.device.hold(OUT)
    plan = Plan(**out_plan(1, [1], [1], fill_frames=ids(1)), step_epoch=1, step_after_out=1)
    store.submit(plan)
    begun = threading.Event()

    def take() -> None:
        store.begin(plan)
        begun.set()
        stamp(store, 1, 9.0)
        store.end(1)

    taker = threading.Thread(target=take)
    taker.start()
    assert not begun.wait(0.05)
    store.submit(Plan())  # another call goes on meanwhile: no lock is held by the waiter
    store.device.release(OUT)
    taker.join(60)
    assert begun.is_set()
    assert holds(store, HOST, 1, 1.0)
    assert holds(store, DEVICE, 1, 9.0)


def test_in_waits_for_out_and_out_for_in(make_store: MakeStore) -> None:
    """Through one host frame and one device frame, back and forth, the first copy held."""
    store = make_store()
    stamp(store, 1, 1.0)
    stamp(store, 2, 2.0)
    store.device.hold(OUT)
    # 1 -> host 1; then host 1 -> device 3; then device 2 -> host 1; then host 1 -> device 1.
    store.submit(Plan(**out_plan(1, [1], [1]), **in_plan(1, [1], [3], in_after_out=1)))
    store.submit(
        Plan(**out_plan(2, [2], [1], out_after_in=1), **in_plan(2, [1], [1], in_after_out=2))
    )
    assert store.wait("in", 1, 0.02) is False
    store.device.release(OUT)
    assert store.wait("in", 2, 60)
    assert holds(store, DEVICE, 3, 1.0)
    assert holds(store, DEVICE, 1, 2.0)


def test_a_copy_in_waits_for_the_readers_of_its_target(make_store: MakeStore) -> None:
    store = make_store()
    stamp(store, 1, 1.0)
    store.submit(Plan(**out_plan(1, [1], [1])))
    step(store, 1)
    stamp(store, 2, 2.0)
    store.submit(Plan(**in_plan(1, [1], [2], in_after_step=1, in_after_out=1)))
    assert store.wait("in", 1, 0.05) is False
    assert holds(store, DEVICE, 2, 2.0)
    store.end(1)
    assert store.wait("in", 1, 60)
    assert holds(store, DEVICE, 2, 1.0)


def test_copy_on_write_copies_the_filled_slots_after_the_arrival(make_store: MakeStore) -> None:
    store = make_store()
    stamp(store, 1, 1.0)
    before = arena_bytes(store, DEVICE)[3].copy()
    store.submit(Plan(**out_plan(1, [1], [1])))
    plan = Plan(
        **in_plan(1, [1], [2], in_after_out=1),
        step_epoch=1,
        step_after_in=1,
        copy_source=ids(2),
        copy_target=ids(3),
        copy_tokens=ids(3),
    )
    store.submit(plan)
    store.begin(plan)
    store.end(1)
    assert holds(store, DEVICE, 3, 1.0, tokens=3)
    key, value = store.block_view(DEVICE, 3, 1)
    for part in (key, value):
        assert part[3].isnan().all(), "a slot that holds no token was copied"
    assert not np.array_equal(before, arena_bytes(store, DEVICE)[3])
    counts = store.counters()
    assert counts["copied_blocks"] == 1
    assert counts["copied_bytes"] == 3 * store.layout.token_bytes


def test_vacated_frames_are_poisoned_after_their_copy(make_store: MakeStore) -> None:
    store = make_store()
    stamp(store, 1, 1.0)
    store.submit(Plan(**out_plan(1, [1], [2]), fill_frames=ids(1, 4)))
    assert store.wait("out", 1, 60)
    assert holds(store, HOST, 2, 1.0)
    for layer in range(2):
        for part in (*store.block_view(DEVICE, 1, layer), *store.block_view(DEVICE, 4, layer)):
            assert part.isnan().all()


def test_poison_alone_is_a_transfer_too(make_store: MakeStore) -> None:
    store = make_store(host_blocks=0)
    stamp(store, 2, 1.0)
    plan = Plan(out_id=1, fill_frames=ids(2), step_epoch=1, step_after_out=1)
    store.submit(plan)
    store.begin(plan)
    assert store.block_view(DEVICE, 2, 0)[0].isnan().all()
    store.end(1)
    assert store.counters()["out_blocks"] == 0


BAD_PLANS = {
    "id skipped": (out_plan(2, [1], [1]), "out_id is 2; expected 1, or 0"),
    "in id skipped": (in_plan(5, [1], [1]), "in_id is 5; expected 1"),
    "no id": (out_plan(0, [1], [1]), "out_id is 0 but the plan has 1 frames"),
    "poison without id": ({"fill_frames": ids(1)}, "out_id is 0 but"),
    "null frame": (out_plan(1, [0], [1]), "out_device names frame 0; allowed: 1 to 6"),
    "guard frame": (out_plan(1, [7], [1]), "out_device names frame 7; allowed: 1 to 6"),
    "host frame": (out_plan(1, [1], [9]), "out_host names frame 9; allowed: 1 to 8"),
    "in device": (in_plan(1, [1], [-1]), "in_device names frame -1"),
    "poison frame": ({"out_id": 1, "fill_frames": ids(99)}, "fill_frames names frame 99"),
    "lengths": (out_plan(1, [1, 2], [1]), "2 device frames, 1 host"),
    "waits for the future": (out_plan(1, [1], [1], out_after_in=1), "out_after_in is 1; the last"),
    "in waits for itself": (in_plan(1, [1], [1], in_after_out=1), "in_after_out is 1"),
    "step waits": ({"step_epoch": 1, "step_after_in": 1}, "step_after_in is 1"),
    "step waits out": ({"step_epoch": 1, "step_after_out": 2}, "step_after_out is 2"),
    "negative": ({"step_epoch": 1, "step_after_out": -1}, "step_after_out is -1"),
    "cycle": (
        out_plan(1, [1], [1], out_after_step=1, step_epoch=1, step_after_out=1),
        "out_after_step is 1; the last that it may wait for is 0",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_cant_be_changes_nothing(make_store: MakeStore, name: str) -> None:
    fields, message = BAD_PLANS[name]
    store = make_store()
    before = arena_bytes(store, DEVICE).copy()
    with pytest.raises(ValueError, match=message) as caught:
        store.submit(Plan(**fields))
    assert len(str(caught.value)) <= 300
    assert np.array_equal(before, arena_bytes(store, DEVICE))
    assert store.retired() == (0, 0)
    assert store._steps.open == {}
    store.submit(Plan(**out_plan(1, [1], [1])))
    assert store.wait("out", 1, 60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sideways", 1), "direction 'sideways'"),
        (("out", 1), "out transfer 1 was never submitted; the last is 0"),
        (("in", -1), "in transfer -1 was never submitted"),
        (("out", 0, -1.0), "timeout -1.0"),
        (("out", 0, float("nan")), "timeout nan"),
    ],
)
def test_bad_waits(make_store: MakeStore, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_store().wait(*arguments)


@pytest.mark.parametrize("sync", [False, True])
def test_a_changed_host_frame_is_corrupt_and_never_reaches_a_step(
    make_store: MakeStore, sync: bool
) -> None:
    """R11: one flipped bit between out and in."""
    store = make_store(sync=sync)
    stamp(store, 1, 1.0)
    store.submit(Plan(**out_plan(1, [1], [3])))
    assert store.wait("out", 1, 60)
    arena_bytes(store, HOST)[3, 77] ^= 4
    plan = Plan(**in_plan(1, [3], [2], in_after_out=1), step_epoch=1, step_after_in=1)
    store.submit(plan)
    with pytest.raises(CorruptEntry, match="host frame 3 came back to device frame 2"):
        store.wait("in", 1, 60)
    assert isinstance(store.error, CorruptEntry)
    with pytest.raises(CorruptEntry) as caught:
        store.begin(plan)
    assert len(str(caught.value)) <= 300
    with pytest.raises(CorruptEntry):
        store.submit(Plan())
    store.end(1)
    assert store.retired() == (1, 0)


@pytest.mark.parametrize("tokens", [1, 4])
def test_more_tokens_asked_back_than_went_out(make_store: MakeStore, tokens: int) -> None:
    store = make_store()
    if tokens > 1:
        store.submit(Plan(out_id=1, out_device=ids(1), out_host=ids(3), out_tokens=ids(3)))
    with pytest.raises(CorruptEntry, match=f"host frame 3 holds .* tokens, {tokens} were"):
        store.submit(
            Plan(
                in_id=1,
                in_host=ids(3),
                in_device=ids(2),
                in_tokens=ids(tokens),
                in_after_out=int(tokens > 1),
            )
        )
        store.wait("in", 1, 60)


def test_a_failed_copy_is_told_and_the_stream_goes_on(make_store: MakeStore) -> None:
    store = make_store()

    def hook(stream: Stream, *_: object) -> None:
        if stream is OUT:
            raise OSError("no such luck")

    store.device.hook = hook
    stamp(store, 1, 5.0)
    plan = Plan(**out_plan(1, [1], [1]), step_epoch=1, step_after_out=1)
    store.submit(plan)
    assert store.wait("out", 1, 60)
    (ticket,) = store.failed
    assert (ticket.stream, ticket.transfer_id) == (OUT, 1)
    assert "no such luck" in str(ticket.error)
    store.begin(plan)
    store.end(1)
    assert store.retired() == (1, 0)
    assert store.counters()["out_blocks"] == 0
    store.device.hook = None
    store.submit(Plan(**out_plan(2, [1], [2])))
    store.submit(Plan(**in_plan(1, [1], [2], in_after_out=2)))  # what never went out: not compared
    store.submit(Plan(**in_plan(2, [2], [3], in_after_out=2)))
    assert store.wait("in", 2, 60)
    assert holds(store, DEVICE, 3, 5.0)
    assert store.counters()["out_blocks"] == 1
    assert len(store.failed) == 1
    assert store.check_guards() == []


def test_another_use_of_a_host_frame_is_refused(make_store: MakeStore) -> None:
    store = make_store()
    store.submit(Plan(**out_plan(1, [1], [1], out_generation=ids(4))))
    with pytest.raises(CorruptEntry, match=r"in_generation: host frame 1 holds its use 4.* use 5"):
        store.submit(Plan(**in_plan(1, [1], [2], in_generation=ids(5))))
    store.submit(Plan(**in_plan(1, [1], [2], in_generation=ids(4), in_after_out=1)))
    both = {**out_plan(2, [1], [1], out_generation=ids(6))}
    store.submit(Plan(**both, **in_plan(2, [1], [3], in_generation=ids(6), in_after_out=2)))
    assert store.wait("in", 2, 60)


def test_guards_are_seen(make_store: MakeStore) -> None:
    store = make_store()
    arena_bytes(store, DEVICE)[-1, 8] ^= 1
    arena_bytes(store, HOST)[0, 5] = 1
    assert store.check_guards() == [
        "device guard frame was written at element 2",
        "host null frame 0 was written at byte 5",
    ]
    arena_bytes(store, DEVICE)[-1, 8] ^= 1
    arena_bytes(store, HOST)[0, 5] = 0


def test_close_while_a_step_waits(make_store: MakeStore) -> None:
    store = make_store()
    store.device.hold(OUT)
    plan = Plan(**out_plan(1, [1], [1]), step_epoch=1, step_after_out=1)
    store.submit(plan)
    raised: list[BaseException] = []

    def begin() -> None:
        try:
            store.begin(plan)
        except BaseException as error:
            raised.append(error)

    waiter = threading.Thread(target=begin)
    waiter.start()
    store.close()
    waiter.join(60)
    assert [type(error) for error in raised] == [ManagerClosed]
    store.end(1)
    store.close()
    for act in (
        lambda: store.submit(Plan()),
        lambda: store.begin(Plan()),
        lambda: store.wait("out", 1),
        lambda: store.kv(0),
        store.counters,
        store.check_guards,
    ):
        with pytest.raises(ManagerClosed):
            act()
