"""Plans under test: what they may touch, and a slow executor that keeps every value as bytes where the
plan says that it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from graphs import rewrite_all, traced
from torch import Tensor

from rewright.codegen.plan import make_plan
from rewright.codegen.select import Phase, select
from rewright.codegen.targets import TARGETS, Target
from rewright.codegen.units import Program, Unit
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph
from rewright.ir.layout import pack, stored_bytes, unpack
from rewright.ir.op import results_of
from rewright.ir.plan import Launch, Plan
from rewright.ir.types import ValueType
from rewright.ir.variant import Variant
from rewright.rewriting import facts_of

GARBAGE = 0xFF
"""A byte that is a NaN in most float types."""


def variant_of(graph: Graph) -> Variant:
    """The variant that a graph's attributes name."""
    attrs = graph.attrs
    return Variant(
        attrs["tokens"], attrs.get("batch", 1), attrs["capacity"], attrs.get("all_positions", False)
    )


def trouble(graph: Graph, plan: Plan, target: Target) -> list[str]:
    """Everything wrong with the places of a plan: the launches are followed byte by byte, and every value
    that is read must lie where it was last written, untouched since."""
    program = Program.of(graph)
    select(program, target, plan.variant)
    return list(_Follower(plan, program).problems())


class _Follower:
    """Who wrote each byte of arena and state last, as spans of equal writers."""

    def __init__(self, plan: Plan, program: Program):
        self._plan, self._program = plan, program
        self._owners: dict[str, list[tuple[int, int, str]]] = {"arena": [], "state": []}

    def problems(self) -> Iterator[str]:
        plan = self._plan
        for name, place in plan.values.items():
            if place.space in ("arena", "state"):
                size = plan.arena_bytes if place.space == "arena" else plan.state_bytes
                if place.offset % 128 or place.offset < 0 or place.end > size:
                    yield f"{name} lies at {place.offset}..{place.end} of {size}"
            if self._program.leaves.get(name) == "state":
                self._write(name)
        for at, launch in enumerate(plan.launches):
            yield from (f"launch {at}, {launch.symbol}: {p}" for p in self._run(launch))
        for name in (*plan.results.values(), *_last_states(self._program)):
            yield from (f"at the end: {p}" for p in self._read(name))

    def _run(self, launch: Launch) -> Iterator[str]:
        start, size = launch.workspace
        if start < 0 or start + size > self._plan.arena_bytes:
            yield f"workspace {start}..{start + size}"
        if size:
            self._claim("arena", start, start + size, "workspace")
        reads = [v for v in launch.reads if v is not None]
        for value in reads:
            yield from self._read(value)
        for value in launch.writes:
            self._write(value)
        updated = {self._program.states[v] for v in launch.writes if v in self._program.states}
        for value in (*reads, *launch.writes):
            if self._program.states.get(value) not in updated or value in launch.writes:
                yield from (f"{p} once the results are there" for p in self._read(value))
        if size and self._owner("arena", start, start + size) != {"workspace"}:
            yield "the workspace overlaps a result"

    def _write(self, value: str) -> None:
        place = self._plan.values[value]
        if place.space in self._owners:
            self._claim(place.space, place.offset, place.end, value)

    def _read(self, value: str) -> Iterator[str]:
        place = self._plan.values[value]
        if place.space not in self._owners:
            return
        found = self._owner(place.space, place.offset, place.end)
        if found != {self._program.root(value)}:
            yield f"{value} holds {', '.join(sorted(found)) or 'nothing'}"

    def _claim(self, space: str, start: int, end: int, owner: str) -> None:
        kept = []
        for first, last, who in self._owners[space]:
            kept += [(a, b, who) for a, b in ((first, min(last, start)), (max(first, end), last)) if a < b]
        self._owners[space] = [*kept, (start, end, owner)]

    def _owner(self, space: str, start: int, end: int) -> set[str]:
        parts = [(max(a, start), min(b, end), who) for a, b, who in self._owners[space]]
        parts = [(a, b, who) for a, b, who in parts if a < b]
        whole = sum(b - a for a, b, _ in parts) == end - start
        return {who for _, _, who in parts} | (set() if whole else {"nothing"})


