"""Why a value leaves its kernel: every value between two launches has a reason, and it is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rewright.codegen.apart import why_apart
from rewright.codegen.targets import TARGETS
from rewright.graph_spec import load_plan, parse_spec
from rewright.ir.plan import Plan


@pytest.fixture(scope="module", params=["host", "sm80"])
def plan(request: pytest.FixtureRequest, tiny_v4: Path) -> Plan:
    return load_plan(parse_spec(f"{tiny_v4}@planned").with_options(target=request.param))[0]


def test_every_value_between_launches_has_a_reason(plan: Plan) -> None:
    reasons = why_apart(plan, TARGETS[plan.target])
    made = {value: launch.phase for launch in plan.launches for value in launch.writes}
    crossing = {
        value
        for launch in plan.launches
        for value in launch.reads
        if value in made and made[value] != launch.phase
    }
    assert crossing
    assert crossing <= set(reasons)
    assert set(plan.results.values()) <= set(reasons)
    states = {v for v in made if plan.values[v].space == "state"}
    assert states
    assert all(any("kept for the next step" in why for why in reasons[v]) for v in states)


def test_a_kernel_that_could_join_is_named(plan: Plan) -> None:
    """`no kernel computes A and then B` holds for the definitions: none has a slot for A before one for B."""
    target = TARGETS[plan.target]
    text = "\n".join(why for reasons in why_apart(plan, target).values() for why in reasons)
    pairs = set(re.findall(r"no kernel of \w+ computes (\w+) and then (\w+)", text))
    assert pairs
    for first, then in pairs:
        for kernel in target.kernels:
            a = [i for i, slot in enumerate(kernel.covers) if first in slot.ops]
            b = [i for i, slot in enumerate(kernel.covers) if then in slot.ops]
            assert not any(i < j for i in a for j in b)


def test_attention_and_wo_a_are_two(tiny_v4: Path) -> None:
    plan = load_plan(parse_spec(f"{tiny_v4}@planned").with_options(target="sm80"))[0]
    (why,) = why_apart(plan, TARGETS["sm80"])["layers.2.attn.o.groups"]
    assert why.endswith("no kernel of sm80 computes attention and then grouped_linear")
