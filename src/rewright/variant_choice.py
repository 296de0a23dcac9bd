"""Which precisions a model is compiled in: the option --variants. docs/variants.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import UsageError
from rewright.ir.variant import PRECISIONS, Variant
from rewright.passes.eliminate_quant import UnquantizedLinear
from rewright.passes.high_precision import NEEDS
from rewright.passes.manager import PassOptions
from rewright.passes.pipelines import REACHABLE
from rewright.passes.report import Report

OPTION = "--variants"


def parse_precisions(text: str) -> tuple[str, ...]:
    """The precisions of a list with commas, the lower first; `UsageError` says what can be listed."""
    given = [name.strip() for name in text.split(",")]
    if unknown := [name for name in given if name not in PRECISIONS]:
        raise UsageError(f"there is no variant {unknown[0]!r}", where=OPTION, fix="low, or low,high")
    if "low" not in given:
        raise UsageError(
            "the high one comes beside the low one",
            where=OPTION,
            fix=f"low,high; the high one alone is --numerics {Numerics.BF16.value}",
        )
    return tuple(p for p in PRECISIONS if p in given)


def require_difference(
    precisions: Sequence[str], numerics: Numerics, passes: PassOptions, where: str = f"{OPTION} low,high"
) -> None:
    """Refuse high variants that would be the low ones once more; `where` is what asked for them."""
    if "high" not in precisions:
        return
    if numerics is not Numerics.FAITHFUL:
        raise UsageError(
            f"nothing is left to be higher: in {numerics.value} numerics no activation is quantised before a "
            "linear",
            where=where,
            fix=f"leave it out, or choose --numerics {Numerics.FAITHFUL.value}",
        )
    made = REACHABLE[: REACHABLE.index(passes.to) + 1]
    if NEEDS.name not in passes.passes or NEEDS.stage not in made:
        raise UsageError(
            f"pass {NEEDS.name} makes the high one, and it does not run",
            where=where,
            fix=f"leave it on and go on to stage {NEEDS.stage} at least",
        )


def notes_of(reports: Mapping[Variant, Report]) -> list[str]:
    """For the user: that high variants are the low ones, which is so where no weight has scales."""
    high = [report for variant, report in reports.items() if variant.is_high]
    rules = [rule for r in high for p in r.passes if p.name == NEEDS.name for rule in p.rules]
    if not high or any(rule.matches for rule in rules if rule.name == UnquantizedLinear.name):
        return []
    return ["no activation is quantised before a linear: high variants compute what low ones do"]


def variants_of(source: ModelSource, precisions: Sequence[str]) -> list[Variant]:
    """Every variant that a model is compiled in: all shapes of the low precision, then of the high one."""
    return [variant.at(precision) for precision in precisions for variant in source.variants()]
