"""Graph diffs of rewritten graphs: which nodes a rule swallowed, what that saves, how it is told."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.diff import GraphDiff, diff_graphs
from rewright.ir.diff_bytes import Balance, Ledger
from rewright.ir.diff_json import to_json
from rewright.ir.diff_stat import render_stat, rule_rows, stat_json, stat_rows
from rewright.ir.diff_text import render
from rewright.ir.errors import UsageError
from rewright.ir.export import json_text
from rewright.ir.fold import fold_layers, ranges
from rewright.ir.graph import Graph
from rewright.ir.graph_index import key_of
from rewright.ir.leftovers import Leftovers
from rewright.ir.moved import Moved
from rewright.ir.op import op_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.rewrites import Rewrite, find_rewrites
from rewright.ir.traffic import traffic
from rewright.passes.facts import Facts
from rewright.passes.manager import PassOptions, run_passes

HEAD = """\
graph small {capacity=128}
stage traced
ir 1

input %tokens : i32[1,1]

"""
# A value quantised twice, a rotation that nobody reads, a view in front of the result.
PLAIN = (
    HEAD
    + """\
.:
  @embed.weight : f32[32,128]
  %embed : f32[1,1,128] = embed(%tokens, @embed.weight) {out="f32"}

layers.0:
  @norm.weight : f32[128]
  %norm : f32[1,1,128] = rms_norm(%.embed, @norm.weight) {eps=1e-06}
  %a.x, %a.x.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%norm) {block=128, fmt="e4m3"}
  @a.weight : f8e4m3[128,128]
  @a.scale : e8m0[1,1]
  %a : f32[1,1,128] = linear(%a.x, %a.x.scale, @a.weight, @a.scale) {out="f32"}
  %b.x, %b.x.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%norm) {block=128, fmt="e4m3"}
  @b.weight : f8e4m3[128,128]
  @b.scale : e8m0[1,1]
  %b : f32[1,1,128] = linear(%b.x, %b.x.scale, @b.weight, @b.scale) {out="f32"}
  %turned : f32[1,1,128] = hadamard(%b)
  %turned.again : f32[1,1,128] = hadamard(%turned)
  %sum : f32[1,1,128] = add(%a, %b)

.:
  @head.weight : f32[32,128]
  %head : f32[1,1,32] = linear(%layers.0.sum, _, @head.weight) {out="f32"}
  %logits : f32[1,32] = reshape(%head) {keep=1, tail=[32]}

return logits = %logits
"""
)
# Norm and quantisation as one node, the second quantisation merged, the view moved to the front.
FUSED = (
    HEAD
    + """\
.:
  @embed.weight : f32[32,128]
  %embed : f32[1,1,128] = embed(%tokens, @embed.weight) {out="f32"}

layers.0:
  @norm.weight : f32[128]
  %a.x, %a.x.scale : f8e4m3[1,1,128], e8m0[1,1,1] = rms_norm_quant(%.embed, _, @norm.weight) \
{block=128, eps=1e-06, fmt="e4m3"}  // norm_quant
  @a.weight : f8e4m3[128,128]
  @a.scale : e8m0[1,1]
  %a : f32[1,1,128] = linear(%a.x, %a.x.scale, @a.weight, @a.scale) {out="f32"}
  @b.weight : f8e4m3[128,128]
  @b.scale : e8m0[1,1]
  %b : f32[1,1,128] = linear(%a.x, %a.x.scale, @b.weight, @b.scale) {out="f32"}
  %sum : f32[1,1,128] = add(%a, %b)

.:
  %head.x : f32[1,128] = reshape(%layers.0.sum) {keep=1, tail=[128]}  // hoist_reshape
  @head.weight : f32[32,128]
  %logits : f32[1,32] = linear(%head.x, _, @head.weight) {out="f32"}  // hoist_reshape

