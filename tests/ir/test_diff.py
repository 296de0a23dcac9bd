"""Structural diff: every kind of change is found, named, and nothing else is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.diff import Aspect, GraphDiff, diff_graphs
from rewright.ir.diff_json import to_json
from rewright.ir.diff_stat import render_stat, stat_rows
from rewright.ir.diff_text import render
from rewright.ir.export import json_text
from rewright.ir.export.json_graph import op_record
from rewright.ir.graph import Graph
from rewright.ir.op import op_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.traffic import traffic

BASE = """\
graph small {capacity=128, numerics="faithful"}
stage traced
ir 1

input %tokens : i32[1,1]
input %pos : i32[1]
input %n_valid : i32[1]
input %slot : i32[1]
state %attn.window : f32[1,8,128]

.:
  @embed.weight : f32[32,128]
  %embed : f32[1,1,128] = embed(%tokens, @embed.weight) {out="f32"}

attn:
  @norm.weight : f32[128]
  %norm : f32[1,1,128] = rms_norm(%.embed, @norm.weight) {eps=1e-06}
  @wkv.weight : f32[128,128]
  %wkv : f32[1,1,128] = linear(%norm, _, @wkv.weight) {out="f32"}
  %codes, %codes.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%wkv) {block=128, fmt="e4m3"}
  %window.next : f32[1,8,128] = ring_write(%.attn.window, %wkv, %.pos, %.n_valid, %.slot)

.:
  @head.weight : f32[32,128]
  %logits : f32[1,1,32] = linear(%attn.wkv, _, @head.weight) {out="f32"}

