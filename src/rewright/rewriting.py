"""Takes the graphs of a model through the passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, UsageError
from rewright.ir.graph import Graph
from rewright.ir.static_scales import StaticScales
from rewright.ir.variant import Variant
from rewright.passes.facts import Facts, FoldWo
from rewright.passes.fold_wo import PASS as FOLD_WO
from rewright.passes.high_precision import high_of
from rewright.passes.manager import PassFailed, PassOptions, Rewritten, run_passes
from rewright.passes.pipelines import REACHABLE
from rewright.passes.static_scales import PASS as STATIC_SCALES

REPRODUCER = Path("rewright-reproducer.json")
"""Where a failed pass is written down if nothing else is said: in the working directory."""

Observe = Callable[[str, str, Graph], None]
"""Called with stage, pass and graph; the pass is empty when a stage is done."""


def rewrite(
    source: ModelSource,
    variant: Variant,
    options: PassOptions,
    fold_wo: FoldWo = "auto",
    static_scales: StaticScales | None = None,
    *,
    observe: Observe | None = None,
    reproducer: Path = REPRODUCER,
) -> Rewritten:
    """Trace a variant and run the passes, for a high one with what `high_of` makes of the options.

    Raises:
        UsageError: folding or static scales are asked for, but the pass does not run.
        PassFailed: a pass failed; what it takes to run it again lies in the file `reproducer`.
    """
    require_folding(options, fold_wo)
    if static_scales is not None:
        require_scaling(options)
    facts = facts_of(source, fold_wo, static_scales)
    facts = high_of(facts) if variant.is_high else facts
    graph = traced(source, variant)
    try:
        return run_passes(graph, facts, options, observe=observe)
    except PassFailed as e:
        raise keep_reproducer(e, reproducer) from e.__cause__


def traced(source: ModelSource, variant: Variant) -> Graph:
    """The traced graph of a variant. That of a high one has the nodes of the low one: a pass makes it
    another."""
    graph = source.graph(variant)
    if variant.is_high:
        graph.attrs["numerics"] = high_of(facts_of(source)).numerics
    return graph


def require_folding(options: PassOptions, fold_wo: FoldWo) -> None:
    """Refuse `fold_wo` "always" where nothing would obey it."""
    made = REACHABLE[: REACHABLE.index(options.to) + 1]
    if fold_wo == "always" and (FOLD_WO.name not in options.passes or FOLD_WO.stage not in made):
        raise UsageError(
            f"--fold-wo always, but pass {FOLD_WO.name} does not run",
            fix=f"leave it on and go on to stage {FOLD_WO.stage} at least",
        )


def require_scaling(options: PassOptions) -> None:
    """Refuse static scales where nothing would use them."""
    made = REACHABLE[: REACHABLE.index(options.to) + 1]
    if STATIC_SCALES.name not in options.passes or STATIC_SCALES.stage not in made:
        raise UsageError(
            f"--static-scales, but pass {STATIC_SCALES.name} does not run",
            fix=f"leave it on and go on to stage {STATIC_SCALES.stage} at least",
        )


def require_scales_fit(scales: StaticScales, source: ModelSource) -> None:
    """Refuse scales that a model does not have.

    Raises:
        UsageError: its numerics quantise no activation.
        BadInput: they were calibrated for another checkpoint.
    """
    if source.numerics is not Numerics.FAITHFUL:
        raise UsageError(
            f"{source.numerics.value} numerics quantise no input of a linear",
            where="--static-scales",
            fix="leave it out, or compile with --numerics faithful",
        )
    if source.checkpoint is None or source.checkpoint.fingerprint() != scales.checkpoint:
        raise BadInput(
            "they were calibrated for another checkpoint",
            where="--static-scales",
            fix="calibrate this one: rewright calibrate CKPT --text FILE -o SCALES",
        )


def facts_of(
    source: ModelSource, fold_wo: FoldWo = "auto", static_scales: StaticScales | None = None
) -> Facts:
    """What passes may know about an opened model."""
    return Facts(
        source.config.to_dict(), source.numerics.value, source.weight_types(), fold_wo, static_scales
    )


def keep_reproducer(error: PassFailed, path: Path) -> PassFailed:
    """Write the error's reproducer; the error to raise instead tells where it is, or that it is nowhere."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(error.reproducer.to_text(), encoding="utf-8")
    except OSError as e:
        return error.told(f"no reproducer: {path} cannot be written ({e.strerror})")
    return error.told(f"run it again with: rewright reproduce {path}")
