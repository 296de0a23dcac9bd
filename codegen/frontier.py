"""Which units can be computed next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from rewright.codegen.flow import Flow
from rewright.codegen.units import Program, Unit


class Frontier:
    """The units that are ready: everything that they wait for has been taken.

    Args:
        program: the units.
        flow: what they wait for.
        done: names of units that were taken before.
    """

    def __init__(self, program: Program, flow: Flow, done: Collection[str] = ()):
        self._place = {unit.name: at for at, unit in enumerate(program.units)}
        self._waiting: dict[str, int] = {}
        self._opens: defaultdict[str, list[Unit]] = defaultdict(list)
        self._ready: dict[str, Unit] = {}
        taken = set(done)
        for unit in program.units:
            if unit.name in taken:
                continue
            before = flow.before(unit) - taken
            self._waiting[unit.name] = len(before)
            for name in before:
                self._opens[name].append(unit)
            if not before:
                self._ready[unit.name] = unit

    @property
    def ready(self) -> list[Unit]:
        """Units that can be taken, in the program's order."""
        return sorted(self._ready.values(), key=lambda unit: self._place[unit.name])

    @property
    def exhausted(self) -> bool:
        """Whether every unit was taken."""
        return not self._waiting

    def take(self, unit: Unit) -> None:
        """Take a ready unit."""
        del self._ready[unit.name], self._waiting[unit.name]
        for other in self._opens[unit.name]:
            self._waiting[other.name] -= 1
            if not self._waiting[other.name]:
                self._ready[other.name] = other

    def put_back(self, unit: Unit) -> None:
        """Undo `take` of the unit that was taken last."""
        for other in self._opens[unit.name]:
            self._waiting[other.name] += 1
            self._ready.pop(other.name, None)
        self._waiting[unit.name] = 0
        self._ready[unit.name] = unit
