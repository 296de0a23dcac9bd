"""FP8 matrices that a precision plan stores as FP4."""

from __future__ import annotations

from torch import Tensor

from rewright.ir import ops
from rewright.ir.derived import DerivedWeight
from rewright.ir.formats import dequantize_weight, quantize_blocks
from rewright.ir.graph import Graph, name_of, type_of_value
from rewright.ir.op import Op
from rewright.ir.precision_plan import FP4_BLOCK
from rewright.ir.types import DType, ValueType
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, Var
from rewright.passes.rule import Log, No, Ok, Rewriter, Rule, Verdict


class Fp4Weight(Rule):
    """linear(x, W) with W stored as FP8 -> the same product with W rounded to FP4, one e8m0 scale for 32
    columns of a row."""

    name = "fp4_weight"
    keeps_numerics = False

    def __init__(self, op: Op):
        self.op = op

    def pattern(self) -> OpPattern:
        others = ((n, Var(n, optional=True)) for n in self.op.operands if n not in ("weight", "scale"))
        return OpPattern(
            self.op.name, "linear", (("weight", Var("weight")), ("scale", Var("scale")), *others)
        )

    def apply(self, graph: Graph, facts: Facts, log: Log) -> bool:
        return bool(facts.precision.fp4_weights) and super().apply(graph, facts, log)

    def check(self, m: Match, facts: Facts) -> Verdict:
        weight = type_of_value(m.value("weight"))
        if _path(m) not in facts.precision.fp4_weights:
            return No("the precision plan keeps the stored weight", m.nodes["linear"])
        if weight.dtype is not DType.F8E4M3:
            return No(f"the weight is stored as {weight.dtype.text}", m.nodes["linear"])
        if weight.shape[-1] % FP4_BLOCK:
            return No(f"its rows do not split into blocks of {FP4_BLOCK}", m.nodes["linear"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        rows, columns = type_of_value(m.value("weight")).shape
        sources = tuple(name_of(m.value(name)) for name in ("weight", "scale"))
        codes = DerivedWeight(
            f"{_path(m)}.fp4.weight", ValueType(DType.E2M1, (rows, columns)), sources, fp4_codes
        )
        scale = DerivedWeight(
            f"{_path(m)}.fp4.scale", ValueType(DType.E8M0, (rows, columns // FP4_BLOCK)), sources, fp4_scale
        )
        operands = m.pick(*(name for name in self.op.operands if name not in ("weight", "scale")))
        operands |= {"weight": new.weight(codes), "scale": new.weight(scale)}
        new(self.op, operands, m.attrs("linear"), gives=m.results("linear"))


def _path(m: Match) -> str:
    """Path of the linear whose weight was matched."""
    return name_of(m.value("weight")).removesuffix(".weight")


def fp4_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3[N,K] and its scales -> packed e2m1 uint8[N,K/2]."""
    return _requantize(weight, scale)[0]


def fp4_scale(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3[N,K] and its scales -> e8m0[N,K/32] of the same matrix as FP4."""
    return _requantize(weight, scale)[1]


def _requantize(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_blocks(dequantize_weight(weight, scale), "e2m1", FP4_BLOCK)


PASS = Pass(
    name="lower_weights",
    stage="canonical",
    summary="Stores FP8 matrices as FP4 where a precision plan wants it.",
    refuses="Rows that do not split into blocks of 32; matrices that are not FP8.",
    rules=(Fp4Weight(ops.linear), Fp4Weight(ops.grouped_linear)),
)
