"""The released model's precision, operation by operation, on the traced graph of V4-Flash.

The rows are those of the precision map of the model's specification: format of the weight as
stored, of the activation that enters the product, and of the result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.fx import Node

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph, kind_of, name_of, operands_of, producer_of, type_of_value
from rewright.ir.op import op_of
from rewright.ir.types import DType
from rewright.ir.variant import Variant

BF16, F32, FP8, FP4, E8M0 = DType.BF16, DType.F32, DType.F8E4M3, DType.E2M1, DType.E8M0

# Every op that multiplies values of two operands over an axis, or reads rows of a weight.
PRODUCTS = {"embed", "expert_linear", "grouped_linear", "hc_mix", "index_score", "linear", "sparse_attention"}
OTHERS = {
    "add_position_bias", "compress", "dequantize", "entry_write", "expert_sum", "hadamard", "hc_collapse",
    "hc_combine", "hc_expand", "hc_head_split", "hc_split", "head_rms_norm", "index_topk", "quantize",
    "reshape", "ring_write", "rms_norm", "rope", "route", "route_hash", "swiglu", "take_last",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row of the map.

    Attributes:
        weight: pattern of the weight's name.
        op: the op that multiplies with it.
        stored: dtypes of the weight and of its scale.
        entering: dtypes of the activation and of its scale; a float enters as it is.
        result: dtype of the result.
        count: matching nodes of the 43 layers.
    """

    weight: str
    op: str
    stored: tuple[DType, DType | None]
    entering: tuple[DType | None, DType | None]
    result: DType
    count: int


L = r"layers\.\d+\."
# 43 layers: 2 with window only, 21 of ratio 4, 20 of ratio 128.
ROWS = [
    Row(r"embed\.weight", "embed", (BF16, None), (None, None), BF16, 1),
    Row(rf"{L}hc_(attn|ffn)_fn", "hc_mix", (F32, None), (BF16, None), F32, 86),
    Row(r"hc_head_fn", "hc_mix", (F32, None), (BF16, None), F32, 1),
    Row(rf"{L}attn\.(wq_a|wkv|wq_b|wo_b)\.weight", "linear", (FP8, E8M0), (FP8, E8M0), BF16, 4 * 43),
    Row(rf"{L}attn\.indexer\.wq_b\.weight", "linear", (FP8, E8M0), (FP8, E8M0), BF16, 21),
    Row(rf"{L}ffn\.shared_experts\.w[123]\.weight", "linear", (FP8, E8M0), (FP8, E8M0), BF16, 3 * 43),
    Row(rf"{L}ffn\.experts\.w[123]\.weight", "expert_linear", (FP4, E8M0), (FP8, E8M0), BF16, 3 * 43),
    Row(rf"{L}attn\.wo_a\.weight", "grouped_linear", (FP8, E8M0), (BF16, None), BF16, 43),
    Row(rf"{L}attn\.compressor\.(wkv|wgate)\.weight", "linear", (BF16, None), (BF16, None), F32, 2 * 41),
    Row(rf"{L}attn\.indexer\.compressor\.(wkv|wgate)\.weight", "linear", (BF16, None), (BF16, None), F32, 42),
    Row(rf"{L}attn\.indexer\.weights_proj\.weight", "linear", (BF16, None), (BF16, None), BF16, 21),
    Row(rf"{L}ffn\.gate\.weight", "linear", (BF16, None), (BF16, None), F32, 43),
    Row(r"head\.weight", "linear", (BF16, None), (BF16, None), F32, 1),
]  # fmt: skip

# Tensors between operations, by name; with the number of them.
BETWEEN = [
    (r"(layers\.\d+\.hc_(attn|ffn)\.)?streams", BF16, 87),
    (r"(layers\.\d+\.hc_(attn|ffn)|hc_head)\.u", BF16, 87),
    (r"layers\.\d+\.(attn|ffn)_norm|norm", BF16, 87),
    (r"layers\.\d+\.attn\.wo_b|layers\.\d+\.ffn\.y", BF16, 86),
    (r"layers\.\d+\.attn\.(q_norm|q|kv|kv\.rounded|o|z)", BF16, 6 * 43),
    (r"layers\.\d+\.attn\.indexer\.q\.rounded", BF16, 21),
    (r"layers\.\d+\.ffn\.(shared_)?experts\.hidden", BF16, 86),
    (r"(layers\.\d+\.hc_(attn|ffn)|hc_head)\.(mix|pre|post|comb)", F32, 86 * 4 + 2),
    (
        r"layers\.\d+\.attn\.(indexer\.)?compressor\.(wkv|wgate|gate|kv_ring\.next|gate_ring\.next)",
        F32,
        62 * 5,
    ),
    (r"layers\.\d+\.ffn\.gate\.(logits|weights)", F32, 86),
    (r"head|logits", F32, 2),
]


