"""What the high variants of a compiled model are rewritten with. docs/variants.md."""

from __future__ import annotations

from dataclasses import replace

from rewright.passes import eliminate_quant
from rewright.passes.facts import Facts

NEEDS = eliminate_quant.PASS
"""The pass that makes a high graph another one."""


def high_of(facts: Facts) -> Facts:
    """The facts of the high variant, of those of the low one.

    Activations before linears are not quantised and need no scales; everything else is that of the low one.
    Where wo_a and wo_b stay apart there, as `auto` always decides in `faithful` numerics, they stay apart
    here: both variants read the same weights.
    """
    fold_wo = "never" if facts.fold_wo == "auto" else facts.fold_wo
    return replace(facts, numerics="bf16", fold_wo=fold_wo, static_scales=None)
