"""Collects what there is to show of a model: the graphs along the way, what passes said, the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rewright.codegen.plan import make_plan
from rewright.codegen.targets import Target
from rewright.graph_spec import (
    PLAN_STAGES,
    GraphSpec,
    choose_variant,
    default_stage,
    for_target,
    load_graph,
    open_source,
    pass_options,
    planned_precision,
    planned_scales,
    variant_of,
)
from rewright.ir.errors import Refused, UsageError
from rewright.ir.graph import Graph
from rewright.ir.manifest import MANIFEST_NAME, PASSES_NAME
from rewright.ir.plan import Plan, parse_plan
from rewright.passes.pipelines import LAST_STAGE, REACHABLE
from rewright.rewriting import rewrite
from rewright.runtime.load import Artifact

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Snapshot:
    """A graph at one point of the way.

    Attributes:
        stage: its stage.
        made_by: the pass that made it of the one before; "" where a whole stage or nothing did.
        graph: the graph.
    """

    stage: str
    made_by: str
    graph: Graph

    @property
    def label(self) -> str:
        """What it is called on a page."""
        return self.made_by or self.stage


@dataclass(frozen=True)
class Study:
    """One variant of one model.

    Attributes:
        spec: what was asked for.
        snapshots: the graph where it began, and after every pass that changed it. Of a compiled model,
            which keeps no more, after every stage that did.
        passes: what each pass did, as `PassReport.to_json` says it.
        plan: the plan of the last snapshot, None where there is none.
        no_plan: why there is no plan.
        notes: for the user.
    """

    spec: GraphSpec
    snapshots: tuple[Snapshot, ...]
    passes: Sequence[Mapping[str, Any]] = ()
    plan: Plan | None = None
    no_plan: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def graph(self) -> Graph:
        """The last graph."""
        return self.snapshots[-1].graph

    @property
    def near_misses(self) -> list[dict[str, str]]:
        """Places that nearly matched: pass, rule, anchor, node and reason of each."""
        return [
            {"pass": p["name"], "rule": rule["name"], **miss}
            for p in self.passes
            for rule in p["rules"]
            for miss in rule["near_misses"]
        ]


def study(
    spec: GraphSpec, progress: Progress = lambda what, done, total: None, *, plan: bool = True
) -> Study:
    """Look at what a spec names, from the traced graph to its stage, or to the plan if it names none.

    Args:
        spec: what is asked for.
        progress: told how far the work is.
        plan: whether a plan is wanted. Without one the graph is that of `load_graph`, which knows no
            target.

    Raises:
        UsageError: a stage, option, target or variant that does not exist.
        BadInput: the path cannot be used.
        PassFailed: a pass failed.
    """
    if (spec.path / MANIFEST_NAME).is_file():
        return _of_artifact(spec)
    planned = plan and (spec.stage is None or spec.stage in (*PLAN_STAGES, LAST_STAGE))
    on, target = for_target(spec) if plan else (replace(spec, stage=spec.stage or default_stage(spec)), None)
    to = LAST_STAGE if planned else _checked(on.stage, spec)
    passes, fold_wo = pass_options(on, to)
    source, variant = open_source(on)
    found: list[Snapshot] = []

    def keep(stage: str, name: str, graph: Graph) -> None:
        if name or stage == "traced":
            progress("passes", len(found), len(passes.passes) + 2)
            found.append(Snapshot(stage, name, graph.copy()))

    result = rewrite(
        source,
        variant,
        passes,
        fold_wo,
        precision=planned_precision(on, source),
        static_scales=planned_scales(on, source),
        observe=keep,
    )
    report = result.report.to_json()["passes"]
    worked = {p["name"] for p in report if any(rule["matches"] for rule in p["rules"])}
    progress("planning", len(passes.passes) + 1, len(passes.passes) + 2)
    made, no_plan = (
        _plan_of(found[-1].graph, target) if planned and target else (None, f"it stops at stage {to}")
    )
    kept = tuple(s for s in found if not s.made_by or s.made_by in worked)
    return Study(spec, kept, report, made, no_plan, tuple(source.notes))


def _checked(stage: str | None, spec: GraphSpec) -> str:
    if stage not in REACHABLE:
        fix = f"stages: {', '.join((*REACHABLE, *PLAN_STAGES))}"
        raise UsageError(f"there is no stage {stage!r}", where=str(spec.path), fix=fix)
    return stage


def _plan_of(graph: Graph, target: Target) -> tuple[Plan | None, str]:
    """The plan, or why the target has none: whoever looks at a model wants to see it all the same."""
    try:
        return make_plan(graph, variant_of(graph), target), ""
    except Refused as e:
        return None, str(e).partition("\n")[0]


def _of_artifact(spec: GraphSpec) -> Study:
    artifact = Artifact.open(spec.path)
    made_for = artifact.manifest.target
    if spec.options.get("target", made_for) not in (made_for, "auto"):
        raise UsageError(f"it was compiled for target {made_for}", where=str(spec.path))
    spec = replace(spec, options={k: v for k, v in spec.options.items() if k != "target"})
    variant = choose_variant(list(artifact.manifest.variants), spec)
    stages = artifact.manifest.stages
    planned = spec.stage is None or spec.stage in (*PLAN_STAGES, stages[-1])
    if not planned:
        stages = stages[: REACHABLE.index(_checked(spec.stage, spec)) + 1]
    # What cannot change in a compiled model is refused on the way.
    shown = stages[-1:] if variant.is_high else stages  # of which no other is kept
    graphs = [load_graph(replace(spec, stage=stage))[0] for stage in shown]
    kept: list[Snapshot] = []
    for graph in graphs:
        if not kept or not _same_nodes(kept[-1].graph, graph):
            kept.append(Snapshot(graph.stage, "", graph))
    report = json.loads((Path(artifact.folder) / PASSES_NAME).read_text(encoding="utf-8"))
    plan = parse_plan(artifact.plan_text(variant)) if planned else None
    no_plan = "" if planned else f"it stops at stage {stages[-1]}"
    done = [p for p in report[variant.name]["passes"] if p["stage"] in stages]
    return Study(spec, tuple(kept), done, plan, no_plan)


def _same_nodes(a: Graph, b: Graph) -> bool:
    """Whether two graphs differ at most in their stage."""
    old = a.stage
    a.stage = b.stage
    try:
        return a == b
    finally:
        a.stage = old
