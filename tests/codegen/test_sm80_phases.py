"""The sm80 plan of a V4-Flash decode step, phase by phase, and everything that sm80 refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from graphs import Net, rewrite_all, small_model, traced
from plans import trouble, variant_of

from rewright.codegen.kernel import Call, No, Ok
from rewright.codegen.kernels import sm80
from rewright.codegen.kernels.sm80_limits import LIMITS, supports, supports_decode
from rewright.codegen.plan import make_plan
from rewright.codegen.targets import TARGETS
from rewright.codegen.units import Program
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.errors import Refused
from rewright.ir.graph import Graph, op_named
from rewright.ir.op import registry
from rewright.ir.plan import Plan
from rewright.rewriting import facts_of

SM80 = TARGETS["sm80"]
LAYERS = 43

ATTENTION = ["sm80.attention_split", "sm80.attention_combine"]
SELECT = ["sm80.index_select_score", "sm80.index_select_topk"]
INPUT = ["sm80.sublayer_in", "sm80.normed_in"]
TAIL = ["sm80.grouped_linear", "sm80.attn_out", "sm80.sublayer_in", "sm80.experts_in", "sm80.experts_out"]
WINDOW = [*INPUT, "sm80.kv_write", *ATTENTION, *TAIL]
POOLED = [*INPUT, "sm80.compress_write", "sm80.kv_write", *ATTENTION, *TAIL]
INDEXED = [
    *INPUT, "sm80.index_query", "sm80.compress_write", *SELECT, "sm80.compress_write", "sm80.kv_write",
    *ATTENTION, *TAIL,
]  # fmt: skip
BY_RATIO = {0: WINDOW, 4: INDEXED, 128: POOLED}
END = ["sm80.take_last", "sm80.hc_mix", "sm80.head"]


@pytest.fixture(scope="module")
def flash(repo_root: Path) -> tuple[Graph, Plan]:
    """V4-Flash's decode step with 8 K of context, after all passes, and its plan."""
    path = repo_root / "examples" / "configs" / "v4-flash.json"
    source = ModelSource.open(path, Numerics.FAITHFUL, max_context=8192)
    variant = max(v for v in source.variants() if v.kind == "decode")
    graph = rewrite_all(source.graph(variant), facts_of(source))
    return graph, make_plan(graph, variant, SM80)


@pytest.fixture(scope="module")
def ratios(repo_root: Path) -> list[int]:
    path = repo_root / "examples" / "configs" / "v4-flash.json"
    return list(ModelSource.open(path, Numerics.FAITHFUL).config.compress_ratios)[:LAYERS]


