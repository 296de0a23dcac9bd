"""docs/sensitivity.md: its tables are those of the results, and its example is a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.precision_plan import parse_plan_text
from rewright.rewriting import resolve_plan


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs/sensitivity.md").read_text()


@pytest.fixture(scope="module")
def measured(repo_root: Path) -> list[dict[str, Any]]:
    """Over all texts, and over each half."""
    folder = repo_root / "benchmarks/results"
    return [
        json.loads((folder / f"sensitivity-tiny-v4{part}.json").read_text())
        for part in ("", "-half0", "-half1")
    ]


def rows(page: str, start: str) -> list[list[str]]:
    """Cells of the tables whose heads begin so, without the heads."""
    tables = re.findall(rf"^{re.escape(start)}.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert tables
    return [[c.strip(" `") for c in line.strip("|").split("|")] for t in tables for line in t.splitlines()]


def interval(found: dict[str, Any]) -> list[str]:
    low, high = found["kl_interval"]
    return [f"{1000 * found['kl']:.2f}", f"{1000 * low:.2f} to {1000 * high:.2f}"]


def test_the_ranking(page: str, measured: list[dict[str, Any]]) -> None:
    of = {(e["name"], e["aspect"]): e for e in measured[0]["experiments"]}
    shown = rows(page, "| lowered | aspect | KL | 95 % | perplexity")
    assert len(shown) == 22 + 10 + 3
    for name, aspect, kl, between, perplexity, top, *kinds in shown:
        found = of[name, aspect]
        assert [kl, between] == interval(found["all"])
        assert perplexity == f"{found['all']['perplexity']:.4f}"
        assert top == f"{100 * found['all']['top1_agreement']:.2f} %"
        assert kinds == [f"{1000 * k['kl']:.2f}" for k in found["kinds"].values()]


def test_the_halves_agree_on_the_first_five(page: str, measured: list[dict[str, Any]]) -> None:
    """The first five of each half are ranked alike by the other, up to overlapping intervals."""
    for scope in ("kind", "module"):
        halves = [
            {(e["name"], e["aspect"]): (at, e["all"]) for at, e in enumerate(found, start=1)}
            for found in ([e for e in half["experiments"] if e["scope"] == scope] for half in measured[1:])
        ]
        for ours, theirs in (halves, halves[::-1]):
            fifth = list(theirs.values())[4][1]
            for key in list(ours)[:5]:
                low, high = ours[key][1]["kl_interval"]
                assert low <= theirs[key][1]["kl_interval"][1]
                assert theirs[key][1]["kl_interval"][0] <= high
                assert theirs[key][1]["kl_interval"][1] >= fifth["kl_interval"][0]
    known: dict[tuple[str, str], list[str]] = {}
    for scope in ("kind", "module"):
        for half in measured[1:]:
            for at, e in enumerate((e for e in half["experiments"] if e["scope"] == scope), start=1):
                known.setdefault((e["name"], e["aspect"]), []).extend([str(at), *interval(e["all"])])
    for name, aspect, *cells in rows(page, "| lowered | aspect | rank in 0/2"):
        assert cells == known[name, aspect]


def test_the_plan(page: str, measured: list[dict[str, Any]]) -> None:
    plan = measured[0]["plan"]
    shown = {name: cells for name, *cells in rows(page, "| model | KL")}
    assert shown["the plan"][:2] == interval(plan["all"])
    assert shown["everything low"][:2] == interval(plan["lowest"])
    assert shown["the plan"][-1] == f"{plan['saves_bytes']:,}"
    assert f"it keeps {plan['kept']} of {plan['units']} modules" in page
    assert plan["all"]["kl"] <= measured[0]["budget"]


def test_the_example_is_a_plan(page: str, tiny_v4: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    found = resolve_plan(
        parse_plan_text(example, "the example"), ModelSource.open(tiny_v4, Numerics.FAITHFUL)
    )
    assert len(found.high_activations) == 6
    assert found.high_keys == {"layers.3.attn", "layers.2.attn.indexer"}
