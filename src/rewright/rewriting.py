"""Takes the graphs of a model through the passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rewright.frontend.kv_formats import PLAIN
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import BadInput, UsageError
from rewright.ir.graph import Graph
from rewright.ir.precision_plan import Adjustable, Precision, PrecisionPlan
from rewright.ir.static_scales import StaticScales
from rewright.ir.variant import Variant
from rewright.passes.eliminate_quant import PASS as ELIMINATE_QUANT
from rewright.passes.facts import Facts, FoldWo
from rewright.passes.fold_wo import PASS as FOLD_WO
from rewright.passes.high_precision import high_of
from rewright.passes.lower_weights import PASS as LOWER_WEIGHTS
from rewright.passes.manager import PassFailed, PassOptions, Rewritten, run_passes
from rewright.passes.pipelines import REACHABLE
from rewright.passes.static_scales import PASS as STATIC_SCALES

REPRODUCER = Path("rewright-reproducer.json")
"""Where a failed pass is written down if nothing else is said: in the working directory."""

PLAN_OPTION = "--precision-plan"
NO_PLAN = Precision()

Observe = Callable[[str, str, Graph], None]
"""Called with stage, pass and graph; the pass is empty when a stage is done."""


def rewrite(
    source: ModelSource,
    variant: Variant,
    options: PassOptions,
    fold_wo: FoldWo = "auto",
    *,
    precision: Precision = NO_PLAN,
    static_scales: StaticScales | None = None,
    observe: Observe | None = None,
    reproducer: Path = REPRODUCER,
) -> Rewritten:
    """Trace a variant and run the passes, for a high one with what `high_of` makes of the options.

    Raises:
        UsageError: folding, a precision plan or static scales are asked for, but the pass does not run.
        PassFailed: a pass failed; what it takes to run it again lies in the file `reproducer`.
    """
    require_folding(options, fold_wo)
    require_precision(options, fold_wo, precision)
    if static_scales is not None:
        require_scaling(options)
    facts = facts_of(source, fold_wo, precision, static_scales)
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


def resolve_plan(plan: PrecisionPlan, source: ModelSource) -> Precision:
    """What a precision plan means for an opened model.

    Raises:
        UsageError: numerics that leave the plan nothing to decide.
        BadInput: a module that the model does not have, or that cannot be changed so.
        Refused: a matrix that cannot be stored as FP4.
    """
    numerics = source.numerics.value
    if numerics == "fp32":
        raise UsageError(
            "there is nothing to round in fp32", where=PLAN_OPTION, fix="choose other --numerics"
        )
    tables = (plan.default, *plan.kinds.values(), *plan.modules.values())
    if numerics == "bf16" and any(t.get("activations") == "fp8" for t in tables):
        raise UsageError(
            f"{plan.where} wants activations in fp8, --numerics bf16 has none",
            where=PLAN_OPTION,
            fix="compile with --numerics faithful",
        )
    found = plan.resolve(Adjustable.of(source.weight_types()))
    kv = source.model.builder.kv
    if found.high_keys and kv != PLAIN:
        raise UsageError(
            f"{plan.where} leaves keys unrounded, and --kv {kv} stores the codes of rounded ones",
            where=PLAN_OPTION,
            fix="compile with --kv bf16, or keep keys at fp8",
        )
    return found


def require_precision(options: PassOptions, fold_wo: FoldWo, precision: Precision) -> None:
    """Refuse a precision plan that some other option would keep from being obeyed."""
    made = REACHABLE[: REACHABLE.index(options.to) + 1]
    needed = [ELIMINATE_QUANT] if precision.high_activations or precision.high_keys else []
    needed += [LOWER_WEIGHTS] if precision.fp4_weights else []
    for pass_ in needed:
        if pass_.name not in options.passes or pass_.stage not in made:
            raise UsageError(
                f"pass {pass_.name}, which obeys the plan, does not run",
                where=PLAN_OPTION,
                fix=f"leave it on and go on to stage {pass_.stage} at least",
            )
    parts = sorted(path for path in precision.fp4_weights if path.endswith((".wo_a", ".wo_b")))
    if fold_wo == "always" and parts:
        raise UsageError(
            f"--fold-wo always, but the plan stores {parts[0]} as FP4",
            where=PLAN_OPTION,
            fix="choose one of the two",
        )


def facts_of(
    source: ModelSource,
    fold_wo: FoldWo = "auto",
    precision: Precision = NO_PLAN,
    static_scales: StaticScales | None = None,
) -> Facts:
    """What passes may know about an opened model."""
    config, numerics = source.config.to_dict(), source.numerics.value
    return Facts(config, numerics, source.weight_types(), fold_wo, precision, static_scales)


def keep_reproducer(error: PassFailed, path: Path) -> PassFailed:
    """Write the error's reproducer; the error to raise instead tells where it is, or that it is nowhere."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(error.reproducer.to_text(), encoding="utf-8")
    except OSError as e:
        return error.told(f"no reproducer: {path} cannot be written ({e.strerror})")
    return error.told(f"run it again with: rewright reproduce {path}")
