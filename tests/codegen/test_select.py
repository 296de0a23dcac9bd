"""Units, kernel signatures, and the choice of kernels: how a phase grows, and what happens if none fits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from graphs import Net
from plans import fits, variant_of

from rewright.codegen import units
from rewright.codegen.flow import Flow
from rewright.codegen.frontier import Frontier
from rewright.codegen.kernel import Call, KernelDef, No, Ok, Slot, Verdict, abi_hash, signature
from rewright.codegen.plan import make_plan
from rewright.codegen.select import Selection, select
from rewright.codegen.targets import TARGETS, Target
from rewright.codegen.units import Program
from rewright.ir import ops
from rewright.ir.compose import Composition, expand
from rewright.ir.errors import CompilerBug, Refused
from rewright.ir.graph import Graph, op_named
from rewright.ir.op import registry
from rewright.ir.types import type_of

HOST = TARGETS["host"]
EPS = {"eps": 1e-6}
E4M3 = {"fmt": "e4m3", "block": 64}


def accept(call: Call) -> Verdict:
    return Ok()


def refuse(reason: str) -> Callable[[Call], Verdict]:
    return lambda call: No(reason)


def one(op: str, supports: Callable[[Call], Verdict] = accept) -> KernelDef:
    return KernelDef((f"toy.{op}",), (Slot((op,)),), supports)


def phase(symbol: str, *covers: Slot, supports: Callable[[Call], Verdict] = accept) -> KernelDef:
    return KernelDef((f"toy.{symbol}",), covers, supports)


def target(*kernels: KernelDef) -> Target:
    return Target("toy", "", kernels)


def choose(graph: Graph, of: Target) -> Selection:
    return select(Program.of(graph), of, variant_of(graph))


def shown(selection: Selection) -> list[tuple[str, list[str]]]:
    """Symbol and units of every phase."""
    return [(p.kernel.symbol, [u.name for u in p.units]) for p in selection.phases]


def chain() -> Graph:
    """x -> n (norm) -> h, g; h + g -> out; y -> m (norm), which has nothing to do with it."""
    net = Net()
    x, y, w = net.input("x", "bf16[1,1,64]"), net.input("y", "bf16[1,1,64]"), net.weight("w", "bf16[64]")
    n = net.rms_norm("n", x, w, **EPS)
    m = net.rms_norm("m", y, w, **EPS)
    h, g = net.hadamard("h", n), net.hadamard("g", n)
    return net.graph(out=net.add("out", h, g), m=m)


SINGLES = (one("rms_norm"), one("hadamard"), one("add"))


class TestGrowth:
    def test_one_unit_after_the_other(self) -> None:
        assert [units for _, units in shown(choose(chain(), target(*SINGLES)))] == [
            ["n"], ["m"], ["h"], ["g"], ["out"],
        ]  # fmt: skip

    def test_a_slot_takes_one_unit_and_many_take_all(self) -> None:
        first = phase("a", Slot(("rms_norm",)), Slot(("hadamard",)))
        assert shown(choose(chain(), target(first, *SINGLES)))[0] == ("toy.a", ["n", "h"])
        every = phase("a", Slot(("rms_norm",)), Slot(("hadamard",), many=True))
        assert shown(choose(chain(), target(every, *SINGLES)))[0] == ("toy.a", ["n", "h", "g"])

    def test_only_ready_units_join(self) -> None:
        """`out` reads g, which is not in the phase."""
        early = phase("a", Slot(("rms_norm",)), Slot(("hadamard",)), Slot(("add",), optional=True))
        found = shown(choose(chain(), target(early, *SINGLES)))
        assert found[0] == ("toy.a", ["n", "h"])
        assert found[-1] == ("toy.add", ["out"])
        whole = phase("a", Slot(("rms_norm",)), Slot(("hadamard",), many=True), Slot(("add",)))
        assert shown(choose(chain(), target(whole, *SINGLES)))[0] == ("toy.a", ["n", "h", "g", "out"])

    def test_only_connected_units_join_unless_the_slot_says_anywhere(self) -> None:
        near = phase("a", Slot(("rms_norm",), many=True))
        assert shown(choose(chain(), target(near, *SINGLES)))[0] == ("toy.a", ["n"])
        far = phase("a", Slot(("rms_norm",)), Slot(("rms_norm",), anywhere=True))
        assert shown(choose(chain(), target(far, *SINGLES)))[0] == ("toy.a", ["n", "m"])

    def test_a_shared_activation_connects_and_a_shared_weight_or_input_does_not(self) -> None:
        """n and m share the weight w; h and g share the activation n."""
        both = phase("b", Slot(("hadamard",), many=True))
        assert ("toy.b", ["h", "g"]) in shown(choose(chain(), target(both, *SINGLES)))
        net = Net()
        x = net.input("x", "bf16[1,1,64]")
        graph = net.graph(a=net.hadamard("a", x), b=net.hadamard("b", x))
        assert shown(choose(graph, target(both))) == [("toy.b", ["a"]), ("toy.b", ["b"])]

    def test_a_predicate_sees_the_unit_and_who_made_what_it_reads(self) -> None:
        picky = phase(
            "a",
            Slot(("rms_norm",), fits=lambda unit, members: unit.name != "n"),
            Slot(
                ("hadamard",),
                optional=True,
                fits=lambda unit, members: members.maker(unit.operands[0]) is None,
            ),
        )
        found = shown(choose(chain(), target(picky, *SINGLES)))
        assert ("toy.rms_norm", ["n"]) in found
        assert ("toy.a", ["m"]) in found

    def test_leading_optional_slots_may_begin_a_phase_or_stay_empty(self) -> None:
        lead = phase(
            "a", Slot(("rms_norm",), optional=True), Slot(("hadamard",)), Slot(("add",), optional=True)
        )
        assert lead.begins == 2
        found = shown(choose(chain(), target(lead, *SINGLES)))
        assert found == [("toy.a", ["n", "h"]), ("toy.rms_norm", ["m"]), ("toy.a", ["g", "out"])]

    def test_the_first_kernel_that_fits_wins(self) -> None:
        pair = phase("a", Slot(("rms_norm",)), Slot(("hadamard",)))
        assert shown(choose(chain(), target(*SINGLES, pair)))[0] == ("toy.rms_norm", ["n"])

    def test_a_reshape_is_seen_through(self) -> None:
        net = Net()
        x, w = net.input("x", "bf16[1,1,64]"), net.weight("w", "bf16[64]")
        split = net.reshape("split", net.rms_norm("n", x, w, **EPS), tail=[2, 32])
        graph = net.graph(out=net.hadamard("h", split))
        pair = phase(
            "a",
            Slot(("rms_norm",)),
            Slot(("hadamard",), fits=lambda u, m: m.maker(u.operands[0]) is not None),
        )
        assert shown(choose(graph, target(pair))) == [("toy.a", ["n", "h"])]
        (launch,) = make_plan(graph, variant_of(graph), target(pair)).launches
        assert (launch.reads, launch.writes) == (("x", "w"), ("h",))

    def test_a_phase_says_what_each_of_its_parts_reads(self) -> None:
        every = phase("a", Slot(("rms_norm",)), Slot(("hadamard",), many=True), Slot(("add",)))
        launch = make_plan(chain(), variant_of(chain()), target(every, *SINGLES)).launches[0]
        assert launch.attrs == {}
        first, *turns, last = launch.parts
        assert (first.op, first.reads, first.writes, first.attrs) == (
            "rms_norm",
            ("x", "w"),
            ("n",),
            {"eps": 1e-6},
        )
        assert [(p.op, p.reads) for p in turns] == [("hadamard", ("n",))] * 2
        assert (last.op, last.writes) == ("add", ("out",))
        assert launch.nodes == ("n", "h", "g", "out")

    def test_what_nobody_reads_outside_stays_in_the_kernel(self) -> None:
        every = phase("a", Slot(("rms_norm",)), Slot(("hadamard",), many=True), Slot(("add",)))
        plan = make_plan(chain(), variant_of(chain()), target(every, *SINGLES))
        assert plan.launches[0].writes == ("out",)
        assert {plan.values[v].space for v in ("n", "h", "g")} == {"kernel"}

    def test_a_result_that_nobody_reads_at_all_has_a_place(self) -> None:
        net = Net()
        codes, _ = net.quantize("q", net.input("x", "bf16[1,1,64]"), **E4M3)
        graph = net.graph(out=codes)
        pair = phase("a", Slot(("quantize",)), Slot(("hadamard",), optional=True))
        for of in (target(pair), target(one("quantize"))):
            plan = make_plan(graph, variant_of(graph), of)
            assert plan.launches[0].writes == ("q", "q.scale")
            assert plan.values["q"].offset != plan.values["q.scale"].offset

    def test_two_symbols_are_two_launches_of_one_phase(self) -> None:
        two = KernelDef(("toy.first", "toy.second"), (Slot(("hadamard",)),), accept, workspace=lambda _: 100)
        net = Net()
        graph = net.graph(out=net.hadamard("h", net.input("x", "bf16[1,1,64]")))
        first, second = make_plan(graph, variant_of(graph), target(two)).launches
        assert (first.symbol, first.writes, second.symbol, second.writes) == (
            "toy.first",
            (),
            "toy.second",
            ("h",),
        )
        assert first.phase == second.phase == "h"
        assert first.reads == second.reads == ("x",)
        assert first.workspace == second.workspace
        assert first.workspace[1] == 100


class TestRefusals:
    def test_a_fused_op_that_every_kernel_refuses_is_taken_apart(self) -> None:
        graph = self._fused()
        of = target(one("rms_norm_quant", refuse("not today")), *SINGLES, one("quantize"))
        found = choose(graph, of)
        assert shown(found) == [
            ("toy.add", ["nq.sum/add"]),
            ("toy.rms_norm", ["nq.sum/rms_norm"]),
            ("toy.quantize", ["nq.sum/quantize"]),
        ]
        assert found.refusals == {"nq.sum": (("toy.rms_norm_quant", "not today"),)}

    def test_a_fused_op_that_no_kernel_knows_is_taken_apart_silently(self) -> None:
        found = choose(self._fused(), target(*SINGLES, one("quantize")))
        assert len(found.phases) == 3
        assert found.refusals == {}

    def test_parts_carry_the_names_and_types_of_the_results(self) -> None:
        graph = self._fused()
        program = Program.of(graph)
        program.take_apart(program.units)
        assert [u.name for u in program.units] == ["nq.sum/add", "nq.sum/rms_norm", "nq.sum/quantize"]
        assert [u.results for u in program.units] == [
            ("nq.sum",),
            ("nq.sum/rms_norm",),
            ("nq.codes", "nq.scale"),
        ]
        assert {(u.node, u.path) for u in program.units} == {("nq.sum", ("rms_norm_quant",))}
        assert all(fits(u, program.types) for u in program.units)

    def test_an_op_that_occurs_twice_is_numbered(self) -> None:
        net = Net()
        x, w = net.input("x", "bf16[1,1,64]"), [net.weight(n, "bf16[64,64]") for n in ("a", "b")]
        made = net.multi_linear("p", x, None, w[0], None, w[1], None, outs="bf16,bf16")
        program = Program.of(net.graph(out=made[0], other=made[1]))
        program.take_apart(program.units)
        assert [u.name for u in program.units] == ["p.0/linear0", "p.0/linear1"]
        assert [u.results for u in program.units] == [("p.0",), ("p.1",)]

    def test_every_fused_op_can_be_taken_apart(self) -> None:
        """On its own examples; parts have the types that their ops infer, and unique names."""
        for op in registry().values():
            if op.composition is None:
                continue
            for operands, attrs in op.example_calls():
                program = _program_of(op, operands, attrs)
                results = program.units[0].results
                program.take_apart(program.units)
                made = [v for u in program.units for v in u.results] + list(program.aliases)
                assert len(made) == len(set(made)), op.name
                assert set(results) <= set(made), op.name
                assert all(fits(u, program.types) for u in program.units), op.name

    def test_a_result_that_is_an_operand_is_copied(self) -> None:
        net = Net()
        x, w = net.state("x", "bf16[1,1,64]"), net.weight("w", "bf16[64]")
        made = net.rms_norm_quant("nq", x, None, w, **EPS, **E4M3, keep_sum=True)
        program = Program.of(net.graph(out=made[0], codes=made[1]))
        program.take_apart(program.units)
        assert [(u.op.name, u.results) for u in program.units][-1] == ("reshape", ("nq.sum",))
        assert program.units[-1].attrs == {"tail": [64], "keep": 2}

    def test_a_result_that_has_another_name_already_is_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def twice(*args: Any) -> Composition:
            taken = expand(*args)
            return replace(taken, results=(taken.results[0], taken.results[0], *taken.results[1:]))

        monkeypatch.setattr(units, "expand", twice)
        net = Net()
        x, y, w = net.input("x", "bf16[1,1,64]"), net.input("y", "bf16[1,1,64]"), net.weight("w", "bf16[64]")
        made = net.rms_norm_quant("nq", x, y, w, **EPS, **E4M3, keep_sum=True, keep=True)
        program = Program.of(net.graph(**{f"out{i}": value for i, value in enumerate(made)}))
        (unit,) = program.units
        program.units = [replace(unit, attrs={**unit.attrs, "keep": False})]
        program.take_apart(program.units)
        assert program.units[0].results == ("nq.sum",)
        assert program.aliases == {"nq.normed": "nq.sum"}

    def test_an_op_without_a_kernel_is_refused(self) -> None:
        with pytest.raises(
            Refused, match=r"h: no kernel of target toy computes hadamard \(there is none\)"
        ) as caught:
            choose(chain(), target(one("rms_norm")))
        assert caught.value.exit_code == 5

    def test_the_refusal_tells_all_reasons(self) -> None:
        of = target(*SINGLES[:1], one("hadamard", refuse("odd")), one("hadamard", refuse("even")))
        with pytest.raises(Refused, match=r"\(toy.hadamard: odd; toy.hadamard: even\)"):
            choose(chain(), of)

    def test_reasons_of_kernels_passed_over_are_kept(self) -> None:
        pair = phase("a", Slot(("rms_norm",)), Slot(("hadamard",)), supports=refuse("too wide"))
        found = choose(chain(), target(pair, *SINGLES))
        assert found.refusals == {"n": (("toy.a", "too wide"),)}
        assert shown(found)[0] == ("toy.rms_norm", ["n"])

    def test_a_phase_that_lacks_a_unit_is_a_near_miss(self) -> None:
        short = phase("a", Slot(("rms_norm",)), Slot(("hadamard",)), Slot(("quantize", "rope")))
        found = choose(chain(), target(short, *SINGLES))
        assert found.refusals == {"n": (("toy.a", "there is no quantize or rope to go with it"),)}

    @staticmethod
    def _fused() -> Graph:
        net = Net()
        x, y, w = net.input("x", "bf16[1,1,64]"), net.input("y", "bf16[1,1,64]"), net.weight("w", "bf16[64]")
        total, codes, scale = net.rms_norm_quant("nq", x, y, w, **EPS, **E4M3, keep_sum=True)
        return net.graph(out=total, codes=codes, scale=scale)


def _program_of(op: Any, operands: Any, attrs: Any) -> Program:
    """One call of an op on leaves."""
    net = Net()
    nodes: list[Any] = []
    states = set(op.updates.values())
    for name, tensor in zip(op.operands, operands, strict=True):
        if tensor is None:
            nodes.append(None)
        else:
            kind = net.state if name in states else net.input
            nodes.append(kind(name, str(type_of(tensor))))
    made = getattr(net, op.name)("made", *nodes, **attrs)
    values = made if isinstance(made, tuple) else (made,)
    return Program.of(net.graph(**{f"out{i}": v for i, v in enumerate(values)}))


class TestAliases:
    def test_a_reshape_of_an_activation_needs_no_launch(self) -> None:
        net = Net()
        n = net.hadamard("n", net.input("x", "bf16[1,1,64]"))
        graph = net.graph(out=net.reshape("again", net.reshape("split", n, tail=[2, 32]), tail=[64]))
        program = Program.of(graph)
        assert [u.name for u in program.units] == ["n"]
        assert program.aliases == {"split": "n", "again": "n"}
        plan = make_plan(graph, variant_of(graph), HOST)
        assert plan.values["again"].offset == plan.values["n"].offset
        assert str(plan.values["again"].type) == "bf16[1,1,64]"
        assert plan.results == {"out": "again"}

    @pytest.mark.parametrize("kind", ["input", "state", "weight"])
    def test_a_reshape_of_a_leaf_is_copied(self, kind: str) -> None:
        net = Net()
        leaf = getattr(net, kind)("leaf", "bf16[1,1,64]")
        graph = net.graph(out=net.reshape("split", leaf, tail=[2, 32]))
        assert [u.name for u in Program.of(graph).units] == ["split"]

    def test_a_reshape_of_the_next_value_of_a_state_is_copied(self) -> None:
        net = Net()
        rows, step = net.input("rows", "bf16[1,1,64]"), net.step()
        after = net.ring_write("after", net.state("ring", "bf16[1,8,64]"), rows, *step)
        graph = net.graph(out=net.reshape("flat", after, tail=[512], keep=1))
        assert [u.name for u in Program.of(graph).units] == ["after", "flat"]

    @pytest.mark.parametrize("value", ["n", "split"])
    def test_a_reshape_from_or_to_padded_rows_is_copied(self, value: str) -> None:
        net = Net("layout")
        n = net.hadamard("n", net.input("x", "bf16[1,1,64]"))
        split = net.reshape("split", n, tail=[2, 32])
        graph = net.graph(out=net.hadamard("out", split))
        node = graph.value(value)
        node.meta["types"] = (node.meta["types"][0].with_pitch(128 if value == "split" else 256),)
        assert [u.name for u in Program.of(graph).units] == ["n", "split", "out"]


class TestSignatures:
    def test_every_part_of_a_signature(self) -> None:
        assert signature(ops.linear) == "linear(x, x_scale?, weight, scale?; out: str) -> ()"
        assert signature(ops.hadamard) == "hadamard(x) -> ()"
        assert signature(ops.quantize) == "quantize(x; fmt: str, block: int, dims: ints) -> (, scale)"
        assert signature(ops.rope) == "rope(x, cos, sin, pos; stride: int, inverse: bool) -> ()"
        assert signature(ops.compress).endswith("; ratio: int, overlap: bool, out: str) -> (, count)")
        assert signature(ops.multi_linear).endswith("weight7?, scale7?; outs: str) -> (*)")
        assert signature(ops.reshape) == "reshape(x; tail: ints, keep: int) -> ()"
        assert "eps: float" in signature(ops.rms_norm)

    def test_the_hash_is_over_sorted_lines(self) -> None:
        text = "toy.add add(x, y) -> ()\ntoy.hadamard hadamard(x) -> ()"
        expected = hashlib.sha256(text.encode()).hexdigest()
        assert abi_hash([one("hadamard"), one("add")]) == abi_hash([one("add"), one("hadamard")]) == expected

    def test_phases_are_signed_by_their_pattern(self) -> None:
        covers = (
            Slot(("rms_norm",)),
            Slot(("quantize",), optional=True),
            Slot(("route", "route_hash"), many=True),
        )
        assert phase("a", *covers).signature == "rms_norm + quantize? + route|route_hash*"

    def test_one_symbol_cannot_stand_for_two_signatures(self) -> None:
        other = KernelDef(("toy.add",), (Slot(("hadamard",)),), accept)
        with pytest.raises(CompilerBug, match=r"toy\.add is defined twice"):
            abi_hash([one("add"), other])

    @pytest.mark.parametrize("name", TARGETS)
    def test_every_target_has_a_hash_and_knows_every_op(self, name: str) -> None:
        assert len(TARGETS[name].abi) == 64
        unfused = {op.name for op in registry().values() if op.composition is None}
        single = {k.covers[0].ops[0] for k in TARGETS[name].kernels if k.single}
        assert unfused <= single

    def test_the_host_has_one_kernel_for_every_op(self) -> None:
        assert sorted(k.symbol for k in HOST.kernels) == sorted(f"host.{op}" for op in registry())

    def test_the_extension_has_the_kernels_that_the_compiler_plans_with(self) -> None:
        from rewright.runtime import _native

        assert _native.kernels() == {k.symbol: k.signature for k in HOST.kernels}


@dataclass(frozen=True)
class Single:
    """One call of an op: its operands as `kind type`, inputs and states before weights, and attributes."""

    op: str
    operands: dict[str, str]
    attrs: dict[str, Any] = field(default_factory=dict)

    def graph(self) -> Graph:
        net = Net()
        given = {name: getattr(net, kind)(name, type) for name, (kind, type) in self._leaves()}
        made = getattr(net, self.op)("made", *map(given.get, op_named(self.op).operands), **self.attrs)
        values = made if isinstance(made, tuple) else (made,)
        return net.graph(**{f"out{i}": value for i, value in enumerate(values)})

    def _leaves(self) -> list[tuple[str, list[str]]]:
        return [(name, text.split()) for name, text in self.operands.items()]


STEP = dict.fromkeys(("pos", "n_valid", "slot"), "input i32[1]")
LOGITS = {"logits": "input f32[1,1,80]"}

HOST_REFUSES = {
    "x is f16; activations are bf16 or f32": Single("hadamard", {"x": "input f16[1,1,64]"}),
    "made is f16; activations are bf16 or f32": Single(
        "linear", {"x": "input bf16[1,1,64]", "weight": "weight bf16[64,64]"}, {"out": "f16"}
    ),
    "weight weight is f64": Single("rms_norm", {"x": "input bf16[1,1,64]", "weight": "weight f64[64]"}, EPS),
    "quantised rows of 192 elements are no multiple of 128": Single(
        "linear",
        {"x": "input f8e4m3[1,1,192]", "x_scale": "input e8m0[1,1,1]", "weight": "weight bf16[64,192]"},
        {"out": "f32"},
    ),
    "rows of weight with 48 elements are no multiple of 32": Single(
        "expert_linear",
        {
            "x": "input bf16[1,1,48]", "experts": "input i32[1,1,2]",
            "weight": "weight e2m1[4,64,48]", "scale": "weight e8m0[4,64,1]",
        },
        {"out": "bf16"},
    ),
    "9 streams are more than 8": Single("hc_expand", {"x": "input bf16[1,1,64]"}, {"streams": 9}),
    "2000 Sinkhorn steps are more than 1024": Single(
        "hc_split",
        {"mix": "input f32[1,1,8]", "scale": "weight f32[3]", "base": "weight f32[8]"},
        {"streams": 2, "iters": 2000, "eps": 1e-6},
    ),
    "65 experts of a token are more than 64": Single(
        "route",
        {**LOGITS, "n_valid": "input i32[1]", "bias": "weight f32[80]"},
        {"k": 65, "scale": 1.0},
    ),
    "66 experts of a token are more than 64": Single(
        "route_hash",
        {**LOGITS, "tokens": "input i32[1,1]", "n_valid": "input i32[1]", "table": "weight i64[9,66]"},
        {"scale": 1.0},
    ),
    "blocks of 33 e2m1 codes are odd": Single(
        "quantize", {"x": "input bf16[1,1,66]"}, {"fmt": "e2m1", "block": 33}
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", HOST_REFUSES)
def test_what_the_host_refuses(reason: str) -> None:
    graph = HOST_REFUSES[reason].graph()
    with pytest.raises(Refused) as caught:
        make_plan(graph, variant_of(graph), HOST)
    assert reason in str(caught.value)


HOST_TAKES_APART = {
    "the result is quantised to e2m1, not e4m3": Single(
        "grouped_linear_quant",
        {"x": "input bf16[1,1,2,64]", "weight": "weight bf16[128,64]"},
        {"fmt": "e2m1", "block": 32},
    ),
    "heads of 32 do not divide result rows of 16": Single(
        "attention",
        {
            "q": "input bf16[1,1,64]", **STEP, "window": "state bf16[1,8,32]",
            "sink": "weight f32[2]", "cos": "weight f32[64,4]", "sin": "weight f32[64,4]",
        },
        {"heads": 2, "eps": 1e-6, "tail": [4, 16], "ratio": 0, "capacity": 64, "scale": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", HOST_TAKES_APART)
def test_what_the_host_takes_apart(reason: str) -> None:
    single = HOST_TAKES_APART[reason]
    graph = single.graph()
    plan = make_plan(graph, variant_of(graph), HOST)
    assert list(plan.refusals.values()) == [((f"host.{single.op}", reason),)]
    assert len(plan.launches) > 1


def test_layouts_of_the_host() -> None:
    net = Net()
    x, codes, scale = (
        net.input("x", "bf16[1,1,128]"),
        net.input("c", "f8e4m3[1,1,128]"),
        net.input("s", "e8m0[1,1,1]"),
    )
    experts, tokens = net.input("e", "i32[1,1,2]"), net.input("tokens", "i32[1,1]")
    weights = {
        "table": "bf16[16,128]", "norm": "bf16[128]", "fp8": "f8e4m3[128,128]", "fp8.scale": "e8m0[1,1]",
        "fp4": "e2m1[4,64,128]", "fp4.scale": "e8m0[4,64,4]", "plain": "bf16[64,128]", "fn": "f32[2,128]",
    }  # fmt: skip
    w = {name: net.weight(name, type) for name, type in weights.items()}
    out = {
        "a": net.embed("a", tokens, w["table"], out="bf16"),
        "b": net.rms_norm("b", x, w["norm"], **EPS),
        "d": net.linear("d", codes, scale, w["fp8"], w["fp8.scale"], out="bf16"),
        "f": net.expert_linear("f", codes, scale, w["fp4"], w["fp4.scale"], experts, out="bf16"),
        "g": net.linear("g", x, None, w["plain"], out="f32"),
        "h": net.hc_mix("h", net.reshape("r", x, tail=[2, 64]), w["fn"], eps=1e-6),
    }
    graph = net.graph(**out)
    plan = make_plan(graph, variant_of(graph), HOST)
    tiled = {name for name, place in plan.values.items() if place.layout == "tile16"}
    assert tiled == {"fp8", "fp4", "fp4.scale", "plain", "fn"}
    assert {place.layout for place in plan.values.values()} == {"", "tile16"}


def test_readers_that_want_a_weight_in_two_layouts_are_a_bug() -> None:
    net = Net()
    tokens, table = net.input("tokens", "i32[1,1]"), net.weight("table", "bf16[64,64]")
    row = net.embed("row", tokens, table, out="bf16")
    graph = net.graph(out=net.linear("logits", row, None, table, out="f32"))
    with pytest.raises(CompilerBug, match="weight table: row reads it row by row and logits reads it tile16"):
        make_plan(graph, variant_of(graph), HOST)


class TestFrontier:
    def test_what_was_put_back_waits_again(self) -> None:
        program = Program.of(chain())
        frontier = Frontier(program, Flow(program))
        first, second = frontier.ready
        assert [first.name, second.name] == ["n", "m"]
        frontier.take(first)
        assert [unit.name for unit in frontier.ready] == ["m", "h", "g"]
        frontier.put_back(first)
        assert [unit.name for unit in frontier.ready] == ["n", "m"]
        assert not frontier.exhausted
        for name in ("m", "n", "g", "h", "out"):
            frontier.take(next(unit for unit in frontier.ready if unit.name == name))
        assert frontier.exhausted

    def test_units_taken_before_are_left_out(self) -> None:
        program = Program.of(chain())
        assert [unit.name for unit in Frontier(program, Flow(program), ["n", "h"]).ready] == ["m", "g"]
