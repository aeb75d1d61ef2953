"""The block map: what the PNG and the page say is what the samples said."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem import picture
from kvmem.picture import timeline as timeline_module
from kvmem.picture.png import _rectangles
from kvmem.picture.timeline import STATES, Timeline, colour_of, name_of


def sample(step: int, **tiers: list[int]) -> dict[str, Any]:
    return {
        "time": 100.0 + step / 4,
        "step": step,
        "tiers": {name: {"owner": np.array(owner, np.int32)} for name, owner in tiers.items()},
    }


def run() -> list[dict[str, Any]]:
    return [
        sample(0, device=[0, 0, 0], host=[0, 0]),
        sample(1, device=[1, -2, 0], host=[0, 0]),
        sample(2, device=[1, -2, 2], host=[0, 7]),
        sample(3, device=[-4, -2, 2], host=[1, 7]),
        sample(4, device=[-1, -3, 2], host=[1, 0]),
    ]


def data_of(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found is not None
    return json.loads(found[1])


def unrolled(runs: list[int], length: int) -> list[int]:
    values = [0] * length
    for start, owner in zip(runs[::2], runs[1::2]):
        values[start:] = [owner] * (length - start)
    return values


def test_the_timeline_keeps_every_owner() -> None:
    timeline = Timeline.from_samples(run())
    assert timeline.steps.tolist() == [0, 1, 2, 3, 4]
    assert timeline.seconds.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert timeline.owner["device"].tolist() == [
        [0, 1, 1, -4, -1],
        [0, -2, -2, -2, -3],
        [0, 0, 2, 2, 2],
    ]
    assert timeline.sequence_ids == [1, 2, 7]


def test_a_tier_without_frames_is_not_drawn() -> None:
    timeline = Timeline.from_samples([sample(0, device=[3], host=[])])
    assert list(timeline.owner) == ["device"]


def test_no_samples_and_samples_of_two_managers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"samples: got none.*snapshot"):
        Timeline.from_samples([])
    with pytest.raises(ValueError, match=r"samples\[1\].*'device' has 2 frames.* has 1"):
        Timeline.from_samples([sample(0, device=[1]), sample(1, device=[1, 2])])


def test_the_page_holds_the_whole_history_and_needs_no_network(tmp_path: Path) -> None:
    page = picture.write_html(run(), tmp_path / "new" / "map.html", title="a <b> & </script> c")
    data = data_of(page)
    wanted = Timeline.from_samples(run())
    for tier in data["tiers"]:
        drawn = [unrolled(frame, len(wanted.steps)) for frame in tier["frames"]]
        assert drawn == wanted.owner[tier["name"]].tolist()
    shown = {owner["id"]: (owner["name"], owner["colour"]) for owner in data["owners"]}
    assert set(shown) == {*STATES, 1, 2, 7}
    assert shown[7] == ("sequence 7", colour_of(7))
    text = page.read_text()
    assert "<b>" not in text
    assert "a &lt;b&gt; &amp; &lt;/script&gt; c" in text
    assert "http" not in text
    assert " src=" not in text
    assert "@DATA@" not in text
    assert "@TITLE@" not in text
    HTMLParser().feed(text)


def test_rectangles_join_rows_that_begin_and_end_alike() -> None:
    owner = np.array([[1, 1, -2, 5], [1, 1, 0, 5], [2, 1, 1, 1], [0, 0, 0, 0]], np.int32)
    wanted = [(0, 2, 0, 2), (0, 2, 3, 4), (2, 1, 0, 1), (2, 1, 1, 4)]
    assert sorted(_rectangles(owner)) == wanted


def test_the_png_has_the_colours_of_the_map(tmp_path: Path) -> None:
    image_module = pytest.importorskip("matplotlib.image")
    path = picture.write_png(run(), tmp_path / "new" / "map.png")
    pixels = (image_module.imread(path)[:, :, :3] * 255).round().astype(np.uint8)
    assert pixels.shape[0] > 600
    assert pixels.shape[1] > 1200
    for owner in (1, 2, 7, -1, -2, -3, -4):
        colour = [int(colour_of(owner)[i : i + 2], 16) for i in (1, 3, 5)]
        # A legend patch alone is far smaller than one frame over one step.
        assert (pixels == colour).all(axis=2).sum() > 3000, name_of(owner)


def test_uneven_steps_are_drawn_as_wide_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    samples = [sample(step, device=[1, 2]) for step in (0, 1, 5)]
    assert picture.write_png(samples, tmp_path / "map.png").stat().st_size > 5000


def test_without_matplotlib_the_png_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'kvmem\[demo\]'"):
        picture.write_png(run(), tmp_path / "map.png")
    assert picture.write_html(run(), tmp_path / "map.html").exists()


def test_all_colours_differ_clearly() -> None:
    colours = [colour for _, colour in STATES.values()] + list(timeline_module.SEQUENCE_COLOURS)
    values = [np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in colours]
    for i, one in enumerate(values):
        for other, name in zip(values[:i], colours):
            assert np.abs(one - other).sum() >= 80, f"{colours[i]} is too near to {name}"
