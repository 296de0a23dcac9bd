"""The middle of an expert: the gated activation, quantised or not, on its way into the down product."""

from __future__ import annotations

from rewright.passes.pattern import OpPattern, Pattern, p


def activation(quantized: bool, **operands: Pattern) -> tuple[OpPattern, dict[str, Pattern]]:
    """Pattern of the activation (label act), and of the operands that take it in the down product."""
    if quantized:
        act = p.swiglu_quant("act", **operands)
        return act, {"x": act, "x_scale": act[1]}
    act = p.swiglu("act", **operands)
    return act, {"x": act}
