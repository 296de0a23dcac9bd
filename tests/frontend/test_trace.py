"""Graphs as they come out of tracing: what is refused, how state flows, how things are called."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.fx import Node

from rewright.frontend.checkpoint import Checkpoint
from rewright.frontend.layers import RMSNorm, Step, Value
from rewright.frontend.numerics import Numerics
from rewright.frontend.source import ModelSource
from rewright.frontend.trace import ModelCodeError
from rewright.ir import ops
from rewright.ir.graph import Graph, kind_of, name_of, operands_of, producer_of, type_of_value, updated_state
from rewright.ir.op import op_of
from rewright.ir.printer import print_graph
from rewright.ir.types import DType, ValueType
from rewright.ir.variant import Variant
from rewright.ir.verify import unused_weights

DECODE = Variant(1, 1, 512)
VARIANTS = [DECODE, Variant(1, 2, 512), Variant(32, 1, 512), Variant(32, 1, 512, all_positions=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> Path:
    """Ratios 0, 4, 128, 4; one hash layer; index_topk 16."""
    return make_checkpoint(tmp_path_factory.mktemp("trace"), {"vocab_size": 64})


def open_source(folder: Path, numerics: Numerics = Numerics.FAITHFUL) -> ModelSource:
    return ModelSource.open(folder, numerics, max_context=512, max_batch=2, chunk=32)


@pytest.fixture(scope="module")
def source(folder: Path) -> ModelSource:
    return open_source(folder)


@pytest.fixture(scope="module")
def graph(source: ModelSource) -> Graph:
    return source.graph(DECODE)


def ops_called(graph: Graph, name: str) -> list[Node]:
    return [n for n in graph.ops if op_of(n.target).name == name]


def operand(node: Node, name: str) -> Node | None:
    return operands_of(node)[op_of(node.target).operands.index(name)]


# -- code that a trace cannot record ----------------------------------------------------------


class Norm(nn.Module):
    """Stands in for the final norm; subclasses misuse a traced value on the line marked `here`."""

    inline = True

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm
        self.weight = norm.weight

    def forward(self, x: Value) -> Value:
        return self.norm(x)


class Branch(Norm):
    def forward(self, x: Value) -> Value:
        y = self.norm(x)
        if (y > 0).any():  # here
            return y
        return x


class BareBranch(Norm):
    def forward(self, x: Value) -> Value:
        y = self.norm(x)
        return y if y else x  # here


class ToInt(Norm):
    def forward(self, x: Value) -> Value:
        y = self.norm(x)
        return ops.reshape(y, tail=[int(y)], name="y")  # here


class Index(Norm):
    def forward(self, x: Value) -> Value:
        rows = [1, 2, 3]
        rows[x]  # here
        return self.norm(x)


class Length(Norm):
    def forward(self, x: Value) -> Value:
        y = self.norm(x)
        return ops.reshape(y, tail=[len(y)], name="y")  # here


class Loop(Norm):
    def forward(self, x: Value) -> Value:
        for row in x:  # here
            x = row
        return self.norm(x)


class Range(Norm):
    def forward(self, x: Value) -> Value:
        for _ in range(x):  # here
            x = self.norm(x)
        return x


class Helper(Norm):
    """The line lies in a function that forward calls."""

    def forward(self, x: Value) -> Value:
        return self.norm(_half(x))


def _half(x: Value) -> Value:
    size = int(x)  # here
    return ops.reshape(x, tail=[size // 2, 2], name="y")


class Attribute(Norm):
    """A traced value where an op wants an attribute."""

    def forward(self, x: Value) -> Value:
        return ops.rms_norm(x, self.norm.weight, eps=x, name="")  # here


class AttributeInList(Norm):
    def forward(self, x: Value) -> Value:
        return ops.reshape(self.norm(x), tail=[x, 4], name="y")  # here


class ForeignCall(Norm):
    """A torch function instead of an op of the graph."""

    def forward(self, x: Value) -> Value:
        return self.norm(x).relu()  # here


def marked_line(code: object) -> int:
    """Line of the file at which a class or function says `here`."""
    lines, first = inspect.getsourcelines(code)  # type: ignore[arg-type]
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))


MISUSES = [Branch, BareBranch, ToInt, Index, Length, Loop, Range, Attribute, AttributeInList, ForeignCall]


@pytest.mark.parametrize(
    ("misuse", "culprit"), [*((m, m) for m in MISUSES), (Helper, _half)], ids=lambda v: v.__name__
)
def test_code_that_cannot_be_traced(folder: Path, misuse: type[Norm], culprit: object) -> None:
    broken = open_source(folder)
    broken.model.norm = misuse(broken.model.norm)
    with pytest.raises(ModelCodeError) as caught:
        broken.graph(DECODE)
    assert caught.value.where == f"{Path(__file__)}:{marked_line(culprit)}"
    assert caught.value.exit_code == 3
    assert caught.value.fix


def test_a_branch_on_a_position(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a method of the model itself, on an input of the step."""
    broken = open_source(folder)
    forward = type(broken.model.layers[2].attn).forward

    def patched(self: nn.Module, x: Value, step: Step, cos: Value, sin: Value) -> Value:
        if step.pos == 0:  # here
            return x
        return forward(self, x, step, cos, sin)

    monkeypatch.setattr(type(broken.model.layers[2].attn), "forward", patched)
    with pytest.raises(ModelCodeError) as caught:
        broken.graph(DECODE)
    assert caught.value.where == f"{Path(__file__)}:{marked_line(patched)}"


