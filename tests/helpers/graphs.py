"""Graphs for tests of passes: built op by op, traced from a small model, or cut out of a larger graph.

A graph that was cut out keeps weights and states; `values` has plausible tensors for its leaves and
`results` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import torch
from torch import Tensor
from torch.fx import Node

from rewright.frontend.numerics import parse_numerics
from rewright.frontend.source import ModelSource
from rewright.ir.graph import (
    LEAVES,
    Graph,
    kind_of,
    name_of,
    op_named,
    operands_of,
    producer_of,
    result_index,
    result_names,
    type_of_value,
)
from rewright.ir.interpret import Interpreter
from rewright.ir.op import op_of
from rewright.ir.precision_plan import Precision
from rewright.ir.types import DType, ValueType, parse_type
from rewright.passes.facts import Facts
from rewright.passes.match import Match
from rewright.passes.pipelines import PIPELINE
from rewright.passes.rule import Log, Transform
from rewright.rewriting import facts_of

SMALL = {
    **checkpoints.BASE_CONFIG,
    "quantization_config": checkpoints.QUANTIZATION,
    "expert_dtype": "fp4",
    "compress_ratios": [0, 4, 128],
    "hidden_size": 128,
    "index_n_heads": 2,
    "index_topk": 4,
    "n_routed_experts": 4,
    "num_hidden_layers": 3,
    "vocab_size": 64,
}
"""Three layers with one of everything: hashed and scored experts, both compressions, an indexer."""


class Net:
    """A graph that is built op by op, result types inferred.

        net = Net()
        x, w = net.input("x", "bf16[1,2,64]"), net.weight("w", "bf16[64]")
        graph = net.graph(out=net.rms_norm("normed", x, w, eps=1e-6))

    Inputs and states come first. An op with several results gives a tuple. The next value of a state
    is its last update.
    """

    def __init__(self, stage: str = "canonical", **attrs: Any):
        self._graph = Graph("net", stage=stage, attrs={"tokens": 1, "capacity": 64, **attrs})
        self._states: dict[str, Node] = {}
        self._origin: dict[Node, str] = {}

    def input(self, name: str, type: str) -> Node:
        return self._graph.leaf("input", name, parse_type(type))

    def inputs(self, type: str, *names: str) -> list[Node]:
        return [self.input(name, type) for name in names]

    def step(self, batch: int = 1) -> list[Node]:
        """pos, n_valid and slot."""
        return self.inputs(f"i32[{batch}]", "pos", "n_valid", "slot")

    def weight(self, name: str, type: str) -> Node:
        return self._graph.leaf("weight", name, parse_type(type))

    def state(self, name: str, type: str) -> Node:
        node = self._graph.leaf("state", name, parse_type(type))
        self._states[name] = node
        self._origin[node] = name
        return node

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def call(name: str, *operands: Node | None, module: str = "", **attrs: Any) -> Any:
            called = op_named(op)
            flat = [*operands, *[None] * (len(called.operands) - len(operands))]
            names = result_names(called, name, attrs)
            node = self._graph.call(called, flat, attrs, names=names, module=module)
            values = [self._graph.result(node, i) for i in range(len(names))]
            for result, at in called.updated(attrs).items():
                state = self._origin[flat[at]]
                self._origin[values[result]], self._states[state] = state, values[result]
            return values[0] if len(values) == 1 else tuple(values)

        return call

    def graph(self, **results: Node) -> Graph:
        """The finished graph."""
        self._graph.finish(results, self._states)
        return self._graph


def facts(numerics: str = "faithful", fold_wo: Any = "auto", precision: Precision | None = None) -> Facts:
    """Facts of no model: nothing is expected."""
    return Facts({}, numerics, {}, fold_wo, precision or Precision())


def small_model(
    folder: Path, numerics: str = "faithful", *, max_batch: int = 1, **overrides: Any
) -> ModelSource:
    """The small configuration with some keys changed, opened without weights."""
    path = folder / "config.json"
    path.write_text(json.dumps({**SMALL, **overrides}))
    return ModelSource.open(path, parse_numerics(numerics), max_context=256, max_batch=max_batch, chunk=8)


def traced(source: ModelSource, kind: str = "decode") -> Graph:
    """The graph of the variant of a kind with the largest capacity."""
    return source.graph([v for v in source.variants() if v.kind == kind][-1])


def rewrite_all(
    graph: Graph, known: Facts, watch: Callable[[Transform, Match], None] | None = None, until: str = ""
) -> Graph:
    """A copy of the graph after the passes before the one called `until`, without any check."""
    graph = graph.copy()
    log = Log(watch=watch)
    for pass_ in PIPELINE:
        graph.stage = pass_.stage
        if pass_.name == until:
            break
        while sum(rule.apply(graph, known, log) for rule in pass_.rules):
            pass
    return graph


def cut(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """Some op nodes of a graph alone: weights and states stay what they are, other values from outside
    become inputs, values that are read outside results."""
    inside = sorted(nodes)
    part = Graph(graph.name, stage=graph.stage, attrs=graph.attrs)
    outer: dict[Node, str] = {}
    for node in inside:
        states = op_of(node.target).updated(dict(node.kwargs)).values()
        for at, value in enumerate(operands_of(node)):
            if value is not None and producer_of(value) not in inside:
                kind = kind_of(value) if kind_of(value) in ("weight", "constant") else "input"
                if at in states or outer.get(value) == "state":
                    kind = "state"
                outer[value] = kind
    ranked = sorted(outer.items(), key=lambda item: LEAVES.index(item[1]))
    mapped = {value: part.leaf(kind, name_of(value), type_of_value(value).dense) for value, kind in ranked}
    newest = {mapped[value]: name_of(value) for value, kind in ranked if kind == "state"}
    following = {name: node for node, name in newest.items()}
    results: dict[str, Node] = {}
    for node in inside:
        meta = node.meta
        operands = [None if v is None else mapped[v] for v in operands_of(node)]
        op = op_of(node.target)
        made = part.call(op, operands, node.kwargs, names=meta["names"], module=meta["module"])
        values = [part.result(made, i) for i in range(len(meta["names"]))]
        for result, at in op.updated(dict(node.kwargs)).items():
            newest[values[result]] = state = newest[operands[at]]
            following[state] = values[result]
        several = len(values) > 1
        for user in node.users if several else [node]:
            mapped[user] = values[result_index(user)]
            outside = [reader for reader in user.users if reader not in inside]
            if outside and values[result_index(user)] not in following.values():
                results[name_of(user)] = values[result_index(user)]
    if not results:
        results = dict(following)
    part.finish(results, following)
    return part


def form_of(graph: Graph) -> tuple[Any, ...]:
    """What a graph computes, whatever its values are called."""
    place = {}
    lines: list[Any] = []
    for node in graph.nodes:
        if kind_of(node) in (*LEAVES, "op"):
            for i in range(len(node.meta["names"])):
                place[node, i] = len(place)
            op = op_of(node.target).name if kind_of(node) == "op" else kind_of(node)
            read = [
                None if v is None else place[producer_of(v), result_index(v)]
                for v in (operands_of(node) if kind_of(node) == "op" else ())
            ]
            lines.append((op, tuple(read), tuple(map(str, node.meta["types"])), repr(dict(node.kwargs))))
    ends = [place[producer_of(v), result_index(v)] for v in graph.results.values()]
    return (*lines, tuple(ends))


def values(graph: Graph, seed: int = 0, *, exact: bool = False) -> dict[str, Tensor]:
    """A tensor for every leaf: rows of several magnitudes, ordinary codes and scales, ids that exist.

    Odd seeds are early in a sequence and mask its last token. With `exact` activations are -1, 0 or 1
    and every row of a matrix picks one of them, so that no rounding changes anything.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for node in graph.of_kind(*LEAVES):
        name, type = name_of(node), type_of_value(node)
        pick = exact and kind_of(node) == "weight" and len(type.shape) > 1
        found[name] = _exact(type, pick, generator) if exact else None
        if found[name] is None:
            found[name] = _value(name, type, generator, graph.attrs, seed)
    return found


