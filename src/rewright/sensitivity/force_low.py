"""What always stays in high precision, rounded all the same, to show what it would do.

The rewrites are for experiments only: no plan and no option of `compile-model` leads to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from rewright.ir import ops
from rewright.ir.errors import UsageError
from rewright.ir.graph import Graph, operands_of, type_of_value
from rewright.ir.op import Op, op_of

RULE = "force_low"


@dataclass(frozen=True)
class Forced:
    """An operand that is rounded to e4m3 wherever an op reads it.

    Attributes:
        name: what the command line calls it.
        readers: names of the ops.
        operand: which of their operands.
        what: for people.
    """

    name: str
    readers: tuple[str, ...]
    operand: str
    what: str


FORCED = {
    f.name: f
    for f in (
        Forced("router", ("route", "route_hash"), "logits", "the router's logits"),
        Forced("attention", ("sparse_attention",), "q", "the queries, and with them the attention logits"),
        Forced("hc", ("hc_split", "hc_head_split"), "mix", "the coefficients of Hyper-Connections"),
    )
}


def parse_forced(names: list[str]) -> tuple[Forced, ...]:
    """The roundings of these names; `UsageError` lists the names."""
    for name in names:
        if name not in FORCED:
            raise UsageError(
                f"there is no {name!r}", where="--force-low", fix=f"choose of {', '.join(FORCED)}"
            )
    return tuple(FORCED[name] for name in dict.fromkeys(names))


def force_low(graph: Graph, forced: Forced) -> Graph:
    """A copy of a traced graph in which the operand goes through e4m3, one scale for 32 elements or, where
    there are no 32, for a row."""
    changed = graph.copy()
    for node in changed.ops:
        if op_of(node.target).name in forced.readers:
            _round_operand(changed, node, op_of(node.target).operands.index(forced.operand))
    return changed


def _round_operand(graph: Graph, reader: Node, index: int) -> None:
    value = operands_of(reader)[index]
    assert value is not None
    type = type_of_value(value)
    block = 32 if type.shape[-1] % 32 == 0 else type.shape[-1]
    base = f"{reader.meta['names'][0]}.forced"
    codes = _insert(graph, reader, ops.quantize, [value], {"fmt": "e4m3", "block": block}, f"{base}.codes")
    back = _insert(
        graph,
        reader,
        ops.dequantize,
        [graph.result(codes), graph.result(codes, 1), None],
        {"block": block, "out": type.dtype.text},
        base,
    )
    reader.update_arg(index, back)


def _insert(
    graph: Graph, before: Node, op: Op, operands: list[Node | None], attrs: dict[str, object], name: str
) -> Node:
    # In no module: a plan that drops the roundings of an attention module must not drop this one.
    node = graph.insert(before, op, operands, attrs, module="", rule=RULE, where=name)
    roles = op.roles(attrs)
    graph.name_results(node, [f"{name}.{role}" if role else name for role in roles])
    return node