@pytest.fixture(scope="module")
def flash(repo_root: Path) -> dict[Numerics, Graph]:
    """Decode graphs of V4-Flash with index scoring."""
    config = repo_root / "examples" / "configs" / "v4-flash.json"
    return {n: ModelSource.open(config, n).graph(Variant(1, 1, 4096)) for n in Numerics}


@pytest.fixture(scope="module")
def faithful(flash: dict[Numerics, Graph]) -> Graph:
    return flash[Numerics.FAITHFUL]


def op_name(node: Node) -> str:
    return op_of(node.target).name


def operand(node: Node, name: str) -> Node | None:
    op = op_of(node.target)
    return operands_of(node)[op.operands.index(name)] if name in op.operands else None


def given(node: Node, name: str) -> Node:
    """An operand that must be there."""
    value = operand(node, name)
    assert value is not None, (name_of(node), name)
    return value


def dtype(value: Node | None) -> DType | None:
    return None if value is None else type_of_value(value).dtype


def attr(node: Node, name: str) -> object:
    return op_of(node.target).bind_attrs(dict(node.kwargs))[name]


def values(graph: Graph) -> Iterator[tuple[str, DType]]:
    """Name and dtype of every op result."""
    for node in graph.ops:
        for name, type in zip(node.meta["names"], node.meta["types"], strict=True):
            yield name, type.dtype


def weight_of(node: Node) -> str:
    weight = operand(node, "fn" if op_name(node) == "hc_mix" else "weight")
    assert weight is not None
    assert kind_of(weight) == "weight"
    return name_of(weight)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\\.|[\\d+]", "", row.weight))
def test_products_with_weights(faithful: Graph, row: Row) -> None:
    found = [n for n in faithful.ops if op_name(n) == row.op and re.fullmatch(row.weight, weight_of(n))]
    assert len(found) == row.count
    for node in found:
        name = weight_of(node)
        weight = type_of_value(faithful.value(name))
        assert (weight.dtype, dtype(operand(node, "scale"))) == row.stored, name
        assert node.meta["types"][0].dtype is row.result, name
        if row.op == "embed":
            continue
        x = given(node, "streams" if row.op == "hc_mix" else "x")
        assert (dtype(x), dtype(operand(node, "x_scale"))) == row.entering, name
        check_scale_blocks(node, row)


