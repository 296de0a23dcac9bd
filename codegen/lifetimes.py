"""How long the values of a step and the working memory of its phases are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewright.codegen.boundary import Boundary
from rewright.codegen.flow import Flow
from rewright.codegen.memory import Lifetime
from rewright.codegen.select import Phase
from rewright.codegen.units import Program
from rewright.ir.errors import CompilerBug
from rewright.ir.layout import stored_bytes


def workspace_name(phase: int) -> str:
    """What the working memory of a phase is called among lifetimes; no value is called so."""
    return f"workspace of phase {phase}"


def lifetimes(
    program: Program,
    flow: Flow,
    boundaries: Sequence[Boundary],
    workspace: Sequence[int],
    carried: Mapping[str, int],
) -> list[Lifetime]:
    """Blocks of the arena: activations from their writer to their last reader, results of the step to
    its end, and working memory during its phase. An alias prolongs the value whose bytes it has; `carried`
    are bytes of values that leave their kernel in another form."""
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, boundary in enumerate(boundaries):
        for value in boundary.values_read:
            if program.kind(program.root(value)) == "activation":
                last[program.root(value)] = at
        for value in boundary.writes:
            if program.kind(value) == "activation":
                born[value] = last[value] = at
    last |= {value: len(boundaries) - 1 for value in flow.wanted if value in born}
    if unborn := sorted(last.keys() - born.keys()):
        raise CompilerBug(f"{', '.join(unborn)}: read, but written by no phase")
    blocks = [
        Lifetime(v, carried.get(v, stored_bytes(program.types[v])), first, last[v])
        for v, first in born.items()
    ]
    blocks += [Lifetime(workspace_name(i), size, i, i) for i, size in enumerate(workspace) if size]
    return blocks


def check_states(program: Program, phases: Sequence[Phase], boundaries: Sequence[Boundary]) -> None:
    """Raise `CompilerBug` where a phase reads a value of a state that a phase before it has overwritten."""
    current = {state: state for state in program.states.values()}
    for phase, boundary in zip(phases, boundaries, strict=True):
        for value in boundary.values_read:
            state = program.states.get(value)
            if state is not None and current[state] != value:
                raise CompilerBug(f"{phase.name} reads {value}, which {current[state]} has overwritten")
        for unit in phase.units:
            current |= {program.states[result]: result for result in unit.updates}
