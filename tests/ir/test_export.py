"""JSON, dot and ONNX say what the graph says, whole or one module of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.ir.diff import diff_graphs
from rewright.ir.errors import CompilerBug, UsageError
from rewright.ir.export import graph_to_dot, graph_to_json, graph_to_onnx, json_text, onnx_graph
from rewright.ir.graph import Graph, kind_of, name_of, op_named, operands_of, producer_of
from rewright.ir.op import op_of, registry
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.subgraph import module_paths
from rewright.ir.traffic import traffic
from rewright.ir.types import DType, ValueType, parse_type

COMPRESSOR = "layers.2.attn.compressor"
"""A module with state, weights and constants; attention, outside, reads the entries it writes."""


@pytest.fixture(scope="module")
def tiny(tiny_v4: Path) -> list[Graph]:
    """Decode, chunk and score graphs of tiny-v4, with and without index scoring, in both numerics."""
    sources = [ModelSource.open(tiny_v4, numerics, max_context=256) for numerics in Numerics]
    return [source.graph(v) for source in sources for v in source.variants()]


@pytest.fixture(scope="module")
def decode(tiny: list[Graph]) -> Graph:
    """Faithful decode with index scoring."""
    return next(g for g in tiny if g.name == "decode-b1-c256")


@pytest.fixture(scope="module")
def flash(repo_root: Path) -> Graph:
    """Decode of the 43-layer V4-Flash configuration, without its weights."""
    source = ModelSource.open(repo_root / "examples/configs/v4-flash.json", Numerics.FAITHFUL)
    return source.graph(source.variants()[-3])


# -- modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("export", [graph_to_json, graph_to_dot, graph_to_onnx])
def test_unknown_module(decode: Graph, export: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"no module 'layers\.2\.atn'") as caught:
        export(decode, module="layers.2.atn")
    assert caught.value.fix is not None
    assert "layers.2.attn" in caught.value.fix
    with pytest.raises(UsageError) as caught:
        export(decode, module="zzz")
    assert caught.value.fix == "its modules are layers, rope"


def test_every_module_exports(decode: Graph) -> None:
    paths = module_paths(decode)
    assert {"layers", "layers.0", "layers.2.attn.indexer.compressor", "rope"} <= set(paths)
    for path in paths:
        check_onnx(graph_to_onnx(decode, module=path))
        document = graph_to_json(decode, module=path)
        known = {v["name"] for part in ("inputs", "states", "weights") for v in document[part]}
        for node in document["nodes"]:
            assert {v for v in node["operands"] if v is not None} <= known  # closed, and in order
            known |= set(node["names"])
        assert {
            *document["results"].values(),
            *document["next_state"].values(),
            *document["leaving"],
        } <= known


def test_border_of_a_module(decode: Graph) -> None:
    document = graph_to_json(decode, module=COMPRESSOR)
    assert [v["name"] for v in document["inputs"]] == ["pos", "n_valid", "slot", "layers.2.attn_norm"]
    rings = ["kv_ring", "gate_ring", "cache"]
    assert [v["name"] for v in document["states"]] == [f"{COMPRESSOR}.{r}" for r in rings]
    assert [w["name"] for w in document["weights"] if w["kind"] == "constant"] == [
        "rope.compressed.cos",
        "rope.compressed.sin",
    ]
    assert document["next_state"] == {f"{COMPRESSOR}.{r}": f"{COMPRESSOR}.{r}.next" for r in rings}
    assert document["leaving"] == [f"{COMPRESSOR}.cache.next"]
    assert document["results"] == {}
    assert {n["module"] for n in document["nodes"]} == {COMPRESSOR}


# -- JSON -------------------------------------------------------------------------------------


def rebuilt(document: dict[str, Any]) -> Graph:
    """The graph that a JSON document describes."""
    graph = Graph(document["name"], stage=document["stage"], attrs=document["attrs"])
    for kind in ("input", "state"):
        for leaf in document[f"{kind}s"]:
            graph.leaf(kind, leaf["name"], parse_type(leaf["type"]))
    for leaf in document["weights"]:
        graph.leaf(leaf["kind"], leaf["name"], parse_type(leaf["type"]), leaf["module"])
    for node in document["nodes"]:
        graph.call(
            op_named(node["op"]),
            [None if v is None else graph.value(v) for v in node["operands"]],
            node["attrs"],
            names=node["names"],
            module=node["module"],
            rule=node["rule"],
        )
    results = {name: graph.value(v) for name, v in document["results"].items()}
    graph.finish(results, {state: graph.value(v) for state, v in document["next_state"].items()})
    return graph


def test_json_holds_the_whole_graph(tiny: list[Graph]) -> None:
    for graph in tiny:
        document = json.loads(json_text(graph_to_json(graph)))
        diff = diff_graphs(graph, rebuilt(document))
        assert diff.empty
        assert diff.header == ()


def test_json_is_the_same_for_equal_graphs(decode: Graph) -> None:
    text = json_text(graph_to_json(decode))
    assert json_text(graph_to_json(parse(print_graph(decode)))) == text
    assert json.dumps(json.loads(text), sort_keys=True, indent=1, ensure_ascii=False) + "\n" == text


@pytest.mark.parametrize("context", [None, 64])
def test_json_costs_add_up_to_the_traffic(decode: Graph, context: int | None) -> None:
    document, moved = graph_to_json(decode, context=context), traffic(decode, context)
    costs = [node["cost"] for node in document["nodes"]]
    assert document["context"] == (context or 256)
    assert sum(sum(c["reads"].values()) for c in costs) == sum(moved.reads.values())
    assert sum(c["writes"] for c in costs) == moved.written
    assert sum(c["flops"] for c in costs) == moved.flops
    weights = {w["name"]: w["bytes"] for w in document["weights"] if w["kind"] == "weight"}
    assert weights == moved.resident


# -- dot --------------------------------------------------------------------------------------

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_][\w]*|\d+|->|[{}\[\]=,;])')


class Dot:
    """The statements of a dot text; a `ValueError` where it breaks the grammar."""

    def __init__(self, text: str):
        self.tokens, at = [], 0
        while at < len(text.rstrip()):
            if (token := _TOKEN.match(text, at)) is None:
                raise ValueError(f"no token at {text[at : at + 20]!r}")
            self.tokens.append(token[1])
            at = token.end()
        self.tokens.reverse()
        self.nodes: dict[str, dict[str, str]] = {}
        self.edges: list[tuple[str, str, dict[str, str]]] = []
        self.clusters: dict[str, list[str]] = {}
        self.take("digraph")
        self.identity()
        self.block("")
        if self.tokens:
            raise ValueError(f"text behind the graph: {self.tokens[-1]}")

    def take(self, *allowed: str) -> str:
        token = self.tokens.pop() if self.tokens else ""
        if allowed and token not in allowed:
            raise ValueError(f"{token!r} instead of {allowed}")
        return token

    def identity(self) -> str:
        token = self.take()
        if token.startswith('"'):
            return token[1:-1].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
        if not token.isalnum():
            raise ValueError(f"{token!r} is no identity")
        return token

    def attributes(self) -> dict[str, str]:
        found = {}
        self.take("[")
        while self.tokens[-1] != "]":
            key = self.identity()
            self.take("=")
            found[key] = self.identity()
            if self.tokens[-1] == ",":
                self.take()
        self.take("]")
        return found

    def block(self, cluster: str) -> None:
        self.take("{")
        while self.tokens[-1] != "}":
            if self.tokens[-1] == "subgraph":
                self.take()
                inner = self.identity()
                if inner in self.clusters:
                    raise ValueError(f"cluster {inner} twice")
                self.clusters[inner] = []
                self.block(inner)
                continue
            name = self.identity()
            if self.tokens[-1] == "=":
                self.take()
                self.identity()
            elif self.tokens[-1] == "->":
                self.take()
                self.edges.append((name, self.identity(), self.attributes()))
            elif name in ("node", "edge"):
                self.attributes()
            elif name in self.nodes:
                raise ValueError(f"{name} twice")
            else:
                self.nodes[name] = self.attributes()
                self.clusters.setdefault(cluster, []).append(name)
            self.take(";")
        self.take("}")


def test_dot_draws_the_whole_graph(tiny: list[Graph]) -> None:
    for graph in tiny:
        dot = Dot(graph_to_dot(graph, weights=True))
        expected = Counter(
            (producer_of(v).meta["names"][0], node.meta["names"][0])
            for node in graph.ops
            for v in operands_of(node)
            if v is not None
        )
        expected.update((name_of(v), f"return {name}") for name, v in graph.results.items())
        expected.update((name_of(v), state) for state, v in graph.next_state.items())
        assert Counter((a, b) for a, b, _ in dot.edges) == expected
        leaves = {name_of(n) for n in graph.of_kind("input", "state", "weight", "constant")}
        ops = {n.meta["names"][0] for n in graph.ops}
        assert dot.nodes.keys() == leaves | ops | {"return logits"}
        for node in graph.ops:
            module = node.meta["module"]
            assert node.meta["names"][0] in dot.clusters[f"cluster_{module}" if module else ""]


def test_dot_labels(decode: Graph) -> None:
    dot = Dot(graph_to_dot(decode))
    assert not [n for n in decode.of_kind("weight", "constant") if name_of(n) in dot.nodes]
    quantize = "layers.0.attn.wq_a.x"
    assert dot.nodes[quantize]["label"] == 'quantize\nwq_a.x, wq_a.x.scale\nblock=128, fmt="e4m3"'
    labels = [attrs["label"] for a, b, attrs in dot.edges if (a, b) == (quantize, "layers.0.attn.wq_a")]
    assert labels == ["f8e4m3[1,1,256]", "scale e8m0[1,1,2]"]


def test_dot_of_a_module_shows_its_border(decode: Graph) -> None:
    dot = Dot(graph_to_dot(decode, module=COMPRESSOR))
    inside = set(dot.clusters[f"cluster_{COMPRESSOR}"])
    outside = {"pos", "n_valid", "slot", "layers.2.attn_norm", f"leaving {COMPRESSOR}.cache.next"}
    assert dot.nodes.keys() == inside | outside
    for end in outside - {"pos", "n_valid", "slot"}:
        assert dot.nodes[end]["style"] == "dashed"
    assert {x for a, b, _ in dot.edges for x in (a, b)} <= dot.nodes.keys()
    # A second result of an op outside has a box of its own.
    edges = Dot(graph_to_dot(decode, module="layers.0.ffn.experts")).edges
    assert ("layers.0.ffn.gate.weights", "layers.0.ffn.experts.hidden") in {(a, b) for a, b, _ in edges}


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_dot_program_reads_it(decode: Graph) -> None:
    text = graph_to_dot(decode, module="layers.2", weights=True)
    done = subprocess.run(["dot", "-Tcanon"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# -- ONNX -------------------------------------------------------------------------------------

ELEMENT_TYPES = {
    DType.F64: TensorProto.DOUBLE,
    DType.F32: TensorProto.FLOAT,
    DType.BF16: TensorProto.BFLOAT16,
    DType.F16: TensorProto.FLOAT16,
    DType.F8E4M3: TensorProto.FLOAT8E4M3FN,
    DType.E8M0: getattr(TensorProto, "FLOAT8E8M0", TensorProto.UINT8),
    DType.E2M1: getattr(TensorProto, "FLOAT4E2M1", TensorProto.UINT8),
    DType.I64: TensorProto.INT64,
    DType.I32: TensorProto.INT32,
    DType.BYTE: TensorProto.INT8,
}


def check_onnx(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=False)
    assert {n.op_type for n in model.graph.node} <= registry().keys()
    assert {n.domain for n in model.graph.node} <= {"rewright"}
    assert not model.graph.initializer


def value_types(model: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Element type and shape of every value by name."""
    infos = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    assert len({i.name for i in infos}) == len(infos)
    types = {i.name: i.type.tensor_type for i in infos}
    return {n: (t.elem_type, tuple(d.dim_value for d in t.shape.dim)) for n, t in types.items()}


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {p.key: p.value for p in model.metadata_props}