class TestFlash:
    def test_launches_of_every_kind_of_layer(self, flash: tuple[Graph, Plan], ratios: list[int]) -> None:
        expected = ["sm80.start"]
        for ratio in ratios:
            expected += BY_RATIO[ratio]
        expected += END
        assert [launch.symbol for launch in flash[1].launches] == expected
        assert {ratio: len(launches) for ratio, launches in BY_RATIO.items()} == {0: 10, 4: 15, 128: 11}
        assert Counter(ratios) == {0: 2, 4: 21, 128: 20}

    def test_no_kernel_refused(self, flash: tuple[Graph, Plan]) -> None:
        refused = {name for name in flash[1].refusals if not name.startswith("head.x/")}
        assert refused == set()

    def test_what_the_phases_of_an_indexed_layer_cover(self, flash: tuple[Graph, Plan]) -> None:
        assert covered(flash[1], 2) == {
            "sm80.sublayer_in": [
                "1.hc_ffn.streams/hc_split", "1.hc_ffn.streams/hc_collapse", "1.hc_ffn.streams/rms_norm",
                "1.hc_ffn.streams/quantize", "attn.wq_a/linear0", "attn.wq_a/linear1",
                "attn.indexer.compressor.wkv/linear0", "attn.indexer.compressor.wkv/linear1",
                "attn.indexer.compressor.wkv/linear2", "attn.indexer.compressor.wkv/linear3",
                "attn.indexer.compressor.wkv/linear4",
                "hc_attn.streams/hc_split", "hc_attn.streams/hc_collapse", "hc_attn.streams/rms_norm",
                "hc_attn.streams/quantize", "ffn.gate.logits", "ffn.shared_experts.w2/linear0",
                "ffn.shared_experts.w2/linear1",
            ],
            "sm80.normed_in": [
                "attn.wq_b.x/rms_norm", "attn.wq_b.x/quantize", "attn.wq_b/linear0", "attn.wq_b/linear1",
            ],
            "sm80.index_query": ["attn.indexer.q.rounded"],
            "sm80.compress_write": ["attn.indexer.compressor.kv_ring.next", "attn.compressor.kv_ring.next"],
            "sm80.kv_write": ["attn.window.next"],
            "sm80.index_select_score": ["attn.indexer.chosen"],
            "sm80.index_select_topk": ["attn.indexer.chosen"],
            "sm80.attention_split": ["attn.o.groups"],
            "sm80.attention_combine": ["attn.o.groups"],
            "sm80.grouped_linear": ["attn.wo_b.x/grouped_linear"],
            "sm80.attn_out": [
                "attn.wo_b.x/quantize", "attn.wo_b", "hc_attn.streams/hc_combine", "hc_attn.streams/hc_mix",
            ],
            "sm80.experts_in": [
                "ffn.shared_experts.w2/swiglu", "ffn.shared_experts.w2/quantize",
                "ffn.shared_experts.w2/linear2", "ffn.y/route_hash",
                "ffn.y/expert_linear0", "ffn.y/expert_linear1",
            ],
            "sm80.experts_out": [
                "ffn.y/swiglu", "ffn.y/quantize", "ffn.y/expert_linear2", "ffn.y/expert_sum",
                "hc_ffn.streams/hc_combine", "hc_ffn.streams/hc_mix",
            ],
        }  # fmt: skip

    def test_what_differs_in_other_layers(self, flash: tuple[Graph, Plan]) -> None:
        window, pooled = covered(flash[1], 1), covered(flash[1], 3)
        assert window["sm80.sublayer_in"][4:6] == ["attn.wq_a/linear0", "attn.wq_a/linear1"]
        assert window["sm80.normed_in"] == ["attn.wq_b.x/rms_norm", "attn.wq_b.x/quantize", "attn.wq_b"]
        compressor = ["attn.compressor.wkv/linear0", "attn.compressor.wkv/linear1"]
        assert pooled["sm80.sublayer_in"][6:8] == compressor
        assert "ffn.y/route" in pooled["sm80.experts_in"]

    def test_the_ends_of_the_step(self, flash: tuple[Graph, Plan]) -> None:
        launches = flash[1].launches
        assert launches[0].nodes == ("embed", "streams", "layers.0.attn.wq_a.x/hc_mix")
        assert launches[0].writes == ("streams", "layers.0.attn.wq_a.x/hc_mix")
        assert launches[-1].nodes == (
            "head.x/hc_head_split",
            "head.x/hc_collapse",
            "head.x/rms_norm",
            "logits",
        )
        assert launches[-1].writes == ("logits",)

    def test_what_crosses_from_phase_to_phase(self, flash: tuple[Graph, Plan]) -> None:
        """Only what the next phases read: no norm, no quantised row of one sub-block's products."""
        by_symbol = {}
        for launch in flash[1].launches:
            if any(".2." in f"{node}." for node in launch.nodes):
                by_symbol[launch.symbol] = [v.removeprefix("layers.2.") for v in launch.writes]
        assert by_symbol["sm80.attn_out"] == ["hc_attn.streams", "hc_attn.streams/hc_mix"]
        assert by_symbol["sm80.experts_in"] == [
            "ffn.shared_experts.w2",
            "ffn.y/route_hash.experts",
            "ffn.y/route_hash.weights",
            "ffn.y/expert_linear0",
            "ffn.y/expert_linear1",
        ]
        assert by_symbol["sm80.experts_out"] == ["hc_ffn.streams", "hc_ffn.streams/hc_mix"]
        assert by_symbol["sm80.attention_split"] == []

    def test_mixing_logits_cross_as_a_part_from_each_block(self, flash: tuple[Graph, Plan]) -> None:
        place = flash[1].values["layers.2.hc_attn.streams/hc_mix"]
        assert (place.layout, place.bytes) == ("hc_partials", 132 * 32 * 4)
        assert flash[1].values["layers.2.attn.wo_b"].space == "kernel"

    def test_memory(self, flash: tuple[Graph, Plan]) -> None:
        graph, plan = flash
        assert trouble(graph, plan, SM80) == []
        assert plan.arena_bytes < 4e6
        states = sum(node.meta["types"][0].nbytes for node in graph.of_kind("state"))
        assert plan.state_bytes == states


