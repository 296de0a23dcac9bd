"""Calibrated scales: what the pass makes, and what it leaves alone.

A power-of-two scale moves no bit of a floating-point code unless a value is too large or too small for it,
so results with fixed scales are those with the scales of each row, up to the smallest code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Net, facts, results, small_model, traced, values
from torch import Tensor

from rewright.ir.amax import amax_reductions
from rewright.ir.graph import Graph, name_of
from rewright.ir.op import Op, op_of, registry
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.static_scales import Segment, StaticScales, parse_static_scales
from rewright.ir.types import type_of
from rewright.passes.facts import Facts
from rewright.passes.manager import PassOptions, run_passes
from rewright.passes.reproducer import Reproducer, read_reproducer
from rewright.passes.rule import Log
from rewright.passes.static_scales import PASS
from rewright.rewriting import facts_of

READER = "layers.0.attn.wq_a"
EXPONENT = 1
"""Of all scales: values up to 896 fit, codes are multiples of 2^-8 at the least."""


def known(*segments: tuple[str, Segment], numerics: str = "faithful") -> Facts:
    scales = StaticScales("", {s.name: s for _, s in segments}, {site: s.name for site, s in segments})
    return replace(facts(numerics), static_scales=scales)


def segment(columns: int, block: int, exponent: int = EXPONENT, name: str = "attn.wq_a.x.0") -> Segment:
    return Segment(name, block, (exponent,) * (columns // block))


def quantizing(op: Op) -> tuple[Graph, dict[str, Tensor]]:
    """A graph of one op that quantises rows of 256 and a linear that reads them."""
    net, batch = Net("precision"), (2, 3)
    quant = {"fmt": "e4m3", "block": 128}
    wide = f"bf16[{batch[0]},{batch[1]},256]"
    norm: Any = {"n": 4, "iters": 3, "eps": 1e-6, "hc_eps": 1e-4, "norm_eps": 1e-5, **quant}
    hc = {"fn": "f32[24,1024]", "scale": "f32[3]", "base": "f32[24]", "norm": "bf16[256]"}
    streams = f"bf16[{batch[0]},{batch[1]},4,256]"
    operands: dict[str, str] = {
        "quantize": {"x": wide},
        "rms_norm_quant": {"x": wide, "residual": wide, "weight": "bf16[256]"},
        "grouped_linear_quant": {"x": "bf16[2,3,2,128]", "weight": "bf16[256,128]"},
        "swiglu_quant": {"gate": wide, "up": wide},
        "hc_pre": {"streams": streams, **hc},
        "hc_post_pre": {
            "y": wide,
            "before": streams,
            "post": "f32[2,3,4]",
            "comb": "f32[2,3,4,4]",
            **hc,
        },
    }[op.name]
    attrs = {"rms_norm_quant": {"eps": 1e-6}, "swiglu_quant": {"limit": 10.0}}.get(op.name, {})
    attrs = norm if op.name.startswith("hc_") else {**attrs, **quant}
    made = {name: net.input(name, type) for name, type in operands.items()}
    got = getattr(net, op.name)("made", *(made.get(name) for name in op.operands), **attrs)
    roles = op.roles(attrs)
    codes, scale = got[roles.index("scale") - 1], got[roles.index("scale")]
    out = net.linear("out", codes, scale, net.weight(f"{READER}.weight", "bf16[64,256]"), None, out="f32")
    others = {
        role: value for role, value in zip(roles, got, strict=True) if value not in (codes, scale) and role
    }
    graph = net.graph(out=out, **others)
    given = values(graph)
    if op.name == "grouped_linear_quant":
        given["weight"] = given["weight"] * 2.0**-6  # products of what fits
    return graph, given


PRODUCERS = [rule.op for rule in PASS.rules if rule.name == "static_scale"]  # type: ignore[attr-defined]
EXPERTS = [rule.op for rule in PASS.rules if rule.name == "static_hidden"]  # type: ignore[attr-defined]


def rewritten(graph: Graph, about: Facts) -> tuple[Graph, Log]:
    graph, log = graph.copy(), Log()
    while sum(rule.apply(graph, about, log) for rule in PASS.rules):
        pass
    return graph, log


@pytest.mark.parametrize("op", PRODUCERS, ids=lambda op: op.name)
@pytest.mark.parametrize("block", [32, 128, 256])
def test_readers_of_codes_see_the_same_values(op: Op, block: int) -> None:
    graph, given = quantizing(op)
    after, log = rewritten(graph, known((f"{READER}.x", segment(256, block))))
    assert log.matches == 1
    assert amax_reductions(graph.ops) == 1
    assert amax_reductions(after.ops) == 0
    assert parse(print_graph(after)) == after
    derived = {name: d.compute() for name, d in log.derived.items()}
    want, got = results(graph, given), results(after, given | derived)
    assert got.keys() == want.keys()
    weight = given[f"{READER}.weight"].float().abs().sum(-1)
    for name in want:
        if name == "out":
            smallest = 2.0 ** (EXPONENT - 10)  # half of the least code: what a value below the range loses
            assert ((got[name] - want[name]).abs() <= smallest * weight + 1e-4 * want[name].abs()).all()
        else:
            assert torch.equal(got[name], want[name])


@pytest.mark.parametrize("op", EXPERTS, ids=lambda op: op.name)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_the_inside_of_an_expert(op: Op, block: int) -> None:
    found = 0
    for operands, attrs in op.example_calls():
        named = dict(zip(op.operands, operands, strict=True))
        if not attrs.get("fmt") or named["fixed"] is not None:
            continue
        net = Net("precision")
        leaves = {}
        for name, tensor in named.items():
            if tensor is not None:
                what = f"layers.0.ffn.experts.{name}.weight"
                leaves[name] = net.input(what, str(type_of(tensor)))
        graph = net.graph(out=getattr(net, op.name)("made", *(leaves.get(n) for n in op.operands), **attrs))
        given = {name_of(leaves[n]): t for n, t in named.items() if t is not None}
        about = known(("layers.0.ffn.experts.w2.x", segment(128, block, 9, "ffn.experts.w2.x.0")))
        after, log = rewritten(graph, about)
        assert log.matches == 1
        assert (amax_reductions(graph.ops), amax_reductions(after.ops)) == (1, 0)
        derived = {name: d.compute() for name, d in log.derived.items()}
        want = results(graph, given)["out"].float()
        got = results(after, given | derived)["out"].float()
        # Inner values are sums of codes far above 1: a scale of 2^9 loses next to nothing of them.
        assert float((got - want).norm() / want.norm()) < 0.02
        found += 1
    assert found > 0


def test_scales_that_are_too_small_saturate() -> None:
    """Not wrapped around, no infinity, no NaN: magnitudes beyond the range become the largest."""
    op = registry()["quantize_static"]
    x = torch.tensor([[[1.0, -1000.0, 449.0, 0.0]]])
    codes = op.reference(x, segment(4, 4, 0).tensor(), fmt="e4m3", block=4)
    assert codes.float().tolist() == [[[1.0, -448.0, 448.0, 0.0]]]


@pytest.mark.parametrize("kind", ["decode", "chunk", "score"])
@pytest.mark.parametrize(
    "without", [(), ("fuse_moe",), ("fuse_norm_quant", "fuse_hyper_connection"), ("all",)]
)
def test_every_input_of_a_linear_gets_its_scales(tmp_path: Path, kind: str, without: tuple[str, ...]) -> None:
    """Whatever was fused before: only keys, entries and index vectors are still scaled row by row."""
    source = small_model(tmp_path)
    about = facts_of(source)
    only = "eliminate_quant,static_scales" if without == ("all",) else None
    options = PassOptions.of(only, () if only else without)
    before = run_passes(traced(source, kind), about, replace(options, passes=options.passes[:-2])).graph
    segments: list[tuple[str, Segment]] = []
    for name, type in source.weight_types().items():
        if about.is_scaled(name.removesuffix(".weight")) and name.endswith(".weight"):
            site = name.removesuffix(".weight") + ".x"
            segments.append((site, segment(type.shape[-1], 32, 0, site)))
    after = run_passes(
        traced(source, kind), replace(about, static_scales=known(*segments).static_scales), options
    )
    left = [n for n in after.graph.ops if amax_reductions([n])]
    rounding = {"quantize", "kv_rows", "kv_write", "compress_write", "index_query"}
    assert {op_of(n.target).name for n in left} <= rounding
    assert all("attn." in n.meta["names"][0] and not n.meta["names"][0].endswith(".x") for n in left)
    assert amax_reductions(before.ops) > len(left)
    (report,) = (p for p in after.report.passes if p.name == PASS.name)
    assert [miss for rule in report.rules for miss in rule.misses] == []
    assert report.after.activation_writes < report.before.activation_writes


def test_layers_share_the_scales_of_a_segment(tmp_path: Path) -> None:
    source = small_model(tmp_path)
    shared = segment(128, 32, 0)
    sites = [(f"layers.{layer}.attn.wq_a.x", shared) for layer in range(3)]
    about = replace(facts_of(source), static_scales=known(*sites).static_scales)
    done = run_passes(traced(source), about)
    leaves = [n for n in done.graph.of_kind("weight") if name_of(n).startswith("static_scales.")]
    assert [name_of(n) for n in leaves] == ["static_scales.attn.wq_a.x.0"]
    assert len(leaves[0].users) == 2 * 3  # the op that quantises and the linears behind it
    assert parse(print_graph(done.graph)) == done.graph
    tensor = done.derived[shared.tensor_name].compute()
    assert tensor.view(torch.uint8).tolist() == [127] * 4


def test_what_was_not_calibrated_is_a_near_miss(tmp_path: Path) -> None:
    source = small_model(tmp_path)
    wrong = ("layers.0.attn.wq_a.x", segment(64, 32))
    about = replace(facts_of(source), static_scales=known(wrong).static_scales)
    report = run_passes(traced(source), about).report
    (of_pass,) = (p for p in report.passes if p.name == PASS.name)
    reasons = [miss.reason for rule in of_pass.rules for miss in rule.misses]
    assert "attn.wq_a.x.0 has scales of 64 elements, not 128" in reasons
    assert "layers.0.ffn.experts.w2.x was not calibrated" in reasons
    assert all(rule.matches == 0 for rule in of_pass.rules)


def test_a_reproducer_keeps_the_scales(tmp_path: Path) -> None:
    graph, _ = quantizing(registry()["quantize"])
    about = known((f"{READER}.x", segment(256, 32)))
    path = tmp_path / "reproducer.json"
    path.write_text(Reproducer.of(graph, about, (PASS.name,), (), False).to_text())
    assert read_reproducer(path).facts.static_scales == about.static_scales


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "is not an object"),
        ({"segments": {}}, "has no segments and sites"),
        ({"segments": {"a": 1}, "sites": {}}, "segment a: block is None"),
        ({"segments": {"a": {"block": 0, "exponents": [1]}}, "sites": {}}, "segment a: block is 0"),
        (
            {"segments": {"a": {"block": 32, "exponents": []}}, "sites": {}},
            "exponents are no list",
        ),
        ({"segments": {"a": {"block": 32, "exponents": [True]}}, "sites": {}}, "exponent True"),
        (
            {"segments": {"a": {"block": 32, "exponents": [128]}}, "sites": {}},
            "128 is not from -126",
        ),
        ({"segments": {}, "sites": {"x": "a"}}, "site x names a segment 'a'"),
        ({"segments": {}, "sites": {}}, "which checkpoint"),
    ],
)
def test_what_is_no_scales(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_static_scales(value)
    good = StaticScales("print", {"a": segment(64, 32, 3, "a")}, {"x": "a"})
    assert parse_static_scales(good.to_json()) == good
