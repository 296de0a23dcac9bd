"""Who makes and who reads the values of a program."""

from __future__ import annotations

from collections import defaultdict

from rewright.codegen.units import Program, Unit


class Flow:
    """Makers and readers of values; an alias counts as the value that holds its bytes.

    Attributes:
        wanted: values that are results of the step.
    """

    def __init__(self, program: Program):
        self._program = program
        self._maker: dict[str, Unit] = {}
        self._readers: defaultdict[str, list[Unit]] = defaultdict(list)
        for unit in program.units:
            self._maker.update(dict.fromkeys(unit.results, unit))
            for value in dict.fromkeys(map(program.root, unit.reads)):
                self._readers[value].append(unit)
        self.wanted = frozenset(program.root(value) for value in program.results.values())

    def maker(self, value: str) -> Unit | None:
        """The unit that makes a value, None for a leaf."""
        return self._maker.get(self._program.root(value))

    def readers(self, value: str) -> list[Unit]:
        """The units that read a value, in order."""
        return self._readers.get(self._program.root(value), [])

    def before(self, unit: Unit) -> set[str]:
        """Names of the units that a unit must come after: the makers of its operands, and where it
        updates a state the other readers of the old value."""
        makers = {maker.name for v in unit.reads if (maker := self.maker(v)) is not None}
        readers = {reader.name for old in unit.updates.values() for reader in self.readers(old)}
        return (makers | readers) - {unit.name}
