"""Bytes that single op nodes move in one step, by what the bytes belong to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torch.fx import Node

from rewright.ir.graph import Graph, kind_of, operands_of, updated_state
from rewright.ir.op import op_of
from rewright.ir.traffic import node_cost


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes and operations of one step; a difference of two may be negative.

    Attributes:
        activation_read, activation_written: bytes of inputs and of results of ops.
        weight_read, constant_read: bytes of checkpoint tensors and of tables.
        state_read, state_written: bytes of state. The next value of a state is state.
        flops: floating-point operations.
    """

    activation_read: int = 0
    activation_written: int = 0
    weight_read: int = 0
    constant_read: int = 0
    state_read: int = 0
    state_written: int = 0
    flops: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(getattr(self, n) + getattr(other, n) for n in _FIELDS))

    def __sub__(self, other: Moved) -> Moved:
        return Moved(*(getattr(self, n) - getattr(other, n) for n in _FIELDS))

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes read and written by the kind of value: activation, weight, constant, state."""
        return {
            "activation": self.activation_read + self.activation_written,
            "weight": self.weight_read,
            "constant": self.constant_read,
            "state": self.state_read + self.state_written,
        }

    @property
    def bytes(self) -> dict[str, int]:
        """Every field but flops, for JSON."""
        return {n: getattr(self, n) for n in _FIELDS if n != "flops"}


_FIELDS = tuple(f.name for f in fields(Moved))
NOTHING = Moved()
_READ_FIELD = {
    "input": "activation_read",
    "op": "activation_read",
    "item": "activation_read",
    "weight": "weight_read",
    "constant": "constant_read",
    "state": "state_read",
}


class Meter:
    """Asks every node of a graph for its cost once.

    Args:
        graph: the graph.
        context: tokens of the sequence after the step; by default the variant's capacity.
    """

    def __init__(self, graph: Graph, context: int | None = None):
        self.context: int = graph.attrs["capacity"] if context is None else context
        self._known: dict[Node, Moved] = {}

    def of(self, node: Node) -> Moved:
        """What one op node moves."""
        if node not in self._known:
            self._known[node] = _moved(node, self.context)
        return self._known[node]

    def total(self, nodes: Iterable[Node]) -> Moved:
        """What several op nodes move together."""
        return sum(map(self.of, nodes), start=Moved())


def _moved(node: Node, context: int) -> Moved:
    op, cost = op_of(node.target), node_cost(node, context)
    amounts = dict.fromkeys(_FIELDS, 0)
    for name, value in zip(op.operands, operands_of(node), strict=True):
        if value is not None:
            kind = "state" if updated_state(value) is not None else kind_of(value)
            amounts[_READ_FIELD[kind]] += cost.reads[name]
    states = op.updated(dict(node.kwargs))
    whole = sum(t.nbytes for i, t in enumerate(node.meta["types"]) if i not in states)
    # A hook gives one number for all results. What exceeds the results that are no state went into state.
    written = min(whole, cost.writes) if states else cost.writes
    return Moved(
        **{
            **amounts,
            "activation_written": written,
            "state_written": cost.writes - written,
            "flops": cost.flops,
        }
    )
