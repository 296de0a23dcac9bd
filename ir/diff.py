"""What differs between two graphs: values and ops are matched by stable name, order is ignored.

An op node goes by the name of its first result. Two graphs are the same in structure when they
have the same leaves, ops and outputs; their headers (name, stage, attributes) may differ, and do
between two stages or two variants. `rewright.ir.diff_text` prints a diff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from rewright.ir.export.json_graph import op_record
from rewright.ir.graph import IR_VERSION, LEAVES, Graph, kind_of, name_of

_ABSENT = object()


@dataclass(frozen=True)
class Aspect:
    """One difference, as JSON values; None stands for what is absent on that side.

    Attributes:
        name: type, kind or module of a leaf; names, types, op, operands, attrs, module or rule of
            an op, of its attrs those that differ; a dotted key of the header; an output.
    """

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Change:
    """A leaf or an op node that one graph has and the other lacks, or that differs.

    Attributes:
        name: the value's name, of an op node its first result's.
        before: the node in the first graph, None if it was added.
        after: the node in the second graph, None if it was removed.
        aspects: what differs between the two; empty unless both exist.
    """

    name: str
    before: Node | None
    after: Node | None
    aspects: tuple[Aspect, ...] = ()

    @property
    def how(self) -> str:
        """removed | added | changed."""
        return "removed" if self.after is None else "added" if self.before is None else "changed"

    @property
    def node(self) -> Node:
        """The node as it is now, or as it was when it is gone."""
        node = self.after or self.before
        assert node is not None
        return node

    @property
    def kind(self) -> str:
        return kind_of(self.node)

    @property
    def module(self) -> str:
        return self.node.meta["module"]


@dataclass(frozen=True)
class GraphDiff:
    """Differences from one graph to another.

    Attributes:
        before, after: the graphs.
        header: differing name, stage and attributes (`attrs.numerics`).
        leaves: inputs, states, weights and constants, by kind, then in graph order.
        nodes: op nodes in the order of the second graph; a removed one follows the node that it
            followed in the first.
        outputs: differing results (`return logits`) and next values of states (`next NAME`).
    """

    before: Graph
    after: Graph
    header: tuple[Aspect, ...]
    leaves: tuple[Change, ...]
    nodes: tuple[Change, ...]
    outputs: tuple[Aspect, ...]

    @property
    def empty(self) -> bool:
        """Whether the graphs have the same structure, headers aside."""
        return not (self.leaves or self.nodes or self.outputs)

    def modules(self) -> dict[str, list[Change]]:
        """Changed op nodes by module, modules in the order of their first change."""
        groups: dict[str, list[Change]] = {}
        for change in self.nodes:
            groups.setdefault(change.module, []).append(change)
        return groups


def diff_graphs(before: Graph, after: Graph) -> GraphDiff:
    """Compare two graphs, of the same variant or not."""
    leaves = _changes(before.of_kind(*LEAVES), after.of_kind(*LEAVES), _leaf_record)
    return GraphDiff(
        before=before,
        after=after,
        header=_aspects(_flat_header(before), _flat_header(after)),
        leaves=tuple(sorted(leaves, key=lambda c: LEAVES.index(c.kind))),
        nodes=tuple(_changes(before.ops, after.ops, op_record)),
        outputs=_aspects(_output_record(before), _output_record(after)),
    )


def to_json(diff: GraphDiff) -> dict[str, Any]:
    """The diff as JSON; lists are sorted by name, so that it does not depend on node order.

        format          "rewright.graph-diff"
        ir              version of the graph language
        before, after   {name, stage, attrs} of the two graphs
        empty           whether the structure is the same
        header          [{name, before, after}]
        leaves, nodes   {removed, added, changed}: records of the first two, of the last
                        [{name, kind, module, aspects: [{name, before, after}]}]
        outputs         [{name, before, after}]; a name is "return RESULT" or "next STATE"

    The record of a leaf is {name, type, kind, module}, that of an op as in `export.json_graph`
    without its cost. An aspect's before or after is null where that side has nothing.
    """
    return {
        "format": "rewright.graph-diff",
        "ir": IR_VERSION,
        "before": _header(diff.before),
        "after": _header(diff.after),
        "empty": diff.empty,
        "header": _aspects_json(diff.header),
        "leaves": _changes_json(diff.leaves),
        "nodes": _changes_json(diff.nodes),
        "outputs": _aspects_json(diff.outputs),
    }


def _changes(
    before: Sequence[Node], after: Sequence[Node], record: Callable[[Node], dict[str, Any]]
) -> list[Change]:
    old = {n.meta["names"][0]: n for n in before}
    new = {n.meta["names"][0]: n for n in after}
    changes = []
    for name in _merged(old, new):
        if name in old and name in new:
            aspects = _aspects(record(old[name]), record(new[name]))
            if aspects:
                changes.append(Change(name, old[name], new[name], aspects))
        else:
            changes.append(Change(name, old.get(name), new.get(name)))
    return changes


def _merged(old: Mapping[str, Node], new: Mapping[str, Node]) -> list[str]:
    """Names of both: the second's in its order, each of the first's behind its predecessor there."""
    behind: dict[str | None, list[str]] = {}
    anchor = None
    for name in old:
        if name in new:
            anchor = name
        else:
            behind.setdefault(anchor, []).append(name)
    merged = behind.get(None, [])
    for name in new:
        merged += [name, *behind.get(name, ())]
    return merged


def _aspects(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Aspect, ...]:
    """Entries that differ, in sorted order; of two dicts only the entries that differ inside."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            inner = _aspects(a, b)
            a = {i.name: i.before for i in inner if i.name in a}
            b = {i.name: i.after for i in inner if i.name in b}
        found.append(Aspect(name, None if a is _ABSENT else a, None if b is _ABSENT else b))
    return tuple(found)


def _leaf_record(node: Node) -> dict[str, Any]:
    return {
        "name": name_of(node),
        "type": str(node.meta["types"][0]),
        "kind": kind_of(node),
        "module": node.meta["module"],
    }


def _output_record(graph: Graph) -> dict[str, str]:
    returned = {f"return {name}": name_of(v) for name, v in graph.results.items()}
    return returned | {f"next {state}": name_of(v) for state, v in graph.next_state.items()}


def _header(graph: Graph) -> dict[str, Any]:
    return {"name": graph.name, "stage": graph.stage, "attrs": dict(graph.attrs)}


def _flat_header(graph: Graph) -> dict[str, Any]:
    attrs = {f"attrs.{name}": value for name, value in graph.attrs.items()}
    return {"name": graph.name, "stage": graph.stage, **attrs}


def _changes_json(changes: Sequence[Change]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {"removed": [], "added": [], "changed": []}
    for change in sorted(changes, key=lambda c: c.name):
        if change.how == "changed":
            entry: dict[str, Any] = {"name": change.name, "kind": change.kind, "module": change.module}
            entry["aspects"] = _aspects_json(change.aspects)
        else:
            entry = op_record(change.node) if change.kind == "op" else _leaf_record(change.node)
        groups[change.how].append(entry)
    return groups


def _aspects_json(aspects: Sequence[Aspect]) -> list[dict[str, Any]]:
    return [{"name": a.name, "before": a.before, "after": a.after} for a in aspects]
