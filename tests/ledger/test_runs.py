"""Host frames are chosen so that the copies of a plan come in long runs (copies.py)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvmem.plan import Plan
from kvmem.store.device import num_runs
from tests.ledger.play import Play

Maker = Callable[..., Play]


def arrays_in(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    return plan.in_host, plan.in_device


def sorted_runs(left: np.ndarray, right: np.ndarray) -> tuple[int, int]:
    """The runs of these pairs, and those that the left frames alone would allow."""
    order = np.argsort(left)
    return num_runs(right[order], left[order]), num_runs(left[order], left[order])


@pytest.mark.parametrize("backwards", [False, True])
def test_frames_side_by_side_go_side_by_side(make_play: Maker, backwards: bool) -> None:
    play = make_play(16, 32)
    parts = [play.made(range(n, n + 4), publish=False) for n in range(0, 64, 4)]
    for s in parts if not backwards else parts[::-1]:
        play.free(s)  # last in, first out
    s = play.made(range(64), publish=False)
    plan = play.swap_out(s)
    assert sorted_runs(plan.out_device, plan.out_host) == (1, 1)
    play.evict(16)
    assert sorted_runs(*arrays_in(play.swap_in(s))) == (1, 1)


def test_a_run_goes_on_in_a_broken_list(make_play: Maker) -> None:
    """Free host frames in the order 8, 4, 7, 3, 6, 2, 5, 1, 9, 10, ..., and a run of sixteen."""
    play = make_play(16, 32)
    parts = [play.made(range(n, n + 4), publish=False) for n in range(0, 80, 10)]
    plans = [play.swap_out(s) for s in parts]
    assert [plan.out_host.tolist() for plan in plans] == [[n] for n in range(1, 9)]
    for n in (0, 4, 1, 5, 2, 6, 3, 7):
        play.free(parts[n])
    plan = play.swap_out(play.made(range(100, 164), publish=False))
    assert plan.out_host.tolist() == list(range(8, 24))


def churn(play: Play, rng: random.Random, turns: int) -> NDArray[np.int64]:
    """Swaps of sequences that come, grow and go. Runs out, as the sources alone would allow; in."""
    counts = np.zeros((2, 2), np.int64)
    live: list[int] = []
    for turn in range(turns):
        if len(live) < 12:
            tokens = [rng.randrange(1000) for _ in range(rng.randrange(8, 96))]
            live.append(play.create(tokens, publish=rng.random() < 0.5))
        s = rng.choice(live)
        others = [r for r in live if r != s and play.at(r) == "RESIDENT"]
        while play.ledger.fits(np.array([s], np.int32)) != "yes" and others:
            plan = play.swap_out(others.pop(rng.randrange(len(others))))
            if len(plan.out_host):
                counts[0] += sorted_runs(plan.out_device, plan.out_host)
        plan, _ = play.run(s)
        if len(plan.in_host):
            counts[1] += sorted_runs(*arrays_in(plan))
        play.append(s, turn)
        if rng.random() < 0.15:
            live.remove(s)
            play.free(s)
    for s in live:
        play.free(s)
    return counts


def test_runs_stay_long_in_a_busy_store(make_play: Maker, seed: int) -> None:
    """The choice of frames breaks few runs.

    Four stores together: in one alone the shares are 1.18 +- 0.05 and 2.3 +- 0.25, and now and
    then three deviations off.
    """
    rng = random.Random(seed)
    (out, least_out), (back, least_back) = sum(
        churn(make_play(96, 256), rng, 400) for _ in range(4)
    )
    print(
        f"runs out {out}, in {back}; as their sources alone would allow {least_out}, {least_back}"
    )
    assert least_out > 200
    assert least_back > 80
    assert out <= 1.3 * least_out  # 1.4 without choosing
    assert back <= 3 * least_back  # 3.9 without: a full device has what is evicted
