"""The interpreter: what it computes, which tensors it writes, and what it keeps alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rewright.ir import ops
from rewright.ir.errors import CompilerBug
from rewright.ir.graph import Graph, op_named
from rewright.ir.interpret import Interpreter, empty_state
from rewright.ir.parser import parse
from rewright.ir.types import DType, ValueType

HEADER = """\
graph step
stage traced
ir 1

input %tokens : i32[1,4]
input %pos : i32[1]
input %n_valid : i32[1]
input %slot : i32[1]
state %ring : f32[2,8,32]

.:
  @table : f32[10,32]
  %rows : f32[1,4,32] = embed(%tokens, @table) {out="f32"}
"""
WRITE = "ring_write(%ring, %rows, %pos, %n_valid, %slot)"
OLD = "  %old : f32[2,8,4,8] = reshape(%ring) {tail=[4, 8]}\n"
NEW = f"  %new : f32[2,8,32] = {WRITE}\n"


def build(body: str) -> Interpreter:
    table = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    return Interpreter(parse(HEADER + body), {"table": table})


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    return {"tokens": i32(1, 2, 3, 4)[None], "pos": i32(3), "n_valid": i32(4), "slot": i32(1)}


@pytest.fixture
def state() -> dict[str, Tensor]:
    return {"ring": torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))}


def test_a_step_is_what_its_ops_give(inputs: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    quantize = '  %q, %q.scale : f8e4m3[1,4,32], e8m0[1,4,1] = quantize(%rows) {block=32, fmt="e4m3"}\n'
    back = '  %back : f32[1,4,32] = dequantize(%q, %q.scale, _) {block=32, out="f32"}\n'
    outputs = "return back = %back\nreturn scale = %q.scale\nnext %ring = %new\n"
    interpreter = build(f"{NEW}{quantize}{back}\n{outputs}")
    table = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    rows = ops.embed(inputs["tokens"], table, out="f32")
    q, scale = ops.quantize(rows, fmt="e4m3", block=32)
    want = ops.ring_write(state["ring"], rows, inputs["pos"], inputs["n_valid"], inputs["slot"])
    results = interpreter.run(inputs, state)
    assert list(results) == ["back", "scale"]
    assert torch.equal(results["back"], ops.dequantize(q, scale, None, block=32, out="f32"))
    assert torch.equal(results["scale"].view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(state["ring"], want)


@pytest.mark.parametrize(
    ("body", "in_place"),
    [
        (f"{NEW}\nreturn rows = %rows\n", True),
        (f"{OLD}{NEW}\nreturn old = %old\n", True),  # the reader stands before the write
        (f"{NEW}{OLD}\nreturn old = %old\n", False),  # and here behind it
        (f"{NEW}\nreturn old = %ring\n", False),  # the caller is a reader too
    ],
)
def test_state_is_written_in_place_where_its_old_value_is_dead(
    inputs: dict[str, Tensor], state: dict[str, Tensor], body: str, in_place: bool
) -> None:
    given, before = state["ring"], state["ring"].clone()
    results = build(f"{body}next %ring = %new\n").run(inputs, state)
    assert (state["ring"] is given) == in_place
    assert torch.equal(given, before) != in_place
    rows = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))[1:5]
    want = before.clone()
    want[1, 3:7] = rows
    assert torch.equal(state["ring"], want)
    if "old" in results:
        assert torch.equal(results["old"].flatten(), before.flatten())


def test_two_updates_of_one_state(inputs: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    again = "  %newer : f32[2,8,32] = ring_write(%new, %rows, %slot, %n_valid, %slot)\n"
    body = f"{NEW}{again}\nreturn rows = %rows\nnext %ring = %newer\n"
    given = state["ring"]
    results = build(body).run(inputs, state)
    assert state["ring"] is given
    assert torch.equal(given[1, 1:5], results["rows"][0])
    assert torch.equal(given[1, 5:7], results["rows"][0, 2:])


def test_state_that_no_op_changes_stays_the_same_tensor(
    inputs: dict[str, Tensor], state: dict[str, Tensor]
) -> None:
    given, before = state["ring"], state["ring"].clone()
    build(f"{OLD}\nreturn old = %old\nnext %ring = %ring\n").run(inputs, state)
    assert state["ring"] is given
    assert torch.equal(given, before)


def test_overrides_stand_for_computed_values(inputs: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    rows = torch.ones(1, 4, 32)
    seen: dict[str, Tensor] = {}
    interpreter = build(f"{NEW}\nreturn rows = %rows\nnext %ring = %new\n")
    results = interpreter.run(inputs, state, overrides={"rows": rows}, observe=seen.__setitem__)
    assert results["rows"] is rows
    assert seen["rows"] is rows
    assert (state["ring"][1, 3:7] == 1).all()


def test_observe_sees_every_result_in_order(inputs: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Results that nobody reads included."""
    quantize = '  %q, %q.scale : f8e4m3[1,4,32], e8m0[1,4,1] = quantize(%rows) {block=32, fmt="e4m3"}\n'
    seen: list[str] = []
    interpreter = build(f"{quantize}{NEW}\nreturn scale = %q.scale\nnext %ring = %new\n")
    interpreter.run(inputs, state, observe=lambda name, _: seen.append(name))
    assert seen == ["rows", "q", "q.scale", "new"]


