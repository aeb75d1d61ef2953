"""The way of a copy: fitted and chosen by what each way costs, and never later than asked."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem.store.cuda.cost_figures import RUN_BYTES, STRAIGHT
from kvmem.store.cuda.cost_model import (
    DIRECTIONS,
    MEASURED_BYTES,
    POINTS,
    WAYS,
    CostModel,
    Costs,
    Direction,
    Point,
    Way,
    fit,
    measure,
    open_model,
    shape,
)
from tests.store.cuda.fake_machine import KEY, MICRO, FakeMachine, usual

# -- choosing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_small_runs_go_together_and_a_big_one_alone(tmp_path: Path, direction: Direction) -> None:
    model = usual().open(tmp_path)
    assert model.source == "measured"
    assert model.choose(direction, 1, 64 << 20) == "copies"
    assert model.choose(direction, 1, 4 << 10) == "copies"
    assert model.choose(direction, 2, 64 << 20) == "copies"
    assert model.choose(direction, 1000, 1000 * 4096) == "batch"
    assert model.choose(direction, 1000, 1000 * 4096, num_host_runs=1) == "staged"
    assert model.choose(direction, 1000, 1000 * 4096, num_host_runs=999) == "batch"


def test_a_dear_call_and_small_runs_never_go_one_by_one(tmp_path: Path) -> None:
    machine = FakeMachine({"copies": (0, 50 * MICRO, 20e9), "batch": (60 * MICRO, 0, 20e9)})
    model = machine.open(tmp_path)
    for num_runs in (2, 10, 5000):
        assert model.choose("out", num_runs, num_runs << 12) == "batch"
    assert model.choose("out", 1, 1 << 30) == "copies"


@pytest.mark.parametrize("there", [("copies",), ("copies", "batch"), ("copies", "staged")])
def test_a_way_that_is_not_there_is_never_chosen(tmp_path: Path, there: tuple[Way, ...]) -> None:
    lines = usual().lines
    machine = FakeMachine({way: lines[way] for way in there})
    for model in (machine.open(tmp_path), machine.open(tmp_path)):
        for num_runs, run_bytes, host_runs in itertools.product((1, 3, 1000), (64, 4096), (1, 3)):
            host_runs = min(host_runs, num_runs)
            chosen = model.choose("in", num_runs, num_runs * run_bytes, num_host_runs=host_runs)
            assert chosen in there
        missing = next(way for way in WAYS if way not in there)
        assert model.figures()["in"][missing] is None
        assert math.isinf(model.seconds(missing, "in", 1, 1))
    assert model.source == "cache"


def test_a_way_of_one_direction_only(tmp_path: Path) -> None:
    machine = usual()

    def time_copy(way: Way, direction: Direction, run_bytes: int, num_runs: int) -> float:
        if (way, direction) == ("batch", "out"):
            raise NotImplementedError
        return machine.time_copy(way, direction, run_bytes, num_runs)

    model = open_model(KEY, time_copy, folder=tmp_path, clock=machine.clock)
    assert model.choose("out", 1000, 1000 << 12) == "copies"
    assert model.choose("in", 1000, 1000 << 12) == "batch"


def test_staging_gains_nothing_where_the_host_is_as_scattered(tmp_path: Path) -> None:
    machine = FakeMachine({"copies": (0, 9 * MICRO, 1e9), "staged": (0, 0, 50e9)})
    model = machine.open(tmp_path)
    for num_runs in (0, 1, 2, 1000):
        assert model.choose("out", num_runs, num_runs << 12) == "copies"
    assert model.choose("out", 2, 2 << 12, num_host_runs=1) == "staged"


@pytest.mark.parametrize("case", range(30))
def test_the_fastest_way_of_any_machine_is_found(tmp_path: Path, case: int, seed: int) -> None:
    """Against the machine's own times; only a way within the noise of the best may be taken."""
    print("seed", seed)
    rng = random.Random(seed)
    lines = {
        way: (10 ** rng.uniform(-6, -4), 10 ** rng.uniform(-8, -5), 10 ** rng.uniform(9, 11.5))
        for way in WAYS
    }
    machine = FakeMachine(lines)
    model = machine.open(tmp_path)
    for _ in range(200):
        num_runs = int(10 ** rng.uniform(0, 4))
        num_bytes = num_runs * int(10 ** rng.uniform(2, 7))
        host_runs = rng.randint(1, num_runs)
        times = {way: machine.seconds(way, num_runs, num_bytes) for way in WAYS}
        times["staged"] += (host_runs - 1) * lines["copies"][1]
        if host_runs == num_runs:
            del times["staged"]
        chosen = model.choose("in", num_runs, num_bytes, num_host_runs=host_runs)
        assert times[chosen] <= min(times.values()) * 1.001


