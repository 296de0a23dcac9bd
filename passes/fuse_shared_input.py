"""Linears that read the same value become one node with several results."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from rewright.ir import ops
from rewright.ir.graph import Graph, kind_of, operands_of, type_of_value
from rewright.ir.op import op_of
from rewright.ir.ops.fused.linear import MOST_LINEARS
from rewright.passes.base import Pass
from rewright.passes.match import Match, Miss, anchors, not_convex
from rewright.passes.rule import Rewriter, Rule

_ROUTES = ("route", "route_hash")


class SharedInput(Rule):
    """linear(x, W0), linear(x, W1), .. -> multi_linear(x, W0, W1, ..), weights of one format."""

    name = "shared_input"

    def find(self, graph: Graph) -> Iterator[Match | Miss]:
        groups: dict[tuple[object, ...], list[Node]] = {}
        for node in anchors(graph, "linear"):
            groups.setdefault(_what_is_shared(node), []).append(node)
        together = {_what_is_shared(node) for node in anchors(graph, "multi_linear")}
        for key, group in groups.items():
            alone = [n for n in group if (len(group) > 1 or key in together) and _chooses_experts(n)]
            for node in alone:
                name = node.meta["names"][0]
                yield Miss(name, "its result chooses experts, which waits for no other product", name, 2)
            members = [n for n in group if n not in alone]
            for start in range(0, len(members), MOST_LINEARS):
                if len(part := members[start : start + MOST_LINEARS]) > 1:
                    yield self._together(graph, part)

    @staticmethod
    def _together(graph: Graph, nodes: list[Node]) -> Match | Miss:
        x, x_scale, *_ = operands_of(nodes[0])
        match = Match(graph, {f"linear{i}": n for i, n in enumerate(nodes)}, {"x": x, "x_scale": x_scale})
        if trouble := not_convex(match):
            return Miss(nodes[0].meta["names"][0], trouble[0], trouble[1].meta["names"][0], len(nodes))
        return match

    def rewrite(self, m: Match, new: Rewriter) -> None:
        operands = m.pick("x", "x_scale")
        for i, node in enumerate(m.nodes.values()):
            _, _, operands[f"weight{i}"], operands[f"scale{i}"] = operands_of(node)
        outs = ",".join(m.attrs(label)["out"] for label in m.nodes)
        new(ops.multi_linear, operands, {"outs": outs}, gives=[m.result(label) for label in m.nodes])


def _what_is_shared(linear: Node) -> tuple[object, ...]:
    """The activation, and the format of the first weight."""
    x, x_scale, weight, scale, *_ = operands_of(linear)
    assert weight is not None
    return x, x_scale, type_of_value(weight).dtype, scale is None


def _chooses_experts(linear: Node) -> bool:
    return any(kind_of(u) == "op" and op_of(u.target).name in _ROUTES for u in linear.users)


PASS = Pass(
    name="fuse_shared_input",
    stage="fused",
    summary="Makes one node with several results of linears that read the same value.",
    refuses="Different operand values; the gate, whose result everything after it waits for.",
    rules=(SharedInput(),),
    requires=("eliminate_quant",),
)
