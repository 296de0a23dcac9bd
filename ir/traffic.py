"""Bytes that one execution of a graph moves, from the cost hooks of its ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Node

from rewright.ir.graph import Graph, kind_of, name_of, operands_of, type_of_value, updated_state
from rewright.ir.op import Cost, op_of


@dataclass(frozen=True)
class Traffic:
    """Totals of a graph.

    Attributes:
        reads: bytes read, by kind of the value read (weight, constant, state, input, op). The next
            value of a state is state.
        weight_reads: bytes read of each weight, by name.
        resident: bytes of each weight as stored, by name.
        written: bytes written (results of ops, state updates).
        flops: floating-point operations.
    """

    reads: Counter[str] = field(default_factory=Counter)
    weight_reads: Counter[str] = field(default_factory=Counter)
    resident: dict[str, int] = field(default_factory=dict)
    written: int = 0
    flops: int = 0


def node_cost(node: Node, context: int) -> Cost:
    """Cost of one op node with `context` tokens visible after the step."""
    operands = tuple(None if v is None else type_of_value(v) for v in operands_of(node))
    return op_of(node.target).estimate(operands, dict(node.kwargs), context)


def traffic(graph: Graph, context: int | None = None) -> Traffic:
    """Add up a graph's ops.

    Args:
        graph: the graph.
        context: tokens of the sequence after the step; by default the variant's capacity.
    """
    visible: int = graph.attrs["capacity"] if context is None else context
    reads: Counter[str] = Counter()
    weight_reads: Counter[str] = Counter()
    written = flops = 0
    for node in graph.ops:
        cost = node_cost(node, visible)
        written += cost.writes
        flops += cost.flops
        for name, value in zip(op_of(node.target).operands, operands_of(node), strict=True):
            if value is None:
                continue
            kind = _kind_read(value)
            reads[kind] += cost.reads[name]
            if kind == "weight":
                weight_reads[name_of(value)] += cost.reads[name]
    resident = {name_of(n): type_of_value(n).nbytes for n in graph.of_kind("weight")}
    return Traffic(reads, weight_reads, resident, written, flops)


def _kind_read(value: Node) -> str:
    if updated_state(value) is not None:
        return "state"
    kind = kind_of(value)
    return "op" if kind == "item" else kind


def by_component(amounts: dict[str, int], component: Callable[[str], str]) -> dict[str, int]:
    """Sum per-weight bytes by component, largest first."""
    totals: Counter[str] = Counter()
    for name, amount in amounts.items():
        totals[component(name)] += amount
    return dict(totals.most_common())
