"""Places that nearly fit are left alone, and the report says why; a model that lacks one is an error.

Every case plants one fault. What the rule must not do shows in the graph that comes out, which still
computes the same; why it did not shows among the rule's misses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from graphs import Net, differing, facts, insert_lines, op_names, results, small_model, traced, values
from torch.fx import Node

from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph, producer_of
from rewright.ir.op import op_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.passes.facts import Facts
from rewright.passes.manager import MissingMatch, PassFailed, PassOptions, Rewritten, rerun, run_passes
from rewright.passes.match import Miss
from rewright.passes.report import RuleReport
from rewright.passes.reproducer import read_reproducer
from rewright.rewriting import facts_of

EPS = {"eps": 1e-6}
E4M3 = {"fmt": "e4m3", "block": 64}


def only(name: str, graph: Graph, known: Facts | None = None) -> Rewritten:
    """One pass over a graph of no model, which must compute the same afterwards."""
    done = run_passes(graph, known or facts(), PassOptions.of(only=name))
    given = values(graph)
    assert differing(results(done.graph, given), results(graph, given)) == []
    return done


def rule(done: Rewritten, name: str) -> RuleReport:
    return next(r for p in done.report.passes for r in p.rules if r.name == name)


def left_alone(name: str, rule_name: str, graph: Graph, known: Facts | None = None) -> list[Miss]:
    """The misses of a rule that must find nothing."""
    done = only(name, graph, known)
    assert rule(done, rule_name).matches == 0
    assert op_names(done.graph) == op_names(graph)
    return list(rule(done, rule_name).near)


def reasons(misses: list[Miss]) -> list[str]:
    return [miss.reason for miss in misses]


# -- norms and quantisation -------------------------------------------------------------------


def normed(*, dims: bool = False, other: str = "") -> Graph:
    net = Net()
    norm = net.rms_norm("norm", net.input("x", "bf16[1,2,128]"), net.weight("w", "bf16[128]"), **EPS)
    part = {"dims": [0, 64]} if dims else {}
    codes, scale = net.quantize("q", norm, **E4M3, **part)
    more = {}
    if other == "hadamard":
        more["turned"] = net.hadamard("turned", norm)
    elif other == "format":
        more["narrow"], more["narrow.scale"] = net.quantize("narrow", norm, fmt="e2m1", block=32)
    elif other == "caller":
        more["norm"] = norm
    return net.graph(codes=codes, scale=scale, **more)


@pytest.mark.parametrize("other", ["hadamard", "format", "caller"])
def test_a_norm_that_others_read_stays_a_result(other: str) -> None:
    done = only("fuse_norm_quant", normed(other=other))
    assert rule(done, "norm_quant").matches == 1
    (node,) = [n for n in done.graph.ops if op_of(n.target).name == "rms_norm_quant"]
    assert node.kwargs["keep"] is True
    assert node.meta["names"] == ("norm", "q", "q.scale")
    assert "rms_norm" not in op_names(done.graph)


def test_a_second_format_of_a_norm_is_not_fused_twice() -> None:
    done = only("fuse_norm_quant", normed(other="format"))
    assert op_names(done.graph) == ["rms_norm_quant", "quantize"]
    assert reasons(list(rule(done, "norm_quant").misses)) == [
        "x of narrow is made by rms_norm_quant, not rms_norm"
    ]


def test_a_norm_of_which_a_part_is_quantised() -> None:
    misses = left_alone("fuse_norm_quant", "norm_quant", normed(dims=True))
    assert misses == [Miss("q", "only a part of the axis is quantised", "q", 2)]


def activated(*, dims: bool = False, read_twice: bool = False) -> Graph:
    net = Net()
    gate, up = net.inputs("bf16[1,2,128]", "gate", "up")
    hidden = net.swiglu("hidden", gate, up, limit=10.0)
    codes, scale = net.quantize("q", hidden, **E4M3, **({"dims": [0, 64]} if dims else {}))
    return net.graph(
        codes=codes, scale=scale, **({"again": net.hadamard("again", hidden)} if read_twice else {})
    )


def test_an_activation_of_which_a_part_is_quantised_or_that_is_read_twice() -> None:
    misses = left_alone("fuse_swiglu_quant", "swiglu_quant", activated(dims=True))
    assert reasons(misses) == ["only a part of the axis is quantised"]
    misses = left_alone("fuse_swiglu_quant", "swiglu_quant", activated(read_twice=True))
    assert misses == [Miss("q", "hidden is also read by again", "again", 2)]


def side_by_side(tail: list[int], keep: int = 2, *, dims: bool = False, twice: bool = False) -> Graph:
    net = Net()
    o = net.input("o", "bf16[1,2,2,64]")
    product = net.grouped_linear("product", o, net.weight("w", "bf16[128,64]"))
    flat = net.reshape("flat", product, tail=tail, keep=keep)
    codes, scale = net.quantize("q", flat, **E4M3, **({"dims": [0, 64]} if dims else {}))
    more = dict(zip(("a", "b"), net.quantize("r", flat, fmt="e2m1", block=32), strict=True)) if twice else {}
    return net.graph(codes=codes, scale=scale, **more)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (side_by_side([1, 128]), "the groups are not laid side by side"),
        (side_by_side([256], 1), "the groups are not laid side by side"),
        (side_by_side([128], dims=True), "only a part of the axis is quantised"),
        (side_by_side([128], twice=True), "flat is also read by r"),
    ],
)
def test_groups_that_are_quantised_otherwise(graph: Graph, reason: str) -> None:
    misses = left_alone("fuse_quant_epilogue", "grouped_linear_quant", graph)
    assert reason in reasons(misses)


def test_groups_that_are_laid_out_otherwise() -> None:
    for graph in (side_by_side([1, 128]), side_by_side([256], 1)):
        graph.stage = "layout"
        done = run_passes(graph, facts(), PassOptions.of(only="unify_layout"))
        assert rule(done, "flat_groups").matches == 0
        assert reasons(list(rule(done, "flat_groups").near)) == ["the groups are not laid side by side"]


def again(**second: Any) -> Graph:
    """Q(DQ(Q(x))) whose second quantisation differs."""
    net = Net()
    x = net.input("x", "bf16[1,2,128]")
    codes, scale = net.quantize("q", x, **E4M3)
    back = net.dequantize("back", codes, scale, block=64, out=second.pop("out", "bf16"))
    codes, scale = net.quantize("again", back, **{**E4M3, **second})
    return net.graph(codes=codes, scale=scale)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"block": 32}, "block is 32 after 64"),
        ({"fmt": "e2m1"}, "fmt is e2m1 after e4m3"),
        ({"dims": [0, 64]}, "dims is [0, 64] after None"),
        ({"out": "f16"}, "the value between them cannot hold every code times its scale"),
    ],
)
def test_a_second_quantisation_that_differs(second: dict[str, Any], reason: str) -> None:
    assert reason in reasons(left_alone("eliminate_quant", "requantize", again(**second)))


def test_codes_that_no_quantiser_here_has_made() -> None:
    """Their scales may be smaller than any that a quantiser chooses (test_quant_exact.py)."""
    net = Net()
    codes, scale = net.input("codes", "f8e4m3[1,2,128]"), net.input("scale", "e8m0[1,2,2]")
    back = net.dequantize("back", codes, scale, block=64, out="bf16")
    again_, scales = net.quantize("again", back, **E4M3)
    misses = left_alone("eliminate_quant", "requantize", net.graph(codes=again_, scale=scales))
    assert reasons(misses) == ["codes of back is the input codes"]


def moved(numerics: str) -> Graph:
    """Codes of the first half that are put back into the second."""
    net = Net()
    x = net.input("x", "f32[1,2,128]")
    codes, scale = net.quantize("q", x, dims=[0, 64], **E4M3)
    back = net.dequantize("back", codes, scale, x, dims=[64, 128], block=64, out="f32")
    codes, scale = net.quantize("again", back, dims=[0, 64], **E4M3)
    return net.graph(codes=codes, scale=scale, back=back)


@pytest.mark.parametrize(("numerics", "name"), [("faithful", "requantize"), ("fp32", "round_trip")])
def test_codes_that_are_put_back_elsewhere(numerics: str, name: str) -> None:
    misses = left_alone("eliminate_quant", name, moved(numerics), facts(numerics))
    assert "the codes are put back into other dims" in reasons(misses)


def rounded_twice() -> Graph:
    net = Net()
    x, y = net.inputs("f32[1,2,128]", "x", "y")
    codes, scale = net.quantize("q", x, **E4M3)
    back = net.dequantize("back", codes, scale, block=64, out="f32")
    part, part_scale = net.quantize("p", x, dims=[0, 64], **E4M3)
    other = net.dequantize("other", part, part_scale, y, dims=[0, 64], block=64, out="f32")
    return net.graph(back=net.hadamard("h", back), other=net.hadamard("g", other), codes=codes)


@pytest.mark.parametrize("numerics", ["faithful", "bf16"])
def test_a_rounding_belongs_to_the_model(numerics: str) -> None:
    misses = left_alone("eliminate_quant", "round_trip", rounded_twice(), facts(numerics))
    assert reasons(misses) == ["the rounding belongs to the model"] * 2


def test_without_roundings_a_round_trip_goes_and_its_codes_stay() -> None:
    """The quantise has two readers, one of which is the caller; the other round trip mixes two values."""
    done = run_passes(rounded_twice(), facts("fp32"), PassOptions.of(only="eliminate_quant"))
    assert rule(done, "round_trip").matches == 1
    assert op_names(done.graph) == ["quantize", "quantize", "dequantize", "hadamard", "hadamard"]
    assert reasons(list(rule(done, "round_trip").near)) == ["the other dims come from another value"]


def test_a_linear_of_a_part() -> None:
    net = Net()
    x = net.input("x", "bf16[1,2,256]")
    codes, scale = net.quantize("q", x, fmt="e4m3", block=128, dims=[0, 128])
    y = net.linear("y", codes, scale, net.weight("w", "bf16[64,128]"), None, out="bf16")
    misses = left_alone("eliminate_quant", "unquantized_linear", net.graph(y=y), facts("bf16"))
    assert reasons(misses) == ["only a part of the axis is quantised"]


# -- reshapes ---------------------------------------------------------------------------------


def viewed(op: str, tail: list[int], keep: int, x: str = "bf16[1,2,64]") -> Graph:
    net = Net()
    value = net.input("x", x)
    if op == "linear":
        value = net.linear("row", value, None, net.weight("w", "bf16[128,64]"), out="bf16")
    elif op == "rms_norm":
        value = net.rms_norm("row", value, net.weight("w", "bf16[64]"), **EPS)
    else:
        value = net.reshape("row", value, tail=[2, 32])
    return net.graph(y=net.reshape("y", value, tail=tail, keep=keep))


@pytest.mark.parametrize(
    ("graph", "name", "reason"),
    [
        (viewed("linear", [2, 64], 2), "hoist_reshape", "the last axis is not kept whole"),
        (
            viewed("linear", [1, 128], 2),
            "hoist_reshape",
            "it makes an axis, of heads perhaps, where there is one",
        ),
        (viewed("rms_norm", [128], 1), "hoist_reshape", "the last axis is not kept whole"),
        (viewed("reshape", [8, 4], 3), "reshape_of_reshape", "the second keeps an axis that the first makes"),
    ],
)
def test_a_reshape_that_splits_otherwise(graph: Graph, name: str, reason: str) -> None:
    assert reason in reasons(left_alone("canonicalize", name, graph))


def test_a_reshape_that_only_looks_the_same() -> None:
    graph = viewed("linear", [64, 2], 2)
    misses = only("canonicalize", graph).report.passes[0].rules
    assert {m.reason for r in misses if r.name == "identity_reshape" for m in r.misses} == {
        "the shape changes"
    }


# -- attention --------------------------------------------------------------------------------


def attended(
    *,
    heads: list[int] | None = None,
    stride: int = 1,
    inverse: tuple[bool, bool] = (False, True),
    groups: tuple[list[int], int] = ([2, 64], 2),
    tables: bool = False,
    turned: bool = False,
) -> Graph:
    net = Net(tokens=2)
    q, kv = net.input("x", "bf16[1,2,128]"), net.input("kv", "bf16[1,2,64]")
    step = net.step()
    window = net.state("window", "bf16[1,8,64]")
    cos, sin = net.weight("cos", "f32[64,16]"), net.weight("sin", "f32[64,16]")
    others = (net.weight("cos2", "f32[64,16]"), sin) if tables else (cos, sin)
    split = net.reshape("heads", q, tail=heads or [2, 64])
    q = net.rope(
        "q", net.head_rms_norm("normed", split, **EPS), cos, sin, step[0], stride=stride, inverse=inverse[0]
    )
    sink = net.weight("sink", "f32[2]")
    out = net.sparse_attention("out", q, kv, window, None, None, sink, *step, ratio=0, capacity=64, scale=0.1)
    back = net.rope("back", out, *others, step[0], inverse=inverse[1])
    net.ring_write("window.next", window, kv, *step)
    more = {"q": net.hadamard("again", q)} if turned else {}
    return net.graph(y=net.reshape("groups", back, tail=groups[0], keep=groups[1]), **more)


ATTENTION = [
    ({"stride": 4}, "the queries are not turned by their token"),
    ({"inverse": (True, True)}, "the queries are not turned by their token"),
    ({"inverse": (False, False)}, "the result is not turned back"),
    ({"tables": True}, "cos of back is cos2, elsewhere cos is cos"),
    ({"turned": True}, "q is also read by again"),
]


@pytest.mark.parametrize(("change", "reason"), ATTENTION)
def test_attention_of_other_queries(change: dict[str, Any], reason: str) -> None:
    assert reason in reasons(left_alone("fuse_attention", "attention", attended(**change)))


def test_attention_that_comes_out_otherwise_keeps_its_last_reshape() -> None:
    done = only("fuse_attention", attended(groups=([256], 1)))
    assert op_names(done.graph) == ["attention", "ring_write", "reshape"]


def key_rows(
    *,
    tokens: int = 1,
    other_rows: bool = False,
    moved: bool = False,
    stride: int = 1,
    read: str = "",
) -> Graph:
    net = Net(tokens=tokens)
    x, q = net.input("x", f"bf16[1,{tokens},64]"), net.input("q", f"bf16[1,{tokens},2,64]")
    step = net.step()
    window = net.state("window", "bf16[1,8,64]")
    tables = net.weight("cos", "f32[64,16]"), net.weight("sin", "f32[64,16]")
    named = {"norm": net.rms_norm("norm", x, net.weight("w", "bf16[64]"), **EPS)}
    named["kv"] = net.rope("kv", named["norm"], *tables, step[0], stride=stride)
    named["codes"], scale = net.quantize("codes", named["kv"], fmt="e4m3", block=32, dims=[0, 32])
    dims = [32, 64] if moved else [0, 32]
    rows = net.dequantize("rows", named["codes"], scale, named["kv"], block=32, dims=dims, out="bf16")
    out = net.sparse_attention(
        "out",
        q,
        rows,
        window,
        None,
        None,
        net.weight("sink", "f32[2]"),
        *step,
        ratio=0,
        capacity=64,
        scale=0.1,
    )
    net.ring_write("window.next", window, x if other_rows else rows, *step)
    return net.graph(out=out, **({read: named[read]} if read else {}))


KEYS = [
    ({"stride": 4}, "the rotation is not that of tokens"),
    ({"moved": True}, "the two halves of the rounding differ"),
    ({"read": "norm"}, "norm is a result of the graph"),
    ({"read": "codes"}, "codes is a result of the graph"),
    ({"read": "kv"}, "the keys before the rounding are read elsewhere"),
]


@pytest.mark.parametrize(("change", "reason"), KEYS)
def test_key_rows_that_are_made_otherwise(change: dict[str, Any], reason: str) -> None:
    assert reason in reasons(left_alone("fuse_kv_write", "kv_rows", key_rows(**change)))


def test_the_window_is_not_written_early() -> None:
    """Of several tokens, or with rows other than those that the attention reads."""
    done = only("fuse_kv_write", key_rows(tokens=2))
    assert op_names(done.graph) == ["kv_rows", "sparse_attention", "ring_write"]
    (miss,) = rule(done, "kv_write").near
    assert miss == Miss(
        "out", "a chunk of several tokens would overwrite keys that it still reads", "window.next", 3
    )
    done = only("fuse_kv_write", key_rows(other_rows=True))
    assert op_names(done.graph) == ["kv_rows", "sparse_attention", "ring_write"]
    assert reasons(list(rule(done, "kv_write").near)) == ["no ring_write reads what belongs to out"]
    assert op_names(only("fuse_kv_write", key_rows()).graph) == ["kv_write", "sparse_attention"]


# -- compression and index --------------------------------------------------------------------


def compressed(*, turn: int = 4, store: int = 4, read: bool = False, base: bool = False) -> Graph:
    net = Net(tokens=5)
    kv, gate = net.inputs("f32[1,5,64]", "kv", "gate")
    step = net.step()
    rings = [net.state(n, "f32[1,8,64]") for n in ("kv_ring", "gate_ring")]
    cache = net.state("cache", "bf16[1,16,32]")
    ape, norm = net.weight("ape", "f32[4,64]"), net.weight("norm", "bf16[32]")
    tables = net.weight("cos", "f32[64,8]"), net.weight("sin", "f32[64,8]")
    biased = net.add_position_bias("biased", gate, ape, step[0])
    pooled, count = net.compress("pooled", kv, biased, *rings, *step, ratio=4, overlap=True, out="bf16")
    turned = net.rope("turned", net.rms_norm("normed", pooled, norm, **EPS), *tables, step[0], stride=turn)
    rotated = net.hadamard("rotated", turned)
    dims = {"block": 16, "dims": [0, 16]}
    codes, scale = net.quantize("codes", rotated, fmt="e4m3", **dims)
    rows = net.dequantize("rounded", codes, scale, turned if base else rotated, out="bf16", **dims)
    net.entry_write("cache.next", cache, rows, count, step[0], step[2], ratio=store)
    net.ring_write("kv_ring.next", rings[0], kv, *step)
    net.ring_write("gate_ring.next", rings[1], biased, *step)
    return net.graph(y=net.hadamard("y", pooled if read else kv))


COMPRESSION = [
    ({"turn": 1}, "entries are not turned by their first token"),
    ({"store": 8}, "entries are pooled and stored at different ratios"),
    ({"read": True}, "pooled is also read by y"),
    ({"base": True}, "base of rounded is made by rope, not hadamard"),
]


@pytest.mark.parametrize(("change", "reason"), COMPRESSION)
def test_compression_that_is_done_otherwise(change: dict[str, Any], reason: str) -> None:
    assert reason in reasons(left_alone("fuse_compress", "compress_write", compressed(**change)))


def indexed(
    *, tail: list[int] | None = None, stride: int = 1, dims: bool = False, ratio: int = 4, read: str = ""
) -> Graph:
    net = Net(tokens=2)
    x, weights = net.input("x", "bf16[1,2,64]"), net.input("weights", "bf16[1,2,2]")
    keys, step = net.input("keys", "bf16[1,16,32]"), net.step()
    tables = net.weight("cos", "f32[64,8]"), net.weight("sin", "f32[64,8]")
    named: dict[str, Node] = {}
    turned = net.rope(
        "turned", net.reshape("heads", x, tail=tail or [2, 32]), *tables, step[0], stride=stride
    )
    named["rotated"] = net.hadamard("rotated", turned)
    part = {"dims": [0, 16]} if dims else {}
    named["codes"], scale = net.quantize("codes", named["rotated"], fmt="e2m1", block=16, **part)
    base = named["rotated"] if dims else None
    named["q"] = net.dequantize("q", named["codes"], scale, base, block=16, out="bf16", **part)
    scoring = {"ratio": 4, "capacity": 64, "weight_scale": 0.5}
    named["scores"] = net.index_score("scores", named["q"], weights, keys, *step, **scoring)
    chosen = net.index_topk("chosen", named["scores"], *step[:2], k=3, ratio=ratio)
    return net.graph(chosen=chosen, **({read: named[read]} if read else {}))


QUERIES = [
    ({"stride": 4}, "the rotation is not that of tokens"),
    ({"dims": True}, "only a part of the axis is rounded"),
    ({"read": "rotated"}, "the queries before the rounding are read elsewhere"),
    ({"read": "codes"}, "codes is a result of the graph"),
]


@pytest.mark.parametrize(("change", "reason"), QUERIES)
def test_index_queries_that_are_made_otherwise(change: dict[str, Any], reason: str) -> None:
    assert reason in reasons(left_alone("fuse_index_query", "index_query", indexed(**change)))


def test_index_queries_that_others_read_too_are_given() -> None:
    done = only("fuse_index_query", indexed(read="q"))
    assert op_names(done.graph) == ["index_query", "index_score", "index_topk"]


SELECTIONS = [
    ({"ratio": 2}, "scores and choice count entries at different ratios"),
    ({"read": "scores"}, "scores is a result of the graph"),
]


@pytest.mark.parametrize(("change", "reason"), SELECTIONS)
def test_scores_that_must_be_stored(change: dict[str, Any], reason: str) -> None:
    assert reason in reasons(left_alone("fuse_index_select", "index_select", indexed(**change)))


# -- Hyper-Connections ------------------------------------------------------------------------


def streams(*, n: int = 5, read: str = "", row: list[int] | None = None) -> Graph:
    """A sub-block's input with its norm, and the head; three different eps."""
    net = Net()
    x = net.input("x", f"bf16[1,2,{n},64]")
    n_valid = net.input("n_valid", "i32[1]")
    size = (2 + n) * n
    weights = (
        net.weight("fn", f"f32[{size},{n * 64}]"),
        net.weight("scale", "f32[3]"),
        net.weight("base", f"f32[{size}]"),
    )
    mix = net.hc_mix("mix", x, weights[0], eps=1e-5)
    named = dict(
        zip(
            ("pre", "post", "comb"),
            net.hc_split("hc", mix, *weights[1:], streams=n, iters=7, eps=1e-3),
            strict=True,
        )
    )
    named["u"] = net.hc_collapse("u", x, named["pre"])
    normed_ = net.rms_norm("norm", named["u"], net.weight("w", "bf16[64]"), eps=1e-2)
    out = net.hc_combine("out", net.hadamard("y", normed_), x, named["post"], named["comb"])
    last = net.reshape("row", net.take_last("last", out, n_valid), tail=row or [1, n, 64], keep=1)
    shape = row or [1, n, 64]
    head = (
        net.weight("head.fn", f"f32[{shape[1]},{n * 64}]"),
        net.weight("head.scale", "f32[1]"),
        net.weight("head.base", f"f32[{shape[1]}]"),
    )
    pre = net.hc_head_split("head.pre", net.hc_mix("head.mix", last, head[0], eps=1e-5), *head[1:], eps=1e-3)
    flat = net.reshape("flat", net.hc_collapse("head.u", last, pre), tail=[shape[2]], keep=1)
    y = net.rms_norm("head.norm", flat, net.weight("head.w", f"bf16[{shape[2]}]"), eps=1e-2)
    return net.graph(y=y, **({read: named[read]} if read else {}))


