"""Graph text: what is printed is read back, and what cannot be read is refused with its line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir import ops
from rewright.ir.errors import BadInput, CompilerBug
from rewright.ir.graph import IR_VERSION, Graph, kind_of, name_of, op_named, operands_of, result_names
from rewright.ir.names import absolute, join, relative, within
from rewright.ir.op import Op, registry
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph, print_node
from rewright.ir.types import DType, ValueType, parse_type, type_of
from rewright.ir.verify import find_problems, verify

OPS = dict(sorted(registry().items()))
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
WEIGHTS = {"weight", "scale", "fn", "ape", "sink", "bias", "table"}
CONSTANTS = {"cos", "sin"}

TEXT = """\
graph chunk4-b1-c128 {batch=1, capacity=128, exact=false, note="x) // y", tokens=4}
stage traced
ir 1

input %tokens : i32[1,4]
input %pos : i32[1]
input %n_valid : i32[1]
input %slot : i32[1]
state %layers.0.attn.window : bf16[2,8,256]

.:
  @embed.weight : bf16[16,256]
  %embed : bf16[1,4,256] = embed(%tokens, @embed.weight) {out="bf16"}

layers.0.attn:
  @kv_norm.weight : bf16[256]
  %kv_norm : bf16[1,4,256] = rms_norm(%.embed, @kv_norm.weight) {eps=1e-06}
  %kv, %kv.scale : f8e4m3[1,4,192], e8m0[1,4,3] = quantize(%kv_norm) {block=64, dims=[0, 192], fmt="e4m3"}
  %rounded : bf16[1,4,256] = dequantize(%kv, %kv.scale, %kv_norm) {block=64, dims=[0, 192], out="bf16"}
  %window.next : bf16[2,8,256] = ring_write(%.layers.0.attn.window, %rounded, %.pos, %.n_valid, %.slot)
  constant @table : f32[16,256]
  %wo : bf16[1,4,16] = linear(%rounded, _, @table) {out="bf16"}  // fold_example

.:
  %logits : bf16[1,16] = take_last(%layers.0.attn.wo, %n_valid)

