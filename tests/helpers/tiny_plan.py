"""Plans of the example model for target sm80, with the weights that they read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rewright.codegen.derive import WithDerived
from rewright.codegen.pack import PackedWeights, layouts_of
from rewright.codegen.plan import make_plan
from rewright.codegen.targets import TARGETS
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.plan import Plan
from rewright.passes.manager import PassOptions
from rewright.rewriting import rewrite

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny-v4"


def tiny_source(numerics: str = "faithful") -> ModelSource:
    """The model as the plans below take it: 256 tokens, up to 8 sequences, chunks of 8."""
    return ModelSource.open(TINY, Numerics(numerics), max_context=256, max_batch=8, chunk=8)


def tiny_plan(
    source: ModelSource, kind: str, batch: int, options: PassOptions | None = None
) -> tuple[Plan, dict[str, Tensor]]:
    """The plan of the largest variant of a kind and a batch, and its weights as they lie in an artifact."""
    variants = [v for v in source.variants() if v.kind == kind and v.batch == batch]
    variant = max(variants, key=lambda v: v.capacity)
    result = rewrite(source, variant, options or PassOptions())
    plan = make_plan(result.graph, variant, TARGETS["sm80"])
    stored = PackedWeights(WithDerived(source.weights(), result.derived), layouts_of([plan]))
    weights = {
        name: (torch.stack(parts) if len(parts) > 1 else parts[0]).reshape(place.type.storage_shape)
        for name, place in plan.values.items()
        if place.space == "weight"
        for parts in [list(stored.parts(name))]
    }
    return plan, weights