return logits = %logits
next %attn.window = %attn.window.next
"""


def edited(*edits: tuple[str, str]) -> Graph:
    """The base graph with each text found exactly once and replaced."""
    text = BASE
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is in the text {text.count(old)} times"
        text = text.replace(old, new)
    return parse(text)


def changes_to(*edits: tuple[str, str]) -> GraphDiff:
    return diff_graphs(parse(BASE), edited(*edits))


def listed(diff: GraphDiff) -> dict[str, list[str]]:
    """Names in the parts of a diff that have any."""
    parts = {f"{c.kind} {c.how}": [] for c in (*diff.leaves, *diff.nodes)}
    for change in (*diff.leaves, *diff.nodes):
        parts[f"{change.kind} {change.how}"].append(change.name)
    parts |= {"header": [a.name for a in diff.header], "outputs": [a.name for a in diff.outputs]}
    return {part: names for part, names in parts.items() if names}


@pytest.fixture(scope="module")
def traced(tiny_v4: Path) -> dict[Numerics, list[Graph]]:
    """Every variant of tiny-v4 in both numerics."""
    graphs = {}
    for numerics in Numerics:
        source = ModelSource.open(tiny_v4, numerics, max_context=256)
        graphs[numerics] = [source.graph(v) for v in source.variants()]
    return graphs


def test_equal_graphs_have_an_empty_diff(traced: dict[Numerics, list[Graph]]) -> None:
    for graph in traced[Numerics.FAITHFUL]:
        diff = diff_graphs(graph, parse(print_graph(graph)))
        assert diff.empty
        assert listed(diff) == {}
        assert render(diff) == "no difference in structure\n"


NORM = "  %norm : f32[1,1,128] = rms_norm(%.embed, @norm.weight) {eps=1e-06}"
WINDOW = "  %window.next : f32[1,8,128] = ring_write(%.attn.window, %wkv, %.pos, %.n_valid, %.slot)"
CODES = '  %codes, %codes.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%wkv) {block=128, fmt="e4m3"}'
LOGITS = '  %logits : f32[1,1,32] = linear(%attn.wkv, _, @head.weight) {out="f32"}'


@pytest.mark.parametrize(
    ("old", "new", "name", "aspects"),
    [
        pytest.param(
            "eps=1e-06",
            "eps=1e-05",
            "attn.norm",
            [Aspect("attrs", {"eps": 1e-06}, {"eps": 1e-05})],
            id="attribute",
        ),
        pytest.param(
            "ring_write(%.attn.window, %wkv",
            "ring_write(%.attn.window, %norm",
            "attn.window.next",
            [
                Aspect(
                    "operands",
                    ["attn.window", "attn.wkv", "pos", "n_valid", "slot"],
                    ["attn.window", "attn.norm", "pos", "n_valid", "slot"],
                )
            ],
            id="operand",
        ),
        pytest.param(
            NORM,
            "  %norm : f32[1,1,128] = hadamard(%.embed)",
            "attn.norm",
            [
                Aspect("attrs", {"eps": 1e-06}, {}),
                Aspect("op", "rms_norm", "hadamard"),
                Aspect("operands", ["embed", "attn.norm.weight"], ["embed"]),
            ],
            id="op",
        ),
        pytest.param(
            LOGITS,
            LOGITS.replace("f32", "bf16"),
            "logits",
            [
                Aspect("attrs", {"out": "f32"}, {"out": "bf16"}),
                Aspect("types", ["f32[1,1,32]"], ["bf16[1,1,32]"]),
            ],
            id="type",
        ),
        pytest.param(
            "%codes.scale",
            "%codes.exponents",
            "attn.codes",
            [Aspect("names", ["attn.codes", "attn.codes.scale"], ["attn.codes", "attn.codes.exponents"])],
            id="name of a second result",
        ),
        pytest.param(
            NORM, NORM + "  // fuse_norm", "attn.norm", [Aspect("rule", None, "fuse_norm")], id="rule"
        ),
        pytest.param(
            WINDOW,
            "\nattn.ring:\n" + WINDOW.replace("%window", "%.attn.window").replace("%wkv", "%.attn.wkv"),
            "attn.window.next",
            [Aspect("module", "attn", "attn.ring")],
            id="module",
        ),
    ],
)
def test_changed_op(old: str, new: str, name: str, aspects: list[Aspect]) -> None:
    diff = changes_to((old, new))
    assert listed(diff) == {"op changed": [name]}
    assert list(diff.nodes[0].aspects) == aspects
    assert not diff.empty
    assert to_json(diff)["nodes"]["changed"] == [
        {
            "name": name,
            "kind": "op",
            "module": diff.nodes[0].module,
            "aspects": [{"name": a.name, "before": a.before, "after": a.after} for a in aspects],
        }
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (CODES + "\n", "", {"op removed": ["attn.codes"]}),
        (CODES, CODES + "\n  %turned : f32[1,1,128] = hadamard(%wkv)", {"op added": ["attn.turned"]}),
        ("input %slot", "input %seed : i32[1]\ninput %slot", {"input added": ["seed"]}),
        ("state %attn.window", "state %old : f32[1]\nstate %attn.window", {"state added": ["old"]}),
        ("  @norm.weight", "  @bias : f32[8]\n  @norm.weight", {"weight added": ["attn.bias"]}),
        ("  @norm.weight", "  constant @norm.weight", {"constant changed": ["attn.norm.weight"]}),
        ("@head.weight : f32", "@head.weight : bf16", {"weight changed": ["head.weight"]}),
        ("return logits = %logits", "return logits = %embed", {"outputs": ["return logits"]}),
        ("return logits", "return scores", {"outputs": ["return logits", "return scores"]}),
        ("= %attn.window.next", "= %attn.window", {"outputs": ["next attn.window"]}),
    ],
)
def test_added_removed_and_retyped(old: str, new: str, expected: dict[str, list[str]]) -> None:
    diff = changes_to((old, new))
    assert listed(diff) == expected
    assert not diff.empty


def test_header_alone_is_no_difference_in_structure() -> None:
    edits = [
        ("graph small", "graph large"),
        ("stage traced", "stage fused"),
        ("capacity=128", "capacity=256"),
    ]
    diff = changes_to(*edits)
    assert diff.empty
    assert diff.header == (
        Aspect("attrs.capacity", 128, 256),
        Aspect("name", "small", "large"),
        Aspect("stage", "traced", "fused"),
    )


def test_order_is_ignored() -> None:
    moved = [("input %pos : i32[1]\n", ""), ("input %slot", "input %pos : i32[1]\ninput %slot")]
    moved += [("  @norm.weight : f32[128]\n", ""), (NORM, "  @norm.weight : f32[128]\n" + NORM)]
    moved += [(CODES + "\n", ""), (WINDOW, WINDOW + "\n" + CODES)]
    moved += [("input %n_valid : i32[1]\n", ""), ("input %tokens", "input %n_valid : i32[1]\ninput %tokens")]
    base, reordered = parse(BASE), edited(*moved)
    assert base != reordered
    assert diff_graphs(base, reordered).empty
    removed = [("input %pos : i32[1]\n", ""), ("input %n_valid : i32[1]\n", "")]
    unused = [(WINDOW + "\n", ""), ("= %attn.window.next", "= %attn.window"), (CODES + "\n", "")]
    target = edited(*removed, *unused, ("eps=1e-06", "eps=1e-05"))
    assert to_json(diff_graphs(reordered, target)) == to_json(diff_graphs(base, target))


def test_removed_op_stands_where_it_was() -> None:
    diff = changes_to(("eps=1e-06", "eps=1e-05"), (CODES + "\n", ""), ("%wkv, %.pos", "%norm, %.pos"))
    assert [c.name for c in diff.nodes] == ["attn.norm", "attn.codes", "attn.window.next"]


def test_rendered_text() -> None:
    diff = changes_to(
        ('numerics="faithful"', 'numerics="fp32"'),
        ("state %attn.window : f32[1,8,128]", "state %attn.window : f32[1,16,128]"),
        ("%window.next : f32[1,8,128]", "%window.next : f32[1,16,128]"),
        ("  @head.weight", "  constant @head.weight"),
        (CODES + "\n", ""),
        (LOGITS, "  %turned : f32[1,1,128] = hadamard(%attn.wkv)\n" + LOGITS.replace("%attn.wkv", "%turned")),
        ("return logits = %logits", "return logits = %logits\nreturn hidden = %turned"),
    )
    assert (
        render(diff)
        == """\
