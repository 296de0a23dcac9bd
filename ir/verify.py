"""Invariants of a graph. Every problem is listed, not the first only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch.fx import Node

from rewright.ir.errors import VerifyError
from rewright.ir.graph import STAGES, Graph, kind_of, name_of, operands_of, type_of_value
from rewright.ir.op import TypeMismatch, op_of
from rewright.ir.types import ROW_ALIGN, ValueType


def verify(graph: Graph, weights: Mapping[str, ValueType] | None = None) -> None:
    """Raise `VerifyError` unless the graph keeps every invariant of its stage.

    Args:
        graph: the graph.
        weights: types of the weights and constants that exist, by name; not checked if None.
    """
    problems = list(find_problems(graph, weights))
    if problems:
        raise VerifyError(graph.name, problems)


def find_problems(
    graph: Graph, weights: Mapping[str, ValueType] | None = None, trusted: Mapping[Node, object] | None = None
) -> Iterator[str]:
    """One line for each broken invariant.

    Args:
        graph: the graph.
        weights: types of the weights and constants that exist, by name; not checked if None.
        trusted: arguments (`node.args`) of op nodes whose types were inferred before; a node that still
            has them is not inferred again.
    """
    yield from _order(graph)
    yield from _names(graph)
    yield from _types(graph, trusted or {})
    yield from _stage(graph)
    yield from _state(graph)
    yield from _layouts(graph)
    if weights is not None:
        yield from _weights(graph, weights)


def _order(graph: Graph) -> Iterator[str]:
    seen: set[Node] = set()
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                yield f"{_label(node)} uses {_label(operand)}, which is not defined before it"
            if kind_of(node) != "item" and kind_of(operand) == "op" and len(operand.meta["names"]) > 1:
                yield f"{_label(node)} uses the results of {_label(operand)} all at once"
        seen.add(node)
    if graph.output is None:
        yield "the graph has no output"


def _names(graph: Graph) -> Iterator[str]:
    seen: set[str] = set()
    for node in graph.nodes:
        for name in node.meta.get("names", ()):
            if name in seen:
                yield f"two values are called {name}"
            seen.add(name)


def _types(graph: Graph, trusted: Mapping[Node, object]) -> Iterator[str]:
    for node in graph.ops:
        if trusted.get(node) is node.args:
            continue
        op = op_of(node.target)
        try:
            operands = tuple(None if v is None else type_of_value(v) for v in operands_of(node))
            inferred = op.infer_types(operands, dict(node.kwargs))
        except TypeMismatch as e:
            yield f"{_label(node)}: {op.name} cannot take its operands: {e}"
            continue
        if inferred != tuple(t.dense for t in node.meta["types"]):
            yield f"{_label(node)}: typed {_show(node.meta['types'])}, inferred {_show(inferred)}"


def _stage(graph: Graph) -> Iterator[str]:
    if graph.stage not in STAGES:
        yield f"there is no stage {graph.stage}"
        return
    for node in graph.ops:
        op = op_of(node.target)
        if STAGES.index(op.since) > STAGES.index(graph.stage):
            yield f"{_label(node)}: {op.name} may not appear before stage {op.since}"


def _state(graph: Graph) -> Iterator[str]:
    """Every state has one next value of its type, reached by a chain of updates that all count."""
    if graph.output is None:
        return
    states = {name_of(n): n for n in graph.of_kind("state")}
    following = graph.next_state
    for name in sorted(states.keys() ^ following.keys()):
        missing = "has no next value" if name in states else "does not exist, but has a next value"
        yield f"state {name} {missing}"
    origin: dict[Node, str] = {node: name for name, node in states.items()}
    last: dict[str, Node] = dict(states)
    for node in graph.ops:
        op = op_of(node.target)
        operands = operands_of(node)
        for result, at in op.updated(dict(node.kwargs)).items():
            before = operands[at] if at < len(operands) else None
            if before is None or before not in origin:
                yield f"{_label(node)}: {op.name} updates a value that is no state"
                continue
            name, after = origin[before], graph.result(node, result)
            if last[name] is not before:
                yield f"{_label(node)}: updates {_label(before)}, but {_label(last[name])} is newer"
            origin[after], last[name] = name, after
    for name, value in following.items():
        if name in last and value is not last[name]:
            yield f"state {name}: its next value is {_label(value)}, not its last update {_label(last[name])}"


def _layouts(graph: Graph) -> Iterator[str]:
    """Padded rows are for activations, from stage `layout` on, and only where the reader can skip them."""
    if all(t.pitch is None for node in graph.nodes for t in node.meta.get("types", ())):
        return
    placed = graph.stage in STAGES and STAGES.index(graph.stage) >= STAGES.index("layout")
    for node in graph.nodes:
        for name, type in zip(node.meta.get("names", ()), node.meta.get("types", ()), strict=True):
            if type.pitch is None:
                continue
            if kind_of(node) != "op":
                yield f"{kind_of(node)} {name} is {type}: only activations have padded rows"
            elif not placed:
                yield f"{name} is {type}: rows are padded from stage layout on"
            elif type.pitch % ROW_ALIGN or type.pitch < type.row_bytes:
                yield f"{name} is {type}: the pitch is no multiple of {ROW_ALIGN} that holds a row"
        if kind_of(node) == "op":
            op = op_of(node.target)
            for name, value in zip(op.operands, operands_of(node), strict=False):
                if value is not None and name in op.dense and type_of_value(value).pitch is not None:
                    yield f"{_label(node)}: {op.name} needs {_label(value)} without padded rows"


def _weights(graph: Graph, weights: Mapping[str, ValueType]) -> Iterator[str]:
    for node in graph.of_kind("weight", "constant"):
        name, stated = name_of(node), type_of_value(node)
        if name not in weights:
            yield f"weight {name} does not exist"
        elif weights[name] != stated:
            yield f"weight {name} is {weights[name]}, the graph says {stated}"


def unused_weights(graph: Graph, weights: Collection[str]) -> list[str]:
    """Names in `weights` that the graph never reads, sorted."""
    return sorted(set(weights) - {name_of(n) for n in graph.of_kind("weight", "constant")})


def _label(node: Node) -> str:
    kind = kind_of(node)
    return kind if kind == "output" else name_of(node)


def _show(types: tuple[ValueType, ...]) -> str:
    return ", ".join(map(str, types))
