"""Padded rows are part of the type: written, read, packed, and refused where a reader cannot skip them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graphs import Net, differing, facts, op_names, results, small_model, traced, values
from hypothesis import given, settings
from hypothesis import strategies as st

from rewright.ir.errors import CompilerBug
from rewright.ir.graph import Graph, producer_of, result_index, type_of_value
from rewright.ir.layout import pack, padded, stored_bytes, unpack
from rewright.ir.op import op_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.types import ROW_ALIGN, DType, ValueType, parse_type, type_of
from rewright.ir.verify import find_problems
from rewright.passes.manager import PassOptions, run_passes
from rewright.rewriting import facts_of


@st.composite
def types(draw: st.DrawFn) -> ValueType:
    """Any element type and shape that a tensor can have."""
    dtype = draw(st.sampled_from(list(DType)))
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    return ValueType(dtype, (*lead, draw(st.integers(1, 40)) * dtype.per_element))


def filled(type: ValueType) -> torch.Tensor:
    """A tensor of a type whose bytes are all different from those of padding."""
    count = max(type.nbytes, 1)
    data = (torch.arange(count) % 255 + 1).to(torch.uint8)
    return data.view(type.dtype.torch_dtype).view(type.storage_shape)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(type=types(), extra=st.integers(0, 2))
def test_rows_are_packed_with_padding_and_unpacked(type: ValueType, extra: int) -> None:
    pitched = type.with_pitch((-(-type.row_bytes // ROW_ALIGN) + extra) * ROW_ALIGN)
    for layout in (type, padded(type), pitched):
        data = pack(filled(type), layout)
        assert data.dtype == torch.uint8
        assert data.shape == (stored_bytes(layout),)
        rows = data.view(-1, layout.pitch or layout.row_bytes)
        assert len(rows) == type.numel // type.shape[-1]
        assert (rows[:, : type.row_bytes] != 0).all()
        assert (rows[:, type.row_bytes :] == 0).all()
        back = unpack(data, layout)
        assert type_of(back) == type
        assert torch.equal(pack(back, type), pack(filled(type), type))
        assert parse_type(str(layout)) == layout


@settings(max_examples=100, deadline=None, derandomize=True)
@given(type=types())
def test_padding_brings_every_row_to_a_multiple(type: ValueType) -> None:
    layout = padded(type)
    assert padded(layout) == layout
    assert layout.dense == type
    pitch = layout.pitch or layout.row_bytes
    assert pitch % ROW_ALIGN == 0
    assert 0 <= pitch - type.row_bytes < ROW_ALIGN
    assert (layout.pitch is None) == (type.row_bytes % ROW_ALIGN == 0)


@pytest.mark.parametrize(
    ("type", "text"),
    [
        (ValueType(DType.BF16, (1, 1, 4), 128), "bf16[1,1,4|128]"),
        (ValueType(DType.E2M1, (2, 66), 128), "e2m1[2,66|128]"),
        (ValueType(DType.F32, (1, 64)), "f32[1,64]"),
    ],
)
def test_a_pitch_in_text(type: ValueType, text: str) -> None:
    assert str(type) == text
    assert parse_type(text) == type


@pytest.mark.parametrize(
    "text", ["bf16[1,4|]", "bf16[1,4|x]", "bf16[|128|128]", "bf16[1,4|-128]", "bf16[1|128,4]"]
)
def test_text_that_is_no_type(text: str) -> None:
    with pytest.raises(ValueError, match="not a type"):
        parse_type(text)


def test_bytes_that_do_not_fit_a_layout() -> None:
    type = ValueType(DType.BF16, (2, 3), 128)
    good = pack(torch.zeros(2, 3, dtype=torch.bfloat16), type)
    assert good.shape == (256,)
    for wrong in (
        good[:-1],
        torch.cat([good, good]),
        good.view(torch.int8),
        torch.zeros(12, dtype=torch.uint8),
    ):
        with pytest.raises(CompilerBug, match=r"are no bf16\[2,3\|128\]"):
            unpack(wrong, type)
    for tensor in (torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(2, 3)):
        with pytest.raises(CompilerBug, match="cannot be laid out as"):
            pack(tensor, type)


TEXT = """\
graph step {capacity=64, tokens=1}
stage layout
ir 1

input %x : bf16[1,2,32]
input %pos : i32[1]
input %n_valid : i32[1]
input %slot : i32[1]
state %ring : bf16[1,8,32]

.:
  @w : bf16[32]
  %normed : bf16[1,2,32|128] = rms_norm(%x, @w) {eps=1e-06}
  %codes, %codes.scale : f8e4m3[1,2,32|128], e8m0[1,2,1|256] = quantize(%normed) {block=32, fmt="e4m3"}
  %rows : bf16[1,2,32] = dequantize(%codes, %codes.scale) {block=32, out="bf16"}
  %split : bf16[1,2,2,16] = reshape(%rows) {tail=[2, 16]}
  %ring.next : bf16[1,8,32] = ring_write(%ring, %rows, %pos, %n_valid, %slot)

