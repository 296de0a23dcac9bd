"""Canonical graph text. `parser.parse` reads it back; docs/ir.md has the grammar.

One node a line: names and types first, then the op, its operands, its attributes in braces, and
behind // the rule that made it. Lines stand under their module path; names are relative to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Node

from rewright.ir.graph import IR_VERSION, LEAVES, Graph, kind_of, name_of, operands_of
from rewright.ir.names import relative, within
from rewright.ir.op import op_of


def print_graph(graph: Graph, *, module: str = "") -> str:
    """The whole graph, or only the nodes of one module's subtree (which does not parse back)."""
    return "\n".join(_lines(graph, module)) + "\n"


def _lines(graph: Graph, module: str) -> Iterator[str]:
    yield f"graph {graph.name}{_attrs(graph.attrs)}"
    yield f"stage {graph.stage}"
    yield f"ir {IR_VERSION}"
    yield ""
    for node in graph.of_kind("input", "state"):
        if within(node.meta["names"][0], module):
            yield f"{kind_of(node)} %{node.meta['names'][0]} : {node.meta['types'][0]}"
    heading: str | None = None
    for node in graph.nodes:
        if kind_of(node) not in ("weight", "constant", "op") or not within(node.meta["module"], module):
            continue
        if node.meta["module"] != heading:
            heading = node.meta["module"]
            yield ""
            yield f"{heading or '.'}:"
        yield "  " + print_node(node, node.meta["module"])
    if module:
        return
    yield ""
    for name, value in graph.results.items():
        yield f"return {name} = %{name_of(value)}"
    for name, value in graph.next_state.items():
        yield f"next %{name} = %{name_of(value)}"


def print_node(node: Node, heading: str) -> str:
    """One weight, constant or op line without indentation."""
    names = ", ".join(_value(kind_of(node), n, heading) for n in node.meta["names"])
    types = ", ".join(str(t) for t in node.meta["types"])
    if kind_of(node) != "op":
        return f"{'constant ' if kind_of(node) == 'constant' else ''}{names} : {types}"
    present = list(operands_of(node))
    while present and present[-1] is None:
        present.pop()
    operands = ", ".join("_" if v is None else _value(kind_of(v), name_of(v), heading) for v in present)
    rule = f"  // {node.meta['rule']}" if node.meta["rule"] else ""
    return f"{names} : {types} = {op_of(node.target).name}({operands}){_attrs(node.kwargs)}{rule}"


def _value(kind: str, name: str, heading: str) -> str:
    sigil = "@" if kind in ("weight", "constant") else "%"
    # Inputs and states are always absolute, so that a read of state stands out.
    if kind in LEAVES and sigil == "%" and heading:
        return f"%.{name}"
    return sigil + relative(name, heading)


def _attrs(attrs: Mapping[str, Any]) -> str:
    if not attrs:
        return ""
    body = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in sorted(attrs.items()))
    return f" {{{body}}}"
