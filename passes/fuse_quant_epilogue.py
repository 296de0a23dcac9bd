"""Quantisation as the epilogue of the product that makes the value."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, maybe, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict


class GroupedLinearQuant(Rule):
    """quantize(grouped_linear(x) with the groups side by side) -> grouped_linear_quant."""

    name = "grouped_linear_quant"

    def pattern(self) -> OpPattern:
        product = p.grouped_linear("product", x="x", weight="weight", scale=maybe("scale"))
        return p.quantize("quant", x=p.reshape("flat", x=product))

    def check(self, m: Match, facts: Facts) -> Verdict:
        flat, quant = m.attrs("flat"), m.attrs("quant")
        if len(flat["tail"]) != 1 or flat["keep"] != 2:
            return No("the groups are not laid side by side", m.nodes["flat"])
        if quant["dims"] is not None:
            return No("only a part of the axis is quantised", m.nodes["quant"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        quant = {name: m.attrs("quant")[name] for name in ("fmt", "block")}
        operands = m.pick("x", "weight", "scale")
        new(ops.grouped_linear_quant, operands, quant, gives=m.results("quant"))


PASS = Pass(
    name="fuse_quant_epilogue",
    stage="fused",
    summary="Lets wo_a quantise its result for wo_b.",
    refuses="A product that is read in another form too, by a quantisation of another format for example.",
    rules=(GroupedLinearQuant(),),
)
