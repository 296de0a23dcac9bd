"""After a rewrite the graph is one that could have been traced: types, order, names, modules, weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs import Net, differing, facts, op_names, results, values

from rewright.ir import ops
from rewright.ir.errors import CompilerBug, VerifyError
from rewright.ir.graph import Graph, name_of, producer_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.verify import find_problems
from rewright.passes import manager
from rewright.passes.base import Pass
from rewright.passes.manager import MOST_ROUNDS, PassFailed, Rewritten, run_passes
from rewright.passes.match import Match
from rewright.passes.pattern import OpPattern, maybe, p
from rewright.passes.rule import Log, No, Ok, Rewriter, Rule, Verdict

EPS = {"eps": 1e-6}
QUANT = {"fmt": "e4m3", "block": 64}
X = "bf16[1,2,64]"

Run = Callable[..., Rewritten]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a pass that has the given rules only."""

    def with_rules(graph: Graph, *rules: Rule, verify: bool = False) -> Rewritten:
        only = Pass("fuse_norm_quant", "fused", "of a test", rules)
        monkeypatch.setattr(manager, "PIPELINE", (only,))
        options = manager.PassOptions((only.name,), to="fused", verify=verify)
        return run_passes(graph, facts(), options)

    return with_rules


def rule(pattern: Any, rewrite: Callable[[Match, Rewriter], object], **attrs: Any) -> Rule:
    """A rule made of two functions."""
    body = {"name": "made_up", "pattern": lambda self: pattern, **attrs}
    return type("MadeUp", (Rule,), {**body, "rewrite": lambda self, m, new: rewrite(m, new)})()


NORM_QUANT = p.quantize("quant", x=p.rms_norm("norm", x="x", weight="weight"))


def fuse(m: Match, new: Rewriter) -> None:
    attrs = {**m.attrs("norm"), **QUANT}
    new(ops.rms_norm_quant, m.pick("x", "weight"), attrs, gives=m.results("quant"))


def quantized() -> Graph:
    """A norm and its quantisation in two modules."""
    net = Net()
    x = net.input("x", X)
    normed = net.rms_norm("a.norm", x, net.weight("a.norm.weight", "bf16[64]"), module="a", **EPS)
    codes, scale = net.quantize("b.w.x", normed, module="b.w", **QUANT)
    return net.graph(y=net.dequantize("b.y", codes, scale, module="b", block=64, out="bf16"))


def sound(graph: Graph) -> None:
    assert list(find_problems(graph)) == []
    assert parse(print_graph(graph)) == graph


def test_what_a_new_node_inherits(run: Run) -> None:
    before = quantized()
    graph = run(before, rule(NORM_QUANT, fuse)).graph
    sound(graph)
    node = producer_of(graph.value("b.w.x"))
    assert node.meta["names"] == ("b.w.x", "b.w.x.scale")
    assert node.meta["rule"] == "made_up"
    assert node.meta["module"] == "b.w"  # of the first root
    assert graph.ops[1].meta["rule"] is None
    assert "a.norm" not in graph
    assert differing(results(graph, values(graph)), results(before, values(before))) == []


def test_the_module_may_be_that_of_another_node(run: Run) -> None:
    graph = run(quantized(), rule(NORM_QUANT, fuse, home="norm")).graph
    sound(graph)
    assert producer_of(graph.value("b.w.x")).meta["module"] == "a"


def test_the_graph_given_stays_as_it_is(run: Run) -> None:
    before = quantized()
    text = print_graph(before)
    run(before, rule(NORM_QUANT, fuse))
    assert print_graph(before) == text


def test_a_new_value_is_called_by_its_role(run: Run) -> None:
    def keep(m: Match, new: Rewriter) -> None:
        attrs = {**m.attrs("norm"), **QUANT, "keep": True}
        new(ops.rms_norm_quant, m.pick("x", "weight"), attrs, gives=[None, *m.results("quant")])

    graph = run(quantized(), rule(NORM_QUANT, keep)).graph
    sound(graph)
    assert graph.ops[0].meta["names"] == ("b.w.x.normed", "b.w.x", "b.w.x.scale")