def test_parameters_of_hyper_connections_come_from_their_nodes() -> None:
    """5 streams, 7 iterations, and an eps of the mixing, of the coefficients and of the norm."""
    done = only("fuse_hyper_connection", streams())
    assert op_names(done.graph) == ["hc_pre", "hadamard", "hc_combine", "hc_head"]
    eps = {"eps": 1e-5, "hc_eps": 1e-3, "norm_eps": 1e-2}
    assert done.graph.ops[0].kwargs == {"n": 5, "iters": 7, **eps}
    assert done.graph.ops[-1].kwargs == {"n": 5, **eps}


def test_more_than_eight_streams_are_left_alone() -> None:
    done = only("fuse_hyper_connection", streams(n=9))
    assert op_names(done.graph) == op_names(streams(n=9))
    reason = "9 streams are more than 8"
    assert reasons(list(rule(done, "hc_pre").near)) == [reason]
    assert reason in reasons(list(rule(done, "hc_head").near))
    eight = only("fuse_hyper_connection", streams(n=8))
    assert [rule(eight, name).matches for name in ("hc_pre", "hc_head")] == [1, 1]


@pytest.mark.parametrize(
    ("read", "name", "reason"),
    [
        ("pre", "hc_pre", "the weights of the sum are read elsewhere"),
        ("u", "pre_norm", "the value before the norm is read elsewhere"),
    ],
)
def test_inner_values_of_hyper_connections_that_are_read(read: str, name: str, reason: str) -> None:
    done = only("fuse_hyper_connection", streams(read=read))
    assert rule(done, name).matches == 0
    assert reason in reasons(list(rule(done, name).near))


