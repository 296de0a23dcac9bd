"""One layout per value: no launch that only moves data, rows where kernels want them."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from rewright.ir import ops
from rewright.ir.graph import Graph, kind_of, producer_of, result_index
from rewright.ir.layout import padded
from rewright.ir.op import op_of
from rewright.ir.types import ROW_ALIGN
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, maybe, p
from rewright.passes.rule import Log, No, Ok, Rewriter, Rule, Transform, Verdict


class FlatGroups(Rule):
    """A grouped product whose groups are laid side by side is written that way."""

    name = "flat_groups"

    def pattern(self) -> OpPattern:
        product = p.grouped_linear("product", x="x", weight="weight", scale=maybe("scale"))
        return p.reshape("flat", x=product)

    def check(self, m: Match, facts: Facts) -> Verdict:
        flat = m.attrs("flat")
        if len(flat["tail"]) != 1 or flat["keep"] != 2:
            return No("the groups are not laid side by side", m.nodes["flat"])
        return Ok()

    def rewrite(self, m: Match, new: Rewriter) -> None:
        operands = m.pick("x", "weight", "scale")
        new(ops.grouped_linear, operands, {"flat": True}, gives=[m.result("flat")])


class PadRows(Transform):
    """Rows of activations begin at multiples of 128 bytes.

    State, and what leaves the graph, keeps its rows back to back, as do values whose rows a reader
    takes apart.
    """

    name = "pad_rows"

    def apply(self, graph: Graph, facts: Facts, log: Log) -> bool:
        found = 0
        for node, index in _paddable(graph):
            types = list(node.meta["types"])
            types[index] = padded(types[index])
            if types[index] != node.meta["types"][index]:
                node.meta["types"] = tuple(types)
                found += 1
        log.matches += found
        return found > 0


def _paddable(graph: Graph) -> Iterator[tuple[Node, int]]:
    fixed = {(producer_of(v), result_index(v)) for v in graph.results.values()}
    for node in graph.ops:
        op = op_of(node.target)
        for name, value in zip(op.operands, node.args, strict=True):
            if name in op.dense and isinstance(value, Node) and kind_of(producer_of(value)) == "op":
                fixed.add((producer_of(value), result_index(value)))
    for node in graph.ops:
        states = op_of(node.target).updated(dict(node.kwargs))
        for index, type in enumerate(node.meta["types"]):
            if index not in states and (node, index) not in fixed and len(type.shape) > 1:
                yield node, index


def _unaligned(graph: Graph) -> Iterator[str]:
    for node, index in _paddable(graph):
        type = node.meta["types"][index]
        if (type.pitch or type.row_bytes) % ROW_ALIGN:
            yield f"rows of {node.meta['names'][index]} are not at multiples of {ROW_ALIGN} bytes"


PASS = Pass(
    name="unify_layout",
    stage="layout",
    summary="Gives every value one layout: no view left where its maker can write it, rows aligned.",
    refuses="State, results of the graph, and rows that a reader takes apart keep their rows back to back.",
    rules=(FlatGroups(), PadRows()),
    ensures=_unaligned,
)
