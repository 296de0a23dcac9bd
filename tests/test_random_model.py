"""Random models: valid content in every layout, finite logits, routing that spreads; bytes of launches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rewright.codegen.plan import make_plan
from rewright.codegen.targets import TARGETS
from rewright.frontend.config import ModelConfig, load_config
from rewright.ir.graph import Graph
from rewright.ir.interpret import Interpreter, empty_state
from rewright.ir.launch_bytes import launch_bytes, routed_values
from rewright.ir.plan import Plan
from rewright.ir.round_trips import step_bytes
from rewright.ir.traffic import traffic
from rewright.ir.types import DType, ValueType
from rewright.ir.variant import Variant
from rewright.ir.weight_layout import LAYOUTS
from rewright.passes.manager import PassOptions
from rewright.random_model import Maker, open_config, random_weights, reduced
from rewright.rewriting import rewrite
from rewright.runtime import _native

CONTEXT = 256


@pytest.fixture(scope="module")
def config(repo_root: Path) -> ModelConfig:
    """tiny-v4 with a layer of each kind, the first of which routes by token id."""
    tiny = load_config(repo_root / "examples" / "tiny-v4")[0]
    return reduced(tiny, [0, 4, 128], hash_layers=1)


def planned(config: ModelConfig, target: str, batch: int = 1) -> tuple[Graph, Plan]:
    source = open_config(config, max_context=CONTEXT, max_batch=batch)
    variant = Variant(1, batch, CONTEXT)
    graph = rewrite(source, variant, PassOptions()).graph
    return graph, make_plan(graph, variant, TARGETS[target])


def test_layers_are_as_asked_for(config: ModelConfig) -> None:
    assert config.compress_ratios == (0, 4, 128)
    assert [config.is_hash_layer(i) for i in range(3)] == [True, False, False]
    assert reduced(config, [4], hash_layers=3).num_hash_layers == 1


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("", DType.F8E4M3), ("tile16", DType.F8E4M3), ("mma8", DType.F8E4M3), ("mma4", DType.E2M1)],
)
def test_no_code_is_a_nan(layout: str, dtype: DType) -> None:
    types = {"a.weight": ValueType(dtype, (3, 128, 256))}
    codes = LAYOUTS[layout].unpack(Maker("cpu", 0, experts=4).make("a.weight", types, layout))
    if dtype is DType.F8E4M3:
        assert codes.float().isfinite().all()
        assert len(codes.view(torch.uint8).unique()) > 100
    else:
        assert len(codes.unique()) == 256


@pytest.mark.parametrize("dtype", [DType.F8E4M3, DType.E2M1])
def test_products_keep_their_size(dtype: DType) -> None:
    from rewright.ir.formats import dequantize_weight

    shape = (256, 1024)
    scale = (2, 8) if dtype is DType.F8E4M3 else (256, 32)
    types = {"a.weight": ValueType(dtype, shape), "a.scale": ValueType(DType.E8M0, scale)}
    maker = Maker("cpu", 1, experts=4)
    weight = dequantize_weight(maker.make("a.weight", types), maker.make("a.scale", types)).float()
    gain = (torch.randn(16, shape[1]) @ weight.mT).std()
    assert 0.4 < gain < 2.5


def test_a_table_names_distinct_experts() -> None:
    types = {"tid2eid": ValueType(DType.I64, (20_000, 6))}
    table = Maker("cpu", 0, experts=8).make("tid2eid", types)
    assert table.min() >= 0
    assert table.max() == 7
    assert all((table[:, i] != table[:, j]).all() for i in range(6) for j in range(i))


def test_logits_are_finite_and_tokens_spread_over_experts(config: ModelConfig) -> None:
    source = open_config(config, max_context=CONTEXT)
    variant = Variant(1, 1, CONTEXT)
    graph = rewrite(source, variant, PassOptions()).graph
    plan = make_plan(graph, variant, TARGETS["host"])
    packed = random_weights([plan], source, seed=3)
    layouts = {n: p.layout for n, p in plan.values.items() if p.space == "weight"}
    weights = {n: LAYOUTS[layouts[n]].unpack(t) for n, t in packed.items()}
    traced = source.graph(variant)
    interpreter, state = Interpreter(traced, weights), empty_state(traced)
    chosen: dict[str, list[int]] = {}

    def observe(name: str, value: Tensor) -> None:
        if name.endswith("gate.experts"):
            chosen.setdefault(name, []).extend(value.flatten().tolist())

    for pos in range(24):
        inputs = {name: torch.tensor([v], dtype=torch.int32) for name, v in (("n_valid", 1), ("slot", 0))}
        inputs |= {"tokens": torch.tensor([[37 * pos % 4096]], dtype=torch.int32)}
        inputs |= {"pos": torch.tensor([pos], dtype=torch.int32)}
        logits = interpreter.run(inputs, state, observe=observe)["logits"]
        assert logits.isfinite().all()
        assert 0.1 < logits.std() < 100
    assert len(chosen) == 3
    for layer, ids in chosen.items():
        counts = torch.bincount(torch.tensor(ids), minlength=config.n_routed_experts)
        assert (counts > 0).sum() >= config.n_routed_experts - 2, layer
        assert counts.max() < 20, layer


def test_the_host_runs_it(config: ModelConfig) -> None:
    source = open_config(config, max_context=CONTEXT)
    plan = planned(config, "host")[1]
    weights = random_weights([plan], source)
    arena, state = (torch.zeros(n, dtype=torch.uint8) for n in (plan.arena_bytes, plan.state_bytes))
    program = _native.Program(
        plan.to_text(),
        {name: (t.data_ptr(), t.numel() * t.element_size()) for name, t in weights.items()},
        (arena.data_ptr(), arena.numel()),
        (state.data_ptr(), state.numel()),
    )
    step = [torch.tensor([v], dtype=torch.int32) for v in (17, 0, 1, 0)]
    program.run(_native.Team(1, program.scratch_bytes), *(t.data_ptr() for t in step))
    address, size = program.result("logits")
    start = address - arena.data_ptr()
    logits = arena[start : start + size].view(torch.float32)
    assert logits.isfinite().all()
    assert logits.std() > 0.1


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("target", ["host", "sm80"])
def test_launches_read_what_the_graph_reads(config: ModelConfig, target: str, batch: int) -> None:
    graph, plan = planned(config, target, batch)
    found, expected = launch_bytes(plan), step_bytes(graph)
    assert sum(b.weights_read for b in found) == pytest.approx(
        expected.weights + expected.constants, rel=2e-3
    )
    assert sum(b.state for b in found) == pytest.approx(expected.state, rel=0.05)
    if target == "sm80":
        # Mixing logits cross as a part from each thread block, whatever the model's size.
        carried = sum(2 * p.bytes for p in plan.values.values() if p.bytes is not None)
        through_memory = sum(b.activations for b in found)
        assert through_memory < 1.5 * expected.activations + carried


def test_weights_of_the_released_model(repo_root: Path) -> None:
    config = load_config(repo_root / "examples" / "configs" / "v4-flash.json")[0]
    graph, plan = planned(reduced(config, [0, 4, 128]), "sm80")
    found = launch_bytes(plan)
    assert sum(b.weights_read for b in found) == sum(traffic(graph).reads[k] for k in ("weight", "constant"))


def test_counted_experts_take_the_place_of_expected_ones(config: ModelConfig) -> None:
    _, plan = planned(config, "sm80", 4)
    ids = routed_values(plan)
    assert len(ids) == 3
    assert all(plan.values[v].space == "arena" for v in ids.values())
    fewest = launch_bytes(plan, distinct=dict.fromkeys(ids.values(), 1.0))
    most = launch_bytes(plan, distinct=dict.fromkeys(ids.values(), 16.0))
    for few, many in zip(fewest, most, strict=True):
        assert many.weights_read - few.weights_read == 15 * few.experts
        assert dataclasses.replace(few, distinct=many.distinct) == many
