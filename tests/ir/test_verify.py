"""Every kind of broken graph is reported, in words, together with the others."""

from __future__ import annotations

import pytest

from rewright.ir.errors import VerifyError
from rewright.ir.graph import Graph, op_named
from rewright.ir.parser import parse
from rewright.ir.types import DType, ValueType
from rewright.ir.verify import find_problems, unused_weights, verify

TEXT = """\
graph step
stage traced
ir 1

input %x : bf16[1,2,64]
input %wide : f32[1,2,64]
input %pos : i32[1]
input %n_valid : i32[1]
input %slot : i32[1]
state %ring : bf16[1,8,64]
state %other : bf16[1,8,64]

.:
  @norm.weight : bf16[64]
  constant @table : bf16[16,64]
  %normed : bf16[1,2,64] = rms_norm(%x, @norm.weight) {eps=1e-06}
  %turned : bf16[1,2,64] = hadamard(%normed)
  %codes, %codes.scale : f8e4m3[1,2,64], e8m0[1,2,2] = quantize(%turned) {block=32, fmt="e4m3"}
  %rounded : bf16[1,2,64] = dequantize(%codes, %codes.scale, _) {block=32, out="bf16"}
  %ring.1 : bf16[1,8,64] = ring_write(%ring, %rounded, %pos, %n_valid, %slot)
  %ring.2 : bf16[1,8,64] = ring_write(%ring.1, %x, %pos, %n_valid, %slot)
  %out : bf16[1,2,16] = linear(%rounded, _, @table, _) {out="bf16"}

return out = %out
next %ring = %ring.2
next %other = %other
"""
WEIGHTS = {
    "norm.weight": ValueType(DType.BF16, (64,)),
    "table": ValueType(DType.BF16, (16, 64)),
}


@pytest.fixture
def graph() -> Graph:
    graph = parse(TEXT)
    verify(graph, WEIGHTS)
    return graph


def problems(graph: Graph) -> list[str]:
    return list(find_problems(graph, WEIGHTS))


def put(graph: Graph, node: str, operand: int, value: str) -> None:
    """Make a node read another value, as a careless rewrite would."""
    graph.value(node).update_arg(operand, graph.value(value))


def test_verify_raises_with_every_problem(graph: Graph) -> None:
    put(graph, "normed", 0, "wide")
    graph.stage = "no_stage"
    with pytest.raises(VerifyError) as caught:
        verify(graph, {})
    assert caught.value.problems == [
        "normed: typed bf16[1,2,64], inferred f32[1,2,64]",
        "there is no stage no_stage",
        "weight norm.weight does not exist",
        "weight table does not exist",
    ]
    assert caught.value.where == "step"
    assert caught.value.exit_code == 5
    assert str(caught.value).startswith("step: 4 problem(s) in the graph\n  - normed: typed")


def test_a_changed_dtype_must_be_carried_downstream(graph: Graph) -> None:
    """Each node on the way is reported once its operand says f32, down to the one that gives bf16 anyway."""
    put(graph, "normed", 0, "wide")
    for name in ("normed", "turned"):
        assert problems(graph) == [f"{name}: typed bf16[1,2,64], inferred f32[1,2,64]"]
        graph.value(name).meta["types"] = (ValueType(DType.F32, (1, 2, 64)),)
    assert problems(graph) == []


def test_a_changed_shape(graph: Graph) -> None:
    graph.value("codes").args[0].meta["types"] = (
        ValueType(DType.F8E4M3, (1, 2, 64)), ValueType(DType.E8M0, (1, 2, 1)),
    )  # fmt: skip
    assert problems(graph) == [
        "codes: typed f8e4m3[1,2,64], e8m0[1,2,1], inferred f8e4m3[1,2,64], e8m0[1,2,2]",
        "rounded: dequantize cannot take its operands: "
        "scale e8m0[1,2,1] does not match f8e4m3[1,2,64] in blocks of 32",
    ]


def test_operands_that_do_not_fit(graph: Graph) -> None:
    put(graph, "normed", 1, "pos")
    (problem,) = problems(graph)
    assert problem.startswith("normed: rms_norm cannot take its operands: ")


def test_a_missing_operand(graph: Graph) -> None:
    normed = graph.value("normed")
    normed.args = (normed.args[0], None)
    assert problems(graph) == ["normed: rms_norm cannot take its operands: operand weight is missing"]
    normed.args = normed.args[:1]
    assert problems(graph) == ["normed: rms_norm cannot take its operands: 1 operands where it takes 2"]