def covered(plan: Plan, layer: int) -> dict[str, list[str]]:
    """Units of the launches of a layer by symbol, names without the layer's own prefix."""
    found: dict[str, list[str]] = {}
    for launch in plan.launches:
        layers = [int(node.split(".")[1]) for node in launch.nodes if node.startswith("layers.")]
        if launch.nodes[0] != "embed" and max(layers, default=None) == layer:
            found.setdefault(launch.symbol, []).extend(
                n.removeprefix(f"layers.{layer}.").removeprefix("layers.") for n in launch.nodes
            )
    return found


class TestSmallModels:
    @pytest.mark.parametrize("numerics", ["faithful", "bf16"])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_a_decode_step_has_the_same_launches_with_and_without_quantisation(
        self, tmp_path: Path, numerics: str, batch: int
    ) -> None:
        source = small_model(tmp_path, numerics, max_batch=batch)
        graph = rewrite_all(traced(source), facts_of(source))
        symbols = [launch.symbol for launch in make_plan(graph, variant_of(graph), SM80).launches]
        assert symbols == ["sm80.start", *WINDOW, *INDEXED, *POOLED, *END]

    def test_more_tokens_than_a_streaming_kernel_takes(self, tmp_path: Path) -> None:
        """Chunks of 8 still fit the phases; the entries of a chunk are written behind attention."""
        source = small_model(tmp_path)
        graph = rewrite_all(traced(source, "chunk"), facts_of(source))
        symbols = Counter(launch.symbol for launch in make_plan(graph, variant_of(graph), SM80).launches)
        assert symbols["sm80.sublayer_in"] == 6
        assert symbols["sm80.experts_out"] == 3
        assert symbols["sm80.kv_rows"] == symbols["sm80.ring_write"] == 3
        wide = small_model(tmp_path, max_batch=9)
        graph = rewrite_all(traced(wide), facts_of(wide))
        plan = make_plan(graph, variant_of(graph), SM80)
        phases = {symbol for kernel in sm80.PHASES if not kernel.single for symbol in kernel.symbols}
        assert not phases & {launch.symbol for launch in plan.launches}
        assert plan.refusals["embed"] == (("sm80.start", "9 tokens of a step are more than 8"),)

    def test_a_graph_without_fusions(self, tmp_path: Path) -> None:
        source = small_model(tmp_path)
        plan = make_plan(traced(source), variant_of(traced(source)), SM80)
        assert len(plan.launches) > 100

    def test_fp32_is_refused(self, tmp_path: Path) -> None:
        graph = traced(small_model(tmp_path, "fp32"))
        with pytest.raises(Refused, match="x is f32, not bf16"):
            make_plan(graph, variant_of(graph), SM80)


def test_fused_ops_are_kept_or_taken_apart() -> None:
    fused = {op.name for op in registry().values() if op.composition is not None}
    kept = {slot.ops[0] for kernel in SM80.kernels if kernel.single for slot in kernel.covers} & fused
    assert kept == set(sm80.FUSED)
    assert SM80.ops & fused == kept


