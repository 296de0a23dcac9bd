"""A graph as Graphviz dot: one box an op, one frame a module, types on the edges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from rewright.ir.graph import Graph, kind_of, name_of, operands_of, producer_of, result_index, type_of_value
from rewright.ir.names import relative
from rewright.ir.op import op_of
from rewright.ir.subgraph import Subgraph, subgraph

_STYLE = {
    "input": "shape=ellipse",
    "state": "shape=cylinder",
    "weight": 'shape=box, fontsize=8, color="gray60", fontcolor="gray40"',
    "constant": 'shape=box, fontsize=8, style=dashed, color="gray60", fontcolor="gray40"',
    "arriving": "shape=ellipse, style=dashed",
}


def graph_to_dot(graph: Graph, *, module: str = "", weights: bool = False) -> str:
    """The graph, or one module's part of it, for the `dot` program.

    Args:
        graph: the graph.
        module: path of the part to draw; values from outside and to outside are dashed.
        weights: draw weights and constants too, small and gray.

    Raises:
        UsageError: there is no such module.
    """
    part = subgraph(graph, module)
    lines = [
        f"digraph {_quote(graph.name)} {{",
        f"  label={_quote(_title(graph, module))}; labelloc=t; rankdir=TB; fontname=sans;",
        "  node [fontname=sans, fontsize=10, shape=box, style=rounded]; edge [fontname=sans, fontsize=8];",
        *_frame_lines(_frames(part, weights), "  "),
        *_edge_lines(part, weights),
        "}",
    ]
    return "\n".join(lines) + "\n"


@dataclass
class _Frame:
    """A module: statements of its own nodes, and the modules inside it by path."""

    path: str = ""
    statements: list[str] = field(default_factory=list)
    inside: dict[str, _Frame] = field(default_factory=dict)

    def at(self, path: str) -> _Frame:
        """The frame of a module path, made on first use."""
        if path == self.path:
            return self
        parent = self.at(path.rpartition(".")[0])
        return parent.inside.setdefault(path, _Frame(path))


def _frames(part: Subgraph, weights: bool) -> _Frame:
    root = _Frame()
    for node in part.leaves:
        if weights or kind_of(node) in ("input", "state"):
            name = name_of(node)
            # A state is named by its module; other leaves say where they stand.
            path = name.rpartition(".")[0] if kind_of(node) == "state" else node.meta["module"]
            root.at(path).statements.append(_box(node, name, path, _STYLE[kind_of(node)]))
    for value in part.arriving:
        root.statements.append(_box(value, name_of(value), "", _STYLE["arriving"]))
    for node in part.ops:
        root.at(node.meta["module"]).statements.append(_op_box(node))
    return root


def _frame_lines(frame: _Frame, indent: str) -> Iterator[str]:
    for statement in frame.statements:
        yield indent + statement
    for inner in frame.inside.values():
        yield f"{indent}subgraph {_quote('cluster_' + inner.path)} {{"
        yield f'{indent}  label={_quote(inner.path)}; color="gray80";'
        yield from _frame_lines(inner, indent + "  ")
        yield indent + "}"


def _edge_lines(part: Subgraph, weights: bool) -> Iterator[str]:
    arriving = set(part.arriving)
    for node in part.ops:
        for value in operands_of(node):
            if value is not None and (weights or kind_of(value) not in ("weight", "constant")):
                # An op outside is not drawn: its value has a box of its own.
                source = name_of(value) if value in arriving else _id(value)
                yield _edge(source, _id(node), _edge_label(value))
    for name, value in part.results.items():
        end = f"return {name}"
        yield f"  {_quote(end)} [label={_quote(end)}, shape=ellipse];"
        yield _edge(_id(value), end, _edge_label(value))
    for value in part.leaving:
        end = f"leaving {name_of(value)}"
        yield f"  {_quote(end)} [label={_quote(name_of(value))}, {_STYLE['arriving']}];"
        yield _edge(_id(value), end, _edge_label(value))
    drawn = {name_of(n) for n in part.leaves_of("state")}
    for state, value in part.next_state.items():
        if state in drawn:
            # The arrow back must not pull the state below its update.
            yield _edge(_id(value), state, "next", "style=dashed, constraint=false")


def _id(value: Node) -> str:
    """Identity of the box that makes a value: the first name of its node."""
    return producer_of(value).meta["names"][0]


def _box(value: Node, name: str, heading: str, style: str) -> str:
    label = f"{relative(name, heading)}\n{type_of_value(value)}"
    return f"{_quote(name)} [label={_quote(label)}, {style}];"


def _op_box(node: Node) -> str:
    names = ", ".join(relative(n, node.meta["module"]) for n in node.meta["names"])
    attrs = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in sorted(node.kwargs.items()))
    label = "\n".join(filter(None, (op_of(node.target).name, names, attrs, node.meta["rule"])))
    return f"{_quote(_id(node))} [label={_quote(label)}];"


def _edge(source: str, end: str, label: str, style: str = "") -> str:
    return f"  {_quote(source)} -> {_quote(end)} [label={_quote(label)}{', ' + style if style else ''}];"


def _edge_label(value: Node) -> str:
    """Type of a value, with its role where the op has several results."""
    if kind_of(value) != "item":
        return str(type_of_value(value))
    parent = producer_of(value)
    role = op_of(parent.target).roles(dict(parent.kwargs))[result_index(value)]
    return f"{role} {type_of_value(value)}".lstrip()


def _title(graph: Graph, module: str) -> str:
    return f"{graph.name}, stage {graph.stage}" + (f", {module}" if module else "")


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