def test_a_row_that_is_split_into_other_streams() -> None:
    done = only("fuse_hyper_connection", streams(n=4, row=[1, 8, 32]))
    assert rule(done, "hc_head").matches == 0
    assert "the last token's streams are no row [B,1,n,D]" in reasons(list(rule(done, "hc_head").near))


# -- a whole model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelSource]:
    folder = tmp_path_factory.mktemp("model")
    return lambda numerics="faithful", **keys: small_model(folder, numerics, **keys)


def test_the_gate_waits_for_no_other_product(model: Callable[..., ModelSource]) -> None:
    source = model("fp32")
    done = run_passes(traced(source), facts_of(source))
    gates = [m for m in rule(done, "shared_input").misses if m.anchor.endswith("gate.logits")]
    assert len(gates) == 3
    assert {m.reason for m in gates} == {"its result chooses experts, which waits for no other product"}
    assert all(op_of(producer_of(done.graph.value(m.anchor)).target).name == "linear" for m in gates)


@pytest.mark.parametrize(("streams_", "matched"), [(5, (6, 6, 5, 1)), (9, (0, 0, 0, 0))])
def test_streams_of_a_model(
    model: Callable[..., ModelSource], streams_: int, matched: tuple[int, ...]
) -> None:
    source = model(hc_mult=streams_, hc_sinkhorn_iters=7, hc_eps=1e-3, rms_norm_eps=1e-5)
    done = run_passes(traced(source, "chunk"), facts_of(source))
    names = ("hc_pre", "pre_norm", "hc_post_pre", "hc_head")
    assert tuple(rule(done, n).matches for n in names) == matched
    assert tuple(rule(done, n).expected for n in names) == matched
    fused = [n for n in done.graph.ops if op_of(n.target).name in ("hc_pre", "hc_post_pre", "hc_head")]
    assert {n.kwargs["n"] for n in fused} <= {5}
    assert {n.kwargs["iters"] for n in fused if "iters" in n.kwargs} <= {7}
    assert {(n.kwargs["hc_eps"], n.kwargs["norm_eps"]) for n in fused} <= {(1e-3, 1e-5)}
    if not fused:
        assert "9 streams are more than 8" in {m.reason for m in rule(done, "hc_pre").near}


