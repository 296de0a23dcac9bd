"""The plan of a graph as JSON: which launches compute which nodes, their bytes, and who refused."""

from __future__ import annotations

from typing import Any

from rewright.codegen.apart import why_apart
from rewright.codegen.targets import TARGETS
from rewright.ir.fold import fold_layers
from rewright.ir.launch_bytes import launch_bytes
from rewright.ir.plan import Plan
from rewright.report.records import Interned


def plan_json(plan: Plan, context: int | None = None) -> dict[str, Any]:
    """The plan.

    target, arena_bytes, state_bytes
    launches    [{symbol, phase, nodes, bytes: {weights, state, activations, total}, alike}]: places
                of launches that are alike in other layers, null in those
    of          {node: [launch]}: places of the launches that compute a graph node, whole or in part
    reasons     [why a value leaves its kernel]
    apart       {value: [place in reasons]}
    refusals    [{unit, symbol, reason}]: kernels that were asked and did not take a unit
    """
    launches: list[dict[str, Any]] = []
    of: dict[str, list[int]] = {}
    for at, (launch, moved) in enumerate(zip(plan.launches, launch_bytes(plan, context), strict=True)):
        amounts = {
            "weights": moved.weights_read,
            "state": moved.state,
            "activations": moved.activations,
            "total": moved.total,
        }
        launches.append(
            {
                "symbol": launch.symbol,
                "phase": launch.phase,
                "nodes": list(launch.nodes),
                "bytes": amounts,
                "alike": None,
            }
        )
        for unit in launch.nodes:
            places = of.setdefault(node_of(unit), [])
            if at not in places:
                places.append(at)
    order = range(len(launches))
    for one in fold_layers(order, lambda at: launches[at]["phase"], lambda at: repr(launches[at])):
        launches[one.item]["alike"] = list(one.rest)
    reasons = Interned()
    apart = {v: list(map(reasons, why)) for v, why in why_apart(plan, TARGETS[plan.target]).items()}
    return {
        "target": plan.target,
        "arena_bytes": plan.arena_bytes,
        "state_bytes": plan.state_bytes,
        "launches": launches,
        "of": of,
        "apart": apart,
        "reasons": reasons.values,
        "refusals": [
            {"unit": unit, "symbol": symbol, "reason": reason}
            for unit, reasons in plan.refusals.items()
            for symbol, reason in reasons
        ],
    }


def node_of(unit: str) -> str:
    """The graph node that a unit of a plan is or belongs to."""
    return unit.partition("/")[0]
