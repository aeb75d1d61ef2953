"""Output shown in the pages is what the commands print."""

from __future__ import annotations

import re

import pytest

from tests.cli.commands import ROOT, run

PAGES = ("docs/quickstart.md", "docs/command-line.md")


def shown_plans(page: str) -> list[tuple[str, str]]:
    """Each ``kvmem plan`` command of a page with the text block behind it."""
    text = (ROOT / page).read_text()
    return re.findall(
        r"^kvmem plan (.*)\n```\n(?:(?!```)[^\n]*\n)*?\n?```text\n(model\n.*?)^```",
        text,
        re.M | re.S,
    )


def test_pages_show_plans() -> None:
    assert [len(shown_plans(page)) for page in PAGES] == [1, 1]


@pytest.mark.parametrize("page", PAGES)
def test_plans_in_the_pages(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in shown_plans(page):
        assert run(capsys, "plan", *words.split()) == (0, text, "")


def test_the_page_of_metrics_names_every_family() -> None:
    """And nothing that is no family."""
    pytest.importorskip("prometheus_client")
    import kvmem
    from kvmem.metrics import Metrics

    config = kvmem.Config(num_layers=1, num_kv_heads=1, head_dim=8, device_blocks=2, host_blocks=2)
    with kvmem.Manager(config) as manager:
        families = {family.name for family in Metrics(manager).collect()}
    page = (ROOT / "docs" / "metrics.md").read_text()
    named: set[str] = set()
    for row in re.findall(r"^\| (`kvmem_.*?) \|", page, re.M):
        names = re.findall(r"`(\w+)`", row)
        stem = names[0]
        while stem not in families and "_" in stem:
            stem = stem.rpartition("_")[0]
        for name in names:
            named.add(name if name.startswith("kvmem") else ends(stem, name, families))
    assert named == families


def ends(stem: str, tail: str, families: set[str]) -> str:
    """The family that ``_tail`` stands for: the first name of its row with another end."""
    while stem and stem + tail not in families:
        stem = stem.rpartition("_")[0]
    return stem + tail
