"""The expert that every token passes."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.expert_pattern import activation, activation_attrs
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, maybe, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict


class SharedExpert(Rule):
    """Gate and up products of one input, activation, down product -> shared_expert."""

    name = "shared_expert"

    def __init__(self, quantized: bool):
        self.quantized = quantized

    def pattern(self) -> tuple[OpPattern, ...]:
        weights = {"weight0": "w1", "scale0": maybe("s1"), "weight1": "w3", "scale1": maybe("s3")}
        products = p.multi_linear("products", x="x", x_scale=maybe("x_scale"), **weights)
        act, taken = activation(self.quantized, gate=products, up=products[1])
        return act, p.linear("down", weight="w2", scale=maybe("s2"), **taken)

    def check(self, m: Match, facts: Facts) -> Verdict:
        gate, up = m.attrs("products")["outs"].split(",")
        return Ok() if gate == up else No("gate and up products differ in type", m.nodes["products"])

    def rewrite(self, m: Match, new: Rewriter) -> None:
        hidden = m.attrs("products")["outs"].split(",")[0]
        attrs = {"hidden": hidden, "out": m.attrs("down")["out"], **activation_attrs(m)}
        operands = m.pick("x", "x_scale", "w1", "s1", "w3", "s3", "w2", "s2")
        new(ops.shared_expert, operands, attrs, gives=[m.result("down")])


PASS = Pass(
    name="fuse_shared_expert",
    stage="fused",
    summary="Makes one node of the shared expert.",
    refuses="Inner values that are read elsewhere.",
    rules=(SharedExpert(quantized=True), SharedExpert(quantized=False)),
    requires=("eliminate_quant", "fuse_shared_input", "fuse_swiglu_quant"),
)
