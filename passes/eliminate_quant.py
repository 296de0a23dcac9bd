"""Quantisation that repeats, undoes itself, or is not wanted."""

from __future__ import annotations

from collections.abc import Iterator

from rewright.ir import ops
from rewright.ir.graph import Graph, kind_of, name_of, producer_of, type_of_value
from rewright.ir.op import Op, op_of
from rewright.ir.precision_plan import owner_of_keys
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, Var, p
from rewright.passes.rule import Log, No, Ok, Rewriter, Rule, Verdict
from rewright.passes.sweep import DeadNodes, MergeDuplicates, duplicates

_QUANTIZATION = ("quantize", "dequantize")
_FORMAT = ("fmt", "block", "dims")


class RequantizeOfDequantize(Rule):
    """Q(DQ(Q(x))) is Q(x): same format, axis and block.

    Exact on values: a block's second scale is at most its first, and shifting a code to a smaller
    power of two loses nothing. That needs a first scale no smaller than the least one a quantiser
    chooses, so codes that come from elsewhere are left alone.
    """

    name = "requantize"
    keeps = ("inner", "back")

    def pattern(self) -> OpPattern:
        inner = p.quantize("inner", x="x")
        back = OpPattern(
            "dequantize",
            "back",
            (("codes", inner), ("scale", inner[1]), ("base", Var("base", optional=True))),
        )
        return p.quantize("again", x=back)

    def check(self, m: Match, facts: Facts) -> Verdict:
        inner, again = m.attrs("inner"), m.attrs("again")
        for attr in _FORMAT:
            if inner[attr] != again[attr]:
                return No(f"{attr} is {again[attr]} after {inner[attr]}", m.nodes["again"])
        if m.attrs("back")["dims"] != inner["dims"]:
            return No("the codes are put back into other dims", m.nodes["back"])
        if m.attrs("back")["out"] not in ("bf16", "f32"):
            return No("the value between them cannot hold every code times its scale", m.nodes["back"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        for index in range(2):
            new.forward(m.result("again", index), m.graph.result(m.nodes["inner"], index))


class RoundTrip(Rule):
    """DQ(Q(x)) is x where the numerics or the precision plan have no rounding; elsewhere it is one of the
    model's."""

    name = "round_trip"
    yields = ("quant",)
    keeps = ("quant",)
    keeps_numerics = False

    def pattern(self) -> OpPattern:
        quant = p.quantize("quant", x="x")
        base = ("base", Var("base", optional=True))
        return OpPattern("dequantize", "back", (("codes", quant), ("scale", quant[1]), base))

    def check(self, m: Match, facts: Facts) -> Verdict:
        module = owner_of_keys(m.nodes["back"].meta["module"])
        if facts.numerics != "fp32" and module not in facts.precision.high_keys:
            return No("the rounding belongs to the model", m.nodes["back"])
        if m.nodes["back"].meta["types"][0] != type_of_value(m.value("x")):
            return No("the element type changes", m.nodes["back"])
        if m["base"] is not None and m["base"] is not m["x"]:
            return No("the other dims come from another value", m.nodes["back"])
        if m.attrs("back")["dims"] != m.attrs("quant")["dims"]:
            return No("the codes are put back into other dims", m.nodes["back"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        new.forward(m.result("back"), m.value("x"))


class UnquantizedLinear(Rule):
    """linear(quantize(x)) is linear(x), of expert linears too: in `bf16` numerics, and where the precision
    plan wants it."""

    keeps = ("quant",)
    keeps_numerics = False
    name = "unquantized_linear"

    def __init__(self, op: Op):
        self.op = op

    def pattern(self) -> OpPattern:
        quant = p.quantize("quant", x="x")
        others = tuple(
            (name, Var(name, optional=True)) for name in self.op.operands if name not in ("x", "x_scale")
        )
        return OpPattern(self.op.name, "linear", (("x", quant), ("x_scale", quant[1]), *others))

    def apply(self, graph: Graph, facts: Facts, log: Log) -> bool:
        wanted = facts.numerics == "bf16" or facts.precision.high_activations
        return bool(wanted) and super().apply(graph, facts, log)

    def check(self, m: Match, facts: Facts) -> Verdict:
        if m.attrs("quant")["dims"] is not None:
            return No("only a part of the axis is quantised", m.nodes["quant"])
        module = name_of(m.value("weight")).removesuffix(".weight")
        if facts.numerics != "bf16" and module not in facts.precision.high_activations:
            return No("the precision plan keeps the quantisation", m.nodes["quant"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        others = m.pick(*(name for name in self.op.operands if name not in ("x", "x_scale")))
        new(self.op, {"x": m["x"], **others}, m.attrs("linear"), gives=m.results("linear"))


def _quantized_twice(graph: Graph) -> Iterator[str]:
    for first, again in duplicates(graph, only=_QUANTIZATION):
        yield f"{name_of(producer_of(again))} is {name_of(producer_of(first))} quantised again"
    for node in graph.ops:
        if op_of(node.target).name in _QUANTIZATION and not any(
            kind_of(u) != "item" or u.users for u in node.users
        ):
            yield f"nobody reads {node.meta['names'][0]}"


PASS = Pass(
    name="eliminate_quant",
    stage="canonical",
    summary="Removes duplicate, cancelling and unread quantisation; in bf16 numerics that before linears; "
    "roundings and quantisation that a precision plan does without.",
    refuses="A rounding DQ(Q(x)) of the model; other formats, blocks or axes; scales of unknown origin.",
    rules=(
        MergeDuplicates("merge_quant", only=_QUANTIZATION),
        RequantizeOfDequantize(),
        RoundTrip(),
        UnquantizedLinear(ops.linear),
        UnquantizedLinear(ops.expert_linear),
        DeadNodes(only=_QUANTIZATION),
    ),
    ensures=_quantized_twice,
)