def _exact(type: ValueType, pick: bool, generator: torch.Generator) -> Tensor | None:
    shape, dtype = type.storage_shape, type.dtype.torch_dtype
    if type.dtype is DType.E8M0:
        return torch.full(shape, 127, dtype=torch.uint8).view(dtype)
    if not (type.dtype.is_float or type.dtype in (DType.F8E4M3, DType.E2M1)):
        return None
    if not pick:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    rows = torch.zeros(shape)
    at = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=generator)
    one = 2.0 if type.dtype is DType.E2M1 else 1.0  # the low nibble 2 is the code of 1
    return rows.scatter_(-1, at, one).to(dtype)


def _value(
    name: str, type: ValueType, generator: torch.Generator, attrs: Mapping[str, Any], seed: int
) -> Tensor:
    shape, dtype = type.storage_shape, type.dtype.torch_dtype
    if type.dtype is DType.E8M0:
        return torch.randint(115, 130, shape, generator=generator, dtype=torch.uint8).view(dtype)
    if type.dtype is DType.E2M1:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if type.dtype is DType.F8E4M3:
        return (torch.randn(shape, generator=generator) * 64).clamp(-448, 448).to(dtype)
    if not type.dtype.is_float:
        return _ids(name, shape, generator, attrs, seed).to(dtype)
    rows = torch.randn(shape, generator=generator)
    if len(shape) > 1:  # a norm's eps counts in small rows, a limit in large ones
        rows *= 2.0 ** torch.randint(-9, 5, (*shape[:-1], 1), generator=generator)
    return rows.to(dtype)


