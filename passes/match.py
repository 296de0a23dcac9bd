"""Finds the places of a graph that a pattern describes, or the reason why one nearly fits.

A match is a set of op nodes that a rule may replace. The matcher itself sees to two things: a value
inside the match that somebody outside reads makes it fail, unless the rule yields that value too,
and the match is convex, i.e. no path leaves it and comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from torch.fx import Node

from rewright.ir.errors import CompilerBug
from rewright.ir.graph import Graph, kind_of, name_of, operands_of, producer_of, result_index
from rewright.ir.op import op_of, registry
from rewright.passes.pattern import Either, OpPattern, Pattern, ResultOf, Var, labels


@dataclass(frozen=True)
class Match:
    """Nodes and values that a pattern was found at.

    Attributes:
        graph: the graph.
        nodes: matched op node by label.
        values: value by variable name; None for an optional operand that is absent.
        keeps: labels of nodes that were only looked at and stay.
    """

    graph: Graph
    nodes: Mapping[str, Node]
    values: Mapping[str, Node | None]
    keeps: Collection[str] = ()

    def __getitem__(self, name: str) -> Node | None:
        """A bound value, None for an optional operand that is absent."""
        return self.values[name]

    @property
    def replaced(self) -> list[Node]:
        """Nodes that the rule replaces, in order."""
        return sorted(node for label, node in self.nodes.items() if label not in self.keeps)

    def value(self, name: str) -> Node:
        """A bound value that is there."""
        value = self.values[name]
        if value is None:
            raise CompilerBug(f"{name} is absent")
        return value

    def pick(self, *names: str) -> dict[str, Node | None]:
        """Several bound values by name, those that the pattern left out as absent."""
        return {name: self.values.get(name) for name in names}

    def __contains__(self, label: str) -> bool:
        return label in self.nodes

    def attrs(self, label: str) -> dict[str, Any]:
        """Every attribute of a matched node, defaults filled in; empty if it was not matched."""
        if label not in self.nodes:
            return {}
        node = self.nodes[label]
        return op_of(node.target).bind_attrs(dict(node.kwargs))

    def results(self, label: str) -> list[Result]:
        """Every result of a matched node."""
        node = self.nodes[label]
        return [Result(node, i) for i in range(len(node.meta["names"]))]

    def result(self, label: str, index: int = 0) -> Result:
        """One result of a matched node."""
        return Result(self.nodes[label], index)

    def read_outside(self, label: str, index: int = 0) -> list[Node]:
        """Nodes outside the match that read a result of a matched node, the output included."""
        return _outside(self.result(label, index), set(self.replaced))


@dataclass(frozen=True)
class Result:
    """A result of an op node, whether a value node stands for it yet or not."""

    node: Node
    index: int

    @property
    def name(self) -> str:
        return self.node.meta["names"][self.index]


@dataclass(frozen=True)
class Miss:
    """Why a pattern that was tried at a node did not match.

    Attributes:
        anchor: name of the node where it was tried.
        reason: what was found instead.
        node: name of the node that the reason is about.
        depth: pattern nodes that had matched by then.
    """

    anchor: str
    reason: str
    node: str
    depth: int


@dataclass(frozen=True)
class _State:
    nodes: dict[str, Node] = field(default_factory=dict)
    values: dict[str, Node | None] = field(default_factory=dict)


class Matcher:
    """Tries one pattern at nodes of a graph.

    Args:
        graph: the graph.
        roots: op patterns; the first is tried at a node, every further one at readers of values that
            are bound by then.
        yields: labels whose results may be read outside, besides those of roots that feed no other.
        keeps: labels of nodes that stay as they are.
    """

    def __init__(
        self,
        graph: Graph,
        roots: tuple[OpPattern, ...],
        yields: Collection[str] = (),
        keeps: Collection[str] = (),
    ):
        self.graph, self.roots, self.keeps = graph, roots, frozenset(keeps)
        inner = {o for root in roots for _, operand in root.operands for o in labels(operand)}
        self.yields = {root.label for root in roots if root.label not in inner} | {*yields, *keeps}
        self._deepest: Miss | None = None

    def at(self, node: Node) -> Match | Miss:
        """The first match anchored at an op node, or what stood in its way when it got furthest."""
        self._deepest = None
        self._anchor = name_of(node)
        for state in self._node(self.roots[0], node, _State()):
            for full in self._further(self.roots[1:], state):
                match = Match(self.graph, full.nodes, full.values, self.keeps)
                trouble = self._read_outside(match) or not_convex(match)
                if trouble is None:
                    return match
                self._fail(full, *trouble, whole=True)
        if self._deepest is None:
            raise CompilerBug(f"pattern {self.roots[0].op} failed at {self._anchor} without a reason")
        return self._deepest

    # -- structure --------------------------------------------------------------------------

    def _node(self, pattern: OpPattern, node: Node, state: _State) -> Iterator[_State]:
        op = op_of(node.target)
        if op.name != pattern.op:
            self._fail(state, f"{name_of(node)} is {op.name}, not {pattern.op}", node)
            return
        known = state.nodes.get(pattern.label)
        if known is not None:
            if known is node:
                yield state
            else:
                self._fail(state, f"{name_of(node)} and {name_of(known)} are two nodes", node)
            return
        if node in state.nodes.values():
            self._fail(state, f"{name_of(node)} is matched already", node)
            return
        wanted = dict(pattern.operands)
        if unknown := wanted.keys() - set(op.operands):
            raise CompilerBug(f"pattern of {op.name} names {sorted(unknown)}, which it does not have")
        states: Iterator[_State] = iter([_State({**state.nodes, pattern.label: node}, state.values)])
        for name, value in zip(op.operands, operands_of(node), strict=True):
            if name in wanted:
                states = self._each(wanted[name], value, states, node, name)
            elif value is not None:
                self._fail(state, f"operand {name} of {name_of(node)} is present", node)
                return
        yield from states

    def _each(
        self, pattern: Pattern, value: Node | None, states: Iterator[_State], node: Node, operand: str
    ) -> Iterator[_State]:
        for state in states:
            yield from self._value(pattern, value, state, node, operand)

    def _value(
        self, pattern: Pattern, value: Node | None, state: _State, reader: Node, operand: str
    ) -> Iterator[_State]:
        if isinstance(pattern, Either):
            for choice in pattern.choices:
                yield from self._value(choice, value, state, reader, operand)
            return
        if isinstance(pattern, Var):
            yield from self._bind(pattern, value, state, reader, operand)
            return
        wanted, index = (pattern.of, pattern.index) if isinstance(pattern, ResultOf) else (pattern, 0)
        if value is None:
            self._fail(state, f"operand {operand} of {name_of(reader)} is absent", reader)
            return
        producer = producer_of(value)
        if kind_of(producer) != "op":
            self._fail(
                state, f"{operand} of {name_of(reader)} is the {kind_of(producer)} {name_of(value)}", reader
            )
        elif op_of(producer.target).name != wanted.op:
            made = op_of(producer.target).name
            self._fail(state, f"{operand} of {name_of(reader)} is made by {made}, not {wanted.op}", producer)
        elif result_index(value) != index:
            self._fail(state, f"{operand} of {name_of(reader)} is another result of {wanted.op}", producer)
        else:
            yield from self._node(wanted, producer, state)

    def _bind(
        self, var: Var, value: Node | None, state: _State, reader: Node, operand: str
    ) -> Iterator[_State]:
        if value is None and not var.optional:
            self._fail(state, f"operand {operand} of {name_of(reader)} is absent", reader)
        elif var.name in state.values and state.values[var.name] is not value:
            found = "absent" if value is None else name_of(value)
            bound = state.values[var.name]
            other = "absent" if bound is None else name_of(bound)
            self._fail(
                state, f"{operand} of {name_of(reader)} is {found}, elsewhere {var.name} is {other}", reader
            )
        else:
            yield _State(state.nodes, {**state.values, var.name: value})

    def _further(self, roots: tuple[OpPattern, ...], state: _State) -> Iterator[_State]:
        if not roots:
            yield state
            return
        candidates = self._readers(roots[0], state)
        if not candidates:
            anchor = state.nodes[self.roots[0].label]
            self._fail(state, f"no {roots[0].op} reads what belongs to {name_of(anchor)}", anchor)
        for node in candidates:
            for found in self._node(roots[0], node, state):
                yield from self._further(roots[1:], found)

    @staticmethod
    def _readers(root: OpPattern, state: _State) -> list[Node]:
        """Ops of the root's kind that read a value which the pattern binds to one of its operands."""
        values: list[Node] = []
        for _, operand in root.operands:
            if isinstance(operand, Var):
                value = state.values.get(operand.name)
                values += [value] if value is not None else []
            elif isinstance(operand, (OpPattern, ResultOf)):
                label = operand.label if isinstance(operand, OpPattern) else operand.of.label
                values += [state.nodes[label]] if label in state.nodes else []
        found: dict[Node, None] = {}
        # The value with the fewest readers decides: every operand of the root must agree anyway.
        for value in sorted(values, key=lambda v: len(v.users))[:1]:
            readers = [r for u in value.users for r in ([u] if kind_of(u) != "item" else u.users)]
            found |= {r: None for r in readers if kind_of(r) == "op" and op_of(r.target).name == root.op}
        return sorted(found)

    # -- safety -----------------------------------------------------------------------------

    def _read_outside(self, match: Match) -> tuple[str, Node] | None:
        inside = set(match.replaced)
        for label, node in match.nodes.items():
            if label in self.yields:
                continue
            for result in match.results(label):
                for reader in _outside(result, inside):
                    who = (
                        "is a result of the graph"
                        if kind_of(reader) == "output"
                        else f"is also read by {name_of(reader)}"
                    )
                    return f"{result.name} {who}", reader if kind_of(reader) == "op" else node
        return None

    def _fail(self, state: _State, reason: str, node: Node, *, whole: bool = False) -> None:
        """Keep a reason if nothing got further; what fits a whole pattern got further than a part."""
        depth = len(state.nodes)
        if self._deepest is None or depth + whole > self._deepest.depth:
            self._deepest = Miss(self._anchor, reason, name_of(producer_of(node)), depth)


