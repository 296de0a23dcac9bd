"""Names a graph: `PATH[@STAGE][?option=value&...]`, PATH being a checkpoint folder, a config.json or
a compiled model. Only configuration and tensor headers are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from rewright.codegen.plan import make_plan
from rewright.codegen.targets import Target
from rewright.frontend.kv_formats import parse_kv
from rewright.frontend.numerics import parse_numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, UsageError
from rewright.ir.graph import STAGES, Graph
from rewright.ir.manifest import MANIFEST_NAME
from rewright.ir.plan import Plan, parse_plan
from rewright.ir.precision_plan import Precision, read_plan
from rewright.ir.static_scales import StaticScales, read_scales
from rewright.ir.variant import PRECISIONS, Variant
from rewright.passes.facts import FoldWo, parse_fold_wo
from rewright.passes.manager import PassOptions
from rewright.passes.pipelines import LAST_STAGE, REACHABLE
from rewright.rewriting import NO_PLAN, require_scales_fit, resolve_plan, rewrite, traced
from rewright.runtime.load import Artifact
from rewright.target_choice import choose_target
from rewright.variant_choice import require_difference, variants_of

KINDS = ("decode", "chunk", "score")
_PASS_OPTIONS = ("fold-wo", "passes", "no-pass", "precision-plan", "static-scales")
_COMPILE_OPTIONS = ("numerics", "max-context", "max-batch", "chunk", "kv", *_PASS_OPTIONS)
_PRECISION_OPTION = "precision"
_OPTIONS = (*_COMPILE_OPTIONS, "variant", "batch", _PRECISION_OPTION, "target")
PLAN_STAGES = ("selected", "planned")
"""Stages at which there is a plan instead of a graph."""


@dataclass(frozen=True)
class GraphSpec:
    """What was asked for.

    Attributes:
        path: checkpoint, configuration or compiled model.
        stage: stage of the graph; None for the last one of a compiled model or of a spec with options
            about passes, else `traced`.
        options: values by option name, of `_OPTIONS`. `no-pass` given several times is one list.
    """

    path: Path
    stage: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    def with_options(self, **options: str | int | None) -> GraphSpec:
        """The spec with further options (underscores for dashes); None leaves one alone."""
        given = {name.replace("_", "-"): str(value) for name, value in options.items() if value is not None}
        return replace(self, options=self.options | given)


def parse_spec(text: str) -> GraphSpec:
    """Read a spec; `UsageError` lists what is possible where a part of it is not."""
    if Path(text).exists():  # also a path that has @ or ? in its name
        return GraphSpec(Path(text))
    head, question, query = text.partition("?")
    path, at, stage = head.rpartition("@")
    if not at:
        path, stage = head, None
    options: dict[str, str] = {}
    for pair in query.split("&") if question else []:
        name, equals, value = pair.partition("=")
        if not equals or name not in _OPTIONS:
            raise UsageError(f"unknown option {pair!r}", where=text, fix=f"options: {', '.join(_OPTIONS)}")
        again = name == "no-pass" and name in options
        options[name] = f"{options[name]},{value}" if again else value
    return GraphSpec(Path(path), stage, options)


def load_graph(spec: GraphSpec) -> tuple[Graph, list[str]]:
    """The graph that a spec names, and notes for the user.

    Raises:
        UsageError: a stage, option or variant that does not exist.
        BadInput: the path cannot be used.
    """
    stages, notes = _load(spec, None if spec.stage is None else (spec.stage,))
    return stages.popitem()[1], notes


def load_plan(spec: GraphSpec) -> tuple[Plan, list[str]]:
    """The plan that a spec names with one of `PLAN_STAGES`, and notes for the user.

    Raises:
        UsageError: an option, target or variant that does not exist.
        BadInput: the path cannot be used.
        Refused: the target has no kernel for some node.
    """
    on = replace(spec, stage=None, options={k: v for k, v in spec.options.items() if k != "target"})
    if (spec.path / MANIFEST_NAME).is_file():
        artifact = Artifact.open(spec.path)
        made_for = artifact.manifest.target
        if spec.options.get("target", made_for) != made_for:
            raise UsageError(f"it was compiled for target {made_for}", where=str(spec.path))
        _from_artifact(on, None)  # refuses what cannot change
        variant = choose_variant(list(artifact.manifest.variants), on)
        return parse_plan(artifact.plan_text(variant)), []
    on, target = for_target(spec)
    graphs, notes = _load(replace(on, stage=LAST_STAGE), (LAST_STAGE,))
    (graph,) = graphs.values()
    return make_plan(graph, variant_of(graph), target), notes


def for_target(spec: GraphSpec) -> tuple[GraphSpec, Target]:
    """The spec of the graph that a plan is made of, without its target, and the target.

    Raises:
        UsageError: a target that does not exist, or more tokens than its kernels take.
    """
    numerics = parse_numerics(spec.options.get("numerics", "faithful"))
    target = choose_target(spec.options.get("target", "auto"), numerics)
    chunk = _number(spec, "chunk", target.default_chunk)
    options = {k: v for k, v in spec.options.items() if k != "target"}
    on = replace(spec, options=options).with_options(chunk=target.chunk(chunk, _number(spec, "max-batch", 1)))
    return on, target


def variant_of(graph: Graph) -> Variant:
    """The variant that a graph was made for."""
    shape = Variant(*(graph.attrs[key] for key in ("tokens", "batch", "capacity", "all_positions")))
    return shape.at(graph.attrs.get("precision", "low"))


def load_stages(spec: GraphSpec) -> tuple[dict[str, Graph], list[str]]:
    """The graph of a spec at every stage that there is, by stage, and notes for the user.

    Raises:
        UsageError: an option or variant that does not exist.
        BadInput: the path cannot be used.
    """
    return _load(spec, REACHABLE)


def _load(spec: GraphSpec, stages: tuple[str, ...] | None) -> tuple[dict[str, Graph], list[str]]:
    """Graphs by stage; without `stages` the default one, of several those that there are."""
    if "target" in spec.options:
        raise UsageError(
            "target belongs to a plan", where=str(spec.path), fix=f"name stage {' or '.join(PLAN_STAGES)}"
        )
    if spec.stage in PLAN_STAGES:
        raise UsageError(
            f"at stage {spec.stage} there is a plan, no graph",
            where=str(spec.path),
            fix=f"look at it with graph dump, or name one of {', '.join(REACHABLE)}",
        )
    if spec.stage is not None and spec.stage not in REACHABLE:
        what = "this version makes" if spec.stage in STAGES else "there is"
        raise UsageError(
            f"{what} no stage {spec.stage!r}", where=str(spec.path), fix=f"stages: {', '.join(REACHABLE)}"
        )
    if not spec.path.exists():
        raise BadInput("no such file or folder", where=str(spec.path), fix="check the path")
    if (spec.path / MANIFEST_NAME).is_file():
        return _from_artifact(spec, stages), []
    default = default_stage(spec)
    return _from_source(spec, stages or (default,))


def default_stage(spec: GraphSpec) -> str:
    """The stage of a checkpoint's graph, where none is named that of the options; checks that they agree."""
    about_passes = [o for o in _PASS_OPTIONS if o in spec.options]
    if spec.stage == "traced" and about_passes:
        raise UsageError(
            f"{', '.join(about_passes)} change nothing at stage traced",
            where=str(spec.path),
            fix=f"name a later stage, {LAST_STAGE} for example",
        )
    return spec.stage or (LAST_STAGE if about_passes else "traced")


