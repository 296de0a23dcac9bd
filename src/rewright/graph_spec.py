"""Names a graph: `PATH[@STAGE][?option=value&...]`, PATH being a checkpoint folder, a config.json or
a compiled model. Only configuration and tensor headers are read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from rewright.frontend.numerics import parse_numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, UsageError
from rewright.ir.graph import STAGES, Graph
from rewright.ir.manifest import MANIFEST_NAME
from rewright.ir.variant import Variant
from rewright.runtime.load import Artifact

AVAILABLE_STAGES = ("traced",)
KINDS = ("decode", "chunk", "score")
_COMPILE_OPTIONS = ("numerics", "max-context", "max-batch", "chunk")
_OPTIONS = (*_COMPILE_OPTIONS, "variant", "batch")


@dataclass(frozen=True)
class GraphSpec:
    """What was asked for.

    Attributes:
        path: checkpoint, configuration or compiled model.
        stage: stage of the graph.
        options: values by option name, of `_OPTIONS`.
    """

    path: Path
    stage: str = "traced"
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
        path, stage = head, "traced"
    options = {}
    for pair in query.split("&") if question else []:
        name, equals, value = pair.partition("=")
        if not equals or name not in _OPTIONS:
            raise UsageError(f"unknown option {pair!r}", where=text, fix=f"options: {', '.join(_OPTIONS)}")
        options[name] = value
    return GraphSpec(Path(path), stage, options)


def load_graph(spec: GraphSpec) -> tuple[Graph, list[str]]:
    """The graph that a spec names, and notes for the user.

    Raises:
        UsageError: a stage, option or variant that does not exist.
        BadInput: the path cannot be used.
    """
    if spec.stage not in STAGES:
        raise UsageError(
            f"there is no stage {spec.stage}", where=str(spec.path), fix=f"stages: {', '.join(STAGES)}"
        )
    if spec.stage not in AVAILABLE_STAGES:
        available = ", ".join(AVAILABLE_STAGES)
        raise UsageError(
            f"this version makes no stage {spec.stage}", where=str(spec.path), fix=f"stages: {available}"
        )
    if not spec.path.exists():
        raise BadInput("no such file or folder", where=str(spec.path), fix="check the path")
    if (spec.path / MANIFEST_NAME).is_file():
        return _from_artifact(spec), []
    return _from_source(spec)


def _from_artifact(spec: GraphSpec) -> Graph:
    artifact = Artifact.open(spec.path)
    if fixed := [o for o in _COMPILE_OPTIONS if o in spec.options]:
        raise UsageError(
            f"{', '.join(fixed)} cannot change in a compiled model",
            where=str(spec.path),
            fix="name the checkpoint it was compiled from",
        )
    return artifact.graph(_choose(list(artifact.manifest.variants), spec))


def _from_source(spec: GraphSpec) -> tuple[Graph, list[str]]:
    source = ModelSource.open(
        spec.path,
        parse_numerics(spec.options.get("numerics", "faithful")),
        max_context=_number(spec, "max-context", 4096),
        max_batch=_number(spec, "max-batch", 1),
        chunk=_number(spec, "chunk", 128),
    )
    return source.graph(_choose(source.variants(), spec)), source.notes


def _choose(variants: list[Variant], spec: GraphSpec) -> Variant:
    """The variant of the wanted kind and batch with the largest capacity."""
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