#: GB/s by KiB of a run, as published of an H100 (vLLM's blog; its PR 42212 for the batches, which
#: from 32 KiB on are as fast as one copy a run can be). No line goes through them.
PUBLISHED: dict[tuple[Way, Direction], dict[int, float]] = {
    ("copies", "out"): {
        4: 1, 8: 2, 16: 4.5, 32: 8, 64: 15, 128: 21.5, 256: 29, 512: 37, 1024: 42.5, 2048: 46,
        4096: 48.5, 16384: 50.7,
    },
    ("staged", "out"): {
        4: 5, 8: 22, 16: 30.5, 32: 34, 64: 41, 128: 45.5, 256: 47, 512: 48, 1024: 48.5, 2048: 48.7,
        4096: 48.8, 16384: 49,
    },
    ("copies", "in"): {
        4: 1, 8: 2.3, 16: 4.2, 32: 7.5, 64: 14.5, 128: 23, 256: 32, 512: 39.5, 1024: 44.5,
        2048: 47.7, 4096: 49.8, 16384: 51.2,
    },
    ("staged", "in"): {
        4: 12.5, 8: 24.5, 16: 30.5, 32: 36, 64: 42, 128: 44, 256: 46, 512: 47, 1024: 47.4,
        2048: 47.7, 4096: 47.7, 16384: 47.8,
    },
    ("batch", "out"): {4: 6.8, 8: 6.8, 16: 7.1, 24: 25.8, 28: 27.5, 64: 38.8, 16384: 51.2},
    ("batch", "in"): {4: 6.8, 8: 6.8, 16: 7.1, 24: 25.8, 28: 27.5, 64: 38.8, 16384: 51.2},
}  # fmt: skip


@pytest.mark.parametrize("there", [("copies", "staged"), WAYS])
def test_on_a_published_machine_the_choice_is_the_best_or_close(
    tmp_path: Path, there: tuple[Way, ...]
) -> None:
    """Also between the sizes that were timed, and where a driver is slow at one size only."""

    def rate(way: Way, direction: Direction, run_bytes: int) -> float:
        """GB/s, between the published sizes along a line in log-log."""
        rates = PUBLISHED[way, direction]
        x = [math.log(size << 10) for size in rates]
        return math.exp(np.interp(math.log(run_bytes), x, [math.log(r) for r in rates.values()]))

    def time_copy(way: Way, direction: Direction, run_bytes: int, num_runs: int) -> float:
        if way not in there:
            raise NotImplementedError
        return 8 * MICRO + run_bytes * num_runs / rate(way, direction, run_bytes) / 1e9

    model = open_model(KEY, time_copy, folder=tmp_path)
    sizes = sorted({size for rates in PUBLISHED.values() for size in rates})
    for direction, size, host_runs in itertools.product(DIRECTIONS, sizes, (1, 1000)):
        ways = [way for way in there if way != "staged" or host_runs == 1]
        times = {way: time_copy(way, direction, size << 10, 1000) for way in ways}
        chosen = model.choose(direction, 1000, 1000 * size << 10, num_host_runs=host_runs)
        print(direction, size, host_runs, chosen, times[chosen] / min(times.values()))
        assert times[chosen] <= 1.15 * min(times.values())