~ attrs.numerics: "faithful" -> "fp32"

~ activation bytes of a step at context 128: 4,369 -> 4,752 (+383)
~ weight bytes of a step at context 128: 82,944 -> 66,560 (-16,384)
~ constant bytes of a step at context 128: 0 -> 16,384 (+16,384)

~ state %attn.window : f32[1,8,128] -> f32[1,16,128]
~ constant @head.weight : kind weight -> constant

attn:
  ~ read by nobody: 1 node, saves 641 bytes
    - %codes, %codes.scale : f8e4m3[1,1,128], e8m0[1,1,1] = quantize(%wkv) {block=128, fmt="e4m3"}
  ~ %window.next: f32[1,8,128] -> f32[1,16,128]

.: saves 16,384 bytes of weights, costs 1,024 bytes and 16,384 of constants
  + %turned : f32[1,1,128] = hadamard(%attn.wkv)
  ~ %logits: reads %turned instead of %attn.wkv

~ return hidden: null -> "turned"
"""
    )


def test_moved_op_stands_under_its_new_module_with_both_lines_relative_to_it() -> None:
    moved = WINDOW.replace("%window", "%.attn.window").replace("%wkv", "%.attn.wkv")
    assert (
        render(changes_to((WINDOW, f"\nattn.ring:\n{moved}")))
        == f"""\
attn.ring:
  ~ %.attn.window.next: module
    - {moved.strip()}
    + {moved.strip()}
"""
    )


def records(graph: Graph) -> dict[str, dict[str, Any]]:
    return {node.meta["names"][0]: op_record(node) for node in graph.ops}


def patched(before: dict[str, dict[str, Any]], changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Op records after applying the `nodes` part of a JSON diff."""
    gone = {r["names"][0] for r in changes["removed"]}
    after = {name: dict(record) for name, record in before.items() if name not in gone}
    after |= {r["names"][0]: r for r in changes["added"]}
    for change in changes["changed"]:
        record = after[change["name"]]
        for aspect in change["aspects"]:
            if aspect["name"] == "attrs":
                kept = {k: v for k, v in record["attrs"].items() if k not in aspect["before"]}
                record["attrs"] = kept | aspect["after"]
            else:
                record[aspect["name"]] = aspect["after"]
    return after


def test_faithful_against_fp32(traced: dict[Numerics, list[Graph]]) -> None:
    for faithful, fp32 in zip(traced[Numerics.FAITHFUL], traced[Numerics.FP32], strict=True):
        text = print_graph(faithful)
        diff = diff_graphs(faithful, fp32)
        document = to_json(diff)
        assert [a.name for a in diff.header] == ["attrs.numerics"]
        removed = Counter(r["op"] for r in document["nodes"]["removed"])
        assert removed == {
            op: sum(op_of(n.target).name == op for n in faithful.ops) for op in ("quantize", "dequantize")
        }
        assert document["nodes"]["added"] == []
        # Complete and exact: the diff turns the first graph's ops into the second's.
        assert patched(records(faithful), document["nodes"]) == records(fp32)
        assert print_graph(faithful) == text  # comparing changes nothing


