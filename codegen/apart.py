"""Why a value leaves its kernel: what keeps the launch that makes it and those that read it apart."""

from __future__ import annotations

from rewright.codegen.kernel import KernelDef
from rewright.codegen.targets import Target
from rewright.ir.launch_bytes import ops_of
from rewright.ir.plan import Launch, Plan


def why_apart(plan: Plan, target: Target) -> dict[str, tuple[str, ...]]:
    """Reasons by value, one sentence each without a full stop; values that stay in a kernel have none.

    Args:
        plan: the plan.
        target: what it was made for.
    """
    makers: dict[str, Launch] = {}
    readers: dict[str, dict[str, Launch]] = {}
    for launch in plan.launches:
        makers.update(dict.fromkeys(launch.writes, launch))
        for value in launch.reads:
            if value is not None:
                readers.setdefault(value, {})[launch.phase] = launch
    results = set(plan.results.values())
    found: dict[str, tuple[str, ...]] = {}
    for value, maker in makers.items():
        others = [r for phase, r in readers.get(value, {}).items() if phase != maker.phase]
        reasons = [_between(value, maker, other, target) for other in others]
        if value in results:
            reasons.append(f"{value} is a result of the step")
        if plan.values[value].space == "state":
            reasons.append(f"{value} is kept for the next step")
        if reasons:
            found[value] = tuple(dict.fromkeys(reasons))
    return found


def _between(value: str, maker: Launch, reader: Launch, target: Target) -> str:
    """Why two launches are two, as far as the definitions of the kernels say it."""
    gives = next((op.op for op in ops_of(maker) if value in op.writes), ops_of(maker)[-1].op)
    takes = next((op.op for op in ops_of(reader) if value in op.reads), ops_of(reader)[0].op)
    head = f"{reader.symbol} reads {value} again"
    both = sorted({k.symbol for k in target.kernels if _holds(k, gives, takes)})
    if not both:
        return f"{head}: no kernel of {target.name} computes {gives} and then {takes}"
    return f"{head}: {', '.join(both)} can compute {gives} and then {takes}, but not in these two places"


def _holds(kernel: KernelDef, first: str, then: str) -> bool:
    """Whether a kernel has a slot for one op and, in it or behind it, one for the other."""
    slots = [(first in slot.ops, then in slot.ops, slot.many) for slot in kernel.covers]
    if any(a and b and many for a, b, many in slots):
        return True
    return any(a and any(b for _, b, _ in slots[i + 1 :]) for i, (a, _, _) in enumerate(slots))