def assert_same(graph: Graph, model: onnx.ModelProto) -> None:
    """Every value, node, operand and attribute of the graph is in the model, and no other."""
    typed = [n for n in graph.nodes if kind_of(n) not in ("item", "output")]
    assert value_types(model) == {
        name: (ELEMENT_TYPES[t.dtype], t.shape)
        for node in typed
        for name, t in zip(node.meta["names"], node.meta["types"], strict=True)
    }
    assert [n.name for n in model.graph.node] == [n.meta["names"][0] for n in graph.ops]
    for node, made in zip(graph.ops, model.graph.node, strict=True):
        op = op_of(node.target)
        assert made.op_type == op.name
        assert list(made.output) == list(node.meta["names"])
        assert list(made.input) == ["" if v is None else name_of(v) for v in operands_of(node)]
        assert made.doc_string == (node.meta["module"] or ".")
        given = {a.name: helper.get_attribute_value(a) for a in made.attribute}
        bound = {k: v for k, v in op.bind_attrs(dict(node.kwargs)).items() if v is not None}
        assert given.keys() == bound.keys()
        for name, value in bound.items():
            if isinstance(value, float):
                assert given[name] == pytest.approx(value, rel=1e-6)  # ONNX floats are fp32
            else:
                assert given[name] == (value.encode() if isinstance(value, str) else value)
    found = metadata(model)
    assert json.loads(found["rewright.results"]) == {n: name_of(v) for n, v in graph.results.items()}
    assert json.loads(found["rewright.next_state"]) == {n: name_of(v) for n, v in graph.next_state.items()}
    returned = [*graph.results.values(), *graph.next_state.values()]
    assert {o.name for o in model.graph.output} == {name_of(v) for v in returned}