def test_sound_code_traces(folder: Path) -> None:
    """The stand-in itself is no reason to refuse."""
    sound = open_source(folder)
    sound.model.norm = Norm(sound.model.norm)
    assert ops_called(sound.graph(DECODE), "rms_norm")


# -- state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_state_comes_out_once(source: ModelSource, variant: Variant) -> None:
    graph = source.graph(variant)
    states = {name_of(n): n for n in graph.of_kind("state")}
    assert states.keys() == source.model.builder.states.keys() == graph.next_state.keys()
    for name, value in graph.next_state.items():
        assert name_of(value) == f"{name}.next"
        assert updated_state(value) is states[name]
        assert type_of_value(value) == type_of_value(states[name])
    assert len(set(graph.next_state.values())) == len(states)
    # What a pass that removes dead code starts from: the output node keeps every update alive.
    assert set(graph.next_state.values()) <= set(graph.output.all_input_nodes)


def test_fx_dead_code_elimination_keeps_state(source: ModelSource) -> None:
    graph = source.graph(DECODE)
    updates = set(graph.next_state.values())
    before = len(graph.ops)
    graph.fx.eliminate_dead_code()
    assert updates <= set(graph.ops)
    assert len(graph.ops) == before, "the traced graph has no dead op"


def test_caches_are_read_after_the_write(graph: Graph) -> None:
    """The entry that this token completes is visible to it, through an edge of the graph."""
    read = 0
    for reader, name in (("sparse_attention", "compressed"), ("index_score", "keys")):
        for node in ops_called(graph, reader):
            cache = operand(node, name)
            if cache is None:
                continue
            read += 1
            assert op_of(cache.target).name == "entry_write"
            assert graph.next_state[name_of(cache).removesuffix(".next")] is cache
            state = operand(cache, "cache")
            assert kind_of(state) == "state"
            assert list(state.users) == [cache], "nobody reads the cache as it was before"
    assert read == 3 + 2


def test_windows_are_read_before_the_write(graph: Graph) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in ops_called(graph, "sparse_attention"):
        window = operand(node, "window")
        assert kind_of(window) == "state"
        (write,) = [u for u in window.users if op_of(u.target).name == "ring_write"]
        assert set(window.users) == {node, write}
        assert order[node] < order[write]
        assert [kind_of(u) for u in write.users] == ["output"]


