"""A graph's op nodes by name and by what they compute, for looking them up from another graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from rewright.ir.graph import Graph, kind_of, name_of, operands_of
from rewright.ir.op import op_of


def key_of(node: Node) -> tuple[str, str]:
    """What an op node is recognised by in another graph: its op and its first result's name."""
    return op_of(node.target).name, node.meta["names"][0]


def readers_of(node: Node) -> Iterator[tuple[Node, Node]]:
    """Every value of an op node with each op node that reads it."""
    for user in node.users:
        if kind_of(user) == "item":
            yield from ((user, reader) for reader in user.users if kind_of(reader) == "op")
        elif kind_of(user) == "op":
            yield node, user


class GraphIndex:
    """Op nodes of one graph.

    Attributes:
        nodes: op nodes by `key_of`.
        makers: op nodes by the names of their results.
        equals: names of all values that are computed alike from equal values, by each of these names.
    """

    def __init__(self, graph: Graph):
        self.nodes = {key_of(n): n for n in graph.ops}
        self.makers = {name: n for n in graph.ops for name in n.meta["names"]}
        self.equals: dict[str, list[str]] = {}
        first: dict[Any, Node] = {}
        for node in graph.ops:
            # Updates of two states are two, whatever they write.
            same = node if op_of(node.target).updates else first.setdefault(self._computation(node), node)
            for name, one in zip(node.meta["names"], same.meta["names"], strict=True):
                self.equals[name] = self.equals.setdefault(one, [])
                self.equals[name].append(name)

    def _computation(self, node: Node) -> Any:
        operands = []
        for value in operands_of(node):
            name = None if value is None else name_of(value)
            operands.append(self.equals[name][0] if name in self.equals else name)
        return node.target, tuple(operands), repr(sorted(node.kwargs.items()))

    def has_equal(self, names: list[str]) -> bool:
        """Whether an op here gives a value of one of these names."""
        return any(name in self.makers for name in names)