def test_onnx_of_every_variant(tiny: list[Graph]) -> None:
    assert {g.name.split("-")[0] for g in tiny} == {"decode", "chunk128", "score128"}
    for graph in tiny:
        model = graph_to_onnx(graph)
        check_onnx(model)
        assert_same(graph, model)


def test_onnx_of_flash_leaves_the_weights_out(flash: Graph, tmp_path: Path) -> None:
    assert sum(traffic(flash).resident.values()) > 150e9
    model = graph_to_onnx(flash)
    check_onnx(model)
    assert_same(flash, model)
    path = tmp_path / "flash.onnx"
    onnx.save(model, str(path))
    assert path.stat().st_size < 2 << 20
    assert onnx.load(str(path)) == model
    onnx.checker.check_model(str(path))


def test_onnx_of_a_module(flash: Graph) -> None:
    whole, part = graph_to_onnx(flash), graph_to_onnx(flash, module=COMPRESSOR)
    check_onnx(part)
    assert metadata(part)["rewright.module"] == COMPRESSOR
    nodes = [n for n in whole.graph.node if n.doc_string == COMPRESSOR]
    assert nodes
    assert list(part.graph.node) == nodes
    taken = {i.name: i.doc_string.partition(":")[0] for i in part.graph.input}
    assert taken["layers.2.attn_norm"] == "arriving"
    assert taken["pos"] == "input"
    assert taken["rope.compressed.cos"] == "constant"
    assert taken[f"{COMPRESSOR}.wkv.weight"] == "weight"
    given = {o.name: o.doc_string for o in part.graph.output}
    # Both: the next value of a state, and read by attention outside.
    assert given[f"{COMPRESSOR}.cache.next"].startswith(f"next {COMPRESSOR}.cache, leaving: bf16[")
    assert value_types(part).items() <= value_types(whole).items()


