"""Graphs obey a precision plan, and nothing else in them changes.

The oracle changes the traced graph itself, node by node as the plan reads; the passes must give the same
numbers, with every rule matching as often as the plan says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graphs import differing, op_names, results, small_model, traced, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rewright.codegen.plan import make_plan
from rewright.codegen.targets import TARGETS
from rewright.frontend.source import ModelSource
from rewright.ir.formats import dequantize_weight, quantize_blocks
from rewright.ir.graph import Graph, name_of, operands_of, producer_of
from rewright.ir.op import op_of
from rewright.ir.precision_plan import Adjustable, Precision
from rewright.ir.types import DType, ValueType
from rewright.ir.variant import Variant
from rewright.passes.lower_weights import fp4_codes, fp4_scale
from rewright.passes.manager import PassOptions, Rewritten, run_passes
from rewright.passes.reproducer import Reproducer, read_reproducer
from rewright.rewriting import facts_of

KINDS = ("decode", "chunk", "score")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def graphs(source: ModelSource) -> dict[str, Graph]:
    return {kind: traced(source, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def model(source: ModelSource) -> Adjustable:
    return Adjustable.of(source.weight_types())


def rewritten(source: ModelSource, graph: Graph, precision: Precision, **options: object) -> Rewritten:
    return run_passes(graph, facts_of(source, precision=precision), PassOptions(**options))  # type: ignore[arg-type]


def by_hand(graph: Graph, precision: Precision) -> Graph:
    """The traced graph with the plan applied to it, without any rule."""
    changed = graph.copy()
    for node in changed.ops:
        op = op_of(node.target)
        operands = dict(zip(op.operands, operands_of(node), strict=True))
        if op.name in ("linear", "expert_linear", "grouped_linear"):
            assert operands["weight"] is not None
            path = name_of(operands["weight"]).removesuffix(".weight")
            if path in precision.high_activations:
                assert operands["x"] is not None
                quant = producer_of(operands["x"])
                assert op_of(quant.target).name == "quantize"
                node.update_arg(op.operands.index("x"), operands_of(quant)[0])
                node.update_arg(op.operands.index("x_scale"), None)
            if path in precision.fp4_weights:
                rows, columns = operands["weight"].meta["types"][0].shape
                types = ValueType(DType.E2M1, (rows, columns)), ValueType(DType.E8M0, (rows, columns // 32))
                for name, type in zip(("weight", "scale"), types, strict=True):
                    leaf = changed.insert_leaf(node, "weight", f"{path}.fp4.{name}", type, "")
                    node.update_arg(op.operands.index(name), leaf)
        module = node.meta["module"].removesuffix(".compressor")
        if op.name == "dequantize" and module in precision.high_keys:
            assert operands["codes"] is not None
            quant = producer_of(operands["codes"])
            changed.redirect(node, operands_of(quant)[0])  # type: ignore[arg-type]
    return changed


def with_fp4(given: dict[str, Tensor], precision: Precision) -> dict[str, Tensor]:
    """The tensors of a graph, and FP4 forms of matrices, computed from their values directly."""
    found = dict(given)
    for path in precision.fp4_weights:
        if f"{path}.weight" in given:
            dense = dequantize_weight(given[f"{path}.weight"], given[f"{path}.scale"])
            found[f"{path}.fp4.weight"], found[f"{path}.fp4.scale"] = quantize_blocks(dense, "e2m1", 32)
    return found


def check(source: ModelSource, graph: Graph, precision: Precision) -> Rewritten:
    done = rewritten(source, graph, precision)
    for pass_ in done.report.passes:
        for rule in pass_.rules:
            assert rule.expected is None or rule.matches == rule.expected, (pass_.name, rule)
    given = with_fp4(values(graph), precision)
    assert differing(results(done.graph, given), results(by_hand(graph, precision), given)) == []
    assert done.derived.keys() == {n for n in given if ".fp4." in n}
    for name, derived in done.derived.items():
        made = derived.compute(*(given[s] for s in derived.sources))
        assert torch.equal(made.view(torch.uint8), given[name].view(torch.uint8))
    variant = Variant(**{k: graph.attrs[k] for k in ("tokens", "batch", "capacity", "all_positions")})
    make_plan(done.graph, variant, TARGETS["host"])  # every node has a kernel
    return done


def subset(paths: tuple[str, ...]) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(paths)) | st.just(frozenset(paths))


@given(data=st.data(), kind=st.sampled_from(KINDS))
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_random_plans(
    source: ModelSource, graphs: dict[str, Graph], model: Adjustable, data: st.DataObject, kind: str
) -> None:
    chosen = (data.draw(subset(model.modules[key])) for key in ("activations", "keys", "weights"))
    check(source, graphs[kind], Precision(*chosen))


def test_an_indexer_that_is_never_asked(model: Adjustable, tmp_path: Path) -> None:
    """Up to 4 * index_topk tokens nothing is scored: the plan's modules of it are not in the graph."""
    everything = Precision(*map(frozenset, (model.modules[k] for k in ("activations", "keys", "weights"))))
    few = small_model(tmp_path, index_topk=64)
    graph = few.graph(min(v for v in few.variants() if v.kind == "decode"))
    assert graph.attrs["capacity"] // 4 <= few.config.index_topk
    check(few, graph, everything)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_in_bf16_is_bf16_numerics(
    source: ModelSource, graphs: dict[str, Graph], model: Adjustable, kind: str, tmp_path: Path
) -> None:
    """The same graph, not only the same numbers."""
    ours = rewritten(source, graphs[kind], Precision(frozenset(model.modules["activations"]))).graph
    plain = small_model(tmp_path, "bf16")
    theirs = run_passes(traced(plain, kind), facts_of(plain)).graph
    ours.attrs["numerics"] = "bf16"
    assert ours == theirs


