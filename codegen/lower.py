"""Phases -> launches, and a place for every value that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rewright.codegen.boundary import Boundary
from rewright.codegen.kernel import Call
from rewright.codegen.memory import Arena
from rewright.codegen.pack import Wish, agree
from rewright.codegen.select import Phase
from rewright.codegen.units import Program
from rewright.ir.carried import carried_bytes
from rewright.ir.errors import CompilerBug
from rewright.ir.plan import Launch, Place
from rewright.ir.weight_layout import packable


def launches_of(phase: Phase, boundary: Boundary, workspace: tuple[int, int]) -> Iterator[Launch]:
    """The launches of a phase. All read what the phase reads and share its working memory; its results
    are there after the last."""
    nodes = tuple(unit.name for unit in phase.units)
    for symbol in phase.kernel.symbols:
        writes = boundary.writes if symbol == phase.kernel.symbols[-1] else ()
        yield Launch(
            symbol, phase.name, nodes, boundary.reads, writes, dict(boundary.attrs), workspace, boundary.parts
        )


def places(
    program: Program,
    boundaries: Sequence[Boundary],
    layouts: Mapping[str, str],
    state: Arena,
    arena: Arena,
    carried: Mapping[str, str],
) -> dict[str, Place]:
    """Places of the leaves in the graph's order, then of other values in the order they come up.

    `layouts` are those of weights, `carried` the forms of values that leave their kernel in another one.
    """
    found: dict[str, Place] = {}

    def add(value: str) -> None:
        root, type = program.root(value), program.types[value]
        match program.kind(root):
            case "input":
                place = Place(type, "input")
            case "weight" | "constant":
                place = Place(type, "weight", 0, layouts.get(value, ""))
            case "state":
                place = Place(type, "state", state.offsets[program.states[value]])
            case _ if root not in arena.offsets:
                place = Place(type, "kernel")
            case _ if root in carried:
                form = carried[root]
                place = Place(type, "arena", arena.offsets[root], form, carried_bytes(form, type))
            case _:
                place = Place(type, "arena", arena.offsets[root])
        found.setdefault(value, place)

    for value in program.leaves:
        add(value)
    for boundary in boundaries:
        inside = (v for part in boundary.parts for v in (*part.reads, *part.writes) if v is not None)
        for value in (*boundary.values_read, *boundary.writes, *inside):
            add(value)
    for value in program.results.values():
        add(value)
    return found


def weight_layouts(program: Program, phases: Sequence[Phase], calls: Sequence[Call]) -> dict[str, str]:
    """Layout of every weight; `CompilerBug` where its readers disagree or it cannot have what they want."""
    layouts = agree(_wishes(phases, calls))
    for weight, layout in layouts.items():
        if not packable(layout, program.types[weight]):
            raise CompilerBug(f"weight {weight}, {program.types[weight]}, cannot be laid out as {layout}")
    return layouts


def _wishes(phases: Sequence[Phase], calls: Sequence[Call]) -> Iterator[Wish]:
    for phase, call in zip(phases, calls, strict=True):
        wished = phase.kernel.layouts(call)
        for unit in phase.units:
            for value in unit.reads:
                if call.is_weight(value):
                    yield Wish(value, wished.get(value, ""), unit.name)