return logits = %logits
"""
)
ROW = 128 * 4
CODES = 128 + 1  # and their scale


def small() -> GraphDiff:
    return diff_graphs(parse(PLAIN), parse(FUSED))


def named(rewrite: Rewrite) -> tuple[str, str, list[str], list[str]]:
    """Rule, how, and first results of the nodes."""
    removed, added = ([n.meta["names"][0] for n in nodes] for nodes in (rewrite.removed, rewrite.added))
    return rewrite.rule, rewrite.how, removed, added


def test_rewrites_of_a_small_graph() -> None:
    assert [named(r) for r in small().rewrites] == [
        ("norm_quant", "applied", ["layers.0.norm", "layers.0.a.x"], ["layers.0.a.x"]),
        ("hoist_reshape", "applied", ["head", "logits"], ["head.x", "logits"]),
    ]


def test_swapped_graphs_undo_what_was_done() -> None:
    undone = diff_graphs(parse(FUSED), parse(PLAIN)).rewrites
    assert [named(r) for r in undone] == [
        ("norm_quant", "undone", ["layers.0.a.x"], ["layers.0.norm", "layers.0.a.x"]),
        ("hoist_reshape", "undone", ["head.x", "logits"], ["head", "logits"]),
    ]


def test_what_no_rewrite_swallowed_is_explained() -> None:
    diff = small()
    assert [(c.name, c.how) for c in diff.rest] == [
        ("layers.0.b.x", "removed"),
        ("layers.0.b", "changed"),
        ("layers.0.turned", "removed"),
        ("layers.0.turned.again", "removed"),
    ]
    leftovers = Leftovers(diff)
    assert [leftovers.why(c) for c in diff.rest] == ["replaced", None, "unread", "unread"]
    assert leftovers.instead == {
        "layers.0.b.x": "layers.0.a.x",
        "layers.0.b.x.scale": "layers.0.a.x.scale",
    }


def test_bytes_of_a_small_graph() -> None:
    rows = {row.label: row for row in rule_rows(small())}
    saved = {label: row.balance.saved for label, row in rows.items()}
    assert list(saved) == [
        "norm_quant",
        "hoist_reshape",
        "(another value is read)",
        "(read by nobody)",
        "(other changes)",
    ]
    # The norm is neither written nor read again. Its weight is read as before.
    assert saved["norm_quant"] == Moved(
        activation_read=ROW, activation_written=ROW, flops=saved["norm_quant"].flops
    )
    assert set(saved["hoist_reshape"].by_kind.values()) == {0}  # a view moves nothing
    assert saved["(another value is read)"].by_kind["activation"] == ROW + CODES
    assert saved["(read by nobody)"].by_kind["activation"] == 2 * 2 * ROW
    assert saved["(other changes)"] == Moved()
    assert {
        label: (r.places, r.balance.nodes_before, r.balance.nodes_after) for label, r in rows.items()
    } == {
        "norm_quant": (1, 2, 1),
        "hoist_reshape": (1, 2, 2),
        "(another value is read)": (1, 1, 0),
        "(read by nobody)": (2, 2, 0),
        "(other changes)": (1, 1, 1),
    }


def test_text_of_a_small_graph() -> None:
    assert (
        render(small())
        == """\
~ op nodes: 11 -> 7 (-4)
~ activation bytes of a step at context 128: 8,328 -> 4,615 (-3,713)

layers.0: saves 3,713 bytes
  ~ rule norm_quant: 2 nodes -> 1, saves 1,024 bytes
    - %norm : f32[1,1,128] = rms_norm(%.embed, @norm.weight) {eps=1e-06}
    - %a.x, %a.x.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%norm) {block=128, fmt="e4m3"}
    + %a.x, %a.x.scale : f8e4m3[1,1,128], e8m0[1,1,1] = rms_norm_quant(%.embed, _, @norm.weight) \
{block=128, eps=1e-06, fmt="e4m3"}  // norm_quant
  ~ %a.x, %a.x.scale are read instead of %b.x, %b.x.scale: saves 641 bytes
    - %b.x, %b.x.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%norm) {block=128, fmt="e4m3"}
  ~ read by nobody: 2 nodes, saves 2,048 bytes
    - %turned : f32[1,1,128] = hadamard(%b)
    - %turned.again : f32[1,1,128] = hadamard(%turned)
  ~ %b: reads %a.x, %a.x.scale instead of %b.x, %b.x.scale

