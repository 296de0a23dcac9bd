"""The graph: a torch.fx graph of Rewright ops with stable names, types and state.

Node kinds (`kind_of`): input, state and constant/weight leaves; op calls; item, which picks one
result of an op with several; output. A *value* is a leaf, an op with one result, or an item.
A graph is built, parsed and copied through the same methods, so every node is typed on entry.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import networkx as nx
import torch.fx
from torch.fx import Node

from rewright.ir.errors import CompilerBug
from rewright.ir.names import join
from rewright.ir.op import Op, TypeMismatch, op_of, registry
from rewright.ir.types import ValueType

IR_VERSION = 1
STAGES = ("traced", "canonical", "fused", "precision", "layout", "selected", "planned")
LEAVES = ("input", "state", "weight", "constant")


def kind_of(node: Node) -> str:
    """input | state | weight | constant | op | item | output, or erased (in no graph any more)."""
    return node.meta["kind"]


def name_of(value: Node) -> str:
    """Stable name of a value."""
    if kind_of(value) == "item":
        parent, index = value.args
        return parent.meta["names"][index]  # type: ignore[union-attr]
    return value.meta["names"][0]


def type_of_value(value: Node) -> ValueType:
    """Type of a value."""
    if kind_of(value) == "item":
        parent, index = value.args
        return parent.meta["types"][index]  # type: ignore[union-attr]
    return value.meta["types"][0]


def operands_of(node: Node) -> tuple[Node | None, ...]:
    """Operand values of an op node in the op's order; None where an optional one is absent."""
    return node.args  # type: ignore[return-value]


def result_index(value: Node) -> int:
    """Which of its producer's results a value is."""
    return value.args[1] if kind_of(value) == "item" else 0  # type: ignore[return-value]


def updated_state(value: Node) -> Node | None:
    """The state value of which an op's result is the next one, None if it is no state's."""
    node = producer_of(value)
    if kind_of(node) != "op":
        return None
    at = op_of(node.target).updated(dict(node.kwargs)).get(result_index(value))
    return None if at is None else operands_of(node)[at]


def producer_of(value: Node) -> Node:
    """The node that makes a value: the op itself for an item."""
    return value.args[0] if kind_of(value) == "item" else value  # type: ignore[return-value]


