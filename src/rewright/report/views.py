"""The part of every module of a graph as boxes and lines, and layers that are alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from rewright.ir.fold import fold_layers
from rewright.ir.graph import Graph, kind_of, operands_of, producer_of
from rewright.ir.printer import print_node
from rewright.report.layout import place
from rewright.report.records import Interned

ROOT = "."
"""Stands for the nodes that are in no module."""
MOST_BOXES = 160
"""Op nodes of the largest part that is drawn; of a larger one the page offers its modules."""
_LAYER = re.compile(r"layers\.\d+")


@dataclass
class Views:
    """Drawings of the modules of several graphs, each different one once.

    A drawing has boxes for the ops of the module in the order of execution, then for the values that
    come from ops outside, in the order in which they are first read.
    """

    layouts: Interned = field(default_factory=Interned)
    _known: dict[Any, int] = field(default_factory=dict)

    def of(self, graph: Graph) -> dict[str, int]:
        """The drawing of every module that is small enough, by its path, and of `ROOT`."""
        found: dict[str, list[Node]] = {}
        for node in graph.ops:
            path = node.meta["module"]
            if not path:
                found.setdefault(ROOT, []).append(node)
            while path:
                found.setdefault(path, []).append(node)
                path = path.rpartition(".")[0]
        return {
            module: self._drawing(nodes)
            for module, nodes in sorted(found.items())
            if len(nodes) <= MOST_BOXES
        }

    def _drawing(self, nodes: Sequence[Node]) -> int:
        at = {node: i for i, node in enumerate(nodes)}
        arriving: dict[Node, int] = {}
        edges: dict[tuple[int, int], None] = {}
        for node in nodes:
            for value in operands_of(node):
                if value is None or kind_of(producer_of(value)) != "op":
                    continue
                maker = producer_of(value)
                start = at.get(maker)
                if start is None:
                    start = arriving.setdefault(value, len(at) + len(arriving))
                edges[start, at[node]] = None
        key = (len(nodes), len(arriving), tuple(edges))
        if key not in self._known:
            sources = range(len(nodes), len(nodes) + len(arriving))
            self._known[key] = self.layouts(place(len(nodes) + len(arriving), list(edges), sources))
        return self._known[key]


def layer_classes(graph: Graph) -> list[list[int]]:
    """Layers that are alike in everything but their number, the first of each sort in order."""
    texts: dict[str, list[str]] = {}
    for node in graph.ops:
        if found := _LAYER.match(node.meta["module"]):
            texts.setdefault(found[0], []).append(print_node(node, ""))
    layers = sorted(texts, key=lambda name: int(name.split(".")[1]))
    alike = fold_layers(layers, where=str, text=lambda name: "\n".join(texts[name]))
    return [[int(one.item.split(".")[1]), *one.others] for one in alike]
