"""What crosses the border of a phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewright.codegen.flow import Flow
from rewright.codegen.select import Phase
from rewright.codegen.units import Program
from rewright.ir.plan import Part


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a phase takes and gives.

    Attributes:
        reads: of one unit its operands, None where one is absent; of several the values from outside
            that they read, each once.
        writes: of one unit its results; of several those of their results that are states, that
            somebody outside reads or that nobody reads. The others never leave the kernel.
        attrs: of one unit its attributes; empty for several.
        parts: the units, where there are several.
    """

    reads: tuple[str | None, ...]
    writes: tuple[str, ...]
    attrs: Mapping[str, Any]
    parts: tuple[Part, ...] = ()

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
    parts = tuple(Part(u.name, u.op.name, u.operands, u.results, dict(u.attrs)) for u in phase.units)
    return Boundary(tuple(dict.fromkeys(reads)), tuple(writes), {}, parts)


def _leaves(value: str, inside: set[str], program: Program, flow: Flow) -> bool:
    """Whether a result of a phase must be written to memory."""
    readers = flow.readers(value)
    outside = any(reader.name not in inside for reader in readers)
    return outside or not readers or value in flow.wanted or value in program.states