class Graph:
    """One variant of a model's step function.

    Attributes:
        name: the variant's name.
        stage: how far it has been rewritten, one of `STAGES`.
        attrs: what it was made for (model, numerics, batch, tokens, capacity, ...), JSON scalars.
        fx: the torch.fx graph underneath.
    """

    def __init__(self, name: str, *, stage: str = "traced", attrs: Mapping[str, Any] | None = None):
        self.name = name
        self.stage = stage
        self.attrs = dict(attrs or {})
        self.fx = torch.fx.Graph()
        self._values: dict[str, Node] = {}

    # -- building ---------------------------------------------------------------------------

    def leaf(self, kind: str, name: str, type: ValueType, module: str = "") -> Node:
        """Append an input or a state, which come before everything else, a weight or a constant."""
        if kind not in LEAVES:
            raise CompilerBug(f"{kind} is no kind of leaf")
        fx_op = "placeholder" if kind in ("input", "state") else "get_attr"
        last = next(iter(reversed(self.fx.nodes)), None)  # torch 2.11 gives no iterator
        if fx_op == "placeholder" and last is not None and last.op != "placeholder":
            raise CompilerBug(f"{kind} {name} comes after other nodes")
        node = self.fx.create_node(fx_op, name, name=_identifier(name))
        return self._register(node, kind, (name,), (type,), module)

    def call(
        self,
        op: Op,
        operands: Sequence[Node | None],
        attrs: Mapping[str, Any],
        *,
        names: Sequence[str],
        module: str,
        rule: str | None = None,
    ) -> Node:
        """Append an op call and infer its types; `CompilerBug` if the operands do not fit."""
        node = self._call(op, operands, attrs, names[0])
        if len(names) != len(node.meta["types"]):
            raise CompilerBug(f"{op.name} has {len(node.meta['types'])} results, not {len(names)}")
        return self._register(node, "op", tuple(names), node.meta["types"], module, rule)

    def _call(self, op: Op, operands: Sequence[Node | None], attrs: Mapping[str, Any], where: str) -> Node:
        types = self.infer(op, operands, attrs, where=where)
        given = op.given_attrs(dict(attrs))
        node = self.fx.create_node("call_function", op.target, tuple(operands), given, _identifier(where))
        node.meta["types"] = types
        return node

    @staticmethod
    def infer(
        op: Op, operands: Sequence[Node | None], attrs: Mapping[str, Any], where: str
    ) -> tuple[ValueType, ...]:
        """Result types of a call on these operands."""
        try:
            return op.infer_types(
                tuple(None if v is None else type_of_value(v) for v in operands), dict(attrs)
            )
        except TypeMismatch as e:
            raise CompilerBug(f"{where}: {op.name} cannot take its operands: {e}") from e

    def result(self, node: Node, index: int = 0) -> Node:
        """The value of an op's result `index`."""
        if len(node.meta["names"]) == 1:
            return node
        for user in node.users:
            if kind_of(user) == "item" and user.args[1] == index:
                return user
        with self.fx.inserting_after(node):
            item = self.fx.create_node("call_function", operator.getitem, (node, index))
        item.meta["kind"] = "item"
        if name := node.meta["names"][index]:
            self._values[name] = item
        return item

    def finish(self, results: Mapping[str, Node], next_state: Mapping[str, Node]) -> None:
        """Append the output: named results, and the next value of every state."""
        node = self.fx.output((tuple(results.values()), tuple(next_state.values())))
        node.meta.update(kind="output", results=tuple(results), states=tuple(next_state))

    def _register(
        self,
        node: Node,
        kind: str,
        names: tuple[str, ...],
        types: tuple[ValueType, ...],
        module: str,
        rule: str | None = None,
    ) -> Node:
        node.meta.update(kind=kind, names=names, types=types, module=module, rule=rule)
        for name in names:
            if name in self._values:
                raise CompilerBug(f"two values are called {name}")
            self._values[name] = node
        return node

    # -- rewriting --------------------------------------------------------------------------

    def insert(
        self,
        before: Node,
        op: Op,
        operands: Sequence[Node | None],
        attrs: Mapping[str, Any],
        *,
        module: str,
        rule: str,
        where: str,
    ) -> Node:
        """A call in front of `before` without names: `name_results` gives it those that it takes over.

        `where` is what an error about it is reported at.
        """
        with self.fx.inserting_before(before):
            node = self._call(op, operands, attrs, where)
        node.meta.update(kind="op", names=("",) * len(node.meta["types"]), module=module, rule=rule)
        return node

    def insert_leaf(self, before: Node, kind: str, name: str, type: ValueType, module: str) -> Node:
        """A weight or constant in front of `before`."""
        with self.fx.inserting_before(before):
            return self.leaf(kind, name, type, module)

    def name_results(self, node: Node, names: Sequence[str]) -> None:
        """Name the results of a node that `insert` made."""
        self._register(node, "op", tuple(names), node.meta["types"], node.meta["module"], node.meta["rule"])
        for user in node.users:
            if kind_of(user) == "item":
                self._values[names[user.args[1]]] = user  # type: ignore[index]

    def redirect(self, old: Node, new: Node) -> None:
        """Let every reader of a value, the output included, read another one instead."""
        old.replace_all_uses_with(new)

    def erase(self, node: Node) -> None:
        """Remove an op that nobody reads, and weights and constants that only it read."""
        operands = [v for v in operands_of(node) if v is not None]
        for item in list(node.users):
            if kind_of(item) == "item" and not item.users:
                self.fx.erase_node(item)
        if node.users:
            users = [r for u in node.users for r in ([u] if kind_of(u) != "item" else u.users)]
            readers = ", ".join(sorted({_describe(u) for u in users}))
            raise CompilerBug(f"{node.meta['names'][0]} is erased while {readers} reads it")
        for name in node.meta["names"]:
            self._values.pop(name, None)
        self.fx.erase_node(node)
        node.meta["kind"] = "erased"
        for leaf in dict.fromkeys(operands):
            if kind_of(leaf) in ("weight", "constant") and not leaf.users:
                del self._values[name_of(leaf)]
                self.fx.erase_node(leaf)

    def settle(self, first: Node, last: Node) -> None:
        """Sort the nodes from `first` to `last` so that each comes after what it reads.

        Otherwise their order stays; weights and constants move to their first reader.
        """
        window = [first]
        while window[-1] is not last:
            window.append(window[-1].next)
            if window[-1].op == "root":
                raise CompilerBug(f"{_describe(first)} does not come before {_describe(last)}")
        place = {node: i for i, node in enumerate(window)}
        order = nx.DiGraph()
        order.add_nodes_from(window)
        for node in window:
            order.add_edges_from((operand, node) for operand in node.all_input_nodes if operand in place)
            if kind_of(node) in ("weight", "constant"):
                readers = [place[user] for user in node.users if user in place]
                place[node] = min(readers, default=place[node])
        anchor = first.prev
        rank = {
            node: (at, kind_of(node) not in ("weight", "constant"), i)
            for i, (node, at) in enumerate(place.items())
        }
        for node in nx.lexicographical_topological_sort(order, key=rank.__getitem__):
            anchor.append(node)
            anchor = node

    # -- reading ----------------------------------------------------------------------------

    @property
    def nodes(self) -> Iterator[Node]:
        """Every node in order, items included."""
        return iter(self.fx.nodes)

    def of_kind(self, *kinds: str) -> list[Node]:
        """Nodes of the given kinds, in order."""
        return [n for n in self.fx.nodes if n.meta["kind"] in kinds]

    @property
    def ops(self) -> list[Node]:
        """Op calls in order."""
        return self.of_kind("op")

    @property
    def output(self) -> Node | None:
        """The output node, None while the graph is being built."""
        last = next(iter(reversed(self.fx.nodes)), None)  # torch 2.11 gives no iterator
        return last if last is not None and kind_of(last) == "output" else None

    @property
    def results(self) -> dict[str, Node]:
        """Returned values by name."""
        return self._outputs("results", 0)

    @property
    def next_state(self) -> dict[str, Node]:
        """Value of every state after the step, by the state's name."""
        return self._outputs("states", 1)

    def _outputs(self, key: str, index: int) -> dict[str, Node]:
        node = self.output
        if node is None:
            raise CompilerBug(f"graph {self.name} has no output yet")
        return dict(zip(node.meta[key], node.args[0][index], strict=True))  # type: ignore[index,arg-type]

    def value(self, name: str) -> Node:
        """The value called `name`; `KeyError` if there is none."""
        node = self._values[name]
        if kind_of(node) == "op" and len(node.meta["names"]) > 1:
            return self.result(node, node.meta["names"].index(name))
        return node

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def copy(self) -> Graph:
        """An independent graph with the same nodes."""
        new = Graph(self.name, stage=self.stage, attrs=self.attrs)
        mapped: dict[Node, Node] = {}
        for node in self.fx.nodes:
            kind, meta = kind_of(node), node.meta
            if kind in LEAVES:
                mapped[node] = new.leaf(kind, meta["names"][0], meta["types"][0], meta["module"])
            elif kind == "op":
                operands = [None if v is None else mapped[v] for v in operands_of(node)]
                mapped[node] = new.call(
                    op_of(node.target),
                    operands,
                    node.kwargs,
                    names=meta["names"],
                    module=meta["module"],
                    rule=meta["rule"],
                )
                mapped[node].meta["types"] = meta[
                    "types"
                ]  # with their layouts, which inference does not know
            elif kind == "item":
                mapped[node] = new.result(mapped[node.args[0]], node.args[1])  # type: ignore[index,arg-type]
            else:
                new.finish(
                    {n: mapped[v] for n, v in self.results.items()},
                    {n: mapped[v] for n, v in self.next_state.items()},
                )
        return new

    def __repr__(self) -> str:
        return f"<Graph {self.name}, {self.stage}, {len(self.ops)} op nodes>"

    def __eq__(self, other: object) -> bool:
        """Equal name, stage, attributes, and node by node kind, names, types, module, rule, operands."""
        if not isinstance(other, Graph):
            return NotImplemented
        return self._contents() == other._contents()

    __hash__ = None  # type: ignore[assignment]

    def _contents(self) -> tuple[Any, ...]:
        nodes = []
        for node in self.fx.nodes:
            kind, meta = kind_of(node), node.meta
            if kind in LEAVES:
                nodes.append((kind, meta["names"], meta["types"], meta["module"]))
            elif kind == "op":
                operands = tuple(None if v is None else name_of(v) for v in operands_of(node))
                nodes.append(
                    (
                        op_of(node.target).name,
                        operands,
                        dict(node.kwargs),
                        meta["names"],
                        meta["types"],
                        meta["module"],
                        meta["rule"],
                    )
                )
            elif kind == "output":
                nodes.append(
                    (
                        {n: name_of(v) for n, v in self.results.items()},
                        {n: name_of(v) for n, v in self.next_state.items()},
                    )
                )
        return self.name, self.stage, self.attrs, nodes


def result_names(op: Op, base: str, attrs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a call's results for a node called `base`."""
    return tuple(join(base, role) for role in op.roles(dict(attrs)))


def op_named(name: str) -> Op:
    """The op called `name`; `KeyError` if there is none."""
    return registry()[name]


def _describe(node: Node) -> str:
    return "the output" if kind_of(node) == "output" else name_of(producer_of(node))


def _identifier(name: str) -> str:
    return name.replace(".", "_")