def check_scale_blocks(node: Node, row: Row) -> None:
    """Block sizes of the weight's and the activation's scales, and that the activation is x itself."""
    weight, scale = operand(node, "weight"), operand(node, "scale")
    if weight is not None and scale is not None:
        assert name_of(scale) == name_of(weight).removesuffix(".weight") + ".scale"
        *lead, rows, cols = type_of_value(weight).shape
        blocks = (rows, cols // 32) if row.stored[0] is FP4 else (rows // 128, cols // 128)
        assert type_of_value(scale).shape == (*lead, *blocks)
    if row.entering[0] is FP8:
        codes, scales = given(node, "x"), given(node, "x_scale")
        quantize = producer_of(codes)
        assert op_name(quantize) == "quantize"
        assert (producer_of(scales), codes.args[1], scales.args[1]) == (quantize, 0, 1)
        assert (attr(quantize, "fmt"), attr(quantize, "block"), attr(quantize, "dims")) == ("e4m3", 128, None)
        assert dtype(given(quantize, "x")) is BF16
        assert len(quantize.users) == 2, "as released, every linear quantises its own input"


def test_no_other_product(faithful: Graph) -> None:
    found = Counter(op_name(n) for n in faithful.ops)
    assert found.keys() <= PRODUCTS | OTHERS
    for op in PRODUCTS - {"index_score", "sparse_attention"}:
        assert found[op] == sum(row.count for row in ROWS if row.op == op), op
    assert (found["index_score"], found["sparse_attention"]) == (21, 43)


def rounding_of(value: Node) -> tuple[object, ...]:
    """Format, block and dims of the rounding that made a value, and that its source is bf16."""
    back = producer_of(value)
    assert op_name(back) == "dequantize", name_of(value)
    there = producer_of(given(back, "codes"))
    assert producer_of(given(back, "scale")) is there
    assert attr(back, "block") == attr(there, "block")
    assert attr(back, "dims") == attr(there, "dims")
    base = operand(back, "base")
    assert base is (given(there, "x") if attr(there, "dims") else None)
    assert dtype(given(there, "x")) is BF16
    return attr(there, "fmt"), attr(there, "block"), attr(there, "dims")


def entries_of(cache: Node) -> Node:
    """What a step appends to a cache that it reads."""
    write = producer_of(cache)
    assert op_name(write) == "entry_write"
    assert dtype(given(write, "cache")) is BF16
    return given(write, "entries")


def test_index_products(faithful: Graph) -> None:
    """q and keys are bf16 on the FP4 grid, behind the Hadamard rotation; scores are bf16."""
    for node in faithful.ops:
        if op_name(node) != "index_score":
            continue
        for value in (given(node, "q"), entries_of(given(node, "keys"))):
            assert dtype(value) is BF16
            assert rounding_of(value) == ("e2m1", 32, None)
            source = given(producer_of(given(producer_of(value), "codes")), "x")
            assert op_name(producer_of(source)) == "hadamard"
        assert dtype(given(node, "weights")) is BF16
        assert node.meta["types"][0].dtype is BF16


def test_attention_products(faithful: Graph) -> None:
    """Keys and values are the same bf16 vectors, dims 0 .. 447 on the FP8 grid; the queries are bf16."""
    for node in faithful.ops:
        if op_name(node) != "sparse_attention":
            continue
        assert dtype(given(node, "q")) is BF16
        assert op_name(producer_of(given(node, "q"))) == "rope"
        window, compressed = given(node, "window"), operand(node, "compressed")
        assert (kind_of(window), dtype(window)) == ("state", BF16)
        vectors = [given(node, "kv")] + ([entries_of(compressed)] if compressed is not None else [])
        assert len(vectors) == (1 if name_of(node).split(".")[1] in ("0", "1") else 2)
        for value in vectors:
            assert dtype(value) is BF16
            assert rounding_of(value) == ("e4m3", 64, [0, 448])
            assert op_name(producer_of(given(producer_of(value), "base"))) == "rope"
        (ring,) = [u for u in window.users if op_name(u) == "ring_write"]
        assert given(ring, "rows") is given(node, "kv"), "the ring holds what attention read"
        assert dtype(given(node, "sink")) is F32
        assert node.meta["types"][0].dtype is BF16


def test_every_rounding_belongs_to_the_map(faithful: Graph) -> None:
    """No quantise but those of the rows above: 451 activations, 43 + 41 key vectors, 42 index vectors."""
    formats = Counter((attr(n, "fmt"), attr(n, "block")) for n in faithful.ops if op_name(n) == "quantize")
    activations = sum(row.count for row in ROWS if row.entering[0] is FP8)
    assert formats == {("e4m3", 128): activations, ("e4m3", 64): 43 + 41, ("e2m1", 32): 42}
    assert sum(op_name(n) == "dequantize" for n in faithful.ops) == 43 + 41 + 42


@pytest.mark.parametrize(("pattern", "wanted", "count"), BETWEEN)
def test_tensors_between_operations(faithful: Graph, pattern: str, wanted: DType, count: int) -> None:
    found = {name: d for name, d in values(faithful) if re.fullmatch(pattern, name)}
    assert len(found) == count
    assert set(found.values()) == {wanted}


def test_fp32_numerics_round_nothing(flash: dict[Numerics, Graph]) -> None:
    graph = flash[Numerics.FP32]
    assert not {"quantize", "dequantize"} & {op_name(n) for n in graph.ops}
    integers = {DType.I32, DType.I64}
    leaves = {name_of(n): dtype(n) for n in graph.of_kind("weight", "constant", "state")}
    assert {n for n, d in leaves.items() if d in integers} == {
        f"layers.{i}.ffn.gate.tid2eid" for i in range(3)
    }
    assert set(leaves.values()) - integers == {F32}
    assert not [n for n in leaves if n.endswith(".scale")]
    results = dict(values(graph))
    assert set(results.values()) - integers == {F32}
    indices = {n.rpartition(".")[2] for n, d in results.items() if d in integers}
    assert indices == {"chosen", "count", "experts"}
    # The rotation stays: it is orthonormal on both sides of the index product.
    assert sum(op_name(n) == "hadamard" for n in graph.ops) == 42
