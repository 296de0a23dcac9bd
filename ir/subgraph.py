"""One module's part of a graph and the values that cross its border."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from torch.fx import Node

from rewright.ir.errors import UsageError
from rewright.ir.graph import LEAVES, Graph, kind_of, operands_of, producer_of
from rewright.ir.names import within


@dataclass(frozen=True)
class Subgraph:
    """The ops under a module, and what they take and give.

    Attributes:
        module: its path; "" is the whole graph.
        leaves: inputs, states, weights and constants that stand under it or that its ops read.
        ops: its op nodes, in order.
        arriving: values that ops outside make and its ops read.
        leaving: values that its ops make and ops outside read.
        results: what the graph returns, as far as it is made here, by name.
        next_state: values of states after the step, as far as they are made here, by state.
    """

    module: str
    leaves: tuple[Node, ...]
    ops: tuple[Node, ...]
    arriving: tuple[Node, ...]
    leaving: tuple[Node, ...]
    results: dict[str, Node]
    next_state: dict[str, Node]

    def leaves_of(self, *kinds: str) -> list[Node]:
        """Leaves of the given kinds, in order."""
        return [n for n in self.leaves if kind_of(n) in kinds]


def module_paths(graph: Graph) -> list[str]:
    """Every module that has nodes, and those around it, sorted; the root "" is not listed."""
    paths = set()
    for node in graph.of_kind("weight", "constant", "op"):
        path = node.meta["module"]
        while path:
            paths.add(path)
            path = path.rpartition(".")[0]
    return sorted(paths)


def subgraph(graph: Graph, module: str = "") -> Subgraph:
    """The part of `graph` under `module`.

    Raises:
        UsageError: there is no such module; the text lists similar ones.
    """
    if module:
        _require_module(graph, module)
    own = {n for n in graph.of_kind(*LEAVES, "op") if within(_place(n), module)}
    arriving: dict[Node, None] = {}
    leaving: dict[Node, None] = {}
    read: set[Node] = set()
    for node in graph.ops:
        for value in operands_of(node):
            if value is None:
                continue
            maker = producer_of(value)
            if node in own and kind_of(maker) in LEAVES:
                read.add(maker)
            elif node in own and maker not in own:
                arriving[value] = None
            elif node not in own and maker in own and kind_of(maker) == "op":
                leaving[value] = None
    return Subgraph(
        module=module,
        leaves=tuple(n for n in graph.of_kind(*LEAVES) if n in own or n in read),
        ops=tuple(n for n in graph.ops if n in own),
        arriving=tuple(arriving),
        leaving=tuple(leaving),
        results={name: v for name, v in graph.results.items() if producer_of(v) in own},
        next_state={name: v for name, v in graph.next_state.items() if producer_of(v) in own},
    )


def _place(node: Node) -> str:
    """Where a node stands: inputs and states have no module but are named by one."""
    return node.meta["names"][0] if kind_of(node) in ("input", "state") else node.meta["module"]


def _require_module(graph: Graph, module: str) -> None:
    paths = module_paths(graph)
    if module in paths:
        return
    similar = difflib.get_close_matches(module, paths)
    offered = similar or [p for p in paths if "." not in p]
    raise UsageError(
        f"there is no module {module!r}",
        where=f"graph {graph.name}",
        fix=("did you mean " if similar else "its modules are ") + ", ".join(offered),
    )