return logits = %logits
next %layers.0.attn.window = %layers.0.attn.window.next
"""


def graph_of(op: Op) -> Graph:
    """Every example of an op, each as a call of its own with weights, constants and state where sensible."""
    graph = Graph(f"all-{op.name}", stage=op.since, attrs={"capacity": 32, "op": op.name})
    results, states = {}, {}
    calls = [(f"layers.{i}.part", *call) for i, call in enumerate(op.example_calls())]
    given = {
        join(module, name): graph.leaf(
            "state" if name in op.updates.values() else "input", join(module, name), type_of(t)
        )
        for module, operands, _ in calls
        for name, t in zip(op.operands, operands, strict=True)
        if t is not None and name not in WEIGHTS | CONSTANTS
    }
    for i, (module, operands, attrs) in enumerate(calls):
        leaves = []
        for name, tensor in zip(op.operands, operands, strict=True):
            leaf = given.get(join(module, name))
            if leaf is None and tensor is not None:
                kind = "weight" if name in WEIGHTS else "constant"
                leaf = graph.leaf(kind, join(module, name), type_of(tensor), module)
            leaves.append(leaf)
        names = result_names(op, join(module, "out"), attrs)
        rule = "some_rule" if i % 2 else None
        node = graph.call(op, leaves, attrs, names=names, module=module, rule=rule)
        for result, at in op.updated(attrs).items():
            states[join(module, op.operands[at])] = graph.result(node, result)
        # The last result is asked for first, and others of every second example are never used.
        for index in reversed(range(len(names))):
            if i % 2 == 0 or index == len(names) - 1:
                results[f"result.{i}.{index}"] = graph.result(node, index)
    graph.finish(results, states)
    return graph


@every_op
def test_every_op_is_read_back(op: Op) -> None:
    graph = graph_of(op)
    assert list(find_problems(graph)) == []
    text = print_graph(graph)
    again = parse(text)
    assert again == graph
    assert print_graph(again) == text


@every_op
def test_copy(op: Op) -> None:
    graph = graph_of(op)
    copy = graph.copy()
    assert copy == graph
    assert not set(copy.nodes) & set(graph.nodes)
    assert print_graph(copy) == print_graph(graph)
    copy.attrs["capacity"] = 7
    copy.ops[0].meta["rule"] = "other"
    assert graph.attrs["capacity"] == 32
    assert graph.ops[0].meta["rule"] is None
    assert copy != graph


def test_text_is_canonical() -> None:
    graph = parse(TEXT)
    verify(graph)
    assert print_graph(graph) == TEXT
    assert print_graph(graph.copy()) == TEXT


def test_the_excerpt_in_the_documentation_is_what_is_printed(repo_root: Path, tiny_v4: Path) -> None:
    source = ModelSource.open(tiny_v4, Numerics.FAITHFUL)
    printed = print_graph(source.graph(source.variants()[0]), module="layers.2.attn.compressor").splitlines()
    (excerpt,) = re.findall(r"```\n(layers\..*?)```", (repo_root / "docs/ir.md").read_text(), re.DOTALL)
    assert [line for line in excerpt.splitlines() if line not in printed] == []


def test_what_was_read() -> None:
    graph = parse(TEXT)
    assert (graph.name, graph.stage) == ("chunk4-b1-c128", "traced")
    assert graph.attrs == {"batch": 1, "capacity": 128, "exact": False, "note": "x) // y", "tokens": 4}
    assert list(graph.results) == ["logits"]
    window = graph.next_state["layers.0.attn.window"]
    assert name_of(window) == "layers.0.attn.window.next"
    ring, rows, *_ = operands_of(window)
    assert (kind_of(ring), name_of(ring)) == ("state", "layers.0.attn.window")
    assert name_of(rows) == "layers.0.attn.rounded"
    linear = graph.value("layers.0.attn.wo")
    assert [v and name_of(v) for v in operands_of(linear)] == [
        "layers.0.attn.rounded", None, "layers.0.attn.table", None,
    ]  # fmt: skip
    assert (linear.meta["rule"], linear.meta["module"]) == ("fold_example", "layers.0.attn")
    assert kind_of(operands_of(linear)[2]) == "constant"
    quantize = graph.value("layers.0.attn.kv.scale")
    assert kind_of(quantize) == "item"
    assert quantize.args[0].kwargs == {"block": 64, "dims": [0, 192], "fmt": "e4m3"}
    assert [n.meta["names"][0] for n in graph.of_kind("weight")] == [
        "embed.weight",
        "layers.0.attn.kv_norm.weight",
    ]


def test_lines_of_one_module() -> None:
    lines = print_graph(parse(TEXT), module="layers.0").splitlines()
    assert lines[4] == "state %layers.0.attn.window : bf16[2,8,256]"
    assert lines[6] == "layers.0.attn:"
    assert lines[7:] == TEXT.split("layers.0.attn:\n")[1].split("\n\n")[0].splitlines()


def test_one_node() -> None:
    graph = parse(TEXT)
    node = graph.value("layers.0.attn.kv_norm")
    assert print_node(node, "layers.0.attn") == (
        "%kv_norm : bf16[1,4,256] = rms_norm(%.embed, @kv_norm.weight) {eps=1e-06}"
    )
    assert print_node(node, "").startswith(
        "%layers.0.attn.kv_norm : bf16[1,4,256] = rms_norm(%embed, @layers.0"
    )


DIFFERENCES = [
    ("graph chunk4-b1-c128", "graph other"),
    ("stage traced", "stage canonical"),
    ("tokens=4", "tokens=5"),
    ("exact=false", "exact=0.5"),
    ("eps=1e-06", "eps=1e-05"),
    ("  // fold_example", ""),
    ("  constant @table", "  @table"),
    ("return logits", "return other"),
    ("%kv.scale, %kv_norm)", "%kv.scale, %.embed)"),
    ("layers.0.attn:\n", "layers.1.attn:\n  @unused : f32[1]\n\nlayers.0.attn:\n"),
    ("take_last(%layers.0.attn.wo,", "take_last(%embed,"),
]


@pytest.mark.parametrize(("old", "new"), DIFFERENCES)
def test_graphs_that_differ_are_unequal(old: str, new: str) -> None:
    assert TEXT.count(old) == 1
    other = parse(TEXT.replace(old, new))
    assert other != parse(TEXT)
    assert other == parse(print_graph(other))


def test_a_graph_equals_graphs_only() -> None:
    assert parse(TEXT) != TEXT
    with pytest.raises(TypeError, match="unhashable"):
        hash(parse(TEXT))


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), scalars))
def test_graph_attributes_of_every_type(attrs: dict[str, Any]) -> None:
    graph = Graph("g", attrs=attrs)
    x = graph.leaf("input", "x", ValueType(DType.BF16, (1, 1, 2)))
    graph.finish({"x": x}, {})
    again = parse(print_graph(graph))
    assert again == graph
    assert {n: type(v) for n, v in again.attrs.items()} == {n: type(v) for n, v in attrs.items()}


def test_op_attributes_keep_their_types() -> None:
    seen: set[type] = set()
    for op in OPS.values():
        for node, again in zip(graph_of(op).ops, parse(print_graph(graph_of(op))).ops, strict=True):
            for name, value in node.kwargs.items():
                assert type(again.kwargs[name]) is type(value)
                seen.add(type(json.loads(json.dumps(value))))
    assert seen == {int, float, str, bool, list}


def test_attributes_are_printed_in_order_of_their_names() -> None:
    graph = Graph("g", attrs={"b": 1, "a": 2})
    x = graph.leaf("input", "x", ValueType(DType.BF16, (1, 1, 64)))
    graph.finish({"x": x}, {})
    assert print_graph(graph).startswith("graph g {a=2, b=1}\n")
    assert graph == parse(print_graph(graph))


def test_defaults_are_left_out() -> None:
    graph = Graph("g")
    x = graph.leaf("input", "x", ValueType(DType.BF16, (1, 1, 64)))
    attrs = {"fmt": "e2m1", "dims": None, "block": 32}
    node = graph.call(op_named("quantize"), [x], attrs, names=("q", "q.scale"), module="")
    assert print_node(node, "").endswith('quantize(%x) {block=32, fmt="e2m1"}')


def test_graph_refuses_what_it_cannot_hold() -> None:
    graph = Graph("g")
    x = graph.leaf("input", "x", ValueType(DType.BF16, (1, 1, 64)))
    with pytest.raises(CompilerBug, match="two values are called x"):
        graph.leaf("weight", "x", ValueType(DType.BF16, (1,)))
    graph.call(op_named("hadamard"), [x], {}, names=("h",), module="")
    with pytest.raises(CompilerBug, match="state late comes after other nodes"):
        graph.leaf("state", "late", ValueType(DType.BF16, (1,)))
    graph.leaf("weight", "w", ValueType(DType.BF16, (1,)))
    with pytest.raises(CompilerBug, match="no kind of leaf"):
        graph.leaf("op", "y", ValueType(DType.BF16, (1,)))
    with pytest.raises(CompilerBug, match=r"y: rms_norm cannot take its operands: operand weight is missing"):
        graph.call(op_named("rms_norm"), [x, None], {"eps": 1.0}, names=("y",), module="")
    with pytest.raises(CompilerBug, match="has no output"):
        _ = graph.results
    with pytest.raises(KeyError):
        graph.value("nowhere")
    assert "x" in graph
    assert "nowhere" not in graph


def test_unknown_stated_type_stands_until_the_verifier() -> None:
    """The text's own type is kept, so that the verifier can say what is wrong with it."""
    graph = parse(TEXT.replace("%logits : bf16[1,16]", "%logits : f32[1,16]"))
    assert list(find_problems(graph)) == ["logits: typed f32[1,16], inferred bf16[1,16]"]