@pytest.mark.parametrize("numerics", ["faithful", "fp32"])
@pytest.mark.parametrize(
    "keys", [{"o_groups": 4}, {"num_attention_heads": 1, "o_groups": 1}, {"index_n_heads": 1}]
)
def test_a_reshape_that_changes_little_is_not_in_the_way(
    model: Callable[..., ModelSource], numerics: str, keys: dict[str, int]
) -> None:
    """As many heads as groups, or a single head: the reshape between is none, or looks like another."""
    source = model(numerics, **keys)
    for kind in ("decode", "score"):
        done = run_passes(traced(source, kind), facts_of(source))
        assert [
            r.name for p in done.report.passes for r in p.rules if r.matches != (r.expected or r.matches)
        ] == []
        assert rule(done, "attention").matches == 3


MISSING = [
    ("fuse_quant_epilogue", "layers.1.attn.z", "layers.1.attn.z is a result of the graph"),
    ("fuse_hyper_connection", "layers.1.hc_ffn.pre", "the weights of the sum are read elsewhere"),
    ("fuse_kv_write", "layers.1.attn.kv", "the keys before the rounding are read elsewhere"),
    ("fuse_compress", "layers.1.attn.compressor.pooled", "pooled is a result of the graph"),
    ("fuse_index_query", "layers.1.attn.indexer.q.rotated", "before the rounding are read elsewhere"),
    ("fuse_index_select", "layers.1.attn.indexer.scores", "scores is a result of the graph"),
    ("fuse_attention", "layers.1.attn.q", "layers.1.attn.q is a result of the graph"),
    ("fuse_swiglu_quant", "layers.1.ffn.experts.hidden", "hidden is a result of the graph"),
    ("fuse_shared_expert", "layers.1.ffn.shared_experts.w1", "w1 is a result of the graph"),
    ("fuse_moe", "layers.1.ffn.gate.experts", "layers.1.ffn.gate.experts is a result of the graph"),
]


