"""Random graphs of ordinary ops: every pass alone, and all of them, keep what they compute.

A graph grows by motifs that rules look for, whole or in part, from values that are shared and wanted
at random: patterns match, overlap, and are broken by readers in every place.
"""

from __future__ import annotations

from random import Random
from typing import Any

from graphs import Net, differing, facts, results, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from rewright.ir.graph import Graph, type_of_value
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.verify import find_problems
from rewright.passes.manager import PassOptions, run_passes
from rewright.passes.pipelines import PIPELINE, pass_names

WIDTH = 128
E4M3 = {"fmt": "e4m3", "block": 128}
FORMATS: tuple[dict[str, Any], ...] = (
    E4M3,
    {"fmt": "e2m1", "block": 32},
    {**E4M3, "block": 64, "dims": [0, 64]},
)
REACHED = {
    "dead_nodes", "merge_duplicates", "identity_reshape", "reshape_of_reshape", "hoist_reshape",
    "merge_quant", "requantize", "shared_input", "norm_quant", "grouped_linear_quant", "swiglu_quant",
    "shared_expert", "flat_groups", "pad_rows",
}  # fmt: skip
"""Rules that such graphs show."""


class Grower:
    """Adds random motifs to a graph; every value on the way may be read and wanted later."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.net = Net("traced", tokens=2)
        self.rows = self.net.inputs(f"bf16[1,2,{WIDTH}]", "x", "y")
        self.other: list[Node] = []
        self.weights: dict[str, Node] = {}
        self.count = 0

    def __call__(self, op: str, *operands: Node | None, **attrs: Any) -> Any:
        self.count += 1
        return getattr(self.net, op)(f"v{self.count}", *operands, **attrs)

    def weight(self, name: str, type: str) -> Node:
        """One of few, so that calls may be equal."""
        name = f"{name}{self.random.randrange(2)}"
        if name not in self.weights:
            self.weights[name] = self.net.weight(name, type)
        return self.weights[name]

    def row(self) -> Node:
        """A value bf16[1,2,WIDTH], rather a late one."""
        return self.rows[-1 - min(int(self.random.expovariate(0.7)), len(self.rows) - 1)]

    def keep(self, value: Node) -> Node:
        rows = str(type_of_value(value)) == f"bf16[1,2,{WIDTH}]"
        (self.rows if rows else self.other).append(value)
        return value

    def rounded(self, x: Node, attrs: dict[str, Any], times: int = 1) -> None:
        """Quantised and put back, several times over: seldom with another format."""
        for _ in range(times):
            codes, scale = self("quantize", x, **attrs)
            back = {n: v for n, v in attrs.items() if n != "fmt"}
            x = self.keep(
                self("dequantize", codes, scale, x if "dims" in attrs else None, out="bf16", **back)
            )
            attrs = attrs if self.random.random() < 0.8 else self.random.choice(FORMATS)

    def norm(self) -> None:
        x = self.row()
        if self.random.random() < 0.5:
            x = self.keep(self("add", x, self.row()))
        normed = self.keep(self("rms_norm", x, self.weight("norm", f"bf16[{WIDTH}]"), eps=1e-6))
        if self.random.random() < 0.8:
            self.rounded(normed, self.random.choice(FORMATS))

    def linears(self) -> None:
        """Of one value, or of its codes; sometimes reshaped on the way."""
        x: list[Node | None] = [self.row(), None]
        stored, scale = "bf16", None
        if self.random.random() < 0.5:
            x = list(self("quantize", x[0], **E4M3))
            stored, scale = "f8e4m3", self.weight("s", "e8m0[1,1]")
        for _ in range(self.random.randint(1, 3)):
            w = self.weight(stored, f"{stored}[{WIDTH},{WIDTH}]")
            y = self.keep(self("linear", *x, w, scale, out=self.random.choice(["bf16", "bf16", "f32"])))
            if self.random.random() < 0.3:
                self.other.append(self("reshape", y, tail=[2, 64]))

    def expert(self) -> None:
        x = self.row()
        gate = self.keep(self("linear", x, None, self.weight("gate", f"bf16[{WIDTH},{WIDTH}]"), out="bf16"))
        up = self.keep(self("linear", x, None, self.weight("up", f"bf16[{WIDTH},{WIDTH}]"), out="bf16"))
        hidden = self.keep(self("swiglu", gate, up, limit=2.0))
        if self.random.random() < 0.5:
            self.rounded(hidden, self.random.choice(FORMATS))
        else:
            self.keep(self("linear", hidden, None, self.weight("down", f"bf16[{WIDTH},{WIDTH}]"), out="bf16"))

    def groups(self) -> None:
        x = self("reshape", self.row(), tail=[2, 64])
        product = self.keep(self("grouped_linear", x, self.weight("wo", f"bf16[{WIDTH},64]")))
        flat = self.keep(self("reshape", product, tail=[WIDTH]))
        if self.random.random() < 0.6:
            self.rounded(flat, self.random.choice(FORMATS))

    def reshapes(self) -> None:
        x = self.row()
        for tail, keep in self.random.sample([([2, 64], 2), ([-1], 2), ([WIDTH], 2), ([2, WIDTH], 1)], 2):
            x = self.keep(self("reshape", x, tail=tail, keep=keep))
        self.other.append(self("reshape", self.row(), tail=[2 * WIDTH], keep=1))

    def leading(self) -> None:
        """A reshape of the axes in front of the last one, behind an op that works row by row."""
        x = self.row()
        if self.random.random() < 0.5:
            y = self("linear", x, None, self.weight("w", f"bf16[{WIDTH},{WIDTH}]"), out="bf16")
        else:
            y = self("rms_norm", x, self.weight("norm", f"bf16[{WIDTH}]"), eps=1e-6)
        self.other.append(self("reshape", y, tail=[2, WIDTH], keep=0))
        if self.random.random() < 0.3:
            self.keep(y)

    def again(self) -> None:
        self.rounded(self.row(), self.random.choice(FORMATS), times=2)

    def equal(self) -> None:
        """The same twice."""
        x = self.row()
        for _ in range(2):
            self.keep(self("hadamard", x))
        for _ in range(2):
            self.rounded(x, E4M3)

    def grow(self) -> Graph:
        motifs = (self.norm, self.linears, self.expert, self.groups, self.reshapes, self.leading, self.again)
        for _ in range(self.random.randint(2, 6)):
            self.random.choice((*motifs, self.equal))()
        made = [*self.rows[2:], *self.other]
        wanted = [v for v in made if self.random.random() < (0.15 if v.users else 0.8)] or made[-1:]
        return self.net.graph(**{f"r{i}": v for i, v in enumerate(wanted)})


GRAPHS = st.integers(0, 2**32).map(lambda seed: Grower(seed).grow())
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


@settings(SETTINGS, max_examples=20)
@given(graph=GRAPHS)
def test_passes_keep_what_a_graph_computes(graph: Graph) -> None:
    """Codes are not wanted: a quantisation that is done again may give other codes of the same values."""
    known = values(graph)
    want = results(graph, known)
    done = run_passes(graph, facts()).graph
    assert differing(results(done, known), want) == []
    assert parse(print_graph(done)) == done
    for pass_ in PIPELINE:
        graph.stage = pass_.stage
        options = PassOptions((pass_.name,), to=pass_.stage)
        once = run_passes(graph, facts(), options).graph
        assert differing(results(once, known), want) == [], pass_.name
        if pass_.idempotent:
            assert run_passes(once, facts(), options).graph == once, pass_.name


@SETTINGS
@given(graph=GRAPHS)
def test_every_rewritten_region_is_equal(graph: Graph) -> None:
    run_passes(graph, facts(), PassOptions(verify=True))


@SETTINGS
@given(
    graph=GRAPHS,
    numerics=st.sampled_from(["bf16", "fp32"]),
    without=st.sets(st.sampled_from(pass_names()), max_size=6),
)
def test_any_choice_of_passes_leaves_a_sound_graph(graph: Graph, numerics: str, without: set[str]) -> None:
    """In numerics that drop roundings too."""
    options = PassOptions.of(without=tuple(without))
    done = run_passes(graph, facts(numerics, "always"), options)
    assert list(find_problems(done.graph)) == []
    assert {n: str(type_of_value(v)) for n, v in done.graph.results.items()} == {
        n: str(type_of_value(v)) for n, v in graph.results.items()
    }
    assert parse(print_graph(done.graph)) == done.graph
    known = values(graph)
    derived = {n: d.compute(*(known[s] for s in d.sources)) for n, d in done.derived.items()}
    results(done.graph, known | derived)


def test_the_graphs_have_something_to_rewrite() -> None:
    """Otherwise they would prove little."""
    seen: set[str] = set()
    for seed in range(50):
        report = run_passes(Grower(seed).grow(), facts()).report
        seen |= {r.name for p in report.passes for r in p.rules if r.matches}
    assert seen == REACHED