def test_weights_that_nobody_reads_any_more_go(run: Run) -> None:
    def drop_norm(m: Match, new: Rewriter) -> None:
        new(ops.quantize, m.pick("x"), m.attrs("quant"), gives=m.results("quant"))

    graph = run(quantized(), rule(NORM_QUANT, drop_norm)).graph
    sound(graph)
    assert graph.of_kind("weight") == []
    assert "a.norm.weight" not in graph


def test_weights_that_others_read_stay(run: Run) -> None:
    net = Net()
    x, w = net.input("x", X), net.weight("w", "bf16[64]")
    first = net.rms_norm("first", x, w, **EPS)
    graph = net.graph(first=net.hadamard("turned", first), second=net.rms_norm("second", x, w, **EPS))

    def skip(m: Match, new: Rewriter) -> None:
        new(ops.hadamard, m.pick("x"), {}, gives=[m.result("turn")])

    pattern = p.hadamard("turn", x=p.rms_norm("norm", x="x", weight="w"))
    after = run(graph, rule(pattern, skip)).graph
    sound(after)
    assert [name_of(n) for n in after.of_kind("weight")] == ["w"]


def test_an_existing_value_stands_for_a_result(run: Run) -> None:
    net = Net()
    x = net.input("x", X)
    once = net.hadamard("once", x)
    twice = net.hadamard("twice", once)
    graph = net.graph(same=twice, y=net.add("y", twice, once))
    pattern = p.hadamard("outer", x=p.hadamard("inner", x="x"))

    def forward(m: Match, new: Rewriter) -> None:
        new.forward(m.result("outer"), m.value("x"))

    after = run(graph, rule(pattern, forward, keeps=("inner",))).graph
    sound(after)
    assert {n: name_of(v) for n, v in after.results.items()} == {"same": "x", "y": "y"}
    assert op_names(after) == ["hadamard", "add"]


def shared(m: Match, new: Rewriter) -> None:
    weights = {"weight0": m["w0"], "weight1": m["w1"]}
    gives = [m.result("first"), m.result("second")]
    new(ops.multi_linear, {"x": m["x"], **weights}, {"outs": "bf16,bf16"}, gives=gives)


SHARED = p.linear("first", x="x", weight="w0"), p.linear("second", x="x", weight="w1")


def test_readers_that_stood_before_the_new_node_move_behind_it(run: Run) -> None:
    """And what reads those; the second weight, which stood behind them, moves before it."""
    net = Net()
    x = net.input("x", X)
    first = net.linear("first", x, None, net.weight("w0", "bf16[64,64]"), out="bf16")
    reader = net.hadamard("reader", net.hadamard("turned", first))
    aside = net.hadamard("aside", x)
    second = net.linear("second", x, None, net.weight("w1", "bf16[64,64]"), out="bf16")
    graph = net.graph(reader=reader, aside=aside, y=net.hadamard("y", second))
    after = run(graph, rule(SHARED, shared)).graph
    sound(after)
    assert op_names(after).index("multi_linear") < min(
        after.ops.index(after.value(name)) for name in ("turned", "reader", "y")
    )
    given = values(graph)
    assert differing(results(after, given), results(graph, given)) == []


def test_types_are_inferred_again(run: Run) -> None:
    """A narrower block gives more scales; who reads them is told."""
    net = Net()
    x, w = net.input("x", X), net.weight("w", "bf16[64]")
    codes, scale = net.quantize("q", net.rms_norm("norm", x, w, **EPS), **QUANT)
    graph = net.graph(y=net.dequantize("y", codes, scale, block=64, out="bf16"))

    def narrower(m: Match, new: Rewriter) -> None:
        attrs = {**m.attrs("norm"), **QUANT, "block": 32}
        new(ops.rms_norm_quant, m.pick("x", "weight"), attrs, gives=m.results("quant"))

    with pytest.raises(PassFailed) as caught:
        run(graph, rule(NORM_QUANT, narrower))
    assert isinstance(caught.value.error, VerifyError)
    assert "scale e8m0[1,2,2] does not match f8e4m3[1,2,64] in blocks of 64" in str(caught.value)
    assert caught.value.exit_code == 5