def test_no_rounding_is_left(source: ModelSource, graphs: dict[str, Graph], model: Adjustable) -> None:
    everything = Precision(frozenset(model.modules["activations"]), frozenset(model.modules["keys"]))
    done = rewritten(source, graphs["decode"], everything, to="canonical")
    assert not {"quantize", "dequantize"} & set(op_names(done.graph))


def test_gate_and_up_of_different_precision_stay_apart(source: ModelSource, graphs: dict[str, Graph]) -> None:
    """Experts whose two first products read different values are no `moe` node, and the counts know it."""
    paths = frozenset({"layers.1.ffn.experts.w1", "layers.2.ffn.shared_experts.w3"})
    done = check(source, graphs["decode"], Precision(paths))
    assert op_names(done.graph).count("moe") == 2
    assert op_names(done.graph).count("shared_expert") == 2


def test_a_matrix_as_fp4() -> None:
    """Each value is the nearest of its block's sixteen."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(160, 256, generator=generator) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.tensor([[120, 121], [122, 119]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    dense = dequantize_weight(weight, scale)
    found = dequantize_weight(fp4_codes(weight, scale), fp4_scale(weight, scale))
    blocks = dense.unflatten(1, (-1, 32))
    step = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6)))
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat([grid, -grid])
    nearest = ((blocks / step)[..., None] - grid).abs().amin(-1)
    error = ((found.unflatten(1, (-1, 32)) - blocks) / step).abs()
    assert torch.allclose(error, nearest, atol=1e-6)


def test_a_reproducer_remembers_the_plan(
    source: ModelSource, graphs: dict[str, Graph], tmp_path: Path
) -> None:
    facts = facts_of(source, precision=Precision(frozenset({"layers.0.attn.wq_a"})))
    path = tmp_path / "reproducer.json"
    path.write_text(Reproducer.of(graphs["decode"], facts, ("eliminate_quant",), (), False).to_text())
    assert read_reproducer(path).facts == facts


def test_folding_leaves_fp4_matrices_alone(source: ModelSource, graphs: dict[str, Graph]) -> None:
    facts = facts_of(source, "always", Precision(fp4_weights=frozenset({"layers.1.attn.wo_a"})))
    done = run_passes(graphs["decode"], facts)
    (fold,) = (r for p in done.report.passes for r in p.rules if r.name == "fold_wo")
    assert (fold.matches, fold.expected) == (2, 2)
    assert {miss.reason for miss in fold.near} >= {"the precision plan stores its parts as FP4"}