.:
  ~ rule hoist_reshape: 2 nodes -> 2
    - %head : f32[1,1,32] = linear(%layers.0.sum, _, @head.weight) {out="f32"}
    - %logits : f32[1,32] = reshape(%head) {keep=1, tail=[32]}
    + %head.x : f32[1,128] = reshape(%layers.0.sum) {keep=1, tail=[128]}  // hoist_reshape
    + %logits : f32[1,32] = linear(%head.x, _, @head.weight) {out="f32"}  // hoist_reshape
"""
    )


def test_a_value_with_a_new_name_divides_two_rules() -> None:
    """Behind the moved view the norm has a new name: its own rule claims it, not that of the product."""
    start = HEAD + ".:\n  @embed.weight : f32[32,128]\n"
    start += '  %embed : f32[1,1,128] = embed(%tokens, @embed.weight) {out="f32"}\n'
    ends = "  @head.weight : f32[32,128]\n", "\nreturn logits = %logits\n"
    plain = (
        "  %turned : f32[1,1,128] = hadamard(%embed)\n  %back : f32[1,1,128] = hadamard(%turned)\n",
        '  %head : f32[1,1,32] = linear(%back, _, @head.weight) {out="f32"}\n'
        "  %logits : f32[1,32] = reshape(%head) {keep=1, tail=[32]}\n",
    )
    fused = (
        "  %head.x : f32[1,128] = reshape(%embed) {keep=1, tail=[128]}  // turn_twice\n",
        '  %logits : f32[1,32] = linear(%head.x, _, @head.weight) {out="f32"}  // hoist_reshape\n',
    )
    before, after = (parse(start + ends[0].join(body) + ends[1]) for body in (plain, fused))
    assert [named(r) for r in find_rewrites(before, after)] == [
        ("turn_twice", "applied", ["turned", "back"], ["head.x"]),
        ("hoist_reshape", "applied", ["head", "logits"], ["logits"]),
    ]
    assert [named(r) for r in find_rewrites(after, before)] == [
        ("turn_twice", "undone", ["head.x"], ["turned", "back"]),
        ("hoist_reshape", "undone", ["logits"], ["head", "logits"]),
    ]


STATEFUL = """\
graph small {capacity=128}
stage traced
ir 1

input %tokens : i32[1,1]
input %pos : i32[1]
input %n_valid : i32[1]
input %slot : i32[1]
state %window : f32[1,128,128]

.:
  @embed.weight : f32[32,128]
  %embed : f32[1,1,128] = embed(%tokens, @embed.weight) {out="f32"}
  @norm.weight : f32[128]
  %norm : f32[1,1,128] = rms_norm(%embed, @norm.weight) {eps=1e-06}
  constant @cos : f32[128,32]
  constant @sin : f32[128,32]
  %kv : f32[1,1,128] = rope(%norm, @cos, @sin, %pos)
  %window.next : f32[1,128,128] = ring_write(%window, %kv, %pos, %n_valid, %slot)
  @head.weight : f32[32,128]
  %logits : f32[1,1,32] = linear(%embed, _, @head.weight) {out="f32"}

