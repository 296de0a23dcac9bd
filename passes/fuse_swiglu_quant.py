"""The gated activation and the quantisation of its result."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, maybe, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict


class SwigluQuant(Rule):
    """quantize(swiglu(gate, up, weights)) -> swiglu_quant."""

    name = "swiglu_quant"

    def pattern(self) -> OpPattern:
        return p.quantize("quant", x=p.swiglu("act", gate="gate", up="up", weights=maybe("weights")))

    def check(self, m: Match, facts: Facts) -> Verdict:
        if m.attrs("quant")["dims"] is not None:
            return No("only a part of the axis is quantised", m.nodes["quant"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        quant = {name: m.attrs("quant")[name] for name in ("fmt", "block")}
        attrs = {**m.attrs("act"), **quant}
        new(ops.swiglu_quant, m.pick("gate", "up", "weights"), attrs, gives=m.results("quant"))


PASS = Pass(
    name="fuse_swiglu_quant",
    stage="fused",
    summary="Makes one node of the gated activation and the quantisation of its result.",
    refuses="An activation that is read elsewhere.",
    rules=(SwigluQuant(),),
)
