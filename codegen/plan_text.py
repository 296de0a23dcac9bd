"""A plan as text: phases with their kernels, nodes with their phases, and who refused what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rewright.ir.errors import UsageError
from rewright.ir.names import within
from rewright.ir.plan import Launch, Plan


def print_plan(plan: Plan, *, module: str = "") -> str:
    """The whole plan, or what it says of the nodes of one module's subtree.

    One line for every phase, node and refusal; no line changes when another does.

    Phases stand in order of execution: `phase = kernels` or, where the phase covers more than the unit
    it is called after, `phase = kernels {units}`. A node that was taken apart stands as
    `node -> phase, phase`.
    """
    head = [
        f"plan {plan.variant.name}",
        f"target {plan.target}",
        f"memory arena={plan.arena_bytes} state={plan.state_bytes}",
        f"launches {len(plan.launches)}",
    ]
    shown = replace(
        plan,
        launches=tuple(item for item in plan.launches if any(_within(n, module) for n in item.nodes)),
        refusals={unit: r for unit, r in plan.refusals.items() if _within(unit, module)},
    )
    if module and not shown.launches:
        raise UsageError(f"no node lies in module {module}", where="--module")
    sections = {"phases": _phases(shown), "nodes": _nodes(shown), "refusals": _refusals(shown)}
    for title, lines in sections.items():
        head += ["", f"{title}:", *(f"  {line}" for line in lines)]
    return "\n".join(head) + "\n"


def _within(unit: str, module: str) -> bool:
    return within(unit.partition("/")[0], module)


def _by_phase(plan: Plan) -> dict[str, list[Launch]]:
    found: dict[str, list[Launch]] = {}
    for launch in plan.launches:
        found.setdefault(launch.phase, []).append(launch)
    return found


def _phases(plan: Plan) -> Iterator[str]:
    for phase, launches in _by_phase(plan).items():
        symbols = " + ".join(launch.symbol for launch in launches)
        units = launches[0].nodes
        yield f"{phase} = {symbols}" + (f" {{{', '.join(units)}}}" if units != (phase,) else "")


def _nodes(plan: Plan) -> Iterator[str]:
    phases: dict[str, dict[str, None]] = {}
    for launch in plan.launches:
        for unit in launch.nodes:
            phases.setdefault(unit.partition("/")[0], {})[launch.phase] = None
    for node, found in phases.items():
        yield f"{node} -> {', '.join(found)}"


def _refusals(plan: Plan) -> Iterator[str]:
    for unit, refusals in plan.refusals.items():
        for symbol, reason in refusals:
            yield f"{unit}: {symbol}: {reason}"