def widened(readers: bool) -> Graph:
    net = Net()
    x = net.input("x", X)
    y = net.linear("y", x, None, net.weight("w", "bf16[64,64]"), out="bf16")
    return net.graph(z=net.hadamard("z", y) if readers else y)


def test_a_cast_must_be_carried_downstream(run: Run) -> None:
    """A rule that changes an element type without its readers is told where it went wrong."""

    pattern = p.linear("product", x="x", weight="w")

    def changed(m: Match, new: Rewriter) -> None:
        operands = {"x": m["x"], "weight": m["w"]}
        new(ops.linear, operands, {"out": "f32"}, gives=[m.result("product")])

    def check(self: Rule, m: Match, known: object) -> Verdict:
        done = m.attrs("product")["out"] == "f32"
        return No("it is f32", m.nodes["product"]) if done else Ok()

    with pytest.raises(PassFailed) as caught:
        run(widened(readers=True), rule(pattern, changed, check=check))
    assert isinstance(caught.value.error, VerifyError)
    assert caught.value.error.problems == ["z: typed bf16[1,2,64], inferred f32[1,2,64]"]
    with pytest.raises(PassFailed) as caught:
        run(widened(readers=False), rule(pattern, changed, check=check))
    assert isinstance(caught.value.error, VerifyError)
    assert caught.value.error.problems == ["result z is f32[1,2,64], it was bf16[1,2,64]"]


def bug(run: Run, graph: Graph, made_up: Rule) -> str:
    with pytest.raises(PassFailed) as caught:
        run(graph, made_up)
    assert isinstance(caught.value.error, CompilerBug)
    assert caught.value.exit_code == CompilerBug.exit_code
    return str(caught.value.error)


def test_a_result_replaced_twice(run: Run) -> None:
    def twice(m: Match, new: Rewriter) -> None:
        fuse(m, new)
        fuse(m, new)

    assert bug(run, quantized(), rule(NORM_QUANT, twice)) == "rule made_up replaces b.w.x twice"


def test_a_reader_left_behind(run: Run) -> None:
    def forget(m: Match, new: Rewriter) -> None:
        gives = [m.result("quant"), None]
        new(ops.rms_norm_quant, m.pick("x", "weight"), {**m.attrs("norm"), **QUANT}, gives=gives)

    message = bug(run, quantized(), rule(NORM_QUANT, forget))
    assert message.startswith("b.w.x is erased while ")


def test_a_yielded_value_that_is_not_given(run: Run) -> None:
    net = Net()
    normed = net.rms_norm("norm", net.input("x", X), net.weight("w", "bf16[64]"), **EPS)
    codes, scale = net.quantize("q", normed, **QUANT)
    graph = net.graph(codes=codes, scale=scale, norm=normed)
    assert bug(run, graph, rule(NORM_QUANT, fuse, yields=("norm",))) == (
        "norm is erased while the output reads it"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gives": []}, "rule made_up: rms_norm_quant has 2 results, 0 are given"),
        ({"operands": {"y": None}}, "rule made_up: rms_norm_quant has no operand ['y']"),
        ({"operands": {"x": None}}, "b.w.x: rms_norm_quant cannot take its operands: operand x is missing"),
        ({"attrs": {"block": 48}}, "64 elements are no multiple of the block 48"),
    ],
)
def test_a_node_that_cannot_be(run: Run, change: dict[str, Any], message: str) -> None:
    def wrong(m: Match, new: Rewriter) -> None:
        operands = m.pick("x", "weight") | change.get("operands", {})
        attrs = {**m.attrs("norm"), **QUANT, **change.get("attrs", {})}
        new(ops.rms_norm_quant, operands, attrs, gives=change.get("gives", m.results("quant")))

    assert message in bug(run, quantized(), rule(NORM_QUANT, wrong))


