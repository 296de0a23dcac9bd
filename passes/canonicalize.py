"""Dead nodes, duplicate values, and changes of shape or type that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rewright.ir import ops
from rewright.ir.graph import Graph, name_of, type_of_value
from rewright.ir.op import op_of
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, Var, p
from rewright.passes.rule import No, Ok, Rewriter, Rule, Verdict
from rewright.passes.sweep import DeadNodes, MergeDuplicates, duplicates

_QUANTIZATION = frozenset({"quantize", "dequantize"})


class IdentityReshape(Rule):
    """A reshape into the shape that the value has goes."""

    name = "identity_reshape"

    def pattern(self) -> OpPattern:
        return p.reshape("view", x="x")

    def check(self, m: Match, facts: Facts) -> Verdict:
        same = type_of_value(m.value("x")) == m.nodes["view"].meta["types"][0]
        return Ok() if same else No("the shape changes", m.nodes["view"])

    def rewrite(self, m: Match, new: Rewriter) -> None:
        new.forward(m.result("view"), m.value("x"))


class ReshapeOfReshape(Rule):
    """Of two reshapes in a row the first goes, where the second keeps no more axes than it."""

    name = "reshape_of_reshape"

    def pattern(self) -> OpPattern:
        return p.reshape("outer", x=p.reshape("inner", x="x"))

    def check(self, m: Match, facts: Facts) -> Verdict:
        fits = m.attrs("outer")["keep"] <= m.attrs("inner")["keep"]
        return Ok() if fits else No("the second keeps an axis that the first makes", m.nodes["outer"])

    def rewrite(self, m: Match, new: Rewriter) -> None:
        new(ops.reshape, m.pick("x"), m.attrs("outer"), gives=[m.result("outer")])


class HoistReshape(Rule):
    """A reshape of the leading axes moves in front of a row-wise op, towards what made the shape."""

    def __init__(self, op: str, rowwise: str, others: tuple[str, ...]):
        self.op, self.rowwise, self.others = op, rowwise, others

    name = "hoist_reshape"

    def pattern(self) -> OpPattern:
        inner = OpPattern(self.op, "row", tuple(self._operands()))
        return p.reshape("view", x=inner)

    def _operands(self) -> Iterator[tuple[str, Any]]:
        yield self.rowwise, Var("x")
        for name in self.others:
            yield name, Var(name, optional=True)

    def check(self, m: Match, facts: Facts) -> Verdict:
        view = m.nodes["view"]
        rows = type_of_value(m.value("x")).shape
        tail, keep = m.attrs("view")["tail"], m.attrs("view")["keep"]
        whole = len(tail) > 0 and tail[-1] == m.nodes["row"].meta["types"][0].shape[-1] and keep < len(rows)
        if whole and len(view.meta["types"][0].shape) > len(rows):
            return No("it makes an axis, of heads perhaps, where there is one", view)
        return Ok() if whole else No("the last axis is not kept whole", view)

    def rewrite(self, m: Match, new: Rewriter) -> None:
        x, attrs = m.value("x"), m.attrs("view")
        tail = [*attrs["tail"][:-1], type_of_value(x).shape[-1]]
        name = f"{m.result('row').name}.x"
        (rows,) = new(ops.reshape, {"x": x}, {**attrs, "tail": tail}, gives=[None], names=[name])
        op = op_of(m.nodes["row"].target)
        new(op, {self.rowwise: rows, **m.pick(*self.others)}, m.attrs("row"), gives=[m.result("view")])


def _duplicates_left(graph: Graph) -> Iterator[str]:
    for first, again in duplicates(graph, leave=_QUANTIZATION):
        yield f"{name_of(again)} is {name_of(first)} computed again"


PASS = Pass(
    name="canonicalize",
    stage="canonical",
    summary="Removes dead nodes, duplicate values and identity reshapes; moves others to their makers.",
    rules=(
        DeadNodes(),
        MergeDuplicates(leave=_QUANTIZATION),
        IdentityReshape(),
        ReshapeOfReshape(),
        HoistReshape("linear", "x", ("weight", "scale")),
        HoistReshape("rms_norm", "x", ("weight",)),
    ),
    ensures=_duplicates_left,
    idempotent=True,
)