@pytest.mark.parametrize(("name", "wanted", "reason"), MISSING, ids=[name for name, _, _ in MISSING])
def test_a_place_that_a_model_must_have(
    model: Callable[..., ModelSource], name: str, wanted: str, reason: str
) -> None:
    """A caller who wants an inner value: the pass fails, says where and why, and may be switched off."""
    source = model()
    text = insert_lines(print_graph(traced(source)), "return logits", [f"return extra = %{wanted}"])
    graph, known = parse(text), facts_of(source)
    with pytest.raises(PassFailed) as caught:
        run_passes(graph, known)
    failed = caught.value
    assert isinstance(failed.error, MissingMatch)
    assert failed.exit_code == 5
    message = str(failed)
    assert message.startswith(f"pass {name}: the graph does not have the expected form\n  rule ")
    lines = [line for line in message.splitlines() if line.startswith("    at layers.1.")]
    assert any(reason in line for line in lines), message
    assert f"compile with --no-pass {name} (in a graph's name ?no-pass={name}) to go on without it" in message
    done = run_passes(graph, known, PassOptions.of(without=(name,)))
    assert "extra" in done.graph.results


def test_a_failed_pass_is_run_again_from_its_file(model: Callable[..., ModelSource], tmp_path: Path) -> None:
    source = model()
    text = insert_lines(
        print_graph(traced(source)), "return logits", ["return extra = %layers.1.attn.indexer.scores"]
    )
    with pytest.raises(PassFailed) as caught:
        run_passes(parse(text), facts_of(source))
    path = tmp_path / "reproducer.json"
    path.write_text(caught.value.reproducer.to_text())
    reproducer = read_reproducer(path)
    assert reproducer == caught.value.reproducer
    assert reproducer.passes[0] == "fuse_index_select"
    with pytest.raises(PassFailed) as again_:
        rerun(reproducer)
    assert str(again_.value) == str(caught.value)
