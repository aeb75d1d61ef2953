"""Figures that are kept for the next process, and files that are not to be believed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmem.store.cuda import cost_figures
from kvmem.store.cuda.cost_figures import (
    DIRECTIONS,
    FORMAT,
    RUN_BYTES,
    WAYS,
    Costs,
    Figures,
    cache_place,
    read_figures,
    write_figures,
)
from kvmem.store.cuda.cost_model import open_model
from tests.store.cuda.fake_machine import KEY, MICRO, usual


def test_a_second_process_measures_nothing(tmp_path: Path) -> None:
    first = usual().open(tmp_path)
    machine = usual()
    second = machine.open(tmp_path)
    assert not machine.calls
    assert second.source == "cache"
    assert first.figures() | {"source": "cache"} == second.figures()
    assert [path.name for path in tmp_path.iterdir()] == [cache_place(KEY, tmp_path).name]


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA H200"},
        {"uuid": "GPU-2"},
        {"driver": "580.66"},
        {"runtime": "13010"},
        {"pinned": False},
    ],
)
def test_another_device_driver_or_runtime_measures_anew(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    usual().open(tmp_path)
    machine = usual()
    assert machine.open(tmp_path, replace(KEY, **change)).source == "measured"
    assert machine.calls
    assert len(list(tmp_path.iterdir())) == 2


def test_the_cache_is_that_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMEM_CUDA_CACHE_DIR", str(tmp_path / "named"))
    machine = usual()
    open_model(KEY, machine.time_copy, clock=machine.clock)
    assert cache_place(KEY).parent == tmp_path / "named"
    assert cache_place(KEY).exists()


def spoiled() -> dict[str, Callable[[str], str | bytes]]:
    """Ways in which the text of a sound file can be wrong."""

    def changed(*path: str, to: Any) -> Callable[[str], str]:
        def change(text: str) -> str:
            head = place = json.loads(text)
            for name in path[:-1]:
                place = place[name]
            if to is KeyError:
                del place[path[-1]]
            else:
                place[path[-1]] = to
            return json.dumps(head)

        return change

    out = ("seconds", "out")
    terms = (*out, "batch")
    found: dict[str, Callable[[str], str | bytes]] = {
        "empty": lambda _: "",
        "cut": lambda text: text[: len(text) // 2],
        "no json": lambda _: "copies",
        "bytes": lambda _: b"\xff\xfe\x00",
        "a list": lambda text: f"[{text}]",
        "a number": lambda _: "7",
        "null": lambda _: "null",
        "deep": lambda _: "[" * 30_000,
        "big": lambda text: text + " " * cost_figures._MOST_FILE_BYTES,
        "another format": changed("format", to=FORMAT + "0"),
        "no format": changed("format", to=KeyError),
        "another device": changed("key", "device", to="NVIDIA A100"),
        "another driver": changed("key", "driver", to="1"),
        "no key": changed("key", to=KeyError),
        "no figures": changed("seconds", to=KeyError),
        "figures of nothing": changed("seconds", to={}),
        "figures as a list": changed("seconds", to=[]),
        "one direction": changed(*out, to=KeyError),
        "one way": changed(*out, "staged", to=KeyError),
        "a fourth way": changed(*out, "magic", to=None),
        "no copies": changed(*out, "copies", to=None),
        "terms as a list": changed(*terms, to=[1, 2, 3, 4]),
        "terms as text": changed(*terms, to="fast"),
        "a fifth term": changed(*terms, "per_page", to=0.0),
        "no shape": changed(*terms, "shape", to=KeyError),
        "a short shape": changed(*terms, "shape", to=[1.0] * (len(RUN_BYTES) - 1)),
        "a shape that is none": changed(*terms, "shape", to=1.0),
        "a shape of text": changed(*terms, "shape", to=["1"] * len(RUN_BYTES)),
        "a flat shape": changed(*terms, "shape", to=[0.0] * len(RUN_BYTES)),
        "a shape without end": changed(*terms, "shape", to=[math.inf] * len(RUN_BYTES)),
        "a huge number": changed(*terms, "per_call", to=10**400),
    }
    for term in ("per_call", "per_run", "per_byte", "error"):
        found[f"no {term}"] = changed(*terms, term, to=KeyError)
        for value in (-1e-9, math.nan, math.inf, None, "1", True, [], {}):
            found[f"{term} {value!r}"] = changed(*terms, term, to=value)
    for term, absurd in (("per_call", 2.0), ("per_run", 1.0), ("per_byte", 1.0), ("per_byte", 0)):
        found[f"{term} {absurd}"] = changed(*terms, term, to=absurd)
    return found


@pytest.mark.parametrize("name", spoiled())
def test_a_file_that_is_wrong_is_measured_anew(tmp_path: Path, name: str) -> None:
    usual().open(tmp_path)
    place = cache_place(KEY, tmp_path)
    sound = place.read_text()
    wrong = spoiled()[name](sound)
    assert wrong != sound
    place.write_bytes(wrong if isinstance(wrong, bytes) else wrong.encode())
    assert read_figures(place, KEY) is None
    machine = usual()
    assert machine.open(tmp_path).source == "measured"
    assert machine.calls
    assert place.read_text() == sound, "and mended"


def test_what_is_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    for name, make in (("fifo", os.mkfifo), ("folder", os.mkdir)):
        place = cache_place(KEY, tmp_path / name)
        place.parent.mkdir()
        make(place)
        assert read_figures(place, KEY) is None
    assert usual().open(tmp_path / "folder").source == "measured"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [place.name]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = usual().open(tmp_path / "file" / "below")
    assert model.source == "measured"
    assert model.choose("out", 1000, 1000 << 12) == "batch"


def figures_of(number: int) -> Figures:
    """Figures that all hang on one number, so that a mixture shows."""
    line = Costs(number * MICRO, number * 1e-8, number * 1e-11, 0.0, (float(number),) * 6)
    return {(way, direction): line for way in WAYS for direction in DIRECTIONS}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_that_write_leave_a_whole_file(tmp_path: Path) -> None:
    place = cache_place(KEY, tmp_path)
    children = []
    for number in (1, 2):
        child = os.fork()
        if child == 0:
            for _ in range(200):
                write_figures(place, KEY, figures_of(number))
            os._exit(0)
        children.append(child)
    known = [figures_of(1), figures_of(2)]
    seen = 0
    while children:
        found = read_figures(place, KEY)
        assert found in known or (found is None and not seen), "neither the one nor the other"
        seen += found is not None
        done, status = os.waitpid(children[0], os.WNOHANG)
        if done:
            assert status == 0
            children.pop(0)
    assert read_figures(place, KEY) in known
    assert [path.name for path in tmp_path.iterdir()] == [place.name], "nothing is left behind"


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    write_figures(cache_place(KEY, tmp_path), KEY, figures_of(1))
    assert not list(tmp_path.iterdir())


def test_what_no_machine_can_be_is_not_kept(tmp_path: Path) -> None:
    """All points as fast as the smallest: the clock stood still, say."""
    open_model(KEY, lambda *_: 1e-5, folder=tmp_path)
    assert not list(tmp_path.iterdir())