def test_rings_are_pooled_before_the_write(graph: Graph) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    pools = ops_called(graph, "compress")
    assert len(pools) == 3 + 2
    for node in pools:
        for name, rows in (("kv_ring", "kv"), ("gate_ring", "gate")):
            ring = operand(node, name)
            assert kind_of(ring) == "state"
            (write,) = [u for u in ring.users if u is not node]
            assert op_of(write.target).name == "ring_write"
            assert order[node] < order[write]
            assert operand(write, "rows") is operand(node, rows)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_state_types(folder: Path, numerics: Numerics) -> None:
    """Two slots, 512 tokens of context, window 128, head dim 128, index dim 128."""
    act, f32 = numerics.activation, DType.F32

    def compressor(path: str, ratio: int, dim: int) -> dict[str, ValueType]:
        rows, width = (8, 2 * dim) if ratio == 4 else (ratio, dim)
        rings = {f"{path}.{ring}": ValueType(f32, (2, rows, width)) for ring in ("kv_ring", "gate_ring")}
        return rings | {f"{path}.cache": ValueType(act, (2, 512 // ratio, dim))}

    wanted = {f"layers.{i}.attn.window": ValueType(act, (2, 128, 128)) for i in range(4)}
    for layer, ratio in ((1, 4), (2, 128), (3, 4)):
        wanted |= compressor(f"layers.{layer}.attn.compressor", ratio, 128)
    for layer in (1, 3):
        wanted |= compressor(f"layers.{layer}.attn.indexer.compressor", 4, 128)
    graph = open_source(folder, numerics).graph(DECODE)
    assert {name_of(n): type_of_value(n) for n in graph.of_kind("state")} == wanted


def test_state_types_of_v4_flash(repo_root: Path) -> None:
    """The sizes of the specification: 12.2 MB of compressor state, bf16 elsewhere."""
    states = ModelSource.open(
        repo_root / "examples" / "configs" / "v4-flash.json", Numerics.FAITHFUL
    ).model.builder.states
    layers = {n.removeprefix("layers."): t for n, t in states.items() if re.match(r"layers\.[123]\.", n)}
    assert {n: str(t) for n, t in layers.items()} == {
        "1.attn.window": "bf16[1,128,512]",
        "2.attn.window": "bf16[1,128,512]",
        "2.attn.compressor.kv_ring": "f32[1,8,1024]",
        "2.attn.compressor.gate_ring": "f32[1,8,1024]",
        "2.attn.compressor.cache": "bf16[1,1024,512]",
        "2.attn.indexer.compressor.kv_ring": "f32[1,8,256]",
        "2.attn.indexer.compressor.gate_ring": "f32[1,8,256]",
        "2.attn.indexer.compressor.cache": "bf16[1,1024,128]",
        "3.attn.window": "bf16[1,128,512]",
        "3.attn.compressor.kv_ring": "f32[1,128,512]",
        "3.attn.compressor.gate_ring": "f32[1,128,512]",
        "3.attn.compressor.cache": "bf16[1,32,512]",
    }
    rings = sum(t.nbytes for n, t in states.items() if n.endswith("_ring"))
    assert rings == 20 * 2 * 128 * 512 * 4 + 21 * 2 * 8 * (1024 + 256) * 4


# -- names and leaves -------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_weight_is_a_leaf_once(folder: Path, numerics: Numerics, variant: Variant) -> None:
    source = open_source(folder, numerics)
    graph = source.graph(variant)
    leaves = [name_of(n) for n in graph.of_kind("weight", "constant")]
    assert sorted(leaves) == list(source.weight_types())
    assert not unused_weights(graph, source.weight_types())
    assert all(n.users for n in graph.of_kind("weight", "constant"))
    constants = [name_of(n) for n in graph.of_kind("constant")]
    assert sorted(constants) == [
        f"rope.{kind}.{part}" for kind in ("compressed", "window") for part in ("cos", "sin")
    ]
    bindings = {n: b for n, b in source.storage.bindings.items() if n in leaves}
    parts = Counter(
        t for b in bindings.values() for p in b.parts for t in (p.tensor, p.scale) if t is not None
    )
    assert parts == Counter(Checkpoint.open(folder).tensors.keys())


def test_weights_are_called_as_in_the_checkpoint(graph: Graph, folder: Path) -> None:
    weights = {name_of(n) for n in graph.of_kind("weight")}
    stored = set(Checkpoint.open(folder).tensors)
    single = {n for n in stored if ".experts." not in n}
    assert weights & stored == single
    stacked = {re.sub(r"\.experts\.\d+\.", ".experts.", n) for n in stored - single}
    assert weights - stored == stacked
    assert len(stacked) == 4 * 6


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_names_are_unique_and_come_from_the_module_path(source: ModelSource, variant: Variant) -> None:
    graph = source.graph(variant)
    names = [n for node in graph.nodes if kind_of(node) != "output" for n in node.meta.get("names", ())]
    assert len(names) == len(set(names))
    assert not [n for n in names if re.search(r"(^|[._])(linear|quantize|call|getitem|op)?_?\d+$", n)], (
        "no counters"
    )
    modules = dict(source.model.named_modules())
    for node in graph.ops:
        assert node.meta["module"] in modules
        for name in node.meta["names"]:
            assert name.startswith(node.meta["module"])


def test_values_are_called_the_same_in_every_variant(source: ModelSource) -> None:
    """But for the choice of the last row, and what several rows need."""
    names = [{n for node in source.graph(v).ops for n in node.meta["names"]} for v in VARIANTS]
    assert names[0] == names[1] == names[2]
    assert names[0] - names[3] == {"last", "last.row", "logits"}
    assert not names[3] - names[0]
    assert set(source.graph(VARIANTS[3]).results) == set(source.graph(DECODE).results) == {"logits"}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_two_traces_print_the_same(folder: Path, source: ModelSource, variant: Variant) -> None:
    text = print_graph(source.graph(variant))
    assert print_graph(source.graph(variant)) == text
    assert print_graph(open_source(folder).graph(variant)) == text


@pytest.mark.parametrize(
    ("variant", "logits"),
    [
        (VARIANTS[0], "f32[1,64]"),
        (VARIANTS[1], "f32[2,64]"),
        (VARIANTS[2], "f32[1,64]"),
        (VARIANTS[3], "f32[1,32,64]"),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_variants(source: ModelSource, variant: Variant, logits: str) -> None:
    graph = source.graph(variant)
    assert (graph.name, graph.stage) == (variant.name, "traced")
    shape = {"batch": variant.batch, "tokens": variant.tokens, "capacity": 512}
    attrs: dict[str, Any] = {**shape, "all_positions": variant.all_positions}
    attrs |= {"model": "deepseek_v4", "numerics": "faithful", "max_batch": 2, "max_context": 512}
    assert graph.attrs == attrs
    inputs = {name_of(n): str(type_of_value(n)) for n in graph.of_kind("input")}
    vector = f"i32[{variant.batch}]"
    tokens = f"i32[{variant.batch},{variant.tokens}]"
    assert inputs == {"tokens": tokens, "pos": vector, "n_valid": vector, "slot": vector}
    assert str(type_of_value(graph.results["logits"])) == logits
    lasts = ops_called(graph, "take_last")
    assert [name_of(producer_of(n)) for n in lasts] == ([] if variant.all_positions else ["last"])


def test_every_variant_of_the_limits_traces(source: ModelSource) -> None:
    variants = source.variants()
    assert {(v.kind, v.batch) for v in variants} == {("decode", 1), ("decode", 2), ("chunk", 1), ("score", 1)}
    assert {v.capacity for v in variants} == {128, 512}
    for variant in variants:
        assert source.graph(variant).name == variant.name


@pytest.mark.parametrize(
    ("topk", "capacity", "scored"), [(16, 64, False), (16, 128, True), (32, 128, False), (31, 128, True)]
)
def test_scores_only_where_entries_are_dropped(
    tmp_path: Path, make_checkpoint: Callable[..., Path], topk: int, capacity: int, scored: bool
) -> None:
    """Up to 4 * index_topk tokens all entries are kept: no query, score or list, but keys as ever."""
    folder = make_checkpoint(tmp_path / "c", {"vocab_size": 32, "n_routed_experts": 2, "index_topk": topk})
    source = open_source(folder)
    graph = source.graph(Variant(1, 1, capacity))
    per_layer = 1 if scored else 0
    for op in ("index_score", "index_topk"):
        assert len(ops_called(graph, op)) == 2 * per_layer
    indices = [operand(n, "indices") for n in ops_called(graph, "sparse_attention")]
    assert [None if i is None else name_of(i) for i in indices] == [
        None,
        "layers.1.attn.indexer.chosen" if scored else None,
        None,
        "layers.3.attn.indexer.chosen" if scored else None,
    ]
    keys = [n for n in graph.next_state if ".indexer.compressor." in n]
    assert len(keys) == 2 * 3
    unused = (
        []
        if scored
        else [
            f"layers.{i}.attn.indexer.{w}"
            for i in (1, 3)
            for w in ("weights_proj.weight", "wq_b.scale", "wq_b.weight")
        ]
    )
    assert unused_weights(graph, source.weight_types()) == unused