def _outside(result: Result, inside: set[Node]) -> list[Node]:
    """Readers of a result that are not in `inside`."""
    several = len(result.node.meta["names"]) > 1
    readers: list[Node] = []
    for user in result.node.users:
        if not several:
            readers.append(user)
        elif kind_of(user) == "item" and user.args[1] == result.index:
            readers += user.users
    return [r for r in readers if r not in inside]


def not_convex(match: Match) -> tuple[str, Node] | None:
    """A node outside that reads from the match and is read by it, through others or not."""
    inside = set(match.replaced)
    first, last = min(inside), max(inside)
    if not any(reader < last for node in inside for reader in _readers_outside(node, inside)):
        return None  # no way out that could lead back in
    between = nx.DiGraph()
    node = first
    while True:
        if kind_of(node) in ("op", "item"):
            between.add_edges_from((o, node) for o in node.all_input_nodes if o is first or o > first)
        if node is last or node.op == "root":
            break
        node = node.next
    outside = between.subgraph([n for n in between if n not in inside and producer_of(n) not in inside])
    leaves = {n for n in outside if any(producer_of(o) in inside for o in n.all_input_nodes)}
    for start in sorted(leaves):
        for reached in [start, *nx.descendants(outside, start)]:
            for user in reached.users:
                if user in inside:
                    return (
                        f"{name_of(start)} lies between nodes that would become one",
                        start,
                    )
    return None


def _readers_outside(node: Node, inside: set[Node]) -> Iterator[Node]:
    """Nodes outside that read a node or one of its results."""
    for user in node.users:
        if kind_of(user) == "item":
            yield from (reader for reader in user.users if reader not in inside)
        elif user not in inside:
            yield user


def anchors(graph: Graph, op: str) -> list[Node]:
    """Op nodes of one kind, in order."""
    if op not in registry():
        raise CompilerBug(f"there is no op {op}")
    return [node for node in graph.ops if op_of(node.target).name == op]
