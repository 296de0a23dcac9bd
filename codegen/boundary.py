"""What crosses the border of a phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewright.codegen.flow import Flow
from rewright.codegen.select import Phase
from rewright.codegen.units import Program, Unit


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a phase takes and gives.

    Attributes:
        reads: of one unit its operands, None where one is absent; of several the values from outside
            that they read, each once.
        writes: of one unit its results; of several those of their results that are states, that
            somebody outside reads or that nobody reads. The others never leave the kernel.
        attrs: of one unit its attributes; of several those of each, by op, numbered where an op
            occurs more than once.
    """

    reads: tuple[str | None, ...]
    writes: tuple[str, ...]
    attrs: Mapping[str, Any]

    @property
    def values_read(self) -> tuple[str, ...]:
        """Values read, each once."""
        return tuple(dict.fromkeys(v for v in self.reads if v is not None))


def boundary_of(phase: Phase, program: Program, flow: Flow) -> Boundary:
    """The border of a phase of the program."""
    if phase.kernel.single:
        (unit,) = phase.units
        return Boundary(unit.operands, unit.results, unit.attrs)
    inside = {unit.name for unit in phase.units}
    made = {result for unit in phase.units for result in unit.results}
    reads = [v for unit in phase.units for v in unit.reads if program.root(v) not in made]
    writes = [v for unit in phase.units for v in unit.results if _leaves(v, inside, program, flow)]
    return Boundary(tuple(dict.fromkeys(reads)), tuple(writes), _attrs_by_part(phase.units))


def _leaves(value: str, inside: set[str], program: Program, flow: Flow) -> bool:
    """Whether a result of a phase must be written to memory."""
    readers = flow.readers(value)
    outside = any(reader.name not in inside for reader in readers)
    return outside or not readers or value in flow.wanted or value in program.states


def _attrs_by_part(units: tuple[Unit, ...]) -> dict[str, Any]:
    total = Counter(unit.op.name for unit in units)
    seen: defaultdict[str, int] = defaultdict(int)
    found = {}
    for unit in units:
        op = unit.op.name
        found[f"{op}{seen[op] if total[op] > 1 else ''}"] = dict(unit.attrs)
        seen[op] += 1
    return found
