"""Stages, layers and modules of launches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rewright.codegen.plan import make_plan
from rewright.codegen.targets import TARGETS
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.plan import Plan
from rewright.ir.stages import layer_of, module_of, stages_of
from rewright.ir.variant import Variant
from rewright.passes.manager import PassOptions
from rewright.rewriting import rewrite


@pytest.fixture(scope="module")
def plan(tiny_v4: Path) -> Plan:
    source = ModelSource.open(tiny_v4, Numerics.FAITHFUL, max_context=256)
    variant = Variant(1, 1, 256)
    return make_plan(rewrite(source, variant, PassOptions()).graph, variant, TARGETS["sm80"])


def test_launches_of_a_phase_are_one_stage(plan: Plan) -> None:
    symbols = Counter(launch.symbol.partition(".")[2] for launch in plan.launches)
    stages = Counter(stages_of(plan))
    assert stages["attention"] == symbols["attention_split"] + symbols["attention_combine"] == 12
    assert stages["index_select"] == symbols["index_select_score"] + symbols["index_select_topk"]
    assert stages["experts_in"] == symbols["experts_in"]
    assert stages["compress_write"] == symbols["compress_write"]
    assert stages.total() == len(plan.launches)


def test_a_kernel_before_both_halves_is_two_stages(plan: Plan) -> None:
    stages = stages_of(plan)
    assert "sublayer_in" not in stages
    for half in ("attn", "ffn"):
        found = [lau for lau, s in zip(plan.launches, stages, strict=True) if s == f"sublayer_in {half}"]
        assert [layer_of(launch) for launch in found] == list(range(6))
        assert all(f".{half}." in f"{launch.nodes[-1]}." for launch in found)


def test_modules(plan: Plan) -> None:
    of_layer_2 = [launch for launch in plan.launches if layer_of(launch) == 2]
    modules = {launch.symbol: module_of(launch) for launch in of_layer_2}
    assert modules["sm80.kv_write"] == "layers.2.attn.window.next"
    assert modules["sm80.experts_in"].startswith("layers.2.ffn")
    assert modules["sm80.attn_out"] == "layers.2"
    assert all(module.startswith("layers.2") for module in modules.values())
    assert module_of(plan.launches[-1]) == "head.x"
