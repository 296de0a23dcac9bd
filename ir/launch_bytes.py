"""Bytes that each launch of a plan moves, from the cost hooks of its ops and the places of its values.

Weights and states are counted by the ops that read them, activations by what enters and leaves the launch:
what its parts hand to each other never goes through memory. A phase of several launches reads its weights
and states in the first; the others read what that one left in the working memory, which is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rewright.ir.op import registry
from rewright.ir.plan import Launch, Place, Plan

ROUTED = ("expert_linear",)
"""Ops that read the matrices of chosen experts only."""
ROUTES = ("route", "route_hash")
"""Ops that choose experts: the ids are their first result."""


@dataclass(frozen=True, slots=True)
class LaunchBytes:
    """Bytes of one launch.

    Attributes:
        weights: read of weights and constants that every step reads alike.
        experts: read of one routed expert.
        distinct: experts that are read.
        state: read and written of the decode state.
        activations: read and written of everything else.
    """

    weights: int
    experts: int
    distinct: float
    state: int
    activations: int

    @property
    def weights_read(self) -> int:
        """Bytes read of all weights."""
        return self.weights + round(self.experts * self.distinct)

    @property
    def total(self) -> int:
        return self.weights_read + self.state + self.activations


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One op of a launch, operands and results by name."""

    op: str
    reads: tuple[str | None, ...]
    writes: tuple[str, ...]
    attrs: Mapping[str, Any]


def ops_of(launch: Launch) -> list[PlannedOp]:
    """The ops that a launch computes; of a phase of several launches each names the phase's op."""
    if launch.parts:
        return [PlannedOp(p.op, p.reads, p.writes, p.attrs) for p in launch.parts]
    name = launch.symbol.partition(".")[2]
    while name not in registry() and "_" in name:  # attention_split is a part of attention
        name = name.rpartition("_")[0]
    return [PlannedOp(name, launch.reads, launch.writes, launch.attrs)]


def launch_bytes(
    plan: Plan, context: int | None = None, distinct: Mapping[str, float] | None = None
) -> list[LaunchBytes]:
    """Bytes of every launch of a plan.

    Args:
        plan: the plan.
        context: tokens of a sequence after the step; by default the variant's capacity.
        distinct: by the name of the ids of chosen experts how many different ones they are; by default,
            and for others, what is to be expected of choices that spread evenly.
    """
    visible = plan.variant.capacity if context is None else context
    found, last = [], None
    for launch in plan.launches:
        first = launch.phase != last
        found.append(_bytes_of(plan, launch, visible, distinct or {}, first))
        last = launch.phase
    return found


def _bytes_of(
    plan: Plan, launch: Launch, context: int, distinct: Mapping[str, float], first: bool
) -> LaunchBytes:
    weights = experts = state = 0
    count = 0.0
    for planned in ops_of(launch) if first else []:
        for value, amount in _reads(plan, planned, context):
            place = plan.values[value]
            if place.space == "weight" and planned.op in ROUTED:
                count = max(count, _distinct(plan, planned, distinct))
                experts += place.type.nbytes // place.type.shape[0]
            elif place.space == "weight":
                weights += amount
            elif place.space == "state":
                state += amount
        state += _state_written(plan, planned)
    passed = (*(launch.reads if first else ()), *launch.writes)
    activations = sum(_activation(plan.values[v]) for v in passed if v is not None)
    return LaunchBytes(weights, experts, count, state, activations)


def _reads(plan: Plan, planned: PlannedOp, context: int) -> Iterator[tuple[str, int]]:
    """Values that an op reads, with bytes."""
    op = registry()[planned.op]
    types = tuple(None if v is None else plan.values[v].type.dense for v in planned.reads)
    cost = op.estimate(types, dict(planned.attrs), context)
    for name, value in zip(op.operands, planned.reads, strict=True):
        if value is not None:
            yield value, cost.reads[name]


def _state_written(plan: Plan, planned: PlannedOp) -> int:
    """A row of every state that an op updates, as if it wrote one for every token."""
    if not any(plan.values[w].space == "state" for w in planned.writes):
        return 0
    rows = plan.variant.batch * plan.variant.tokens
    widths = (plan.values[w].type.row_bytes for w in planned.writes if plan.values[w].space == "state")
    return rows * sum(widths)


def _distinct(plan: Plan, planned: PlannedOp, distinct: Mapping[str, float]) -> float:
    op = registry()[planned.op]
    named = dict(zip(op.operands, planned.reads, strict=True))
    ids, weight = named["experts"], named["weight"]
    if ids is None or weight is None:
        return 0.0
    if ids in distinct:
        return distinct[ids]
    batch, tokens, k = plan.values[ids].type.shape
    count = plan.values[weight].type.shape[0]
    return count * (1.0 - (1.0 - k / count) ** (batch * tokens))


def _activation(place: Place) -> int:
    return place.end - place.offset if place.space == "arena" else 0


def routed_values(plan: Plan) -> dict[int, str]:
    """Of every launch that chooses experts, by its position, the value that holds the ids."""
    return {
        at: planned.writes[0]
        for at, launch in enumerate(plan.launches)
        for planned in ops_of(launch)
        if planned.op in ROUTES
    }