@dataclass(frozen=True)
class Case:
    """A call with one thing that sm80 has or lacks: operands as `kind type`, inputs before weights."""

    op: str
    operands: dict[str, str]
    attrs: dict[str, Any]

    def call(self) -> Call:
        net = Net()
        given = {name: getattr(net, kind)(name, type) for name, (kind, type) in self._split()}
        made = getattr(net, self.op)("made", *map(given.get, op_named(self.op).operands), **self.attrs)
        first = made[0] if isinstance(made, tuple) else made
        graph = net.graph(out=first)
        program = Program.of(graph)
        return Call((program.units[0],), program.types, program.leaves, variant_of(graph))

    def _split(self) -> list[tuple[str, list[str]]]:
        return [(name, text.split()) for name, text in self.operands.items()]


STEP = dict.fromkeys(("pos", "n_valid", "slot"), "input i32[1]")


def norm(dtype: str = "bf16", weight: str = "bf16") -> Case:
    return Case("rms_norm", {"x": f"input {dtype}[1,1,64]", "weight": f"weight {weight}[64]"}, {"eps": 1e-6})


def product(rows: int, columns: int, dtype: str = "bf16") -> Case:
    operands = {"x": f"input bf16[1,1,{columns}]", "weight": f"weight {dtype}[{rows},{columns}]"}
    if dtype == "f8e4m3":
        operands["scale"] = f"weight e8m0[{-(-rows // 128)},{-(-columns // 128)}]"
    return Case("linear", operands, {"out": "bf16"})


def calibrated_product(block: int) -> Case:
    """Of codes that share one row of scales."""
    weight = {"weight": "weight f8e4m3[128,256]", "scale": "weight e8m0[1,2]"}
    operands = {"x": "input f8e4m3[1,1,256]", "x_scale": f"weight e8m0[{256 // block}]", **weight}
    return Case("linear", operands, {"out": "bf16"})


def calibrated_codes(block: int) -> Case:
    operands = {"x": "input bf16[1,1,256]", "fixed": f"weight e8m0[{256 // block}]"}
    return Case("quantize_static", operands, {"fmt": "e4m3", "block": block})


def attention(heads: int, width: int, **packed: str) -> Case:
    window = f"bf16[1,8,{width}]" if not packed else "byte[1,8,583]"
    operands = {
        "q": f"input bf16[1,1,{heads},{width}]", **STEP,
        "window": f"state {window}", "sink": f"weight f32[{heads}]",
    }  # fmt: skip
    return Case("sparse_attention", operands, {"ratio": 0, "capacity": 64, "scale": 1.0, **packed})


def rows_of_keys(width: int) -> Case:
    operands = {"x": f"input bf16[1,1,{width}]", "pos": "input i32[1]", "weight": f"weight bf16[{width}]"}
    tables = {"cos": "weight f32[64,4]", "sin": "weight f32[64,4]"}
    return Case("kv_rows", {**operands, **tables}, {"eps": 1e-6})


def score(width: int, **packed: str) -> Case:
    keys = f"bf16[1,16,{width}]" if not packed else "byte[1,16,68]"
    operands = {
        "q": f"input bf16[1,1,4,{width}]", "weights": "input bf16[1,1,4]", **STEP, "keys": f"state {keys}",
    }  # fmt: skip
    return Case("index_score", operands, {"ratio": 4, "capacity": 64, "weight_scale": 1.0, **packed})


def streams(count: int) -> Case:
    return Case("hc_expand", {"x": "input bf16[1,1,64]"}, {"streams": count})


def mixed(count: int) -> Case:
    size = (2 + count) * count
    operands = {"mix": f"input f32[1,1,{size}]", "scale": "weight f32[3]", "base": f"weight f32[{size}]"}
    return Case("hc_split", operands, {"streams": count, "iters": 3, "eps": 1e-6})


def routed(experts: int, k: int) -> Case:
    operands = {
        "logits": f"input f32[1,1,{experts}]",
        "n_valid": "input i32[1]",
        "bias": f"weight f32[{experts}]",
    }
    return Case("route", operands, {"k": k, "scale": 1.0})