def test_a_shorter_chunk_costs_and_gives_its_own_rows(
    inputs: dict[str, Tensor], state: dict[str, Tensor]
) -> None:
    inputs |= {"tokens": i32(5, 6)[None], "n_valid": i32(2)}
    results = build(f"{NEW}\nreturn rows = %rows\nnext %ring = %new\n").run(inputs, state)
    assert results["rows"].shape == (1, 2, 32)
    assert torch.equal(state["ring"][1, 3:5], results["rows"][0])


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "tokens",
            torch.zeros(1, 5, dtype=torch.int32),
            r"input tokens is i32\[1,5\], the graph says i32\[1,4\]",
        ),
        ("tokens", torch.zeros(2, 3, dtype=torch.int32), r"input tokens is i32\[2,3\]"),
        ("tokens", torch.zeros(1, 3, dtype=torch.int64), r"input tokens is i64\[1,3\]"),
        ("pos", torch.zeros(1), r"input pos is f32\[1\], the graph says i32\[1\]"),
        ("pos", torch.zeros(0, dtype=torch.int32), r"input pos is i32\[0\]"),
        ("ring", torch.zeros(2, 7, 32), r"state ring is f32\[2,7,32\], the graph says f32\[2,8,32\]"),
    ],
)
def test_inputs_of_another_type_are_refused(
    inputs: dict[str, Tensor], state: dict[str, Tensor], name: str, tensor: Tensor, message: str
) -> None:
    interpreter = build(f"{NEW}\nreturn rows = %rows\nnext %ring = %new\n")
    (state if name in state else inputs)[name] = tensor
    before = state["ring"].clone()
    with pytest.raises(CompilerBug, match=message):
        interpreter.run(inputs, state)
    assert torch.equal(state["ring"], before)


def test_weights_of_another_type_are_refused() -> None:
    graph = parse(f"{HEADER}\nreturn rows = %rows\nnext %ring = %ring\n")
    with pytest.raises(CompilerBug, match=r"weight table is bf16\[10,32\], the graph says f32\[10,32\]"):
        Interpreter(graph, {"table": torch.zeros(10, 32, dtype=torch.bfloat16)})


def chain(length: int, use_all: bool) -> Interpreter:
    """x -> codes, scale -> x -> .., or the codes and scales are read by nobody unless `use_all`."""
    graph = Graph("chain")
    x = graph.leaf("input", "x", ValueType(DType.F32, (1, 1, 64)))
    for i in range(length):
        attrs = {"fmt": "e4m3", "block": 64}
        node = graph.call(op_named("quantize"), [x], attrs, names=(f"q.{i}", f"q.{i}.scale"), module="")
        if use_all:
            operands = [graph.result(node, 0), graph.result(node, 1), None]
            attrs = {"block": 64, "out": "f32"}
            x = graph.call(op_named("dequantize"), operands, attrs, names=(f"x.{i}",), module="")
        else:
            graph.result(node, i % 2)  # picked, and read by nobody either
            x = graph.call(op_named("hadamard"), [x], {}, names=(f"x.{i}",), module="")
    graph.finish({"x": x}, {})
    return Interpreter(graph, {})


def alive_at_most(run: Callable[[Callable[[str, Tensor], None]], object]) -> int:
    """Most results of ops alive at once during a run."""
    seen: list[weakref.ref[Tensor]] = []
    most = 0

    def observe(_: str, value: Tensor) -> None:
        nonlocal most
        seen.append(weakref.ref(value))
        most = max(most, sum(r() is not None for r in seen))

    run(observe)
    return most


@pytest.mark.parametrize("use_all", [True, False])
def test_dead_values_are_dropped(use_all: bool) -> None:
    """However long the graph: the operands and results of two neighbouring steps."""
    inputs = {"x": torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))}
    short, long = (
        alive_at_most(lambda observe, n=n: chain(n, use_all).run(inputs, {}, observe=observe))
        for n in (3, 40)
    )
    assert short == long
    assert long <= 4


def test_empty_state() -> None:
    graph = Graph("g")
    graph.leaf("state", "cache", ValueType(DType.BF16, (2, 8, 4)))
    graph.leaf("state", "packed", ValueType(DType.E2M1, (2, 8, 64)))
    state = empty_state(graph)
    assert {n: (t.shape, t.dtype) for n, t in state.items()} == {
        "cache": ((2, 8, 4), torch.bfloat16), "packed": ((2, 8, 32), torch.uint8),
    }  # fmt: skip
    assert not any(t.any() for t in state.values())