def test_different_variants(traced: dict[Numerics, list[Graph]]) -> None:
    small, *others = traced[Numerics.FAITHFUL]
    for other in others:
        diff = diff_graphs(small, other)
        assert not diff.empty
        assert patched(records(small), to_json(diff)["nodes"]) == records(other)


def test_swapping_the_graphs_swaps_the_diff(traced: dict[Numerics, list[Graph]]) -> None:
    a, b = traced[Numerics.FAITHFUL][0], traced[Numerics.FP32][3]
    there, back = to_json(diff_graphs(a, b)), to_json(diff_graphs(b, a))
    for part in ("leaves", "nodes"):
        assert there[part]["removed"] == back[part]["added"]
        assert there[part]["added"] == back[part]["removed"]
        assert [c["name"] for c in there[part]["changed"]] == [c["name"] for c in back[part]["changed"]]
    assert [(a["before"], a["after"]) for a in there["header"]] == [
        (a["after"], a["before"]) for a in back["header"]
    ]


def test_json_and_text_are_the_same_for_equal_graphs(traced: dict[Numerics, list[Graph]]) -> None:
    a, b = traced[Numerics.FAITHFUL][0], traced[Numerics.FP32][0]
    first, second = diff_graphs(a, b), diff_graphs(parse(print_graph(a)), parse(print_graph(b)))
    assert json_text(to_json(first)) == json_text(to_json(second))
    assert json.loads(json_text(to_json(first))) == to_json(first)
    assert render(first) == render(second)
    assert render_stat(first) == render_stat(second)


def test_stat_of_a_small_graph() -> None:
    diff = changes_to((CODES + "\n", ""), ("@head.weight : f32", "@head.weight : bf16"))
    rows = {row.label: (row.before, row.after) for row in stat_rows(diff)}
    assert {op: rows[op] for op in ("embed", "linear", "quantize", "nodes")} == {
        "embed": (1, 1),
        "linear": (2, 2),
        "quantize": (1, 0),
        "nodes": (6, 5),
    }
    # embed and head [32,128], norm [128], wkv [128,128] in f32; then the head in bf16.
    resident = 4 * (2 * 32 * 128 + 128 + 128 * 128)
    assert rows["weight bytes resident"] == (resident, resident - 2 * 32 * 128)
    # A quantisation writes 128 codes and one scale.
    assert rows["activation bytes written"][0] - rows["activation bytes written"][1] == 129
    lines = render_stat(diff).splitlines()
    assert lines[0].split() == ["before", "after", "delta"]
    assert [line.split() for line in lines if line.startswith(("linear", "quantize"))] == [
        ["linear", "2", "2", "="],
        ["quantize", "1", "0", "-1"],
    ]
    between, saved = lines.index(""), ["bytes", "saved"]
    assert len({len(line) for line in lines[:between]}) == 1
    assert [line.split() for line in lines[between + 1 :]] == [
        ["rule", "places", "nodes", "activation", *saved, "weight", *saved],
        ["(read", "by", "nobody)", "1", "1", "->", "0", "641", "0"],
        ["(unchanged", "nodes)", "5", "5", "->", "5", "0", "8,192"],
        ["all", "6", "->", "5", "641", "8,192"],
    ]


@pytest.mark.parametrize("context", [None, 64])
def test_stat_adds_up_to_the_traffic(traced: dict[Numerics, list[Graph]], context: int | None) -> None:
    faithful, fp32 = traced[Numerics.FAITHFUL][3], traced[Numerics.FP32][3]
    rows = {row.label: row for row in stat_rows(diff_graphs(faithful, fp32), context)}
    for side, graph in (("before", faithful), ("after", fp32)):
        moved = traffic(graph, context)
        shown = {label: getattr(row, side) for label, row in rows.items()}
        assert shown["weight bytes resident"] == sum(moved.resident.values())
        assert shown["weight bytes read"] == sum(moved.weight_reads.values())
        assert shown["state bytes read"] == moved.reads["state"]
        assert shown["activation bytes read"] == moved.reads["input"] + moved.reads["op"]
        assert shown["activation bytes written"] + shown["state bytes written"] == moved.written
        assert shown["flops"] == moved.flops
        all_bytes = sum(n for label, n in shown.items() if label.endswith(("bytes read", "bytes written")))
        assert all_bytes == sum(moved.reads.values()) + moved.written
        ops = [n for label, n in shown.items() if label in {op_of(node.target).name for node in graph.ops}]
        assert sum(ops) == shown["nodes"] == len(graph.ops)
