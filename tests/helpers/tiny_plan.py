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
from rewright.ir.static_scales import Segment, StaticScales
from rewright.passes.manager import PassOptions
from rewright.rewriting import facts_of, rewrite

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny-v4"


def tiny_source(numerics: str = "faithful") -> ModelSource:
    """The model as the plans below take it: 256 tokens, up to 8 sequences, chunks of 8."""
    return ModelSource.open(TINY, Numerics(numerics), max_context=256, max_batch=8, chunk=8)


def tiny_scales(source: ModelSource) -> StaticScales:
    """Scales for every input of a linear, another for each of three blocks: the largest values do not fit."""
    about, segments = facts_of(source), {}
    for name, type in source.weight_types().items():
        module, _, what = name.rpartition(".")
        if what == "weight" and about.is_scaled(module):
            exponents = tuple(-8 + block % 3 for block in range(type.shape[-1] // 128))
            segments[f"{module}.x"] = Segment(f"{module}.x", 128, exponents)
    return StaticScales("made up", segments, {name: name for name in segments})


def tiny_plan(
    source: ModelSource,
    kind: str,
    batch: int,
    options: PassOptions | None = None,
    static_scales: StaticScales | None = None,
) -> tuple[Plan, dict[str, Tensor]]:
    """The plan of the largest variant of a kind and a batch, and its weights as they lie in an artifact."""
    variants = [v for v in source.variants() if v.kind == kind and v.batch == batch]
    variant = max(variants, key=lambda v: v.capacity)
    result = rewrite(source, variant, options or PassOptions(), static_scales=static_scales)
    plan = make_plan(result.graph, variant, TARGETS["sm80"])
    stored = PackedWeights(WithDerived(source.weights(), result.derived), layouts_of([plan]))
    weights = {
        name: (torch.stack(parts) if len(parts) > 1 else parts[0]).reshape(place.type.storage_shape)
        for name, place in plan.values.items()
        if place.space == "weight"
        for parts in [list(stored.parts(name))]
    }
    return plan, weights
