"""Places in memory: no value is overwritten while somebody still reads it.

Two checks that know nothing of how places are found: one follows the launches byte by byte, the other
runs them on bytes and compares the results with the interpreter's, bit by bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from graphs import MODELS, Net, differing, op_names, results, rewrite_all, small_model, traced, values
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import execute, trouble, variant_of
from torch.fx import Node

from rewright.codegen.boundary import boundary_of
from rewright.codegen.flow import Flow
from rewright.codegen.kernel import KernelDef, Ok, Slot
from rewright.codegen.lifetimes import check_states
from rewright.codegen.memory import Lifetime, in_a_row, share
from rewright.codegen.plan import make_plan
from rewright.codegen.select import select
from rewright.codegen.targets import TARGETS, Target
from rewright.codegen.units import Program
from rewright.ir.errors import CompilerBug
from rewright.ir.graph import Graph, type_of_value
from rewright.rewriting import facts_of

HOST = TARGETS["host"]


class TestShare:
    def test_neighbours_in_time_are_apart_and_others_share(self) -> None:
        arena = share([Lifetime("a", 256, 0, 1), Lifetime("b", 256, 1, 2), Lifetime("c", 256, 2, 3)])
        assert arena.offsets == {"a": 0, "b": 256, "c": 0}
        assert arena.nbytes == 512

    def test_the_smallest_gap_that_holds_a_block_takes_it(self) -> None:
        blocks = [
            Lifetime("wide", 1024, 0, 0),  # leaves a gap of 1024 below what follows
            Lifetime("wall", 900, 0, 2),
            Lifetime("thin", 384, 0, 0),  # a gap of 384
            Lifetime("top", 380, 0, 2),
            Lifetime("late", 300, 1, 2),
        ]
        offsets = share(blocks).offsets
        assert offsets["late"] == offsets["thin"]

    def test_offsets_are_multiples_of_128_and_nothing_is_empty(self) -> None:
        arena = share([Lifetime("a", 1, 0, 0), Lifetime("b", 0, 0, 0), Lifetime("c", 129, 0, 0)])
        assert sorted(arena.offsets.values()) == [0, 256, 384]
        assert arena.nbytes == 512

    def test_the_order_of_the_blocks_changes_nothing(self) -> None:
        random = Random(1)
        blocks = [
            Lifetime(f"v{i}", random.choice((100, 200, 1000)), first, first + random.randrange(4))
            for i, first in enumerate(random.choices(range(20), k=60))
        ]
        shuffled = random.sample(blocks, k=len(blocks))
        assert share(blocks) == share(shuffled)

    def test_a_block_that_ends_before_it_begins_is_a_bug(self) -> None:
        with pytest.raises(CompilerBug, match="dies before"):
            share([Lifetime("a", 1, 1, 0)])

    def test_states_lie_one_behind_the_other(self) -> None:
        assert in_a_row([("a", 130), ("b", 128)]).offsets == {"a": 0, "b": 256}
        assert in_a_row([("a", 130), ("b", 128)]).nbytes == 384


def model_graphs(folder: Path, kind: str, numerics: str, keys: dict[str, Any]) -> list[Graph]:
    """Traced, and after all passes."""
    source = small_model(folder, numerics, **keys)
    graph = traced(source, kind)
    return [graph, rewrite_all(graph, facts_of(source))]


CASES = [(t, *model) for t in TARGETS for model in MODELS if t == "host" or model[1] != "fp32"]


@pytest.mark.parametrize(("target", "kind", "numerics", "keys"), CASES)
def test_models_keep_their_values(
    tmp_path: Path, target: str, kind: str, numerics: str, keys: dict[str, Any]
) -> None:
    """sm80 has no fp32 activations."""
    for graph in model_graphs(tmp_path, kind, numerics, keys):
        plan = make_plan(graph, variant_of(graph), TARGETS[target])
        assert trouble(graph, plan, TARGETS[target]) == []
        data = values(graph)
        assert differing(execute(graph, TARGETS[target], data, plan), results(graph, data)) == []


WIDTH = 64


class Grower:
    """A random graph of activations and one state: values that nobody reads, aliases of aliases, states
    that are read before and after their updates, results in any place."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.net = Net("traced", tokens=2)
        self.rows = self.net.inputs(f"bf16[1,2,{WIDTH}]", "x", "y")
        self.step = self.net.step()
        self.ring = self.net.state("ring", f"bf16[1,8,{WIDTH}]")
        self.scale = self.net.weight("scale", f"bf16[{WIDTH}]")
        self.sink = self.net.weight("sink", "f32[1]")
        self.count = 0

    def __call__(self, op: str, *operands: Node | None, **attrs: Any) -> Any:
        self.count += 1
        return getattr(self.net, op)(f"v{self.count}", *operands, **attrs)

    def row(self) -> Node:
        return self.random.choice(self.rows[-6:])

    def grow(self) -> None:
        match self.random.choice(("norm", "sum", "round", "view", "store", "look", "fused")):
            case "norm":
                self.rows.append(self("rms_norm", self.row(), self.scale, eps=1e-6))
            case "sum":
                self.rows.append(self("add", self.row(), self.row()))
            case "round":
                codes, scale = self("quantize", self.row(), fmt="e4m3", block=32)
                self.rows.append(self("dequantize", codes, scale, block=32, out="bf16"))
            case "view":
                split = self("reshape", self.row(), tail=[2, WIDTH // 2])
                self.rows.append(self("reshape", split, tail=[WIDTH]))
                if self.random.random() < 0.5:
                    self("hadamard", split)
            case "store":
                self.ring = self("ring_write", self.ring, self.row(), *self.step)
            case "look":
                heads = self("reshape", self.row(), tail=[1, WIDTH])
                attrs = {"ratio": 0, "capacity": 64, "scale": 0.125}
                seen = self(
                    "sparse_attention",
                    heads,
                    self.row(),
                    self.ring,
                    None,
                    None,
                    self.sink,
                    *self.step,
                    **attrs,
                )
                self.rows.append(self("reshape", seen, tail=[WIDTH]))
            case "fused":
                keep = self.random.random() < 0.5
                made = self(
                    "rms_norm_quant", self.row(), self.row(), self.scale,
                    eps=1e-6, fmt="e4m3", block=64, keep=keep, keep_sum=not keep,
                )  # fmt: skip
                self.rows.append(made[0])

    def finish(self) -> Graph:
        wanted = self.random.sample(self.rows, k=self.random.randrange(1, 4))
        return self.net.graph(**{f"out{i}": value for i, value in enumerate(wanted)})


def random_graph(seed: int) -> Graph:
    grower = Grower(seed)
    for _ in range(grower.random.randrange(3, 25)):
        grower.grow()
    return grower.finish()


def toy(*dropped: str) -> Target:
    """The host target without the kernels of some ops."""
    kernels = tuple(k for k in HOST.kernels if k.covers[0].ops[0] not in dropped)
    return Target("toy", "", kernels)


def pairs() -> Target:
    """A target that computes two neighbours in one launch where it can, and needs working memory."""

    def of(first: str, second: str) -> KernelDef:
        covers = (Slot((first,)), Slot((second,)))
        return KernelDef((f"{first}_{second}",), covers, lambda _: Ok(), workspace=lambda _: 300)

    both = [of(a, b) for a in ("add", "rms_norm", "quantize") for b in ("add", "rms_norm", "dequantize")]
    return Target("pairs", "", (*both, *toy("rms_norm_quant").kernels))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_graphs_keep_their_values(seed: int) -> None:
    graph = random_graph(seed)
    data = values(graph, seed % 2)
    want = results(graph, data)
    for target in (HOST, toy("rms_norm_quant"), pairs()):
        plan = make_plan(graph, variant_of(graph), target)
        assert trouble(graph, plan, target) == []
        assert differing(execute(graph, target, data, plan), want) == []


def test_random_graphs_show_what_they_are_for() -> None:
    seen = {op for seed in range(40) for op in op_names(random_graph(seed))}
    assert {"reshape", "ring_write", "sparse_attention", "rms_norm_quant", "quantize"} <= seen


class TestStates:
    def test_the_next_value_lies_where_the_state_lies(self) -> None:
        net = Net()
        rows = net.input("rows", "bf16[1,1,64]")
        step = net.step()
        other, ring = net.state("other", "bf16[1,8,64]"), net.state("ring", "bf16[1,8,64]")
        once = net.ring_write("once", ring, rows, *step)
        net.ring_write("twice", once, rows, *step)
        net.ring_write("else", other, rows, *step)
        graph = net.graph(rows=net.hadamard("out", rows))
        plan = make_plan(graph, variant_of(graph), HOST)
        offsets = {n: p.offset for n, p in plan.values.items() if p.space == "state"}
        assert offsets == {"other": 0, "else": 0, "ring": 1024, "once": 1024, "twice": 1024}
        assert plan.state_bytes == 2048

    def test_an_update_waits_for_the_readers_of_the_old_value(self) -> None:
        graph = self._late_reader(of_new=False)
        plan = make_plan(graph, variant_of(graph), HOST)
        assert [launch.phase for launch in plan.launches][-2:] == ["seen", "next"]
        data = values(graph)
        assert differing(execute(graph, HOST, data, plan), results(graph, data)) == []

    def test_an_old_value_that_is_needed_with_the_new_one_is_a_bug(self) -> None:
        graph = self._late_reader(of_new=True)
        with pytest.raises(CompilerBug, match="old value"):
            make_plan(graph, variant_of(graph), HOST)

    def test_an_old_value_that_is_read_after_its_update_is_a_bug(self) -> None:
        """Which no choice of kernels gives: the phases of a legal order, turned around."""
        graph = self._late_reader(of_new=False)
        program = Program.of(graph)
        phases, flow = select(program, HOST, variant_of(graph)).phases, Flow(program)
        for order in (phases, phases[::-1]):
            boundaries = [boundary_of(phase, program, flow) for phase in order]
            if order is phases:
                check_states(program, order, boundaries)
            else:
                with pytest.raises(CompilerBug, match="seen reads ring, which next has overwritten"):
                    check_states(program, order, boundaries)

    @staticmethod
    def _late_reader(of_new: bool) -> Graph:
        """A graph in which the old ring is read after its update, and maybe after the new one was read."""
        net = Net(tokens=2)
        rows, heads = net.input("rows", "bf16[1,2,64]"), net.input("heads", "bf16[1,2,1,64]")
        step = net.step()
        ring, sink = net.state("ring", "bf16[1,8,64]"), net.weight("sink", "f32[1]")
        after = net.ring_write("next", ring, rows, *step)
        attrs = {"ratio": 0, "capacity": 64, "scale": 0.125}
        if of_new:
            heads = net.sparse_attention("new", heads, rows, after, None, None, sink, *step, **attrs)
        return net.graph(
            out=net.sparse_attention("seen", heads, rows, ring, None, None, sink, *step, **attrs)
        )


class TestTheCheck:
    """That the checks above would notice."""

    @pytest.fixture
    def graph(self) -> Graph:
        net = Net()
        x = net.input("x", "bf16[1,1,64]")
        a, b = net.hadamard("a", x), net.hadamard("b", x)
        return net.graph(out=net.add("sum", a, b))

    @pytest.mark.parametrize(("moved", "onto"), [("b", "a"), ("sum", "a"), ("sum", "b")])
    def test_an_overlap_is_found(self, graph: Graph, moved: str, onto: str) -> None:
        plan = make_plan(graph, variant_of(graph), HOST)
        place = replace(plan.values[moved], offset=plan.values[onto].offset)
        broken = replace(plan, values={**plan.values, moved: place})
        assert trouble(graph, plan, HOST) == []
        assert trouble(graph, broken, HOST) != []

    def test_an_overlap_in_part_is_found(self, graph: Graph) -> None:
        plan = make_plan(graph, variant_of(graph), HOST)
        moved = {n: replace(p, offset=p.offset and p.offset - 64) for n, p in plan.values.items()}
        assert any("64.." in problem for problem in trouble(graph, replace(plan, values=moved), HOST))

    def test_a_workspace_over_an_operand_is_found(self, graph: Graph) -> None:
        plan = make_plan(graph, variant_of(graph), HOST)
        last = replace(plan.launches[-1], workspace=(plan.values["a"].offset, 64))
        broken = replace(plan, launches=(*plan.launches[:-1], last))
        assert any("a holds" in problem for problem in trouble(graph, broken, HOST))


def test_types_of_places_are_those_of_the_graph() -> None:
    graph = random_graph(3)
    plan = make_plan(graph, variant_of(graph), HOST)
    for name, place in plan.values.items():
        if name in graph:
            assert place.type == type_of_value(graph.value(name))
