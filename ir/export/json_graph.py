"""A graph as JSON. Stable: equal graphs give equal text.

    format      "rewright.graph"
    ir          version of the graph language
    name, stage, attrs
                the graph's header; attrs as in graph text
    module      the part that was exported, "" for all of it
    context     tokens of the sequence after the step, for which costs are given
    inputs      [{name, type}]; in a part also the results of ops outside that it reads
    states      [{name, type}]
    weights     [{name, type, kind, module, bytes}]; kind is weight or constant
    nodes       op calls in an order of execution:
        names, types    of the results
        op, attrs       attrs with defaults filled in
        operands        value names, null where an optional operand is absent
        module, rule    where it stands, what made it (null: the frontend)
        cost            {reads: {operand: bytes}, writes: bytes, resident: {operand: bytes}, flops}
    results     {result: value name}
    next_state  {state: name of its value after the step}
    leaving     in a part, values that ops outside read

A type is text as in `rewright.ir.types.parse_type`, such as bf16[1,1,4096].
"""

from __future__ import annotations

import json
from typing import Any

from torch.fx import Node

from rewright.ir.graph import IR_VERSION, Graph, kind_of, name_of, operands_of, type_of_value
from rewright.ir.op import op_of
from rewright.ir.subgraph import subgraph
from rewright.ir.traffic import node_cost


def graph_to_json(graph: Graph, *, module: str = "", context: int | None = None) -> dict[str, Any]:
    """The graph, or one module's part of it, as the JSON document described above.

    Args:
        graph: the graph.
        module: path of the part to export.
        context: tokens of the sequence after the step; by default the variant's capacity.

    Raises:
        UsageError: there is no such module.
    """
    part = subgraph(graph, module)
    visible: int = graph.attrs["capacity"] if context is None else context
    return {
        "format": "rewright.graph",
        "ir": IR_VERSION,
        "name": graph.name,
        "stage": graph.stage,
        "attrs": dict(graph.attrs),
        "module": module,
        "context": visible,
        "inputs": [_value(v) for v in (*part.leaves_of("input"), *part.arriving)],
        "states": [_value(v) for v in part.leaves_of("state")],
        "weights": [_weight(v) for v in part.leaves_of("weight", "constant")],
        "nodes": [{**op_record(node), "cost": _cost(node, visible)} for node in part.ops],
        "results": {name: name_of(v) for name, v in part.results.items()},
        "next_state": {name: name_of(v) for name, v in part.next_state.items()},
        "leaving": [name_of(v) for v in part.leaving],
    }


def json_text(document: dict[str, Any]) -> str:
    """A document as it is written to a file: sorted keys, one value a line."""
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def op_record(node: Node) -> dict[str, Any]:
    """Everything a graph says about an op node, as JSON values."""
    op, meta = op_of(node.target), node.meta
    attrs = op.bind_attrs(dict(node.kwargs))
    return {
        "names": list(meta["names"]),
        "types": [str(t) for t in meta["types"]],
        "op": op.name,
        "operands": [None if v is None else name_of(v) for v in operands_of(node)],
        "attrs": {name: list(v) if isinstance(v, (list, tuple)) else v for name, v in attrs.items()},
        "module": meta["module"],
        "rule": meta["rule"],
    }


def _value(value: Node) -> dict[str, Any]:
    return {"name": name_of(value), "type": str(type_of_value(value))}


def _weight(node: Node) -> dict[str, Any]:
    extra = {"kind": kind_of(node), "module": node.meta["module"], "bytes": type_of_value(node).nbytes}
    return {**_value(node), **extra}


def _cost(node: Node, context: int) -> dict[str, Any]:
    cost = node_cost(node, context)
    return {
        "reads": dict(cost.reads),
        "writes": cost.writes,
        "resident": dict(cost.resident),
        "flops": cost.flops,
    }
