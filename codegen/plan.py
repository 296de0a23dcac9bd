"""Graph -> plan: kernels for all nodes, and memory for all values."""

from __future__ import annotations

from rewright.codegen.boundary import boundary_of
from rewright.codegen.flow import Flow
from rewright.codegen.kernel import Call
from rewright.codegen.lifetimes import check_states, lifetimes, workspace_name
from rewright.codegen.lower import launches_of, places, weight_layouts
from rewright.codegen.memory import in_a_row, share
from rewright.codegen.select import select
from rewright.codegen.targets import Target
from rewright.codegen.units import Program
from rewright.ir.carried import carried_bytes
from rewright.ir.graph import Graph
from rewright.ir.layout import stored_bytes
from rewright.ir.plan import Plan
from rewright.ir.variant import Variant


def make_plan(graph: Graph, variant: Variant, target: Target) -> Plan:
    """What executes a graph on a target.

    Args:
        graph: the graph at any stage.
        variant: what it was made for.
        target: the kernels.

    Raises:
        Refused: the target has no kernel for some node.
    """
    program = Program.of(graph)
    selection = select(program, target, variant)
    phases, flow = selection.phases, Flow(program)
    calls = [Call(phase.units, program.types, program.leaves, variant) for phase in phases]
    boundaries = [boundary_of(phase, program, flow) for phase in phases]
    check_states(program, phases, boundaries)
    sizes = [phase.kernel.workspace(call) for phase, call in zip(phases, calls, strict=True)]
    carried = {
        v: f for phase, call in zip(phases, calls, strict=True) for v, f in phase.kernel.carries(call).items()
    }
    bytes_of = {value: carried_bytes(form, program.types[value]) for value, form in carried.items()}
    arena = share(lifetimes(program, flow, boundaries, sizes, bytes_of))
    states = [name for name, kind in program.leaves.items() if kind == "state"]
    state = in_a_row((name, stored_bytes(program.types[name])) for name in states)
    layouts = weight_layouts(program, phases, calls)
    memory = [(arena.offsets[workspace_name(at)], size) if size else (0, 0) for at, size in enumerate(sizes)]
    return Plan(
        target=target.name,
        abi=target.abi,
        variant=variant,
        arena_bytes=arena.nbytes,
        state_bytes=state.nbytes,
        values=places(program, boundaries, layouts, state, arena, carried),
        launches=tuple(
            launch
            for phase, boundary, workspace in zip(phases, boundaries, memory, strict=True)
            for launch in launches_of(phase, boundary, workspace)
        ),
        results=dict(program.results),
        refusals=selection.refusals,
    )
