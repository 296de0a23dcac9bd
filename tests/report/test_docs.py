"""docs/tour.md shows what the commands print, and docs/ir.md every key of a page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewright.graph_spec import load_graph, parse_spec
from rewright.ir.diff import diff_graphs
from rewright.report.document import diff_document, study_document
from rewright.report.life import life_of
from rewright.report.study import study

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def tour(repo_root: Path) -> str:
    return (repo_root / "docs/tour.md").read_text()


@pytest.mark.full
def test_the_tour_shows_what_is_printed(
    tour: str, repo_root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    pairs = re.findall(r"```sh\nrewright ([^\n]*)\n```\n\n```\n(.*?)```", tour, re.DOTALL)
    assert len(pairs) == 3
    for command, excerpt in pairs:
        done = cli(*shlex.split(command))
        assert done.code == 0
        at = 0
        for line in excerpt.splitlines():
            if line != "...":
                at = done.stdout.index(line + "\n", at) + len(line)


def test_files_of_the_tour_exist(tour: str, repo_root: Path) -> None:
    linked = re.findall(r"\]\(([\w./-]+\.\w+)[#)]", tour)
    assert len(linked) > 1
    assert [f for f in linked if not (repo_root / "docs" / f).exists()] == []
    assert (repo_root / "docs/images/report.png").stat().st_size < 300_000


def test_every_key_is_described(repo_root: Path, tiny_v4: Path) -> None:
    page = (repo_root / "docs/ir.md").read_text()
    (section,) = re.findall(r"\n## JSON forms\n(.*?)\n## ", page, re.DOTALL)
    described = set(re.findall(r"`(\w+)`", section))
    found = study(parse_spec(str(tiny_v4)).with_options(target="host"))
    dump = study_document(found)
    difference = diff_graphs(*(load_graph(parse_spec(f"{tiny_v4}@{s}"))[0] for s in ("traced", "fused")))
    diff = diff_document(("a", "b"), difference)
    keys = {*dump, *diff, *dump["snapshots"][0], *dump["steps"][0], *dump["steps"][0]["parts"][0]}
    keys |= set(dump["layouts"][0]) | set(dump["plan"]) | set(dump["plan"]["launches"][0])
    keys |= set(life_of(found, "embed").to_json())
    # What a plan says of itself, and what every document begins with.
    assert keys - described - {"arena_bytes", "state_bytes", "format"} == set()


def test_tables_are_not_overwritten(tiny_v4: Path) -> None:
    """A document is put together of parts; none of them takes the place of another's table."""
    difference = diff_graphs(*(load_graph(parse_spec(f"{tiny_v4}@{s}"))[0] for s in ("traced", "fused")))
    for document in (study_document(study(parse_spec(str(tiny_v4)))), diff_document(("a", "b"), difference)):
        for table in ("names", "types", "ops", "modules", "rules"):
            assert all(isinstance(entry, str) for entry in document[table])
        assert len(document["nodes"]) > 100
