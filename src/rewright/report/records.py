"""The nodes of several graphs as JSON records; what does not change from one to the next is said once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Node

from rewright.ir.export.json_graph import op_record
from rewright.ir.graph import LEAVES, Graph, kind_of, name_of
from rewright.ir.moved import Meter, Moved


class Interned:
    """A list of distinct values, and where each stands in it."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._at: dict[str, int] = {}

    def __call__(self, value: Any) -> int:
        """The place of a value, at the end if it is new."""
        key = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        if key not in self._at:
            self._at[key] = len(self.values)
            self.values.append(value)
        return self._at[key]


class Records:
    """Op nodes and leaves of graphs as places in tables.

    A record is [names, types, op, operands, attrs, module, rule, cost]: places in `names`, `types`,
    `ops`, `attrs`, `modules`, `rules`, `costs`; -1 for an absent operand.

    Args:
        context: tokens of the sequence after the step, for costs; by default each graph's capacity.
    """

    def __init__(self, context: int | None = None):
        self.context = context
        self.names, self.types, self.ops, self.attrs = Interned(), Interned(), Interned(), Interned()
        self.modules, self.rules, self.costs = Interned(), Interned(), Interned()
        self.records = Interned()
        self.leaves: dict[str, list[Any]] = {}
        self._of: dict[Node, int] = {}

    def add(self, graph: Graph) -> list[int]:
        """Records of a graph's op nodes, in the order of execution."""
        for leaf in graph.of_kind(*LEAVES):
            type = leaf.meta["types"][0]
            self.leaves[name_of(leaf)] = [kind_of(leaf), self.types(str(type)), type.nbytes]
        meter = Meter(graph, self.context)
        for node in graph.ops:
            self._of[node] = self.records(self._record(node, meter))
        return [self._of[node] for node in graph.ops]

    def of(self, *nodes: Node) -> list[int]:
        """Records of nodes of graphs that were added."""
        return [self._of[node] for node in nodes]

    def to_json(self) -> dict[str, Any]:
        """Every table."""
        return {
            "names": self.names.values,
            "types": self.types.values,
            "ops": self.ops.values,
            "attrs": self.attrs.values,
            "modules": self.modules.values,
            "rules": self.rules.values,
            "costs": self.costs.values,
            "nodes": self.records.values,
            "leaves": dict(sorted(self.leaves.items())),
        }

    def _record(self, node: Node, meter: Meter) -> list[Any]:
        record = op_record(node)
        return [
            [self.names(name) for name in record["names"]],
            [self.types(type) for type in record["types"]],
            self.ops(record["op"]),
            [-1 if name is None else self.names(name) for name in record["operands"]],
            self.attrs(record["attrs"]),
            self.modules(record["module"]),
            self.rules(record["rule"] or ""),
            self.costs(list(_cost(meter.of(node)))),
        ]


COST_FIELDS = (
    "activation_read",
    "activation_written",
    "weight_read",
    "constant_read",
    "state_read",
    "state_written",
    "flops",
)


def _cost(moved: Moved) -> Iterator[int]:
    return (getattr(moved, name) for name in COST_FIELDS)


def moved_json(moved: Moved) -> Mapping[str, int]:
    """Bytes by kind and their sum."""
    by_kind = moved.by_kind
    return {**by_kind, "total": sum(by_kind.values())}
