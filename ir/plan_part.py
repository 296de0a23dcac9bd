"""A plan of some launches of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rewright.ir.plan import Plan


def launches_alone(plan: Plan, positions: Sequence[int]) -> Plan:
    """A plan of the launches at these positions only; values stay where they are, results are left out."""
    launches = tuple(plan.launches[at] for at in positions)
    used = {v for launch in launches for v in (*launch.reads, *launch.writes)}
    used |= {v for launch in launches for part in launch.parts for v in (*part.reads, *part.writes)}
    values = {name: place for name, place in plan.values.items() if name in used}
    return replace(plan, launches=launches, values=values, results={}, refusals={})
