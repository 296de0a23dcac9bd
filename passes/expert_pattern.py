"""The middle of an expert: the gated activation, quantised or not, on its way into the down product."""

from __future__ import annotations

from typing import Any

from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, Pattern, p


def activation(quantized: bool, **operands: Pattern) -> tuple[OpPattern, dict[str, Pattern]]:
    """Pattern of the activation (label act), and of the operands that take it in the down product."""
    if quantized:
        act = p.swiglu_quant("act", **operands)
        return act, {"x": act, "x_scale": act[1]}
    act = p.swiglu("act", **operands)
    return act, {"x": act}


def activation_attrs(m: Match) -> dict[str, Any]:
    """What an expert takes over of the attributes of its activation."""
    given = m.attrs("act")
    return {name: given[name] for name in ("limit", "fmt", "block") if name in given}
