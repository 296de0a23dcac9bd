"""RMS norm, with a residual before it or not, and the quantisation of its result."""

from __future__ import annotations

from rewright.ir import ops
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, either, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict


class NormQuant(Rule):
    """quantize(rms_norm(x + residual)) -> rms_norm_quant; the norm is a result only if it is read."""

    name = "norm_quant"
    home = "norm"
    yields = ("norm", "sum")

    def pattern(self) -> OpPattern:
        total = either(p.add("sum", x="x", y="residual"), "x")
        return p.quantize("quant", x=p.rms_norm("norm", x=total, weight="weight"))

    def check(self, m: Match, facts: Facts) -> Verdict:
        if m.attrs("quant")["dims"] is not None:
            return No("only a part of the axis is quantised", m.nodes["quant"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        keep = bool(m.read_outside("norm"))
        keep_sum = "sum" in m and bool(m.read_outside("sum"))
        quant = {name: m.attrs("quant")[name] for name in ("fmt", "block")}
        kept = [m.result(label) for label, kept in (("sum", keep_sum), ("norm", keep)) if kept]
        attrs = {**m.attrs("norm"), **quant, "keep": keep, "keep_sum": keep_sum}
        gives = [*kept, *m.results("quant")]
        new(ops.rms_norm_quant, m.pick("x", "residual", "weight"), attrs, gives=gives)


PASS = Pass(
    name="fuse_norm_quant",
    stage="fused",
    summary="Makes one node of an RMS norm and the quantisation of its result.",
    refuses="Quantisation of a part of the axis. A norm that others read too stays a result.",
    rules=(NormQuant(),),
    requires=("eliminate_quant",),
)