def _last_states(program: Program) -> list[str]:
    last = {state: state for state in program.states.values()}
    for unit in program.units:
        last |= {program.states[result]: result for result in unit.updates}
    return list(last.values())


def execute(
    graph: Graph, target: Target, given: Mapping[str, Tensor], plan: Plan | None = None
) -> dict[str, Tensor]:
    """Results and next states (`next NAME`) of one step, as `graphs.results` gives them.

    Launch by launch: the units of a phase run as references on operands that are read from memory, their
    results are written to memory, and the working memory is filled with garbage before and afterwards.
    """
    variant = variant_of(graph)
    plan = plan or make_plan(graph, variant, target)
    program = Program.of(graph)
    phases = {phase.name: phase for phase in select(program, target, variant).phases}
    memory = _Memory(plan, given)
    for launch in plan.launches:
        memory.scribble(launch)
        if launch.writes:
            memory.write(_computed(phases[launch.phase], program, memory), launch.writes)
            memory.scribble(launch)
    states = [name for name, kind in program.leaves.items() if kind == "state"]
    found = {name: memory.read(value) for name, value in plan.results.items()}
    return found | {f"next {name}": memory.read(name) for name in states}


class _Memory:
    """Arena and state as bytes; weights and inputs by name."""

    def __init__(self, plan: Plan, given: Mapping[str, Tensor]):
        self._plan, self._given = plan, given
        self._spaces = {
            "arena": torch.full((plan.arena_bytes,), GARBAGE, dtype=torch.uint8),
            "state": torch.full((plan.state_bytes,), GARBAGE, dtype=torch.uint8),
        }
        states = {name for name, place in plan.values.items() if place.space == "state" and name in given}
        self.write({name: given[name] for name in states}, states)

    def read(self, value: str) -> Tensor:
        place = self._plan.values[value]
        if place.space not in self._spaces:
            return self._given[value].clone()
        return unpack(
            self._spaces[place.space][place.offset : place.offset + stored_bytes(place.type)], place.type
        )

    def write(self, values: Mapping[str, Tensor], names: Iterable[str]) -> None:
        for name in names:
            place = self._plan.values[name]
            end = place.offset + stored_bytes(place.type)  # (a value that is carried in parts has more)
            self._spaces[place.space][place.offset : end] = pack(values[name], place.type)

    def scribble(self, launch: Launch) -> None:
        start, size = launch.workspace
        self._spaces["arena"][start : start + size] = GARBAGE


def _computed(phase: Phase, program: Program, memory: _Memory) -> dict[str, Tensor]:
    """Every result of a phase's units."""
    made: dict[str, Tensor] = {}

    def operand(value: str | None) -> Tensor | None:
        if value is None:
            return None
        if program.root(value) in made:
            return made[program.root(value)].reshape(program.types[value].storage_shape)
        return memory.read(value)

    for unit in phase.units:
        results = unit.op.functional(*map(operand, unit.operands), **dict(unit.attrs))
        made |= dict(zip(unit.results, results_of(results), strict=True))
    return made


def fits(unit: Unit, types: Mapping[str, ValueType]) -> bool:
    """Whether the types of a unit's results are those that its op infers."""
    given = tuple(None if v is None else types[v] for v in unit.operands)
    inferred = unit.op.infer_types(given, dict(unit.attrs))
    return inferred == tuple(types[v].dense for v in unit.results)


def tiny_plans() -> str:
    """The plans of tiny-v4's decode step on every target, one after the other."""
    path = Path(__file__).resolve().parents[2] / "examples" / "tiny-v4"
    source = ModelSource.open(path, Numerics.FAITHFUL, max_context=256, max_batch=1, chunk=8)
    graph = rewrite_all(traced(source), facts_of(source))
    return "".join(make_plan(graph, variant_of(graph), target).to_text() for target in TARGETS.values())