def _ids(
    name: str, shape: tuple[int, ...], generator: torch.Generator, attrs: Mapping[str, Any], seed: int
) -> Tensor:
    match name:
        case "slot":
            return torch.arange(shape[0]).flip(0)
        case "n_valid":
            return torch.full(shape, attrs["tokens"] - seed % 2)
        case "pos":
            late = max(0, min(attrs["capacity"], 256) - attrs["tokens"] - 1)
            return torch.arange(shape[0]) + (3 if seed % 2 else late)
    return torch.randint(0, 4, shape, generator=generator)


def results(graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results and next states (`next NAME`) of one step."""
    leaves = {kind: [name_of(n) for n in graph.of_kind(kind)] for kind in LEAVES}
    weights = {name: given[name] for name in (*leaves["weight"], *leaves["constant"])}
    state = {name: given[name].clone() for name in leaves["state"]}
    found = Interpreter(graph, weights).run({n: given[n].clone() for n in leaves["input"]}, state)
    return {**found, **{f"next {name}": state[name] for name in state}}


def differing(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """Names at which two sets of results differ in type or in any bit; NaN equals the same NaN."""
    assert got.keys() == want.keys()
    return [n for n in want if not _same(got[n], want[n])]


def _same(got: Tensor, want: Tensor) -> bool:
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    )


@dataclass(frozen=True)
class Place:
    """Where a rule matches.

    Attributes:
        rule: the rule.
        graph: the graph before, as small as it can be.
        facts: for the rule's check.
    """

    rule: Transform
    graph: Graph
    facts: Facts


def places_in(graph: Graph, known: Facts, *, whole: bool = False) -> list[Place]:
    """Every place of a graph that some rule rewrites on its way through the passes, equal ones once.

    Args:
        graph: the graph.
        known: facts of its model.
        whole: whether a place is the whole graph, as it is then, and not the matched nodes alone.
    """
    found: dict[Any, Place] = {}

    def watch(rule: Transform, match: Match) -> None:
        part = match.graph.copy() if whole else cut(match.graph, match.nodes.values())
        found.setdefault(
            (rule, form_of(part)), Place(rule, part, facts(known.numerics, known.fold_wo, known.precision))
        )

    rewrite_all(graph, known, watch)
    return list(found.values())


MODELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("decode", "faithful", {"o_groups": 4, "max_batch": 2}),  # as many groups as heads
    ("score", "faithful", {"o_groups": 4}),
    ("chunk", "faithful", {}),
    ("decode", "bf16", {}),
    ("chunk", "fp32", {}),
)
"""Kind, numerics and changed keys of small models whose graphs show most forms of every rule."""


def all_places(folder: Path) -> list[Place]:
    """Places of the small models, then of the graphs written by hand."""
    found: list[Place] = []
    for kind, numerics, keys in MODELS:
        source = small_model(folder, numerics, **keys)
        found += places_in(traced(source, kind), facts_of(source))
    for graph, known in nets().values():
        found += places_in(graph, known, whole=True)
    return found


def op_names(graph: Graph) -> list[str]:
    """Names of the ops that a graph calls, in order."""
    return [op_of(node.target).name for node in graph.ops]


def insert_lines(text: str, after: str, lines: Sequence[str]) -> str:
    """Graph text with lines behind the first one that contains `after`."""
    head, found, rest = text.partition(after)
    assert found, f"no {after!r} in the text"
    end = rest.index("\n") + 1
    return head + found + rest[:end] + "".join(f"{line}\n" for line in lines) + rest[end:]


def nets() -> dict[str, tuple[Graph, Facts]]:
    """Graphs written by hand, with what the models above lack: one for each form of a rule."""
    found = {
        "identity_reshape": (_identity_reshape(), facts()),
        "reshape_of_reshape": (_reshape_of_reshape(), facts()),
        "hoist_reshape": (_hoist_reshape(), facts()),
        "requantize": (_requantize(), facts()),
        "round_trip": (_round_trip(), facts("fp32")),
        "unquantized_linear": (_linear_of_codes(), facts("bf16")),
        "unquantized_linear of a plan": (
            _linear_of_codes(),
            facts(precision=Precision(frozenset({"w", "ws"}))),
        ),
        "fp4_weight": (_fp8_products(), facts(precision=Precision(fp4_weights=frozenset({"a", "b", "c"})))),
        "norm_quant of a sum": (_norm_of_sum(), facts()),
        "kv_rows of whole rows": (_kv_rows(), facts()),
        "hc_post_pre without a norm": (_streams(), facts()),
    }
    for rotated in (True, False):
        for rounded in ("whole", "part", ""):
            found[f"compress_write {rotated} {rounded}"] = (_compressor(rotated, rounded), facts())
    for quantized in (True, False):
        for scaled in (True, False):
            tag = f"{quantized} {scaled}"
            found[f"fold_wo {tag}"] = (_output(quantized, scaled, True), facts(fold_wo="always"))
            found[f"wo {tag}"] = (_output(quantized, scaled, False), facts())
            found[f"shared_expert {tag}"] = (_shared_expert(quantized, scaled), facts())
            for hashed in (True, False):
                found[f"moe {tag} {hashed}"] = (_moe(quantized, scaled, hashed), facts())
    return found


_E4M3 = {"fmt": "e4m3", "block": 128}
_FP8 = {"a": "f8e4m3[64,128]", "b": "f8e4m3[32,128]", "c": "f8e4m3[64,128]"}
_EPS = {"eps": 1e-6}


def _identity_reshape() -> Graph:
    net = Net()
    x = net.input("x", "bf16[1,2,64]")
    return net.graph(
        y=net.hadamard("y", net.reshape("same", x, tail=[64])), same=net.reshape("out", x, tail=[-1])
    )


def _reshape_of_reshape() -> Graph:
    net = Net()
    split = net.reshape("split", net.input("x", "bf16[1,2,64]"), tail=[2, 32])
    return net.graph(y=net.reshape("y", split, tail=[8, 16], keep=1))


def _hoist_reshape() -> Graph:
    net = Net()
    x = net.input("x", "bf16[2,1,128]")
    fp8 = net.weight("w", "f8e4m3[128,128]"), net.weight("s", "e8m0[1,1]")
    product = net.linear("product", x, None, *fp8, out="bf16")
    normed = net.rms_norm("normed", product, net.weight("norm", "bf16[128]"), **_EPS)
    return net.graph(y=net.reshape("y", normed, tail=[128], keep=1))


def _requantize() -> Graph:
    """Once whole in e2m1 through f32, once a part in e4m3 through bf16."""
    net = Net()
    x = net.input("x", "bf16[2,1,128]")

    def twice(name: str, fmt: str, out: str, base: Node | None, **dims: Any) -> Node:
        values = net.quantize(f"{name}.q", x, fmt=fmt, block=32, **dims)
        back = net.dequantize(f"{name}.back", *values, base, block=32, out=out, **dims)
        values = net.quantize(f"{name}.again", back, fmt=fmt, block=32, **dims)
        return net.dequantize(name, *values, base, block=32, out="bf16", **dims)

    return net.graph(a=twice("whole", "e2m1", "f32", None), b=twice("part", "e4m3", "bf16", x, dims=[0, 64]))


def _round_trip() -> Graph:
    net = Net()
    x = net.input("x", "f32[2,1,128]")
    codes, scale = net.quantize("whole.q", x, fmt="e2m1", block=32)
    whole = net.dequantize("whole", codes, scale, block=32, out="f32")
    codes, scale = net.quantize("part.q", x, dims=[0, 64], fmt="e4m3", block=64)
    part = net.dequantize("part", codes, scale, x, dims=[0, 64], block=64, out="f32")
    return net.graph(whole=net.hadamard("a", whole), part=net.hadamard("b", part))


def _linear_of_codes() -> Graph:
    """Weights without scales, of a plain and of an expert linear."""
    net = Net()
    x, experts = net.input("x", "bf16[1,2,128]"), net.input("experts", "i32[1,2,2]")
    plain, stack = net.weight("w", "bf16[64,128]"), net.weight("ws", "bf16[4,64,128]")
    codes, scale = net.quantize("q", x, **_E4M3)
    return net.graph(
        a=net.linear("a", codes, scale, plain, out="bf16"),
        b=net.expert_linear("b", codes, scale, stack, None, experts, out="bf16"),
    )


def _fp8_products() -> Graph:
    """FP8 matrices behind codes, behind floats, and of groups."""
    net = Net()
    x, groups = net.input("x", "bf16[1,2,128]"), net.input("groups", "bf16[1,2,2,128]")
    codes, scale = net.quantize("q", x, **_E4M3)
    stored = [(net.weight(f"{n}.weight", t), net.weight(f"{n}.scale", "e8m0[1,1]")) for n, t in _FP8.items()]
    return net.graph(
        a=net.linear("a.y", codes, scale, *stored[0], out="bf16"),
        b=net.linear("b.y", x, None, *stored[1], out="f32"),
        c=net.grouped_linear("c.y", groups, *stored[2]),
    )


def _norm_of_sum() -> Graph:
    """The residual connection of models without Hyper-Connections, twice in a row."""
    net = Net()
    x, y = net.inputs("bf16[1,3,128]", "x", "y")
    first = net.add("first", x, y)
    normed = net.rms_norm("first.norm", first, net.weight("w0", "bf16[128]"), **_EPS)
    codes, scale = net.quantize("first.q", normed, **_E4M3)
    z = net.dequantize("z", codes, scale, block=128, out="bf16")
    last = net.rms_norm("last.norm", net.add("last", first, z), net.weight("w1", "f32[128]"), eps=1e-2)
    codes, scale = net.quantize("last.q", last, **_E4M3)
    return net.graph(codes=codes, scale=scale, last=last)


def _kv_rows() -> Graph:
    net = Net(tokens=2)
    x, q = net.input("x", "bf16[1,2,64]"), net.input("q", "bf16[1,2,2,64]")
    step = net.step()
    window = net.state("window", "bf16[1,8,64]")
    tables = net.weight("cos", "f32[64,16]"), net.weight("sin", "f32[64,16]")
    normed = net.rms_norm("norm", x, net.weight("w", "bf16[64]"), **_EPS)
    codes, scale = net.quantize("codes", net.rope("kv", normed, *tables, step[0]), fmt="e4m3", block=32)
    rows = net.dequantize("rows", codes, scale, block=32, out="bf16")
    sink = net.weight("sink", "f32[2]")
    y = net.sparse_attention("y", q, rows, window, None, None, sink, *step, ratio=0, capacity=64, scale=0.1)
    net.ring_write("window.next", window, rows, *step)
    return net.graph(y=y)


def _streams() -> Graph:
    """What a sub-block reads without a norm, its coefficients and the streams read further on."""
    net = Net()
    streams, y = net.input("streams", "bf16[1,2,5,64]"), net.input("y", "bf16[1,2,64]")
    post, comb = net.input("post", "f32[1,2,5]"), net.input("comb", "f32[1,2,5,5]")
    mixed = net.hc_combine("mixed", y, streams, post, comb)
    weights = [net.weight(n, t) for n, t in (("fn", "f32[35,320]"), ("scale", "f32[3]"), ("base", "f32[35]"))]
    mix = net.hc_mix("mix", mixed, weights[0], eps=1e-5)
    pre, after, back = net.hc_split("split", mix, *weights[1:], streams=5, iters=7, eps=1e-3)
    u = net.hc_collapse("u", mixed, pre)
    turned = net.hadamard("turned", u)
    return net.graph(y=net.hc_combine("out", turned, mixed, after, back), u=u)


def _compressor(rotated: bool, rounded: str) -> Graph:
    net = Net(tokens=5)
    kv, gate = net.inputs("f32[1,5,64]", "kv", "gate")
    step = net.step()
    rings = [net.state(n, "f32[1,8,64]") for n in ("kv_ring", "gate_ring")]
    cache = net.state("cache", "bf16[1,16,32]")
    ape, norm = net.weight("ape", "f32[4,64]"), net.weight("norm", "bf16[32]")
    tables = net.weight("cos", "f32[64,8]"), net.weight("sin", "f32[64,8]")
    biased = net.add_position_bias("biased", gate, ape, step[0])
    pooled, count = net.compress("pooled", kv, biased, *rings, *step, ratio=4, overlap=True, out="bf16")
    net.ring_write("kv_ring.next", rings[0], kv, *step)
    net.ring_write("gate_ring.next", rings[1], biased, *step)
    rows = net.rope("turned", net.rms_norm("normed", pooled, norm, **_EPS), *tables, step[0], stride=4)
    rows = net.hadamard("rotated", rows) if rotated else rows
    if rounded:
        dims = {"dims": [0, 16]} if rounded == "part" else {}
        codes, scale = net.quantize("codes", rows, fmt="e4m3", block=16, **dims)
        base = rows if dims else None
        rows = net.dequantize("rounded", codes, scale, base, block=16, out="bf16", **dims)
    store = net.entry_write("cache.next", cache, rows, count, step[0], step[2], ratio=4)
    return net.graph(store=store)


def _matrix(net: Net, name: str, *shape: int, scaled: bool, fp4: bool = False) -> list[Node | None]:
    """A stored weight and its scale."""
    sizes = ",".join(map(str, shape))
    if not scaled:
        return [net.weight(name, f"bf16[{sizes}]"), None]
    *lead, n, k = shape
    blocks = (*lead, n, k // 32) if fp4 else (*lead, n // 128, k // 128)
    stored = "e2m1" if fp4 else "f8e4m3"
    scale = f"e8m0[{','.join(map(str, blocks))}]"
    return [net.weight(name, f"{stored}[{sizes}]"), net.weight(f"{name}.scale", scale)]


def _output(quantized: bool, scaled: bool, grouped: bool) -> Graph:
    """wo_a and wo_b; heads that are groups need no reshape."""
    net = Net()
    o = net.input("o", "bf16[1,2,4,64]" if grouped else "bf16[1,2,2,128]")
    groups = net.reshape("groups", o, tail=[2, 128]) if grouped else o
    first = net.grouped_linear("wo_a", groups, *_matrix(net, "a.wo_a.weight", 256, 128, scaled=scaled))
    z: Any = [net.reshape("z", first, tail=[256]), None]
    if quantized:
        z = net.quantize("x", z[0], **_E4M3)
    return net.graph(
        y=net.linear("wo_b", *z, *_matrix(net, "a.wo_b.weight", 128, 256, scaled=scaled), out="bf16")
    )


def _shared_expert(quantized: bool, scaled: bool) -> Graph:
    """`quantized`: before the down product; `scaled`: codes go in and meet scaled weights."""
    net = Net()
    x: list[Node | None] = [net.input("x", "f8e4m3[1,2,128]" if scaled else "bf16[1,2,128]"), None]
    if scaled:
        x[1] = net.input("x_scale", "e8m0[1,2,1]")
    up = [
        net.linear(n, *x, *_matrix(net, f"{n}.w", 128, 128, scaled=scaled), out="bf16") for n in ("w1", "w3")
    ]
    hidden: Any = [net.swiglu("hidden", *up, limit=2.0), None]
    if quantized:
        hidden = net.quantize("codes", hidden[0], **_E4M3)
    return net.graph(y=net.linear("w2", *hidden, *_matrix(net, "w2.w", 128, 128, scaled=scaled), out="bf16"))


def _moe(quantized: bool, scaled: bool, hashed: bool) -> Graph:
    net = Net(tokens=3)
    x: list[Node | None] = [net.input("x", "f8e4m3[1,3,128]" if scaled else "bf16[1,3,128]"), None]
    if scaled:
        x[1] = net.input("x_scale", "e8m0[1,3,1]")
    logits, shared = net.input("logits", "f32[1,3,4]"), net.input("shared", "bf16[1,3,128]")
    tokens, n_valid = net.input("tokens", "i32[1,3]"), net.input("n_valid", "i32[1]")
    if hashed:
        table = net.weight("table", "i64[11,2]")
        experts, weights = net.route_hash("route", logits, table, tokens, n_valid, scale=1.5)
    else:
        bias = net.weight("bias", "f32[4]")
        experts, weights = net.route("route", logits, bias, n_valid, k=2, scale=1.5)
    stored = {"scaled": scaled, "fp4": True}
    up = [
        net.expert_linear(n, *x, *_matrix(net, f"{n}.w", 4, 128, 128, **stored), experts, out="bf16")
        for n in ("w1", "w3")
    ]
    hidden: Any = [net.swiglu("hidden", *up, weights, limit=2.0), None]
    if quantized:
        hidden = net.quantize("codes", hidden[0], **_E4M3)
    down = net.expert_linear("w2", *hidden, *_matrix(net, "w2.w", 4, 128, 128, **stored), experts, out="bf16")
    return net.graph(y=net.expert_sum("y", down, experts, shared))