def test_onnx_is_the_same_for_equal_graphs(decode: Graph) -> None:
    again = graph_to_onnx(parse(print_graph(decode)))
    assert graph_to_onnx(decode).SerializeToString() == again.SerializeToString()


def test_onnx_format_is_the_oldest_that_has_the_types(tiny: list[Graph]) -> None:
    versions = {g.attrs["numerics"]: graph_to_onnx(g).ir_version for g in tiny}
    quantized = 12 if hasattr(TensorProto, "FLOAT8E8M0") else 11
    assert versions == {"faithful": quantized, "bf16": quantized, "fp32": 8}


def test_onnx_without_a_type_falls_back_to_bytes(decode: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnx before 1.19 has no e8m0; the logical shape stays and the doc_string tells the type."""
    monkeypatch.setitem(onnx_graph._ELEMENT_TYPES, DType.E8M0, ("FLOAT_NOT_YET", 99))
    model = graph_to_onnx(decode)
    check_onnx(model)
    assert value_types(model)["layers.0.attn.wq_a.x.scale"] == (TensorProto.UINT8, (1, 1, 2))
    docs = {v.name: v.doc_string for v in model.graph.value_info}
    assert docs["layers.0.attn.wq_a.x.scale"] == "e8m0[1,1,2]"
    assert model.ir_version == 11  # for e2m1


def test_onnx_attribute_types() -> None:
    values = {"flag": True, "empty": [], "dims": (0, 64), "eps": 1.0, "n": 3, "out": "bf16"}
    kinds = {name: onnx_graph._attribute("op", name, value).type for name, value in values.items()}
    a = onnx.AttributeProto
    assert kinds == {
        "flag": a.INT,
        "empty": a.INTS,
        "dims": a.INTS,
        "eps": a.FLOAT,
        "n": a.INT,
        "out": a.STRING,
    }
    with pytest.raises(CompilerBug, match="no ONNX type"):
        onnx_graph._attribute("op", "table", {"a": 1})


def test_a_value_returned_twice_and_a_state_returned_unchanged() -> None:
    graph = Graph("small", attrs={"capacity": 128})
    x = graph.leaf("input", "x", ValueType(DType.F32, (1, 1, 128)))
    state = graph.leaf("state", "kept", ValueType(DType.F32, (4,)))
    y = graph.call(op_named("hadamard"), [x], {}, names=["y"], module="", rule="some_rule")
    graph.finish({"a": y, "b": y}, {"kept": state})
    model = graph_to_onnx(graph)
    check_onnx(model)
    assert [(o.name, o.doc_string) for o in model.graph.output] == [
        ("y", "result a, result b: f32[1,1,128]"),
        ("kept", "next kept: f32[4]"),
    ]
    assert model.graph.node[0].doc_string == ".  // some_rule"
    assert Dot(graph_to_dot(graph)).nodes.keys() == {"x", "kept", "y", "return a", "return b"}
    assert diff_graphs(graph, rebuilt(graph_to_json(graph))).empty


def test_only_the_onnx_exporter_imports_onnx() -> None:
    code = "import sys, rewright.ir.export, rewright.ir.diff; print('onnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