def test_of_equals_the_simplest_is_taken_and_noise_makes_equals(tmp_path: Path) -> None:
    same = (5 * MICRO, MICRO, 20e9)
    model = FakeMachine(dict.fromkeys(WAYS, same)).open(tmp_path / "1")
    assert model.choose("out", 100, 1 << 20, num_host_runs=1) == "copies"

    lines: dict[Way, tuple[float, float, float]] = {
        "copies": same,
        "batch": (5 * MICRO, MICRO, 20.3e9),
    }
    exact = FakeMachine(lines).open(tmp_path / "2")
    assert exact.choose("out", 1, 1 << 30) == "batch"
    noisy = FakeMachine(lines, again=1.1).open(tmp_path / "3")
    assert noisy.figures()["out"]["copies"]["error"] == pytest.approx(0.1)
    assert noisy.choose("out", 1, 1 << 30) == "copies", "1.5 % can't be told in that noise"


def test_a_way_is_not_compared_with_what_was_not_measured() -> None:
    model = CostModel({("batch", "out"): Costs(0.0, 0.0, 1e-11, 0.0)}, "partly measured")
    assert model.choose("out", 1000, 1 << 20) == "copies"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"direction": "both"}, "direction='both'; allowed: out, in"),
        ({"num_runs": -1}, "num_runs=-1"),
        ({"num_bytes": -1}, "num_bytes=-1"),
        ({"num_host_runs": 6}, "num_host_runs=6"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    model = usual().open(tmp_path)
    with pytest.raises(ValueError, match=match):
        model.choose(**{"direction": "out", "num_runs": 5, "num_bytes": 9} | options)


def test_figures_are_for_people_and_for_json(tmp_path: Path) -> None:
    figures = json.loads(json.dumps(usual().open(tmp_path).figures()))
    assert figures["source"] == "measured"
    assert set(figures) == {"source", *DIRECTIONS}
    copies = figures["out"]["copies"]
    assert copies["per_run_us"] == pytest.approx(4)
    assert copies["gb_per_second"] == pytest.approx(51)
    assert copies["error"] == pytest.approx(0, abs=1e-9)


# -- fitting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(20))
def test_a_line_is_found_again(case: int, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    line = [10 ** rng.uniform(*ends) for ends in ((-6, -4), (-8, -5), (-12, -9))]
    line[rng.randrange(4) % 3] *= rng.choice([0, 1])
    times = {p: line[0] + line[1] * p.num_runs + line[2] * p.num_bytes for p in POINTS}
    assert fit(times) == pytest.approx(tuple(line), rel=1e-6, abs=1e-16)


@pytest.mark.parametrize("case", range(20))
def test_no_term_is_negative_and_no_other_line_is_better(case: int, seed: int) -> None:
    """Times that no line explains; a random walk from the result finds nothing better."""
    print("seed", seed)
    rng = random.Random(seed)
    times = {point: 10 ** rng.uniform(-6, -3) for point in POINTS}

    def error(line: tuple[float, ...]) -> float:
        terms = [(line[0] + line[1] * p.num_runs + line[2] * p.num_bytes) / times[p] for p in times]
        return sum((term - 1) ** 2 for term in terms)

    best = fit(times)
    assert all(term >= 0 for term in best)
    for _ in range(500):
        other = tuple(
            term * rng.uniform(0.8, 1.25) + rng.choice([0, 0, 10 ** rng.uniform(-14, -7)])
            for term in best
        )
        assert error(other) >= error(best) * (1 - 1e-9)


def test_a_shape_is_what_a_line_misses_at_each_size() -> None:
    line = Costs(10 * MICRO, 2 * MICRO, 1e-10, 0.0)
    for slow, factor in itertools.product(RUN_BYTES, (0.2, 1.5, 7.0)):
        bent = {
            p: line.per_call
            + (line.per_run * p.num_runs + line.per_byte * p.num_bytes)
            * (factor if p.run_bytes == slow else 1)
            for p in POINTS
        }
        found = shape(line, bent)
        assert found == pytest.approx([factor if size == slow else 1 for size in RUN_BYTES])
        costs = replace(line, shape=found)
        for point in POINTS:
            assert costs.seconds(*point_of(point)) == pytest.approx(bent[point])
    assert shape(line, {}) == STRAIGHT


def test_a_shape_is_straight_between_sizes_and_even_beyond() -> None:
    costs = Costs(0.0, 0.0, 1e-9, 0.0, (1.0, 3.0, 1.0, 1.0, 1.0, 2.0))
    bends = [costs.seconds(7, 7 * size) / (7 * size * 1e-9) for size in (1, 4096, 8192, 16384)]
    assert bends == pytest.approx([1, 1, 2, 3])
    assert costs.seconds(1, 64 << 20) == pytest.approx(2e-9 * (64 << 20))
    assert costs.seconds(0, 0) == costs.seconds(5, 0) == 0


def point_of(point: Point) -> tuple[int, int]:
    return point.num_runs, point.num_bytes


# -- measuring -------------------------------------------------------------------------------------


def test_the_first_copy_of_a_way_loads_code_and_is_not_counted() -> None:
    """Nor does it stand for how long the next ones take: little time is left after it."""
    cold, warm = usual(), usual()
    cold.warming = 0.075
    costs, complete = measure(cold.time_copy, clock=cold.clock)
    assert complete
    assert costs == measure(warm.time_copy, clock=warm.clock)[0]


def test_all_points_are_timed_and_fit_in_the_memory_that_is_asked_for() -> None:
    machine = usual()
    assert measure(machine.time_copy, clock=machine.clock)[1]
    timed = set(machine.calls)
    assert timed == {(w, d, *p) for w in WAYS for d in DIRECTIONS for p in POINTS}
    assert max(run_bytes * num_runs for _, _, run_bytes, num_runs in timed) == MEASURED_BYTES


@pytest.mark.parametrize("case", range(40))
def test_the_time_is_kept_on_any_machine(case: int, seed: int) -> None:
    """Fast and slow links, dear calls, dear preparations: the end is never after the deadline."""
    print("seed", seed)
    rng = random.Random(seed)
    lines: dict[Way, tuple[float, float, float]] = {
        way: (10 ** rng.uniform(-6, -2), 10 ** rng.uniform(-8, -4), 10 ** rng.uniform(7, 11))
        for way in WAYS
    }
    machine = FakeMachine(lines, overhead=10 ** rng.uniform(-6, -3))
    budget = rng.choice([0.5, 0.05])
    _, complete = measure(machine.time_copy, budget_seconds=budget, clock=machine.clock)
    first = sum(machine.seconds(w, 1, POINTS[0].num_bytes) + machine.overhead for w in WAYS)
    assert machine.now - 100 <= budget + 4 * first, "nothing is known before the first ones"
    if complete:
        assert len(set(machine.calls)) == len(POINTS) * len(WAYS) * len(DIRECTIONS)


def test_a_slow_first_copy_ends_the_measuring() -> None:
    machine = usual()
    machine.warming = 10.0
    costs, complete = measure(machine.time_copy, clock=machine.clock)
    assert len(machine.calls) == 1
    assert not complete
    assert set(costs.values()) == {None}
    model = CostModel(costs, "partly measured")
    assert model.choose("out", 1000, 1 << 20, num_host_runs=1) == "copies"


def test_half_a_measurement_is_used_but_not_kept(tmp_path: Path) -> None:
    machine = FakeMachine(
        {"copies": (0.0, 1e-5, 200e6), "batch": (1e-5, 1e-8, 200e6)}, overhead=1e-3
    )
    model = machine.open(tmp_path)
    assert machine.now - 100 <= 0.5
    assert model.source == "partly measured"
    assert model.choose("out", 1000, 1000 << 12) == "batch"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf])
def test_a_time_that_is_none_is_a_mistake_of_the_caller(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match="time_copy gave .* for copies out"):
        open_model(KEY, lambda *_: seconds, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_time_of_nothing_is_a_very_short_one(tmp_path: Path) -> None:
    model = open_model(KEY, lambda *_: 0.0, folder=tmp_path)
    assert model.choose("out", 1000, 1 << 20) == "copies"


def test_an_error_of_a_copy_comes_out(tmp_path: Path) -> None:
    def time_copy(*_: Any) -> float:
        raise RuntimeError("illegal address")

    with pytest.raises(RuntimeError, match="illegal address"):
        open_model(KEY, time_copy, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_points_tell_the_terms_apart() -> None:
    """A way that is cheap in one term only must not look cheap in another."""
    for term in range(3):
        times = {p: (1.0, float(p.num_runs), float(p.num_bytes))[term] for p in POINTS}
        found = fit(times)
        assert [round(value, 9) for value in found] == [float(i == term) for i in range(3)]