ERRORS = {
    "empty": ("", None, 1, "the three header lines are missing"),
    "garbage": ("\0\1\2\n\n\n\n", None, 1, "the header does not read"),
    "no graph line": ("graph chunk4", "chunk4", 1, "the header does not read"),
    "unknown stage": ("stage traced", "stage final", 1, "the header does not read"),
    "graph attributes": ("{batch=1,", "{batch:1,", 1, "do not read as key=value"),
    "newer version": ("ir 1", f"ir {IR_VERSION + 1}", 3, f"ir version {IR_VERSION + 1}; this Rewright reads"),
    "unreadable line": ("input %pos", "inptu %pos", 6, "cannot read 'inptu"),
    "unknown leaf type": ("%slot : i32[1]", "%slot : i33[1]", 8, "not a type: 'i33[1]'"),
    "negative size": ("%slot : i32[1]", "%slot : i32[-1]", 8, "not a type"),
    "input after an op": ("return", "input %late : i32[1]\nreturn", 27, "late comes after other nodes"),
    "value defined twice": ("input %slot", "input %pos", 8, "two values are called pos"),
    "neither weight nor op": ("  @embed.weight :", "  embed.weight :", 12, "neither a weight nor an op call"),
    "unknown op": ("= embed(", "= embde(", 13, "there is no op embde"),
    "unknown dtype attribute": ('{out="bf16"}\n\nlayers', '{out="b16"}\n\nlayers', 13, "KeyError: 'b16'"),
    "unknown type": ("kv_norm : bf16[1,4,256] =", "kv_norm : bf17[1,4,256] =", 17, "not a type: 'bf17"),
    "unclosed type": ("kv_norm : bf16[1,4,256] =", "kv_norm : bf16[1,4,256 =", 17, "neither a weight nor"),
    "undefined value": ("rms_norm(%.embed", "rms_norm(%.embde", 17, "embde is used before it is defined"),
    "no value name": ("rms_norm(%.embed", "rms_norm(embed", 17, "not a value name: 'embed'"),
    "operands that do not fit": ("rms_norm(%.embed", "rms_norm(%.tokens", 17, "rms_norm cannot take"),
    "missing attribute": (" {eps=1e-06}", "", 17, "missing ['eps']"),
    "unknown attribute": ("eps=1e-06", "eps=1e-06, x=1", 17, "unknown attributes ['x']"),
    "attribute of another type": ("eps=1e-06", 'eps="small"', 17, "attribute eps cannot be 'small'"),
    "attribute that is no JSON": ("eps=1e-06", "eps=small", 17, "Expecting value"),
    "attributes without comma": ("dims=[0, 192], fmt", "dims=[0, 192]; fmt", 18, "do not read as key=value"),
    "too few types": (", e8m0[1,4,3]", "", 18, "2 names but 1 types"),
    "too few names": ("%kv, %kv.scale :", "%kv :", 18, "has 2 results, not 1"),
    "too few operands": ("%.pos, %.n_valid, %.slot)", "%.pos, %.n_valid)", 20, "operand slot is missing"),
    "too many operands": ("_, @table)", "_, @table, _, _)", 22, "takes 4 operands, not 5"),
    "absent but required": ("rms_norm(%.embed", "rms_norm(_", 17, "operand x is missing"),
    "undefined result": ("return logits = %logits", "return logits = %logist", 27, "logist is used before"),
    "undefined next": ("= %layers.0.attn.window.next", "= %w", 28, "w is used before it is defined"),
    "two results of one name": ("next %", "return logits = %logits\nnext %", 28, "logits is given twice"),
    "no return": ("return logits = %logits\n", "", 28, "the text ends without a return line"),
    "cut short": (TEXT[TEXT.index("layers.0.attn:") :], "", 15, "the text ends without a return line"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "what"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_line(old: str, new: str | None, line: int, what: str) -> None:
    text = old if new is None else TEXT.replace(old, new)
    assert new is None or TEXT.count(old) == 1
    with pytest.raises(BadInput) as caught:
        parse(text, "dump.txt")
    assert caught.value.where == f"dump.txt, line {line}"
    assert what in caught.value.what


TEXTS = [TEXT, *(print_graph(graph_of(op)) for op in OPS.values())]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A valid text after a few edits of lines or characters."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            lines = text.splitlines(keepends=True) or [""]
            at, to = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            line = lines[at]
            if draw(st.booleans()):
                del lines[at]
            if draw(st.booleans()):
                lines.insert(to, line)
            text = "".join(lines)
        else:
            at = draw(st.integers(0, len(text)))
            width = draw(st.integers(0, 3))
            character = st.sampled_from('%@.,:=()[]{}_-/ "\n0123456789abefimnx') | st.characters()
            text = text[:at] + draw(st.text(character, max_size=2)) + text[at + width :]
    return text


def assert_survives(graph: Graph) -> None:
    """It is read back from its own text, and the verifier can look at it."""
    printed = print_graph(graph)
    assert parse(printed) == graph
    assert print_graph(parse(printed)) == printed
    assert all(isinstance(problem, str) for problem in find_problems(graph))


@given(damaged())
@settings(max_examples=400, deadline=None)
def test_damaged_text_is_read_or_refused(text: str) -> None:
    """Never another exception; and what can be read survives being printed."""
    try:
        graph = parse(text)
    except BadInput as refusal:
        place = refusal.where
    else:
        assert_survives(graph)
        return
    assert re.fullmatch(r"graph text, line \d+", place or "")


paths = st.lists(st.from_regex(r"\w+", fullmatch=True), max_size=4).map(".".join)


@given(paths, paths.filter(bool))
def test_names_relative_to_any_heading(heading: str, name: str) -> None:
    assert absolute(relative(name, heading), heading) == name
    inner = join(heading, name)
    assert relative(inner, heading) == name
    assert within(inner, heading)


def test_within_a_module() -> None:
    assert within("layers.1", "layers.1")
    assert within("layers.1.attn", "layers.1")
    assert not within("layers.10", "layers.1")
    assert relative("layers.10.x", "layers.1") == ".layers.10.x"
    assert within("anything", "")


@pytest.mark.parametrize("dtype", DType)
def test_types_are_read_back(dtype: DType) -> None:
    for shape in ((), (4,), (2, 1, 64)):
        type = ValueType(dtype, shape)
        assert parse_type(str(type)) == type
    assert type_of(type.empty()) == type
    assert type.empty().nbytes == type.nbytes


NO_TYPES = ["", "bf16", "bf16[", "bf16[1", "bf16]1[", "bf16[1,]", "bf16[,1]", "bf16[1 ]", "bf16[-1]"]
NO_TYPES += ["bf16[1_0]", "bf16[x]", "BF16[1]", "f8[1]", "bf16[1]]"]


@pytest.mark.parametrize("text", NO_TYPES)
def test_text_that_is_no_type(text: str) -> None:
    with pytest.raises(ValueError, match="not a type"):
        parse_type(text)


def test_packed_types_count_logical_elements() -> None:
    type = ValueType(DType.E2M1, (3, 64))
    assert (type.numel, type.nbytes, type.storage_shape) == (192, 96, (3, 32))
    assert type_of(torch.zeros(3, 32, dtype=torch.uint8)) == type
    with pytest.raises(CompilerBug, match="must be a multiple of 2"):
        _ = ValueType(DType.E2M1, (3, 5)).storage_shape
    with pytest.raises(CompilerBug, match=r"no graph type is held as torch\.complex64"):
        type_of(torch.zeros(1, dtype=torch.complex64))


def test_calling_an_op_while_tracing_records_it_whole() -> None:
    def step(x: Any) -> Any:
        codes, scale = ops.quantize(x, fmt="e4m3", block=32, name="codes")
        return ops.dequantize(codes, scale, None, block=32, out="bf16")

    traced = torch.fx.symbolic_trace(step)
    roles = [n.meta["role"] for n in traced.graph.nodes if "role" in n.meta]
    assert roles == ["codes", "dequantize"]
    x = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(traced(x), step(x))
