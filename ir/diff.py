"""What differs between two graphs: values and ops are matched by stable name, order is ignored.

An op node goes by the name of its first result. Two graphs are the same in structure when they
have the same leaves, ops and outputs; their headers (name, stage, attributes) may differ, and do
between two stages or two variants. `diff_text` prints a diff, `diff_stat` adds it up, `diff_json` is
its JSON form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from rewright.ir.export.json_graph import op_record
from rewright.ir.graph import LEAVES, Graph, kind_of, name_of
from rewright.ir.names import within
from rewright.ir.rewrites import Rewrite, find_rewrites
from rewright.ir.subgraph import module_paths, subgraph

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
    def nodes(self) -> tuple[Node, ...]:
        """What there is of the two."""
        return tuple(n for n in (self.before, self.after) if n is not None)

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
        rewrites: which op nodes stand for which and the rule that did it, in the order of the second
            graph.
        rest: `nodes` without what the rewrites explain.
        module: the part that is compared, "" for all of it.
    """

    before: Graph
    after: Graph
    header: tuple[Aspect, ...]
    leaves: tuple[Change, ...]
    nodes: tuple[Change, ...]
    outputs: tuple[Aspect, ...]
    rewrites: tuple[Rewrite, ...]
    rest: tuple[Change, ...]
    module: str = ""

    @property
    def empty(self) -> bool:
        """Whether the graphs have the same structure, headers aside."""
        return not (self.leaves or self.nodes or self.outputs)

    def ops(self, graph: Graph) -> list[Node]:
        """Op nodes of one of the two graphs that the diff is about, in order.

        These are the nodes under `module`, and those outside that took part in something within.
        """
        involved = {n for r in self.rewrites for n in r.nodes} | {n for c in self.rest for n in c.nodes}
        return [n for n in graph.ops if n in involved or within(n.meta["module"], self.module)]

    def within(self, module: str) -> GraphDiff:
        """What differs under a module: its own changes, and whole every rewrite that it has a node of.

        Raises:
            UsageError: neither graph has the module.
        """
        if module not in (*module_paths(self.before), *module_paths(self.after)):
            subgraph(self.after, module)  # refuses it, and says what there is
        here = {n for g in (self.before, self.after) for n in g.ops if within(n.meta["module"], module)}
        rewrites = tuple(r for r in self.rewrites if not here.isdisjoint(r.nodes))
        shown = here.union(*(r.nodes for r in rewrites))
        return replace(
            self,
            leaves=tuple(c for c in self.leaves if within(c.name, module) or within(c.module, module)),
            nodes=tuple(c for c in self.nodes if not shown.isdisjoint(c.nodes)),
            outputs=tuple(a for a in self.outputs if _touches(a, module)),
            rewrites=rewrites,
            rest=tuple(c for c in self.rest if not here.isdisjoint(c.nodes)),
            module=module,
        )


def diff_graphs(before: Graph, after: Graph) -> GraphDiff:
    """Compare two graphs, of the same variant or not."""
    leaves = _changes(before.of_kind(*LEAVES), after.of_kind(*LEAVES), leaf_record)
    nodes = _changes(before.ops, after.ops, op_record)
    rewrites = find_rewrites(before, after)
    return GraphDiff(
        before=before,
        after=after,
        header=_aspects(_flat_header(before), _flat_header(after)),
        leaves=tuple(sorted(leaves, key=lambda c: LEAVES.index(c.kind))),
        nodes=tuple(nodes),
        outputs=_aspects(_output_record(before), _output_record(after)),
        rewrites=rewrites,
        rest=tuple(_unexplained(nodes, rewrites)),
    )


def leaf_record(node: Node) -> dict[str, Any]:
    """Everything a graph says about a leaf, as JSON values."""
    return {
        "name": name_of(node),
        "type": str(node.meta["types"][0]),
        "kind": kind_of(node),
        "module": node.meta["module"],
    }


def _unexplained(changes: Sequence[Change], rewrites: Sequence[Rewrite]) -> Iterator[Change]:
    explained = {n for r in rewrites for n in r.nodes}
    for change in changes:
        before = None if change.before in explained else change.before
        after = None if change.after in explained else change.after
        if before is not None and after is not None:
            yield change
        elif before is not None or after is not None:
            yield Change(change.name, before, after)


def _touches(output: Aspect, module: str) -> bool:
    names = (output.name.partition(" ")[2], output.before, output.after)
    return any(isinstance(name, str) and within(name, module) for name in names)


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


def _output_record(graph: Graph) -> dict[str, str]:
    returned = {f"return {name}": name_of(v) for name, v in graph.results.items()}
    return returned | {f"next {state}": name_of(v) for state, v in graph.next_state.items()}


def _flat_header(graph: Graph) -> dict[str, Any]:
    attrs = {f"attrs.{name}": value for name, value in graph.attrs.items()}
    return {"name": graph.name, "stage": graph.stage, **attrs}