return logits = %logits
next %window = %window.next
"""


def test_a_state_update_swallows_what_it_writes() -> None:
    head, written = STATEFUL.split("  @norm.weight")
    _, end = written.split("%slot)\n", 1)
    fused = (
        f"{head}  @norm.weight : f32[128]\n  constant @cos : f32[128,32]\n  constant @sin : f32[128,32]\n"
        "  %window.next : f32[1,128,128] = kv_write(%embed, @norm.weight, @cos, @sin, %pos, %n_valid, %slot, "
        f"%window) {{eps=1e-06}}  // kv_write\n{end}"
    )
    diff = diff_graphs(parse(STATEFUL), parse(fused))
    assert [named(r) for r in diff.rewrites] == [
        ("kv_write", "applied", ["norm", "kv", "window.next"], ["window.next"])
    ]
    # The norm and the turned row stay inside; both copies of the position but one are not read.
    saved = Ledger(diff).of(*diff.rewrites).saved
    assert saved.activation_written == 2 * ROW
    assert saved.activation_read == 2 * ROW + 4
    assert saved.state_written == saved.state_read == saved.weight_read == saved.constant_read == 0
    assert not diff.rest


# -- the real model -------------------------------------------------------------------------------


class Model:
    """Graphs of tiny-v4, rewritten or not."""

    def __init__(self, path: Path, numerics: Numerics):
        self.numerics = numerics
        self.source = ModelSource.open(path, numerics, max_context=1024)
        self.variants = self.source.variants()
        self._traced: dict[int, Graph] = {}
        self._done: dict[tuple[int, PassOptions], Graph] = {}

    def traced(self, variant: int) -> Graph:
        if variant not in self._traced:
            self._traced[variant] = self.source.graph(self.variants[variant])
        return self._traced[variant]

    def rewritten(self, variant: int, options: PassOptions | None = None) -> Graph:
        key = variant, options or PassOptions.of()
        if key not in self._done:
            facts = Facts(self.source.config.to_dict(), self.numerics.value, self.source.weight_types())
            self._done[key] = run_passes(self.traced(variant), facts, key[1]).graph
        return self._done[key]


@pytest.fixture(scope="module")
def models(tiny_v4: Path) -> dict[Numerics, Model]:
    return {n: Model(tiny_v4, n) for n in (Numerics.FAITHFUL, Numerics.FP32)}


@pytest.fixture(scope="module")
def faithful(models: dict[Numerics, Model]) -> Model:
    return models[Numerics.FAITHFUL]


Pair = Callable[[dict[Numerics, Model]], tuple[Graph, Graph]]
WITHOUT_NORM_QUANT = PassOptions.of(without=("fuse_norm_quant",))
PAIRS: dict[str, Pair] = {
    "traced to layout": lambda m: (m[Numerics.FAITHFUL].traced(3), m[Numerics.FAITHFUL].rewritten(3)),
    "layout to traced": lambda m: (m[Numerics.FAITHFUL].rewritten(3), m[Numerics.FAITHFUL].traced(3)),
    "chunk": lambda m: (m[Numerics.FAITHFUL].traced(1), m[Numerics.FAITHFUL].rewritten(1)),
    "score": lambda m: (m[Numerics.FAITHFUL].traced(5), m[Numerics.FAITHFUL].rewritten(5)),
    "without a pass": lambda m: (
        m[Numerics.FAITHFUL].rewritten(3),
        m[Numerics.FAITHFUL].rewritten(3, WITHOUT_NORM_QUANT),
    ),
    "with a pass": lambda m: (
        m[Numerics.FAITHFUL].rewritten(3, WITHOUT_NORM_QUANT),
        m[Numerics.FAITHFUL].rewritten(3),
    ),
    "numerics": lambda m: (m[Numerics.FAITHFUL].traced(3), m[Numerics.FP32].traced(3)),
    "numerics, rewritten": lambda m: (m[Numerics.FAITHFUL].rewritten(3), m[Numerics.FP32].rewritten(3)),
    "variants": lambda m: (m[Numerics.FAITHFUL].rewritten(0), m[Numerics.FAITHFUL].rewritten(5)),
    "nothing": lambda m: (m[Numerics.FAITHFUL].rewritten(3), m[Numerics.FAITHFUL].rewritten(3)),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, models: dict[Numerics, Model]) -> tuple[Graph, Graph]:
    return PAIRS[request.param](models)


@pytest.mark.parametrize("context", [None, 64])
def test_every_byte_is_accounted_for(pair: tuple[Graph, Graph], context: int | None) -> None:
    diff = diff_graphs(*pair)
    ledger = Ledger(diff, context)
    total = ledger.total()
    for graph, moved in zip(pair, (total.before, total.after), strict=True):
        expected = traffic(graph, context)
        assert moved.activation_read == expected.reads["op"] + expected.reads["input"]
        assert moved.activation_written + moved.state_written == expected.written
        assert moved.weight_read == expected.reads["weight"] == sum(expected.weight_reads.values())
        assert moved.constant_read == expected.reads["constant"]
        assert moved.state_read == expected.reads["state"]
        assert moved.flops == expected.flops
    by_rule = sum((row.balance for row in rule_rows(diff, context)), start=Balance())
    assert by_rule.saved == total.saved
    assert by_rule.nodes_after - by_rule.nodes_before == total.nodes_after - total.nodes_before
    by_module = sum(ledger.modules().values(), start=ledger.unchanged())
    assert by_module == total
    assert (total.nodes_before, total.nodes_after) == tuple(len(g.ops) for g in pair)


def test_every_node_is_told_once(pair: tuple[Graph, Graph]) -> None:
    diff = diff_graphs(*pair)
    told = Counter(n for part in (*diff.rewrites, *diff.rest) for n in part.nodes)
    assert set(told.values()) <= {1}
    changed = {n for c in diff.nodes for n in c.nodes}
    assert changed == set(told)
    document = to_json(diff)
    named_removed = [n for r in document["rewrites"] for n in r["removed"]]
    assert len(named_removed) == len(set(named_removed))
    assert sum(len(m["nodes"]) for m in document["modules"].values()) == 2 * len(document["modules"])
    assert json.loads(json_text(document)) == document
    assert json.loads(json_text(stat_json(diff)))["nodes"] == document["totals"]["nodes"]


# Where both graphs have rules that the other lacks, either side may give the name.
@pytest.mark.parametrize("name", sorted(PAIRS.keys() - {"numerics, rewritten", "variants"}))
def test_swapping_the_graphs_swaps_the_rewrites(models: dict[Numerics, Model], name: str) -> None:
    pair = PAIRS[name](models)
    there, back = diff_graphs(*pair), diff_graphs(*reversed(pair))
    assert Ledger(there).total().saved == Moved() - Ledger(back).total().saved
    opposite = {"applied": "undone", "undone": "applied", "differs": "differs"}
    expected = {(r.rule, opposite[r.how], r.added, r.removed) for r in there.rewrites}
    assert {(r.rule, r.how, r.removed, r.added) for r in back.rewrites} == expected


@pytest.mark.parametrize("variant", range(6))
def test_traced_against_layout(faithful: Model, variant: int) -> None:
    """Every op with a rule is a rewrite of its own; what else is gone was a copy or read by nobody."""
    diff = diff_graphs(faithful.traced(variant), faithful.rewritten(variant))
    with_rule = [n for n in diff.after.ops if n.meta["rule"]]
    assert [n for r in diff.rewrites for n in r.added] == with_rule
    assert all(r.how == "applied" and r.removed for r in diff.rewrites)
    leftovers = Leftovers(diff)
    for change in diff.rest:
        if change.after is None:
            assert leftovers.why(change) is not None
        else:
            assert change.before is not None
            assert {a.name for a in change.aspects} <= {"types", "operands"}
    layers = len(faithful.source.config.compress_ratios)
    for rule, count in {"moe": layers, "attention": layers, "hc_post_pre": 2 * layers - 1}.items():
        assert sum(r.rule == rule for r in diff.rewrites) == count


def test_the_nodes_that_a_rule_swallowed(faithful: Model) -> None:
    diff = diff_graphs(faithful.traced(3), faithful.rewritten(3))
    swallowed = {(r.rule, r.added[0].meta["names"][0]): [key_of(n) for n in r.removed] for r in diff.rewrites}
    attn = "layers.2.attn"
    assert swallowed["kv_write", f"{attn}.window.next"] == [
        ("rms_norm", f"{attn}.kv_norm"),
        ("rope", f"{attn}.kv"),
        ("quantize", f"{attn}.kv.codes"),
        ("dequantize", f"{attn}.kv.rounded"),
        ("ring_write", f"{attn}.window.next"),
    ]
    assert swallowed["norm_quant", f"{attn}.wq_b.x"] == [
        ("rms_norm", f"{attn}.q_norm"),
        ("quantize", f"{attn}.wq_b.x"),
    ]
    assert swallowed["hc_head", "head.x"] == [
        ("take_last", "last"),
        ("reshape", "last.row"),
        ("hc_mix", "hc_head.mix"),
        ("hc_head_split", "hc_head.pre"),
        ("hc_collapse", "hc_head.u"),
        ("rms_norm", "norm"),
    ]
    assert swallowed["hoist_reshape", "logits"] == [("linear", "head"), ("reshape", "logits")]
    assert Leftovers(diff).instead[f"{attn}.wkv.x"] == f"{attn}.wq_a.x"


def test_one_pass_alone(faithful: Model) -> None:
    """The write of a key row also changes what attention reads: one rewrite, of both nodes."""
    diff = diff_graphs(
        faithful.traced(3), faithful.rewritten(3, PassOptions.of(only="fuse_kv_write", to="fused"))
    )
    assert {r.rule for r in diff.rewrites} == {"kv_write"}
    assert diff.rest == ()
    for layer, rewrite in enumerate(diff.rewrites):
        attn = f"layers.{layer}.attn"
        removed = [
            f"{attn}.{n}" for n in ("kv_norm", "kv", "kv.codes", "kv.rounded", "attended", "window.next")
        ]
        added = [f"{attn}.window.next", f"{attn}.attended"]
        assert named(rewrite) == ("kv_write", "applied", removed, added)


def test_without_a_pass_exactly_its_nodes_differ(faithful: Model) -> None:
    diff = diff_graphs(faithful.rewritten(3), faithful.rewritten(3, WITHOUT_NORM_QUANT))
    assert diff.rest == ()
    for rewrite in diff.rewrites:
        ops = [op_of(n.target).name for n in rewrite.added]
        if rewrite.rule == "norm_quant":
            assert rewrite.how == "undone"
            assert [op_of(n.target).name for n in rewrite.removed] == ["rms_norm_quant"]
            assert ops == ["rms_norm", "quantize"]
        else:  # a norm that had become a part of another node came without its quantisation
            assert rewrite.how == "differs"
            assert len(rewrite.removed) == 1
            assert ops == [op_of(rewrite.removed[0].target).name, "quantize"]
    layers = range(len(faithful.source.config.compress_ratios))
    quantised = {
        n.meta["names"][0] for r in diff.rewrites for n in r.added if op_of(n.target).name == "quantize"
    }
    assert quantised == {
        f"layers.{layer}.{name}"
        for layer in layers
        for name in ("attn.wq_a.x", "attn.wq_b.x", "ffn.experts.w1.x")
    }


def test_layout_changes_types_only(faithful: Model) -> None:
    diff = diff_graphs(faithful.rewritten(3, PassOptions.of(to="precision")), faithful.rewritten(3))
    assert diff.rewrites == ()
    assert render(diff).count("\n    ") == 0
    line = "  ~ %gate.logits: f32[1,1,16] -> f32[1,1,16|128]\n"
    assert f"layers.0.ffn (alike in layers 1-5):\n{line}" in render(diff)
    assert render(diff, fold=False).count(line) == 6


class TestModule:
    def test_parts_of_the_model_add_up(self, faithful: Model) -> None:
        diff = diff_graphs(faithful.traced(3), faithful.rewritten(3))
        for module in ("layers.2", "layers.2.attn", "layers.3.ffn", "layers.5.ffn.experts"):
            part = diff.within(module)
            assert part.module == module
            assert not part.empty
            by_rule = sum((row.balance for row in rule_rows(part)), start=Balance())
            assert by_rule.saved == Ledger(part).total().saved
            assert to_json(part)["module"] == module
            for rewrite in part.rewrites:
                assert any(n.meta["module"].startswith(module) for n in rewrite.nodes)

    def test_a_rewrite_across_the_border_is_shown_whole(self, faithful: Model) -> None:
        part = diff_graphs(faithful.traced(3), faithful.rewritten(3)).within("layers.1.ffn.shared_experts")
        assert [named(r)[0] for r in part.rewrites] == ["shared_expert"]
        part = diff_graphs(faithful.traced(3), faithful.rewritten(3)).within("layers.1.ffn.experts")
        assert [named(r)[0] for r in part.rewrites] == ["hc_post_pre", "moe"]
        rows = {row.label: (row.before, row.after) for row in stat_rows(part)}
        assert rows["expert_linear"] == (3, 0)
        assert rows["hc_combine"] == (1, 0)
        assert rows["nodes"] == (6 + 7 + 1, 2)  # and a copy of the quantised input

    def test_a_module_that_neither_graph_has(self, faithful: Model) -> None:
        diff = diff_graphs(faithful.traced(3), faithful.rewritten(3))
        with pytest.raises(UsageError, match=r"layers\.2\.attn"):
            diff.within("layers.2.atn")
        with pytest.raises(UsageError):
            diff.within("layers.9")


class TestFolding:
    def test_every_layer_is_named_once(self, faithful: Model) -> None:
        diff = diff_graphs(faithful.traced(3), faithful.rewritten(3))
        folded, whole = render(diff), render(diff, fold=False)
        assert len(folded.splitlines()) < len(whole.splitlines()) / 2
        assert whole.count("~ rule norm_quant") == 6
        assert folded.count("~ rule norm_quant") == 1
        heading = re.search(r"^(layers\.\d+\.attn.*)\n(  .*\n)*  ~ rule norm_quant", folded, re.MULTILINE)
        assert heading is not None
        assert heading[1].startswith("layers.0.attn (alike in layers 1-5): each saves ")
        assert "layers.2.attn.indexer (alike in layer 4): each saves " in folded

    def test_other_savings_are_not_alike(self) -> None:
        items = ["layers.0.a 5 layers.0", "layers.1.a 5 layers.1", "layers.2.a 6 layers.2", "head", "head"]
        folded = fold_layers(items, where=str, text=str)
        assert [(f.item, f.others) for f in folded] == [
            (items[0], (1,)),
            (items[2], ()),
            ("head", ()),
            ("head", ()),
        ]

    def test_layers_count_from_the_own_one(self) -> None:
        items = [("layers.1.a", "layers.0.x"), ("layers.2.a", "layers.1.x"), ("layers.3.a", "layers.3.x")]
        folded = fold_layers(items, where=lambda i: i[0], text=lambda i: i[1])
        assert [f.others for f in folded] == [(2,), ()]

    @pytest.mark.parametrize(
        ("numbers", "text"),
        [
            ([], ""),
            ([7], "7"),
            ([1, 2], "1, 2"),
            ([1, 2, 3], "1-3"),
            ([2, 4, 6], "2, 4, 6"),
            ([2, 4, 6, 8], "2, 4 .. 8"),
            ([1, 2, 3, 6, 8, 10, 12, 20], "1-3, 6, 8 .. 12, 20"),
            ([0, 3, 4, 5, 6], "0, 3-6"),
        ],
    )
    def test_ranges(self, numbers: list[int], text: str) -> None:
        assert ranges(numbers) == text


def test_equal_graphs_have_no_rewrites(faithful: Model) -> None:
    graph = faithful.rewritten(3)
    diff = diff_graphs(graph, parse(print_graph(graph)))
    assert (diff.rewrites, diff.rest) == ((), ())
    assert rule_rows(diff) == []
    assert render(diff) == "no difference in structure\n"
    assert "rule" not in render_stat(diff)


@pytest.mark.full
def test_the_large_model_reads_in_one_go(repo_root: Path) -> None:
    source = ModelSource.open(
        repo_root / "examples/configs/v4-flash.json", Numerics.FAITHFUL, max_context=8192
    )
    traced = source.graph(max(source.variants(), key=lambda v: (v.kind == "decode", v.capacity)))
    facts = Facts(source.config.to_dict(), "faithful", source.weight_types())
    text = render(diff_graphs(traced, run_passes(traced, facts).graph))
    assert len(text.splitlines()) < 300
    assert "layers.0.attn (alike in layers 1-42): each saves " in text
    assert "layers.2.attn.indexer (alike in layers 4, 6 .. 42): each saves " in text
