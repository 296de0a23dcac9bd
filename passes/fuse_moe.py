"""The routed experts, from the gate's logits to the sum with the shared expert."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.expert_pattern import activation, activation_attrs
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, maybe, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict


class Moe(Rule):
    """route, three expert products with their activation, expert_sum -> moe."""

    name = "moe"

    def __init__(self, *, quantized: bool, hashed: bool):
        self.quantized, self.hashed = quantized, hashed

    def pattern(self) -> OpPattern:
        if self.hashed:
            route = p.route_hash("route", logits="logits", table="table", tokens="tokens", n_valid="n_valid")
        else:
            route = p.route("route", logits="logits", bias="bias", n_valid="n_valid")
        shared = {"x": "x", "x_scale": maybe("x_scale"), "experts": route}
        gate = p.expert_linear("gate", weight="w1", scale=maybe("s1"), **shared)
        up = p.expert_linear("up", weight="w3", scale=maybe("s3"), **shared)
        _, taken = activation(self.quantized, gate=gate, up=up, weights=route[1])
        down = p.expert_linear("down", weight="w2", scale=maybe("s2"), experts=route, **taken)
        return p.expert_sum("sum", routed=down, experts=route, shared="shared")

    def check(self, m: Match, facts: Facts) -> Verdict:
        if m.attrs("gate")["out"] != m.attrs("up")["out"]:
            return No("gate and up products differ in type", m.nodes["up"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        route = m.attrs("route")
        attrs = {
            **({"k": route["k"]} if not self.hashed else {}),
            "route_scale": route["scale"],
            "hidden": m.attrs("gate")["out"],
            "out": m.attrs("down")["out"],
            **activation_attrs(m),
        }
        names = ("x", "x_scale", "logits", "bias", "table", "tokens", "n_valid")
        operands = m.pick(*names, "w1", "s1", "w3", "s3", "w2", "s2", "shared")
        new(ops.moe, operands, attrs, gives=[m.result("sum")])


PASS = Pass(
    name="fuse_moe",
    stage="fused",
    summary="Makes one node of routing, the routed experts and the sum with the shared expert.",
    refuses="Inner values that are read elsewhere.",
    rules=tuple(Moe(quantized=q, hashed=h) for q in (True, False) for h in (False, True)),
    requires=("eliminate_quant", "fuse_swiglu_quant"),
)