def _from_artifact(spec: GraphSpec, stages: tuple[str, ...] | None) -> dict[str, Graph]:
    artifact = Artifact.open(spec.path)
    if fixed := [o for o in _COMPILE_OPTIONS if o in spec.options]:
        raise UsageError(
            f"{', '.join(fixed)} cannot change in a compiled model",
            where=str(spec.path),
            fix="name the checkpoint it was compiled from",
        )
    kept = artifact.manifest.stages
    chosen = kept[-1:] if stages is None else stages
    if len(chosen) > 1:
        chosen = tuple(stage for stage in chosen if stage in kept)
    variant = choose_variant(list(artifact.manifest.variants), spec)
    if len(chosen) > 1 and variant.is_high:  # of which no other is kept
        chosen = kept[-1:]
    return {stage: artifact.graph(variant, stage) for stage in chosen}


def open_source(spec: GraphSpec) -> tuple[ModelSource, Variant]:
    """The checkpoint or configuration of a spec, and the variant that it names.

    Raises:
        UsageError: an option or variant that does not exist.
        BadInput: the path cannot be used.
    """
    if not spec.path.exists():
        raise BadInput("no such file or folder", where=str(spec.path), fix="check the path")
    given = spec.options
    source = ModelSource.open(
        spec.path,
        parse_numerics(given.get("numerics", "faithful")),
        max_context=_number(spec, "max-context", 4096),
        max_batch=_number(spec, "max-batch", 1),
        chunk=_number(spec, "chunk", 128),
        kv=parse_kv(given.get("kv", "bf16")),
    )
    if parse_precision(spec) == "high" and spec.stage != "traced":
        passes, _ = pass_options(spec, spec.stage if spec.stage in REACHABLE else LAST_STAGE)
        require_difference(PRECISIONS, source.numerics, passes, f"{spec.path}?{_PRECISION_OPTION}=high")
    return source, choose_variant(variants_of(source, PRECISIONS), spec)


