"""The pages of graph dump and graph diff: complete, offline, the same every time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import document_of, nodes_of

from rewright.codegen.targets import TARGETS
from rewright.graph_spec import load_graph, load_plan, parse_spec
from rewright.ir.export.json_graph import op_record
from rewright.ir.moved import Meter
from rewright.ir.round_trips import step_bytes
from rewright.passes.pipelines import pass_names
from rewright.report.document import study_document
from rewright.report.page import render_page
from rewright.report.study import Study, study

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def tiny(tiny_v4: Path) -> Study:
    return study(parse_spec(str(tiny_v4)).with_options(target="sm80"))


@pytest.fixture(scope="module")
def document(tiny: Study) -> dict[str, Any]:
    return study_document(tiny)


def test_every_stage_is_in_it_node_by_node(document: dict[str, Any], tiny: Study, tiny_v4: Path) -> None:
    for stage, at in (("traced", 0), ("layout", -1)):
        graph = load_graph(parse_spec(f"{tiny_v4}@{stage}"))[0]
        meter = Meter(graph)
        found = nodes_of(document, at)
        assert [{k: n[k] for k in op_record(graph.ops[0])} for n in found] == [
            op_record(n) for n in graph.ops
        ]
        assert [n["cost"]["activation_read"] for n in found] == [
            meter.of(n).activation_read for n in graph.ops
        ]
        assert document["snapshots"][at]["bytes"]["total"] == step_bytes(graph).total


def test_passes_are_all_listed_and_those_that_worked_have_a_graph(document: dict[str, Any]) -> None:
    assert [p["name"] for p in document["passes"]] == list(pass_names())
    worked = [p["name"] for p in document["passes"] if p["matches"]]
    assert [s["pass"] for s in document["snapshots"]] == ["", *worked]
    for p in document["passes"]:
        if p["matches"]:
            at = [s["pass"] for s in document["snapshots"]].index(p["name"])
            assert len(document["snapshots"][at]["nodes"]) == p["after"]["nodes"]


def test_each_step_accounts_for_every_byte(document: dict[str, Any]) -> None:
    for step in document["steps"]:
        saved = sum(part["saved"]["total"] for part in step["parts"]) + step["unchanged"]["total"]
        assert step["bytes"]["before"]["total"] - step["bytes"]["after"]["total"] == saved


def test_parts_stand_for_all_layers_alike(document: dict[str, Any]) -> None:
    for step in document["steps"]:
        listed = [i for i, part in enumerate(step["parts"]) if part["alike"] is not None]
        listed += [i for part in step["parts"] for i in part["alike"] or ()]
        assert sorted(listed) == list(range(len(step["parts"])))


def test_layers_are_sorted_by_what_is_in_them(document: dict[str, Any]) -> None:
    first, last = document["snapshots"][0]["layers"], document["snapshots"][-1]["layers"]
    assert sorted(n for members in first for n in members) == list(range(6))
    assert [2, 4] in first
    assert sorted(n for members in last for n in members) == list(range(6))


def test_drawings_have_a_box_for_every_node(document: dict[str, Any]) -> None:
    for at, snapshot in enumerate(document["snapshots"]):
        nodes = nodes_of(document, at)
        for module, view in snapshot["views"].items():
            inside = [n for n in nodes if f"{n['module']}.".startswith(f"{module}.") or module == "."]
            if module == ".":
                inside = [n for n in nodes if not n["module"]]
            made = {name for n in inside for name in n["names"]}
            every = {name for n in nodes for name in n["names"]}
            outside = {v for n in inside for v in n["operands"] if v in every and v not in made}
            assert len(document["layouts"][view]["boxes"]) == len(inside) + len(outside)


def test_the_plan_is_that_of_the_target(document: dict[str, Any], tiny_v4: Path) -> None:
    plan = load_plan(parse_spec(f"{tiny_v4}@planned").with_options(target="sm80"))[0]
    assert [entry["symbol"] for entry in document["plan"]["launches"]] == [e.symbol for e in plan.launches]
    symbols = {s for k in TARGETS["sm80"].kernels for s in k.symbols}
    assert set(document["plan"]["kernels"]) <= symbols
    for node, places in document["plan"]["of"].items():
        for at in places:
            assert any(u.partition("/")[0] == node for u in plan.launches[at].nodes)


def test_near_misses_have_their_reasons(document: dict[str, Any], tiny: Study) -> None:
    assert sum(len(m["anchors"]) for m in document["misses"]) == len(tiny.near_misses)
    (wo,) = [m for m in document["misses"] if m["pass"] == "fold_wo"]
    assert wo["anchors"][0] == "layers.0.attn.wo_a"
    assert "faithful numerics keep the rounding" in wo["reason"]


def test_the_page_is_one_file_and_the_same_every_time(document: dict[str, Any], tiny_v4: Path) -> None:
    page = render_page(document)
    again = study(parse_spec(str(tiny_v4)).with_options(target="sm80"))
    assert render_page(study_document(again)) == page
    assert document_of(page) == json.loads(json.dumps(document))
    addresses = set(re.findall(r"https?://[\w./-]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a format, not an address
    assert not re.search(r"<link|<img|@import|url\(|\bfetch\(|XMLHttpRequest|src=", page)


def test_a_compiled_model_shows_its_stages(cli: Cli, compiled_tiny: Path, tmp_path: Path) -> None:
    done = cli("graph", "dump", compiled_tiny, "--format", "html", "-o", tmp_path / "page.html")
    assert done.code == 0
    document = document_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [s["label"] for s in document["snapshots"]] == ["traced", "canonical", "fused", "layout"]
    assert document["plan"]["target"] == "host"
    assert [p["name"] for p in document["passes"]] == list(pass_names())


def test_a_stage_ends_the_page(cli: Cli, tiny_v4: Path) -> None:
    done = cli("graph", "dump", f"{tiny_v4}@canonical", "--format", "html")
    document = document_of(done.stdout)
    assert document["snapshots"][-1]["stage"] == "canonical"
    assert document["plan"] is None
    assert document["no_plan"] == "it stops at stage canonical"


def test_what_a_target_refuses_is_said(cli: Cli, tiny_v4: Path) -> None:
    done = cli("graph", "dump", f"{tiny_v4}?numerics=fp32", "--target", "sm80", "--format", "html")
    assert done.code == 0
    document = document_of(done.stdout)
    assert document["plan"] is None
    assert "no kernel of target sm80" in document["no_plan"]


def test_a_module_that_does_not_exist(cli: Cli, tiny_v4: Path) -> None:
    done = cli("graph", "dump", tiny_v4, "--format", "html", "--module", "layers.9")
    assert done.code == 2
    assert "there is no module 'layers.9'" in done.stderr


def test_without_fuse_norm_quant(cli: Cli, tiny_v4: Path) -> None:
    """The page names exactly the nodes that differ, and its bytes are those of the two traffic totals."""
    specs = f"{tiny_v4}@layout?no-pass=fuse_norm_quant", f"{tiny_v4}@layout"
    done = cli("graph", "diff", *specs, "--format", "html")
    assert done.code == 0
    document = document_of(done.stdout)
    before, after = (load_graph(parse_spec(s))[0] for s in specs)
    old, new = ({n.meta["names"][0]: op_record(n) for n in g.ops} for g in (before, after))
    differ = {name for name in old | new if old.get(name) != new.get(name)}
    (step,) = document["steps"]
    named = {
        document["names"][document["nodes"][at][0][0]]
        for part in step["parts"]
        for at in (*part["removed"], *part["added"])
    }
    assert differ
    assert named == differ
    totals = [
        json.loads(cli("graph", "traffic", s, "--format", "json").stdout)["stages"]["layout"]["total"]
        for s in specs
    ]
    assert step["bytes"]["before"]["total"] - step["bytes"]["after"]["total"] == totals[0] - totals[1] > 0
    assert sum(r["saved"]["total"] for r in document["savings"]) == totals[0] - totals[1]
    assert [s["bytes"]["total"] for s in document["snapshots"]] == totals


def test_equal_graphs_have_nothing_to_show(cli: Cli, tiny_v4: Path) -> None:
    done = cli("graph", "diff", tiny_v4, tiny_v4, "--format", "html", "--exit-code")
    assert done.code == 0
    assert document_of(done.stdout)["steps"][0]["parts"] == []
    assert cli("graph", "diff", tiny_v4, f"{tiny_v4}@fused", "--format", "html", "--exit-code").code == 1
