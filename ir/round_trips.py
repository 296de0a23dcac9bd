"""Where the bytes of one step go: totals by kind, and the values that go through memory and back.

A round trip is a value that one op writes and others read again within the same step: what fusion
can save. Weights, constants, inputs and states are no round trips, nor is the next value of a state,
which has to be written anyway; their bytes are in `StepBytes`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Node

from rewright.ir.graph import Graph, kind_of, name_of, operands_of
from rewright.ir.op import Cost, op_of
from rewright.ir.traffic import node_cost, traffic

_LAYER = re.compile(r"layers\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A value that an op makes, in bytes of one step.

    Attributes:
        name: of the value.
        producer: op that writes it.
        readers: op of each node that reads it, in graph order; none for a result of the step that only
            its caller reads. A reshape moves nothing: who reads its result reads this value.
        written: bytes written.
        read: bytes read, summed over the readers. A reader may take less than the whole value.
    """

    name: str
    producer: str
    readers: tuple[str, ...]
    written: int
    read: int

    @property
    def total(self) -> int:
        return self.written + self.read


@dataclass(frozen=True, slots=True)
class TripGroup:
    """The same value of every layer that has it; the numbers are sums over these.

    Attributes:
        name: of the value, with `layers.*` where several layers have it.
        count: values.
        producer: op that writes them.
        readers: reading nodes by op.
        written, read: bytes.
    """

    name: str
    count: int
    producer: str
    readers: Counter[str]
    written: int
    read: int

    @property
    def total(self) -> int:
        return self.written + self.read


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one step of a graph reads and writes; together they are all of `traffic`.

    Attributes:
        nodes: ops.
        weights: weight bytes read.
        constants: bytes read of tables that the compiler made.
        state_read, state_written: bytes of states and of their next values.
        activations_read: bytes read of everything else that ops make, and of the step's inputs.
        activations_written: bytes written of everything else.
    """

    nodes: int
    weights: int
    constants: int
    state_read: int
    state_written: int
    activations_read: int
    activations_written: int

    @property
    def state(self) -> int:
        return self.state_read + self.state_written

    @property
    def activations(self) -> int:
        return self.activations_read + self.activations_written

    @property
    def total(self) -> int:
        return self.weights + self.constants + self.state + self.activations


def step_bytes(graph: Graph, context: int | None = None) -> StepBytes:
    """Totals of one step.

    Args:
        graph: the graph, at any stage.
        context: tokens of the sequence after the step; by default the variant's capacity.
    """
    moved = traffic(graph, context)
    visible = _visible(graph, context)
    pure = sum(sum(_written(node, node_cost(node, visible)).values()) for node in graph.ops)
    return StepBytes(
        nodes=len(graph.ops),
        weights=moved.reads["weight"],
        constants=moved.reads["constant"],
        state_read=moved.reads["state"],
        state_written=moved.written - pure,
        activations_read=moved.reads["input"] + moved.reads["op"],
        activations_written=pure,
    )


@dataclass
class _Record:
    producer: str
    written: int
    read: int = 0
    readers: list[str] = field(default_factory=list)


def round_trips(graph: Graph, context: int | None = None) -> list[RoundTrip]:
    """Every value that an op makes, most bytes first, equal ones by name.

    Args:
        graph: the graph, at any stage.
        context: tokens of the sequence after the step; by default the variant's capacity.
    """
    visible = _visible(graph, context)
    records: dict[str, _Record] = {}
    views: dict[Node, Node] = {}
    for node in graph.ops:
        cost, op = node_cost(node, visible), op_of(node.target)
        if (seen := _seen_through(node, cost)) is not None:
            views[node] = views.get(seen, seen)
            continue
        amounts: Counter[Node] = Counter()  # an op may read one value through several operands
        for name, value in zip(op.operands, operands_of(node), strict=True):
            if value is not None:
                amounts[views.get(value, value)] += cost.reads[name]
        for value, amount in amounts.items():
            record = records.get(name_of(value)) if kind_of(value) in ("op", "item") else None
            if record is not None:  # a state's next value has none
                record.read += amount
                record.readers.append(op.name)
        for index, amount in _written(node, cost).items():
            records[node.meta["names"][index]] = _Record(op.name, amount)
    trips = [RoundTrip(n, r.producer, tuple(r.readers), r.written, r.read) for n, r in records.items()]
    return sorted(trips, key=lambda t: (-t.total, t.name))


def by_layer(trips: Iterable[RoundTrip]) -> list[TripGroup]:
    """One line for the same value of all layers (`layers.*`) made by the same op, most bytes first."""
    members: dict[tuple[str, str], list[RoundTrip]] = {}
    for trip in trips:
        members.setdefault((_LAYER.sub("layers.*", trip.name, count=1), trip.producer), []).append(trip)
    groups = [
        TripGroup(
            name=pattern if len(same) > 1 else same[0].name,
            count=len(same),
            producer=producer,
            readers=Counter(reader for trip in same for reader in trip.readers),
            written=sum(trip.written for trip in same),
            read=sum(trip.read for trip in same),
        )
        for (pattern, producer), same in members.items()
    ]
    return sorted(groups, key=lambda g: (-g.total, g.name, g.producer))


def _visible(graph: Graph, context: int | None) -> int:
    return graph.attrs["capacity"] if context is None else context


def _seen_through(node: Node, cost: Cost) -> Node | None:
    """The operand of an op that moves nothing, so that its result is the operand's memory seen otherwise."""
    operands = [v for v in operands_of(node) if v is not None]
    moves = cost.writes or any(cost.reads.values()) or op_of(node.target).updated(dict(node.kwargs))
    return None if moves or len(operands) != 1 else operands[0]


def _written(node: Node, cost: Cost) -> dict[int, int]:
    """Bytes written of each result that is no state's next value, by its position.

    A cost hook gives one sum. Results take their whole size of it, or an equal part of that where
    the hook says that less is written (scores of entries that do not exist yet).
    """
    states = op_of(node.target).updated(dict(node.kwargs))
    sizes = {i: t.nbytes for i, t in enumerate(node.meta["types"]) if i not in states}
    whole = sum(sizes.values())
    if whole <= cost.writes:
        return sizes
    parts = {i: size * cost.writes // whole for i, size in sizes.items()}
    last = max(parts)
    parts[last] += cost.writes - sum(parts.values())
    return parts