TAKES = [
    norm(), norm(weight="f32"), product(128, 128, "f8e4m3"), product(64, 128), product(3, 256, "f32"),
    *(attention(4, width) for width in (128, 256, 512)), rows_of_keys(512), score(128),
    streams(2), streams(4), mixed(2), mixed(4), routed(384, 8),
    calibrated_product(128), calibrated_codes(128),
]  # fmt: skip
CALIBRATED = "a calibrated scale is for {} values; these kernels take one for 128 (calibrate --block)"
PACKED = "holds packed keys ({}); these kernels read bf16 only (--kv bf16)"
REFUSES: dict[str, dict[str, Case]] = {
    "keys": {
        f"window {PACKED.format('e4m3:64:448')}": attention(4, 512, window_rows="e4m3:64:448"),
        f"keys {PACKED.format('e2m1:32:128')}": score(128, keys_rows="e2m1:32:128"),
    },
    "activations": {"x is f32, not bf16": norm("f32"), "x is f16, not bf16": norm("f16")},
    "weights": {"weight weight is f16": norm(weight="f16"), "weight weight is f64": norm(weight="f64")},
    "scales": {
        CALIBRATED.format(32): calibrated_product(32),
        CALIBRATED.format(256): calibrated_product(256),
        CALIBRATED.format(64): calibrated_codes(64),
    },
    "matrix": {
        "rows of 192 elements are no multiple of 128": product(128, 192),
        "192 rows of a matrix with scales are no multiple of 128": product(192, 128, "f8e4m3"),
    },
    "head_dim": {
        "head_dim 192 is not 128 or 256 or 512": attention(4, 192),
        "head_dim 64 is not 128 or 256 or 512": rows_of_keys(64),
    },
    "heads": {"3 heads are fewer than 4": attention(3, 128)},
    "index_head_dim": {"index heads of 64 are not 128": score(64)},
    "hc_mult": {"3 streams are not 2 or 4": streams(3), "5 streams are not 2 or 4": mixed(5)},
    "experts": {"385 experts are more than 384": routed(385, 8)},
    "top_k": {"9 experts of a token are more than 8": routed(16, 9)},
}
"""Reasons by limit, each with a call that is just beyond it."""


class TestLimits:
    @pytest.mark.parametrize("case", TAKES, ids=lambda case: f"{case.op} {case.attrs}")
    def test_what_sm80_takes(self, case: Case) -> None:
        assert supports(case.call()) == Ok()
        assert [limit.name for limit in LIMITS if limit.find(case.call())] == []

    @pytest.mark.parametrize(
        ("limit", "reason"), [(limit, reason) for limit, cases in REFUSES.items() for reason in cases]
    )
    def test_what_sm80_refuses(self, limit: str, reason: str) -> None:
        call = REFUSES[limit][reason].call()
        assert supports(call) == No(reason)
        assert [found.name for found in LIMITS if found.find(call)] == [limit]

    def test_every_limit_is_shown(self) -> None:
        assert [limit.name for limit in LIMITS] == list(REFUSES)

    def test_streaming_kernels_take_few_tokens(self) -> None:
        call = norm().call()
        assert supports_decode(call) == Ok()
        for batch, tokens, verdict in (
            (8, 1, Ok()),
            (1, 8, Ok()),
            (3, 3, No("9 tokens of a step are more than 8")),
        ):
            variant = type(call.variant)(tokens, batch, 64)
            assert supports_decode(Call(call.units, call.types, call.kinds, variant)) == verdict

    @pytest.mark.parametrize(
        ("keys", "reason"),
        [
            ({"head_dim": 1024}, "head_dim 1024 is not"),
            ({"num_attention_heads": 2}, "2 heads are fewer than 4"),
            ({"hc_mult": 3}, "3 streams are not"),
            ({"n_routed_experts": 385}, "385 experts are more than 384"),
            ({"n_routed_experts": 16, "num_experts_per_tok": 9}, "9 experts of a token are more than 8"),
            ({"index_head_dim": 256}, "index heads of 256 are not 128"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_a_model_beyond_a_limit_is_refused_and_named(
        self, tmp_path: Path, keys: dict[str, int], reason: str
    ) -> None:
        graph = traced(small_model(tmp_path, **keys))
        with pytest.raises(Refused, match=reason) as caught:
            make_plan(graph, variant_of(graph), SM80)
        assert caught.value.exit_code == 5
        assert "no kernel of target sm80 computes" in str(caught.value)
