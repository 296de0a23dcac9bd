"""Scales that are known before a model runs, in place of those found as it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx import Node

from rewright.ir import ops
from rewright.ir.derived import DerivedWeight
from rewright.ir.graph import Graph, kind_of, name_of, operands_of, type_of_value
from rewright.ir.op import Op, op_of
from rewright.ir.static_scales import Segment, StaticScales
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match, Miss, Result
from rewright.passes.pattern import OpPattern, Var
from rewright.passes.rule import Log, No, Ok, Rewriter, Rule, Verdict

_WEIGHT = re.compile(r"weight\d*|w[13]")
"""Operands of linears, fused ones too, that are multiplied with their quantised input."""


class _Scaled(Rule):
    """What the two rules have in common: an op that quantises, and the segment that its site belongs to."""

    keeps_numerics = False

    def __init__(self, op: Op, known: StaticScales | None = None):
        self.op, self.known = op, known

    def pattern(self) -> OpPattern:
        operands = tuple((n, Var(n, optional=True)) for n in self.op.operands if n != "fixed")
        return OpPattern(self.op.name, "node", operands)

    def find(self, graph: Graph) -> Iterator[Match | Miss]:
        for found in super().find(graph):
            if isinstance(found, Match) and found.attrs("node")["fmt"] and self.sites(found):
                yield found

    def apply(self, graph: Graph, facts: Facts, log: Log) -> bool:
        if facts.static_scales is None:
            return False
        knowing = type(self)(self.op, facts.static_scales)
        return super(_Scaled, knowing).apply(graph, facts, log)

    def sites(self, m: Match) -> list[str]:
        """Names that the site of a match can have; none where it is no input of a linear."""
        raise NotImplementedError

    def columns(self, m: Match) -> int:
        """Elements of a row that is quantised."""
        raise NotImplementedError

    def segment(self, m: Match) -> Segment | None:
        assert self.known is not None
        return self.known.find(self.sites(m))

    def check(self, m: Match, facts: Facts) -> Verdict:
        segment = self.segment(m)
        if segment is None:
            return No(f"{self.sites(m)[0]} was not calibrated", m.nodes["node"])
        if segment.columns != self.columns(m):
            return No(
                f"{segment.name} has scales of {segment.columns} elements, not {self.columns(m)}",
                m.nodes["node"],
            )
        return Ok()

    def scales(self, m: Match, new: Rewriter) -> tuple[Segment, Node]:
        """The segment of a match that was checked, and its scales as a weight."""
        segment = self.segment(m)
        assert segment is not None
        return segment, new.weight(DerivedWeight(segment.tensor_name, segment.type, (), segment.tensor))


class StaticScale(_Scaled):
    """Quantisation of a linear's input by calibrated scales, which its readers take for those of the row."""

    name = "static_scale"

    def sites(self, m: Match) -> list[str]:
        codes, _ = self._results(m)
        return list(sites_of(codes))

    def columns(self, m: Match) -> int:
        codes, _ = self._results(m)
        return codes.node.meta["types"][codes.index].shape[-1]

    def _results(self, m: Match) -> tuple[Result, Result]:
        """Codes and scales."""
        roles = self.op.roles(m.attrs("node"))
        at = roles.index("scale")
        return m.result("node", at - 1), m.result("node", at)

    def rewrite(self, m: Match, new: Rewriter) -> None:
        segment, fixed = self.scales(m, new)
        _, scale = self._results(m)
        attrs = {**m.attrs("node"), "block": segment.block}
        if self.op is ops.quantize:
            attrs = {name: attrs[name] for name in ("fmt", "block")}
            new(ops.quantize_static, {"x": m["x"], "fixed": fixed}, attrs, gives=[m.result("node")])
        else:
            gives = [result for result in m.results("node") if result != scale]
            operands = m.pick(*(n for n in self.op.operands if n != "fixed"))
            new(self.op, {**operands, "fixed": fixed}, {**attrs, "static": True}, gives=gives)
        new.forward(scale, fixed)


class StaticHidden(_Scaled):
    """The same between the products of an expert, shared or routed."""

    name = "static_hidden"

    def sites(self, m: Match) -> list[str]:
        return [_site(m.value("w2"))]

    def columns(self, m: Match) -> int:
        return type_of_value(m.value("w2")).shape[-1]

    def rewrite(self, m: Match, new: Rewriter) -> None:
        segment, fixed = self.scales(m, new)
        operands = m.pick(*(n for n in self.op.operands if n != "fixed"))
        attrs = {**m.attrs("node"), "block": segment.block}
        new(self.op, {**operands, "fixed": fixed}, attrs, gives=m.results("node"))


def sites_of(codes: Result) -> Iterator[str]:
    """Names that the site of a quantised value can have: one for each linear that reads the codes."""
    for reader in _readers(codes):
        yield from _sites_of(reader)


def _readers(result: Result) -> Iterator[Node]:
    """Ops that read a result of an op."""
    if len(result.node.meta["names"]) == 1:
        yield from result.node.users
        return
    for item in result.node.users:
        if kind_of(item) == "item" and item.args[1] == result.index:
            yield from item.users


def _sites_of(reader: Node) -> Iterator[str]:
    """Sites named after the linears that a node computes of its quantised input."""
    if kind_of(reader) != "op":
        return
    op = op_of(reader.target)
    if "x_scale" not in op.operands:
        return
    for name, value in zip(op.operands, operands_of(reader), strict=True):
        if value is not None and _WEIGHT.fullmatch(name):
            yield _site(value)


def _site(weight: Node) -> str:
    return name_of(weight).removesuffix(".weight").removesuffix(".fp4") + ".x"


PASS = Pass(
    name="static_scales",
    stage="precision",
    summary="Quantises inputs of linears by calibrated scales, shared by segments of layers.",
    refuses="Sites that were not calibrated. Keys, entries and index vectors keep the scales of their rows.",
    rules=(
        *(
            StaticScale(op)
            for op in (
                ops.quantize,
                ops.rms_norm_quant,
                ops.grouped_linear_quant,
                ops.swiglu_quant,
                ops.hc_pre,
                ops.hc_post_pre,
            )
        ),
        StaticHidden(ops.shared_expert),
        StaticHidden(ops.moe),
    ),
)
