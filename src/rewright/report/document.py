"""The JSON of a page about one model, or about the difference of two graphs. docs/ir.md describes it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rewright.codegen.targets import TARGETS
from rewright.ir.diff import GraphDiff, diff_graphs
from rewright.ir.diff_stat import rule_rows
from rewright.ir.fold import fold_layers
from rewright.ir.graph import Graph, name_of
from rewright.ir.op import registry
from rewright.ir.plan import Plan
from rewright.ir.round_trips import by_layer, round_trips, step_bytes
from rewright.passes.pipelines import PIPELINE
from rewright.report.changes import changes_json
from rewright.report.planned import plan_json
from rewright.report.records import COST_FIELDS, Records, moved_json
from rewright.report.study import Study
from rewright.report.views import Views, layer_classes

FORMAT = "rewright.report"
VERSION = 1
MOST_TRIPS = 60


def study_document(study: Study, module: str = "", context: int | None = None) -> dict[str, Any]:
    """The page of `rewright graph dump X --format html`.

    Args:
        study: the model.
        module: the module that is shown first.
        context: tokens of the sequence after the step; by default the capacity.
    """
    labels = [(s.label, s.stage, s.made_by) for s in study.snapshots]
    graphs = [s.graph for s in study.snapshots]
    diffs = [diff_graphs(a, b) for a, b in itertools.pairwise(graphs)]
    document = _document(labels, graphs, diffs, context)
    return {
        **document,
        "kind": "dump",
        "subject": _short(str(study.spec.path)),
        "module": module,
        "passes": _passes(study.passes),
        "misses": _misses(study.near_misses),
        "plan": _plan(study.plan, context),
        "no_plan": study.no_plan,
    }


def diff_document(
    names: tuple[str, str],
    diff: GraphDiff,
    module: str = "",
    context: int | None = None,
    after: Study | None = None,
) -> dict[str, Any]:
    """The page of `rewright graph diff A B --format html`.

    Args:
        names: what the two graphs were asked for as.
        diff: their difference.
        module: the module that is shown first.
        context: tokens of the sequence after the step; by default each graph's capacity.
        after: the second graph with what passes said about it.
    """
    graphs = (diff.before, diff.after)
    labels = [(f"{'AB'[i]}: {g.stage}", g.stage, "") for i, g in enumerate(graphs)]
    document = _document(labels, graphs, [diff], context)
    rows = [
        {
            "label": row.label,
            "places": row.places,
            "before": row.balance.nodes_before,
            "after": row.balance.nodes_after,
            "saved": moved_json(row.balance.saved),
        }
        for row in rule_rows(diff, context)
    ]
    return {
        **document,
        "kind": "diff",
        "subject": " → ".join(map(_short, names)),
        "specs": list(map(_short, names)),
        "module": module,
        "savings": rows,
        "header": [{"name": a.name, "before": a.before, "after": a.after} for a in diff.header],
        "outputs": [{"name": a.name, "before": a.before, "after": a.after} for a in diff.outputs],
        "passes": _passes(after.passes) if after else [],
        "misses": _misses(after.near_misses) if after else [],
        "plan": None,
        "no_plan": "a comparison shows no plan",
    }


def _document(
    labels: Sequence[tuple[str, str, str]],
    graphs: Sequence[Graph],
    diffs: Sequence[GraphDiff],
    context: int | None,
) -> dict[str, Any]:
    records, views = Records(context), Views()
    snapshots = []
    for (label, stage, made_by), graph in zip(labels, graphs, strict=True):
        snapshots.append(
            {
                "label": label,
                "stage": stage,
                "pass": made_by,
                "nodes": records.add(graph),
                "bytes": _step(graph, context),
                "layers": layer_classes(graph),
                "views": views.of(graph),
                "trips": _trips(graph, context),
            }
        )
    last = graphs[-1]
    return {
        "format": FORMAT,
        "version": VERSION,
        "graph": {"name": last.name, "attrs": dict(last.attrs)},
        "context": last.attrs["capacity"] if context is None else context,
        "results": {name: name_of(v) for name, v in last.results.items()},
        "next_state": {name: name_of(v) for name, v in last.next_state.items()},
        "cost_fields": list(COST_FIELDS),
        "snapshots": snapshots,
        "steps": [changes_json(diff, records, context) for diff in diffs],
        "layouts": views.layouts.values,
        "docs": {name: _doc(name) for name in sorted(records.ops.values)},
        "rule_pass": {rule.name: p.name for p in reversed(PIPELINE) for rule in p.rules},
        **records.to_json(),
    }


def _short(spec: str) -> str:
    """A path as it was given; of an absolute one the end, so that a page says nothing of the machine."""
    return "/".join(spec.split("/")[-2:]) if spec.startswith("/") else spec


def _doc(op: str) -> str:
    """The first sentence that an op's definition says about it."""
    text = (registry()[op].__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(text.split())


def _step(graph: Graph, context: int | None) -> dict[str, int]:
    step = step_bytes(graph, context)
    return {
        "weights": step.weights,
        "constants": step.constants,
        "state_read": step.state_read,
        "state_written": step.state_written,
        "activations_read": step.activations_read,
        "activations_written": step.activations_written,
        "activations": step.activations,
        "total": step.total,
    }


def _trips(graph: Graph, context: int | None) -> list[dict[str, Any]]:
    """Values that are written and read again, most bytes first, layers added up."""
    return [
        {
            "name": t.name,
            "count": t.count,
            "producer": t.producer,
            "readers": dict(sorted(t.readers.items(), key=lambda item: (-item[1], item[0]))),
            "written": t.written,
            "read": t.read,
        }
        for t in by_layer(round_trips(graph, context))[:MOST_TRIPS]
    ]


def _passes(passes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    summaries = {p.name: p.summary for p in PIPELINE}
    refuses = {p.name: p.refuses for p in PIPELINE}
    return [
        {
            "name": p["name"],
            "stage": p["stage"],
            "enabled": p["enabled"],
            "summary": summaries.get(p["name"], ""),
            "refuses": refuses.get(p["name"], ""),
            "before": p["before"],
            "after": p["after"],
            "matches": sum(rule["matches"] for rule in p["rules"]),
            "near": sum(len(rule["near_misses"]) for rule in p["rules"]),
            "rules": [[rule["name"], rule["matches"], rule["expected"]] for rule in p["rules"]],
        }
        for p in passes
    ]


def _misses(misses: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Near misses; those that are alike in several layers once, with the anchors of all."""

    def text(miss: Mapping[str, str]) -> str:
        return f"{miss['pass']}/{miss['rule']} {miss['anchor']} {miss['reason']}"

    return [
        {**one.item, "anchors": [one.item["anchor"], *(other["anchor"] for other in one.rest)]}
        for one in fold_layers(misses, lambda miss: miss["anchor"], text)
    ]


def _plan(plan: Plan | None, context: int | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    described = plan_json(plan, context)
    kernels = {}
    for kernel in TARGETS[plan.target].kernels:
        for symbol in kernel.symbols:
            kernels.setdefault(symbol, re.sub(r"\s+", " ", kernel.signature))
    used = {launch["symbol"] for launch in described["launches"]}
    return {**described, "kernels": {s: text for s, text in sorted(kernels.items()) if s in used}}