return split = %split
next %ring = %ring.next
"""


def test_a_graph_with_padded_rows_is_read_back_and_sound() -> None:
    graph = parse(TEXT)
    assert print_graph(graph) == TEXT
    assert list(find_problems(graph)) == []


def test_a_copy_keeps_padded_rows() -> None:
    graph = parse(TEXT)
    assert graph.copy() == graph


PROBLEMS = [
    ("stage layout", "stage fused", "normed is bf16[1,2,32|128]: rows are padded from stage layout on"),
    ("@w : bf16[32]", "@w : bf16[32|128]", "weight w is bf16[32|128]: only activations have padded rows"),
    (
        "%x : bf16[1,2,32]",
        "%x : bf16[1,2,32|128]",
        "input x is bf16[1,2,32|128]: only activations have padded rows",
    ),
    (
        "%ring : bf16[1,8,32]",
        "%ring : bf16[1,8,32|128]",
        "state ring is bf16[1,8,32|128]: only activations have padded rows",
    ),
    (
        "%normed : bf16[1,2,32|128]",
        "%normed : bf16[1,2,32|96]",
        "normed is bf16[1,2,32|96]: the pitch is no multiple of 128 that holds a row",
    ),
    ("%rows : bf16[1,2,32]", "%rows : bf16[1,2,32|128]", "split: reshape needs rows without padded rows"),
]


@pytest.mark.parametrize(("old", "new", "problem"), PROBLEMS)
def test_a_layout_that_cannot_be(old: str, new: str, problem: str) -> None:
    assert problem in list(find_problems(parse(TEXT.replace(old, new))))


def test_a_pitch_that_holds_no_row() -> None:
    text = TEXT.replace("%x : bf16[1,2,32]", "%x : bf16[1,2,96]").replace("@w : bf16[32]", "@w : bf16[96]")
    text = text[: text.index("  %codes")].replace("bf16[1,2,32|128]", "bf16[1,2,96|128]")
    graph = parse(text + "\nreturn normed = %normed\nnext %ring = %ring\n")
    assert list(find_problems(graph)) == [
        "normed is bf16[1,2,96|128]: the pitch is no multiple of 128 that holds a row"
    ]


def dense_values(graph: Graph) -> set[str]:
    """Values whose rows must stay back to back: results, states, and what some reader takes apart."""
    fixed = {(producer_of(v), result_index(v)) for v in graph.results.values()}
    for node in graph.ops:
        op = op_of(node.target)
        fixed |= {(node, i) for i in op.updated(dict(node.kwargs))}
        for name, value in zip(op.operands, node.args, strict=True):
            if value is not None and name in op.dense:
                fixed.add((producer_of(value), result_index(value)))
    return {node.meta["names"][i] for node, i in fixed}


@pytest.mark.parametrize(("numerics", "kind"), [("faithful", "decode"), ("fp32", "chunk"), ("bf16", "score")])
def test_rows_of_a_model_are_padded_where_they_may_be(tmp_path: Path, numerics: str, kind: str) -> None:
    source = small_model(tmp_path, numerics)
    before = traced(source, kind)
    done = run_passes(before, facts_of(source))
    graph, derived = done.graph, {name: d.type for name, d in done.derived.items()}
    assert graph.stage == "layout"
    assert list(find_problems(graph, source.weight_types() | derived)) == []
    assert parse(print_graph(graph)) == graph
    dense = dense_values(graph)
    padded_rows = 0
    for node in graph.ops:
        for name, type in zip(node.meta["names"], node.meta["types"], strict=True):
            if name in dense or len(type.shape) < 2:
                assert type.pitch is None, name
            else:
                assert type == padded(type.dense), name
                padded_rows += type.pitch is not None
    assert padded_rows > 0
    assert [str(type_of_value(v)) for v in graph.results.values()] == [
        str(type_of_value(v)) for v in before.results.values()
    ]


def test_padding_changes_no_value(tmp_path: Path) -> None:
    net = Net("layout", tokens=2)
    x, step = net.input("x", "bf16[1,2,32]"), net.step()
    ring = net.state("ring", "bf16[1,8,32]")
    normed = net.rms_norm("normed", x, net.weight("w", "bf16[32]"), eps=1e-6)
    split = net.hadamard("turned", net.reshape("split", normed, tail=[2, 16]))
    net.ring_write("ring.next", ring, normed, *step)
    graph = net.graph(y=net.hadamard("y", split), n=net.hadamard("n", normed))
    done = run_passes(graph, facts(), PassOptions.of(only="unify_layout")).graph
    assert op_names(done) == op_names(graph)
    types = {
        n: str(t) for node in done.ops for n, t in zip(node.meta["names"], node.meta["types"], strict=True)
    }
    assert types == {
        "normed": "bf16[1,2,32]",  # a reshape takes its rows apart
        "split": "bf16[1,2,2,16|128]",
        "turned": "bf16[1,2,2,16|128]",
        "ring.next": "bf16[1,8,32]",
        "y": "bf16[1,2,2,16]",
        "n": "bf16[1,2,32]",
    }
    known = values(graph)
    assert differing(results(done, known), results(graph, known)) == []


def test_the_pass_says_what_it_left_unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its promise is checked: without the rule that pads, the verification after the pass fails."""
    from rewright.passes import manager, unify_layout
    from rewright.passes.base import Pass

    rules = unify_layout.PASS.rules[:-1]
    lame = Pass("unify_layout", "layout", "pads nothing", rules, ensures=unify_layout.PASS.ensures)
    monkeypatch.setattr(manager, "PIPELINE", (lame,))
    net = Net("layout")
    x = net.input("x", "bf16[1,2,32]")
    graph = net.graph(y=net.hadamard("y", net.hadamard("h", x)))
    with pytest.raises(manager.PassFailed, match="rows of h are not at multiples of 128 bytes"):
        run_passes(graph, facts(), PassOptions.of(only="unify_layout"))