def parse_precision(spec: GraphSpec) -> str:
    """The precision of the variant that a spec names."""
    precision = spec.options.get(_PRECISION_OPTION, "low")
    if precision not in PRECISIONS:
        raise UsageError(
            f"there is no precision {precision!r}",
            where=str(spec.path),
            fix=f"one of {', '.join(PRECISIONS)}",
        )
    return precision


def pass_options(spec: GraphSpec, to: str) -> tuple[PassOptions, FoldWo]:
    """Which passes a spec wants, up to a stage."""
    given = spec.options
    without = tuple(n for n in given.get("no-pass", "").split(",") if n)
    passes = PassOptions.of(given.get("passes"), without, to)
    return passes, parse_fold_wo(given.get("fold-wo", "auto"))


def planned_precision(spec: GraphSpec, source: ModelSource) -> Precision:
    """What the precision plan of a spec means for its model."""
    path = spec.options.get("precision-plan")
    return NO_PLAN if path is None else resolve_plan(read_plan(Path(path)), source)


def planned_scales(spec: GraphSpec, source: ModelSource) -> StaticScales | None:
    """The calibrated scales of a spec, if it names a file of them."""
    path = spec.options.get("static-scales")
    if path is None:
        return None
    scales = read_scales(Path(path))
    require_scales_fit(scales, source)
    return scales


def _from_source(spec: GraphSpec, stages: tuple[str, ...]) -> tuple[dict[str, Graph], list[str]]:
    passes, fold_wo = pass_options(spec, stages[-1])
    source, variant = open_source(spec)
    if stages == ("traced",):
        return {"traced": traced(source, variant)}, source.notes
    found: dict[str, Graph] = {}

    def keep(stage: str, name: str, graph: Graph) -> None:
        if not name and stage in stages:
            found[stage] = graph.copy()

    rewrite(
        source,
        variant,
        passes,
        fold_wo,
        precision=planned_precision(spec, source),
        static_scales=planned_scales(spec, source),
        observe=keep,
    )
    return found, source.notes


def choose_variant(variants: list[Variant], spec: GraphSpec) -> Variant:
    """The variant of the wanted kind, batch and precision with the largest capacity."""
    precision = parse_precision(spec)
    variants = [v for v in variants if v.precision == precision]
    if not variants:
        raise UsageError(
            f"it was compiled without {precision} variants",
            where=str(spec.path),
            fix="compile the checkpoint again with --variants low,high",
        )
    kind, batch = spec.options.get("variant", "decode"), _number(spec, "batch", 1)
    if kind not in KINDS:
        raise UsageError(
            f"there is no variant {kind}", where=str(spec.path), fix=f"variants: {', '.join(KINDS)}"
        )
    found = [v for v in variants if v.kind == kind and v.batch == batch]
    if not found:
        batches = sorted({v.batch for v in variants if v.kind == kind})
        raise UsageError(
            f"there is no {kind} variant for batch {batch}",
            where=str(spec.path),
            fix=f"batches: {', '.join(map(str, batches)) or 'none'}; see --max-batch and --chunk",
        )
    return max(found, key=lambda v: v.capacity)


def _number(spec: GraphSpec, option: str, default: int) -> int:
    text = spec.options.get(option, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} is not a number: {text!r}", where=str(spec.path)) from None
