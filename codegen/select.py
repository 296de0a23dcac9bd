"""Chooses kernels: units -> phases.

The first unit that is ready begins a phase. The kernels that it can begin are asked in the target's
order: a phase grows along the kernel's slots, always by units that are ready, so that the order of the
phases is legal by construction. If no kernel takes the unit, a fused one is taken apart and its parts
are asked in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rewright.codegen.flow import Flow
from rewright.codegen.frontier import Frontier
from rewright.codegen.grow import Growth
from rewright.codegen.kernel import Call, KernelDef, Ok
from rewright.codegen.targets import Target
from rewright.codegen.units import Program, Unit
from rewright.ir.errors import CompilerBug, Refused
from rewright.ir.variant import Variant

Refusal = tuple[str, str]
"""Symbol of a kernel, and why it did not take a unit."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Units that one kernel computes.

    Attributes:
        kernel: the kernel.
        units: in the order of its slots.
    """

    kernel: KernelDef
    units: tuple[Unit, ...]

    @property
    def name(self) -> str:
        """That of its first unit."""
        return self.units[0].name


@dataclass
class Selection:
    """The phases of a program in order.

    Attributes:
        phases: every unit of the program stands in one of them.
        refusals: kernels that were asked before another took a unit, or before it was taken apart, by
            the unit's name. Where none refused and the unit ended up alone, kernels of several units
            that found some of them.
    """

    phases: list[Phase] = field(default_factory=list)
    refusals: dict[str, tuple[Refusal, ...]] = field(default_factory=dict)


def select(program: Program, target: Target, variant: Variant) -> Selection:
    """Choose a kernel for every unit. Fused units that must be are taken apart in `program`.

    Raises:
        Refused: no kernel of the target computes some unit.
    """
    while unknown := [u for u in program.units if u.fused and u.op.name not in target.ops]:
        program.take_apart(unknown)
    selection = Selection()
    done: list[str] = []
    frontier = Frontier(program, Flow(program))
    while ready := frontier.ready:
        seed = ready[0]
        choice = _choose(seed, target, program, frontier, variant)
        if choice.refusals:
            selection.refusals[seed.name] = choice.refusals
        if choice.phase is not None:
            selection.phases.append(choice.phase)
            done += [unit.name for unit in choice.phase.units]
        elif seed.fused:
            program.take_apart([seed])
            frontier = Frontier(program, Flow(program), done)
        else:
            raise _refused(seed, target, choice.refusals)
    if not frontier.exhausted:
        raise CompilerBug("some unit reads the old value of a state after what its update waits for")
    return selection


def _refused(unit: Unit, target: Target, refusals: tuple[Refusal, ...]) -> Refused:
    reasons = "; ".join(f"{symbol}: {reason}" for symbol, reason in refusals) or "there is none"
    return Refused(
        f"no kernel of target {target.name} computes {unit.op.name} ({reasons})",
        where=unit.name,
        fix="compile for another target or with other options",
    )


@dataclass
class _Choice:
    """What came of asking kernels for a unit.

    Attributes:
        phase: of the first kernel that takes it, its units taken from the frontier; None if none does.
        refusals: of the kernels asked before.
    """

    phase: Phase | None
    refusals: tuple[Refusal, ...]


def _choose(seed: Unit, target: Target, program: Program, frontier: Frontier, variant: Variant) -> _Choice:
    """Ask the kernels that a unit can begin, in order."""
    growth = Growth(program, frontier)
    refusals: list[Refusal] = []
    near_misses: list[Refusal] = []
    for kernel in target.beginning_with(seed.op.name):
        for first in growth.beginnings(kernel, seed):
            missing = growth.fill(kernel, seed, first)
            if missing is None:
                units = tuple(growth.units)
                verdict = kernel.supports(Call(units, program.types, program.leaves, variant))
                if isinstance(verdict, Ok):
                    reasons = refusals or (near_misses if kernel.single else [])
                    return _Choice(Phase(kernel, units), tuple(reasons))
                refusals.append((kernel.symbol, verdict.reason))
            elif len(growth.units) > 1:
                near_misses.append((kernel.symbol, f"there is no {' or '.join(missing.ops)} to go with it"))
            growth.undo()
    return _Choice(None, tuple(refusals or near_misses))
