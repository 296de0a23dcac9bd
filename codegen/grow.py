"""Grows a phase along the slots of a kernel."""

from __future__ import annotations

from rewright.codegen.frontier import Frontier
from rewright.codegen.kernel import KernelDef, Slot
from rewright.codegen.units import Program, Unit


class Growth:
    """A phase in the making. Its units are taken from the frontier, and can be put back.

    Args:
        program: whose units they are.
        frontier: the units that can be taken.

    Attributes:
        units: so far, in the order taken.
    """

    def __init__(self, program: Program, frontier: Frontier):
        self._program, self._frontier = program, frontier
        self.units: list[Unit] = []
        self._makers: dict[str, Unit] = {}
        self._near: set[str] = set()

    def maker(self, value: str | None) -> Unit | None:
        """The unit of the phase that makes a value."""
        return None if value is None else self._makers.get(self._program.root(value))

    def fill(self, kernel: KernelDef, seed: Unit, first: int) -> Slot | None:
        """Take the seed for slot `first` of a kernel, then what fills that slot and those behind it.

        Returns:
            The first required slot that stayed empty.
        """
        self._take(seed)
        for at, slot in enumerate(kernel.covers[first:]):
            filled = at == 0
            while (slot.many or not filled) and (unit := self._candidate(slot)) is not None:
                self._take(unit)
                filled = True
            if not filled and not slot.optional:
                return slot
        return None

    def undo(self) -> None:
        """Put every unit back."""
        while self.units:
            self._frontier.put_back(self.units.pop())
        self._makers.clear()
        self._near.clear()

    def beginnings(self, kernel: KernelDef, seed: Unit) -> list[int]:
        """The slots of a kernel that a unit can begin it with."""
        beginning = enumerate(kernel.covers[: kernel.begins])
        return [at for at, slot in beginning if self._fits(slot, seed)]

    def _candidate(self, slot: Slot) -> Unit | None:
        """The first ready unit that may fill a slot."""
        for unit in self._frontier.ready:
            if self._fits(slot, unit) and (slot.anywhere or self._connected(unit)):
                return unit
        return None

    def _fits(self, slot: Slot, unit: Unit) -> bool:
        return unit.op.name in slot.ops and (slot.fits is None or slot.fits(unit, self))

    def _connected(self, unit: Unit) -> bool:
        """Whether a unit reads a value of the phase, or an activation or state that a unit of it reads."""
        return not self._near.isdisjoint(map(self._program.root, unit.reads))

    def _take(self, unit: Unit) -> None:
        self._frontier.take(unit)
        self.units.append(unit)
        self._makers.update(dict.fromkeys(unit.results, unit))
        read = map(self._program.root, unit.reads)
        self._near |= {v for v in read if self._program.kind(v) in ("activation", "state")}
        self._near |= set(unit.results)