def test_two_values_of_one_name(run: Run) -> None:
    def clash(m: Match, new: Rewriter) -> None:
        (y,) = new(ops.hadamard, m.pick("x"), {}, gives=[None], names=["b.y"])
        new(ops.rms_norm_quant, {"x": y, **m.pick("weight")}, {**EPS, **QUANT}, gives=m.results("quant"))

    assert bug(run, quantized(), rule(NORM_QUANT, clash)) == "two values are called b.y"


def test_rules_that_chase_each_other_come_to_an_error(run: Run) -> None:
    net = Net()
    x, y = net.inputs(X, "x", "y")
    graph = net.graph(sum=net.add("sum", x, y))

    def swap(m: Match, new: Rewriter) -> None:
        new(ops.add, {"x": m["y"], "y": m["x"]}, {}, gives=[m.result("sum")])

    message = bug(run, graph, rule(p.add("sum", x="x", y="y"), swap))
    assert message == f"its rules do not come to an end after {MOST_ROUNDS} rounds"


def test_what_a_rewrite_makes_is_looked_at_again(run: Run) -> None:
    """Four transforms in a row cancel in pairs, the outer pair only after the inner one."""
    net = Net()
    turned = x = net.input("x", X)
    for i in range(5):
        turned = net.hadamard(f"h{i}", turned)
    graph = net.graph(y=net.add("y", turned, x))

    def cancel(m: Match, new: Rewriter) -> None:
        new.forward(m.result("outer"), m.value("x"))

    cancelling = rule(p.hadamard("outer", x=p.hadamard("inner", x="x")), cancel)
    done = run(graph, cancelling)
    assert op_names(done.graph) == ["hadamard", "add"]
    assert [r.matches for p_ in done.report.passes for r in p_.rules] == [2]


def test_a_refused_match_does_not_hide_another() -> None:
    """Overlapping matches: the first is refused by the rule, the second is rewritten."""
    net = Net()
    turned = net.input("x", X)
    for i in range(3):
        turned = net.hadamard(f"h{i}", turned)
    graph = net.graph(y=turned)

    def check(self: Rule, m: Match, known: object) -> Verdict:
        refuse = name_of(m.nodes["outer"]) == "h1"
        return No("not this one", m.nodes["inner"]) if refuse else Ok()

    def cancel(m: Match, new: Rewriter) -> None:
        new.forward(m.result("outer"), m.value("x"))

    log = Log()
    pair = p.hadamard("outer", x=p.hadamard("inner", x="x"))
    assert rule(pair, cancel, check=check).apply(graph, facts(), log)
    assert op_names(graph) == ["hadamard"]
    assert log.matches == 1
    assert [(m.anchor, m.reason, m.node, m.depth) for m in log.misses] == [
        ("h0", "x of h0 is the input x", "h0", 1),
        ("h1", "not this one", "h0", 2),
    ]


def test_a_refusal_because_of_the_caller_names_the_match() -> None:
    """The output has no name: the near miss is about the place itself."""
    graph = widened(readers=False)

    def check(self: Rule, m: Match, known: object) -> Verdict:
        return No("the caller reads it", m.read_outside("product")[0])

    log = Log()
    pattern: OpPattern = p.linear("product", x="x", weight="w", scale=maybe("scale"))
    assert not rule(pattern, lambda m, new: None, check=check).apply(graph, facts(), log)
    assert [(m.anchor, m.reason, m.node) for m in log.misses] == [("y", "the caller reads it", "y")]


def test_who_watches_sees_every_match_and_what_took_its_place() -> None:
    seen: list[tuple[str, list[str]]] = []

    def watch(made_up: Any, match: Match) -> Callable[[list[Any]], None]:
        names = [name_of(n) for n in match.replaced]
        return lambda made: seen.append((made_up.name, names + [name_of(n) for n in made]))

    graph = quantized()
    rule(NORM_QUANT, fuse).apply(graph, facts(), Log(watch=watch))
    assert seen == [("made_up", ["a.norm", "b.w.x", "b.w.x"])]
