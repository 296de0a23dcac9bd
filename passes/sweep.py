"""Transforms over the whole graph that need no pattern."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch.fx import Node

from rewright.ir.graph import Graph, kind_of, operands_of
from rewright.ir.op import op_of
from rewright.passes.facts import Facts
from rewright.passes.rule import Log, Transform


class DeadNodes(Transform):
    """Removes ops that nothing reads, readers before what they read; state updates are results.

    Args:
        only: names of the ops to look at; all by default.
    """

    name = "dead_nodes"

    def __init__(self, only: Collection[str] | None = None):
        self.only = only

    def apply(self, graph: Graph, facts: Facts, log: Log) -> bool:
        dead = 0
        for node in reversed(graph.ops):
            if self.only is not None and op_of(node.target).name not in self.only:
                continue
            if all(kind_of(user) == "item" and not user.users for user in node.users):
                graph.erase(node)
                dead += 1
        log.matches += dead
        return dead > 0


class MergeDuplicates(Transform):
    """Of equal calls on the same operands the first stays.

    Args:
        only: names of the ops to look at; all by default.
        leave: names of ops to leave alone.
    """

    def __init__(
        self,
        name: str = "merge_duplicates",
        *,
        only: Collection[str] | None = None,
        leave: Collection[str] = (),
    ):
        self.name, self.only, self.leave = name, only, leave

    def apply(self, graph: Graph, facts: Facts, log: Log) -> bool:
        merged = 0
        for first, again in list(duplicates(graph, self.only, self.leave)):
            for index in range(len(again.meta["names"])):
                _redirect(graph, again, first, index)
            graph.erase(again)
            merged += 1
        log.matches += merged
        return merged > 0


def duplicates(
    graph: Graph, only: Collection[str] | None = None, leave: Collection[str] = ()
) -> Iterator[tuple[Node, Node]]:
    """Pairs of an op node and a later one that computes the same from the same values."""
    seen: dict[Any, Node] = {}
    for node in graph.ops:
        op = op_of(node.target)
        if op.updates or op.name in leave or (only is not None and op.name not in only):
            continue
        key = (op.name, operands_of(node), repr(sorted(node.kwargs.items())))
        if key in seen:
            yield seen[key], node
        else:
            seen[key] = node


def _redirect(graph: Graph, old: Node, new: Node, index: int) -> None:
    if len(old.meta["names"]) == 1:
        graph.redirect(old, new)
        return
    for item in [u for u in old.users if kind_of(u) == "item" and u.args[1] == index]:
        graph.redirect(item, graph.result(new, index))
