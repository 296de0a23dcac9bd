"""Every launch of sm80 plans of the example model beside the references of its ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plan_steps import PlanSteps, Written
from tiny_plan import tiny_plan, tiny_scales, tiny_source

from rewright.runtime import _native

STEPS = [("decode", 1), ("decode", 2), ("decode", 8), ("chunk", 1), ("score", 1)]
MODELS = ["faithful", "calibrated", "bf16"]
"""Numerics; faithful ones with calibrated scales too."""

# Largest difference relative to a value's largest element: f32 in sums of another order; bf16 and codes by
# one step where a sum lies at the edge of two, which few elements do. A product of a row that its launch
# norms first may have met such an element: one bf16 step of one of its terms.
F32, F32_BEHIND_ROUNDING, BF16, MOST_CODES = 2e-6, 2e-3, 2**-7, 0.01


@pytest.mark.parametrize(("kind", "batch"), STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_emulated(model: str, kind: str, batch: int) -> None:
    check(model, kind, batch, _native.open_emulation(4), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "batch"), STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_on_a_card(model: str, kind: str, batch: int) -> None:
    kernels = Path(_native.__file__).parent / "kernels"
    card = _native.open_cuda(0, sorted(map(str, kernels.glob("*.fatbin"))))
    check(model, kind, batch, card, "cuda")


def check(model: str, kind: str, batch: int, device: _native.Device, where: str) -> None:
    calibrated = model == "calibrated"
    source = tiny_source("faithful" if calibrated else model)
    plan, weights = tiny_plan(source, kind, batch, static_scales=tiny_scales(source) if calibrated else None)
    assert calibrated == any(part.op == "quantize_static" for made in plan.launches for part in made.parts)
    variant = plan.variant
    steps = PlanSteps(plan, weights, device, where)
    steps.set_width(source.config.hc_mult * source.config.hidden_size)
    generator = torch.Generator().manual_seed(1)
    shape, compared = (variant.batch, variant.tokens), 0
    for at in range(2):
        tokens = torch.randint(0, source.config.vocab_size, shape, generator=generator, dtype=torch.int32)
        pos = torch.full((variant.batch,), at * variant.tokens, dtype=torch.int32)
        n_valid = torch.full((variant.batch,), variant.tokens, dtype=torch.int32)
        slot = torch.arange(variant.batch, dtype=torch.int32)
        for written in steps.step(tokens, pos, n_valid, slot):
            compare(written)
            compared += 1
    assert compared > 100


def compare(written: Written) -> None:
    got, want = written.got, written.want
    where = f"{written.launch.symbol}: {written.name}"
    if want.dtype in (torch.int32, torch.int64):
        assert torch.equal(got, want), where
    elif want.element_size() == 1:
        codes = want.contiguous().view(torch.uint8)
        assert (got.view(torch.uint8) != codes).float().mean() <= MOST_CODES, where
    else:
        assert got.isfinite().all(), where
        normed = any(part.op == "rms_norm" for part in written.launch.parts)
        step = BF16 if want.dtype == torch.bfloat16 else F32_BEHIND_ROUNDING if normed else F32
        assert (got.double() - want.double()).abs().max() <= step * want.double().abs().max(), where