def test_an_update_without_operands(graph: Graph) -> None:
    graph.value("ring.1").args = ()
    assert problems(graph) == [
        "ring.1: ring_write cannot take its operands: 0 operands where it takes 5",
        "ring.1: ring_write updates a value that is no state",
        "ring.2: ring_write updates a value that is no state",
        "state ring: its next value is ring.2, not its last update ring",
    ]


@pytest.mark.parametrize(
    ("attrs", "what"),
    [
        ({}, "unknown attributes [], missing ['eps']"),
        ({"eps": 1e-6, "x": 1}, "unknown attributes ['x'], missing []"),
        ({"eps": "small"}, "attribute eps cannot be 'small'"),
    ],
)
def test_wrong_attributes(graph: Graph, attrs: dict[str, object], what: str) -> None:
    graph.value("normed").kwargs = attrs
    assert problems(graph) == [f"normed: rms_norm cannot take its operands: op rms_norm: {what}"]


def test_use_before_definition(graph: Graph) -> None:
    graph.value("out").append(graph.value("turned"))
    assert problems(graph) == ["codes uses turned, which is not defined before it"]


def test_results_used_all_at_once(graph: Graph) -> None:
    quantize = graph.value("codes").args[0]
    graph.value("rounded").update_arg(0, quantize)
    assert problems(graph) == ["rounded uses the results of codes all at once"]


def test_no_output() -> None:
    graph = Graph("g")
    graph.leaf("state", "ring", ValueType(DType.BF16, (1, 8, 4)))
    assert problems(graph) == ["the graph has no output"]


def test_two_values_of_one_name(graph: Graph) -> None:
    graph.value("turned").meta["names"] = ("normed",)
    graph.value("codes").args[0].meta["names"] = ("codes", "out")
    assert problems(graph) == ["two values are called normed", "two values are called out"]


def test_op_of_a_later_stage(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_named("hadamard"), "since", "fused")
    expected = ["turned: hadamard may not appear before stage fused"]
    for stage, found in (("traced", expected), ("canonical", expected), ("fused", []), ("planned", [])):
        graph.stage = stage
        assert problems(graph) == found


def finish_with(text: str) -> Graph:
    """The graph with other lines of `next` than its own."""
    return parse(TEXT[: TEXT.index("next ")] + text)


@pytest.mark.parametrize(
    ("following", "found"),
    [
        ("next %ring = %ring.2\n", ["state other has no next value"]),
        ("", ["state other has no next value", "state ring has no next value"]),
        (
            "next %ring = %ring.2\nnext %other = %other\nnext %x = %x\n",
            ["state x does not exist, but has a next value"],
        ),
        (
            "next %ring = %ring.1\nnext %other = %other\n",
            ["state ring: its next value is ring.1, not its last update ring.2"],
        ),
        (
            "next %ring = %other\nnext %other = %ring.2\n",
            ["state ring: its next value is other, not its last update ring.2",
             "state other: its next value is ring.2, not its last update other"],
        ),
    ],
)  # fmt: skip
def test_next_values(following: str, found: list[str]) -> None:
    assert problems(finish_with(following)) == found


def test_an_update_that_misses_the_one_before(graph: Graph) -> None:
    put(graph, "ring.2", 0, "ring")
    assert problems(graph) == ["ring.2: updates ring, but ring.1 is newer"]


def test_an_update_of_no_state() -> None:
    text = TEXT.replace("state %other", "input %other").replace("ring_write(%ring.1,", "ring_write(%other,")
    graph = parse(text.replace("next %other = %other\n", ""))
    assert problems(graph) == [
        "ring.2: ring_write updates a value that is no state",
        "state ring: its next value is ring.2, not its last update ring.1",
    ]


def test_weights_are_checked_where_they_are_known(graph: Graph) -> None:
    stored = {"norm.weight": ValueType(DType.F32, (64,))}
    assert list(find_problems(graph, stored)) == [
        "weight norm.weight is f32[64], the graph says bf16[64]",
        "weight table does not exist",
    ]
    assert list(find_problems(graph)) == []


def test_unused_weights(graph: Graph) -> None:
    assert unused_weights(graph, {**WEIGHTS, "b": WEIGHTS["table"], "a": WEIGHTS["table"]}) == ["a", "b"]
    assert unused_weights(graph, WEIGHTS) == []
