"""The matcher finds what a pattern describes, nothing else, and says what stood in its way."""

from __future__ import annotations

import pytest
from graphs import Net, insert_lines
from torch.fx import Node

from rewright.ir.errors import CompilerBug
from rewright.ir.graph import Graph, name_of, producer_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.passes.match import Match, Matcher, Miss, anchors
from rewright.passes.pattern import OpPattern, either, maybe, p

X = "bf16[1,2,64]"
EPS = {"eps": 1e-6}
E4M3 = {"fmt": "e4m3", "block": 64}


def at(graph: Graph, name: str, *roots: OpPattern, **limits: tuple[str, ...]) -> Match | Miss:
    return Matcher(graph, roots, **limits).at(producer_of(graph.value(name)))


def found(graph: Graph, name: str, *roots: OpPattern, **limits: tuple[str, ...]) -> Match:
    match = at(graph, name, *roots, **limits)
    assert isinstance(match, Match), match
    return match


def refused(graph: Graph, name: str, *roots: OpPattern, **limits: tuple[str, ...]) -> Miss:
    miss = at(graph, name, *roots, **limits)
    assert isinstance(miss, Miss)
    return miss


def bound(match: Match) -> dict[str, str | None]:
    return {name: None if value is None else name_of(value) for name, value in match.values.items()}


def labels(match: Match) -> dict[str, str]:
    return {label: name_of(node) for label, node in match.nodes.items()}


def test_operands_are_told_apart_by_name_whatever_the_order_of_the_pattern() -> None:
    net = Net()
    x, y = net.inputs(X, "left", "right")
    graph = net.graph(sum=net.add("sum", x, y))
    assert bound(found(graph, "sum", p.add("sum", y="second", x="first"))) == {
        "first": "left", "second": "right",
    }  # fmt: skip


def test_a_pattern_on_one_side_does_not_match_the_other() -> None:
    """Operand order counts: the matcher does not know that a sum commutes."""
    net = Net()
    x, y = net.inputs(X, "x", "y")
    graph = net.graph(a=net.add("a", net.hadamard("h", x), y), b=net.add("b", y, net.hadamard("g", x)))
    left = p.add("sum", x=p.hadamard("turn", x="x"), y="y")
    assert labels(found(graph, "a", left)) == {"sum": "a", "turn": "h"}
    assert refused(graph, "b", left).reason == "x of b is the input y"


def test_one_variable_is_one_value() -> None:
    net = Net()
    x, y = net.inputs(X, "x", "y")
    graph = net.graph(twice=net.add("twice", x, x), sum=net.add("sum", x, y))
    same = p.add("sum", x="x", y="x")
    assert bound(found(graph, "twice", same)) == {"x": "x"}
    miss = refused(graph, "sum", same)
    assert (miss.reason, miss.node) == ("y of sum is y, elsewhere x is x", "sum")


def test_one_label_is_one_node_and_two_labels_are_two() -> None:
    turn = p.hadamard("turn", x="x")
    same, other = p.add("sum", x=turn, y=turn), p.add("sum", x=turn, y=p.hadamard("again", x="x"))
    one, two = sum_of("h", "h"), sum_of("h", "g")
    assert labels(found(one, "sum", same)) == {"sum": "sum", "turn": "h"}
    assert refused(one, "sum", other).reason == "h is matched already"
    assert labels(found(two, "sum", other)) == {"sum": "sum", "turn": "h", "again": "g"}
    assert refused(two, "sum", same).reason == "g and h are two nodes"


def sum_of(*names: str) -> Graph:
    net = Net()
    (x,) = net.inputs(X, "x")
    turned = {name: net.hadamard(name, x) for name in dict.fromkeys(names)}
    return net.graph(sum=net.add("sum", *(turned[name] for name in names)))


def swiglu(weights: bool) -> Graph:
    net = Net()
    gate, up = net.inputs(X, "gate", "up")
    extra = [net.input("weights", "f32[1,2]")] if weights else []
    return net.graph(y=net.swiglu("y", gate, up, *extra, limit=10.0))


@pytest.mark.parametrize("present", [True, False])
def test_optional_operands(present: bool) -> None:
    """Named, it must be there; `maybe` takes both; not mentioned, it must be absent."""
    graph, sides = swiglu(present), {"gate": "gate", "up": "up"}
    match = found(graph, "y", p.swiglu("act", **sides, weights=maybe("w")))
    assert bound(match)["w"] == ("weights" if present else None)
    assert match["w"] is (graph.value("weights") if present else None)
    named, absent = p.swiglu("act", **sides, weights="w"), p.swiglu("act", **sides)
    if present:
        found(graph, "y", named)
        assert refused(graph, "y", absent).reason == "operand weights of y is present"
    else:
        found(graph, "y", absent)
        assert refused(graph, "y", named).reason == "operand weights of y is absent"
        with pytest.raises(CompilerBug, match="w is absent"):
            match.value("w")


def test_an_absent_operand_is_no_value_of_a_variable_that_has_one() -> None:
    net = Net()
    gate, up, weights = (*net.inputs(X, "gate", "up"), net.input("weights", "f32[1,2]"))
    first = net.swiglu("first", gate, up, weights, limit=10.0)
    graph = net.graph(y=net.swiglu("y", first, up, limit=10.0))
    inner = p.swiglu("inner", gate="gate", up="up", weights=maybe("w"))
    pattern = p.swiglu("outer", gate=inner, up="up", weights=maybe("w"))
    assert refused(graph, "y", pattern).reason == "weights of y is absent, elsewhere w is weights"


def test_results_are_told_apart_by_their_index() -> None:
    net = Net()
    (x,) = net.inputs(X, "x")
    codes, scale = net.quantize("q", x, **E4M3)
    graph = net.graph(y=net.dequantize("y", codes, scale, block=64, out="bf16"))
    quant = p.quantize("quant", x="x")
    found(graph, "y", p.dequantize("back", codes=quant, scale=quant[1]))
    found(graph, "y", p.dequantize("back", codes=quant[0], scale=quant[1]))
    miss = refused(graph, "y", p.dequantize("back", codes=quant[1], scale=quant[1]))
    assert (miss.reason, miss.node) == ("codes of y is another result of quantize", "q")


def test_alternatives_are_tried_in_order() -> None:
    net = Net()
    (x,) = net.inputs(X, "x")
    w = net.weight("w", "bf16[64]")
    deep = net.rms_norm("deep", net.hadamard("h", x), w, **EPS)
    graph = net.graph(deep=deep, flat=net.rms_norm("flat", x, w, **EPS))
    pattern = p.rms_norm("norm", x=either(p.hadamard("turn", x="x"), "x"), weight="w")
    assert labels(found(graph, "deep", pattern)) == {"norm": "deep", "turn": "h"}
    assert labels(found(graph, "flat", pattern)) == {"norm": "flat"}
    reversed_ = p.rms_norm("norm", x=either("x", p.hadamard("turn", x="x")), weight="w")
    assert bound(found(graph, "deep", reversed_)) == {"x": "h", "w": "w"}


def test_a_later_alternative_stands_in_where_the_first_is_read_elsewhere() -> None:
    net = Net()
    (x,) = net.inputs(X, "x")
    h = net.hadamard("h", x)
    graph = net.graph(h=h, y=net.rms_norm("y", h, net.weight("w", "bf16[64]"), **EPS))
    pattern = p.rms_norm("norm", x=either(p.hadamard("turn", x="x"), "x"), weight="w")
    match = found(graph, "y", pattern)
    assert labels(match) == {"norm": "y"}
    assert bound(match) == {"x": "h", "w": "w"}


def chain(*, second: str = "", output: bool = False) -> Graph:
    """norm -> quantize -> dequantize, the norm read by another op or by the caller too."""
    net = Net()
    (x,) = net.inputs(X, "x")
    norm = net.rms_norm("norm", x, net.weight("w", "bf16[64]"), **EPS)
    codes, scale = net.quantize("q", norm, **E4M3)
    results = {"y": net.dequantize("y", codes, scale, block=64, out="bf16")}
    results |= {second: net.hadamard(second, norm)} if second else {}
    results |= {"norm": norm} if output else {}
    return net.graph(**results)


QUANT = p.quantize("quant", x=p.rms_norm("norm", x="x", weight="w"))


def test_an_interior_value_with_a_second_reader() -> None:
    found(chain(), "q", QUANT)
    miss = refused(chain(second="other"), "q", QUANT)
    assert miss == Miss("q", "norm is also read by other", "other", 2)
    match = found(chain(second="other"), "q", QUANT, yields=("norm",))
    assert [name_of(n) for n in match.read_outside("norm")] == ["other"]


def test_an_interior_value_that_the_caller_wants() -> None:
    miss = refused(chain(output=True), "q", QUANT)
    assert miss == Miss("q", "norm is a result of the graph", "norm", 2)
    found(chain(output=True), "q", QUANT, yields=("norm",))


def test_one_result_of_several_with_a_second_reader() -> None:
    """The scale is read outside, the codes are not."""
    net = Net()
    (x,) = net.inputs(X, "x")
    codes, scale = net.quantize("q", x, **E4M3)
    graph = net.graph(y=net.dequantize("y", codes, scale, block=64, out="bf16"), scale=scale)
    quant = p.quantize("quant", x="x")
    back = p.dequantize("back", codes=quant, scale=quant[1])
    assert refused(graph, "y", back).reason == "q.scale is a result of the graph"
    match = found(graph, "y", back, yields=("quant",))
    assert [match.read_outside("quant", i) != [] for i in range(2)] == [False, True]


def test_a_result_that_nobody_reads_is_no_obstacle() -> None:
    net = Net()
    (x,) = net.inputs(X, "x")
    codes, _ = net.quantize("q", net.rms_norm("norm", x, net.weight("w", "bf16[64]"), **EPS), **E4M3)
    assert [r.name for r in found(net.graph(codes=codes), "q", QUANT).results("quant")] == ["q", "q.scale"]


def test_what_is_kept_may_have_any_readers_and_is_not_replaced() -> None:
    match = found(chain(second="other"), "q", QUANT, keeps=("norm",))
    assert [name_of(n) for n in match.replaced] == ["q"]
    assert labels(match) == {"quant": "q", "norm": "norm"}
    assert "norm" in match
    assert "sum" not in match
    assert match.attrs("norm") == EPS
    assert match.attrs("sum") == {}


def pair(*, across: bool) -> Graph:
    """Two readers of one norm; the second reads the first through another op if `across`."""
    net = Net()
    (x,) = net.inputs(X, "x")
    norm = net.rms_norm("norm", x, net.weight("w", "bf16[64]"), **EPS)
    first = net.hadamard("first", norm)
    between = net.hadamard("between", first) if across else norm
    return net.graph(first=first, y=net.add("y", norm, between))


def test_several_roots_share_their_values() -> None:
    norm = p.rms_norm("norm", x="x", weight="w")
    roots = p.hadamard("turn", x=norm), p.add("sum", x=norm, y="y")
    assert labels(found(pair(across=False), "first", *roots)) == {
        "turn": "first", "norm": "norm", "sum": "y",
    }  # fmt: skip


def test_a_further_root_that_is_missing() -> None:
    roots = p.hadamard("turn", x=p.rms_norm("norm", x="x", weight="w")), p.swiglu("act", gate="x", up="x")
    miss = refused(pair(across=False), "first", *roots)
    assert miss.reason == "no swiglu reads what belongs to first"


def test_the_further_root_is_the_reader_that_fits() -> None:
    """Of two sums of the norm only one has the right second operand."""
    net = Net()
    x, y = net.inputs(X, "x", "y")
    turned = net.hadamard("turned", x)
    wrong, right = net.add("wrong", turned, y), net.add("right", turned, x)
    roots = p.hadamard("turn", x="x"), p.add("sum", x=p.hadamard("turn", x="x"), y="x")
    graph = net.graph(wrong=wrong, right=right)
    assert labels(found(graph, "turned", *roots, yields=("turn",))) == {"turn": "turned", "sum": "right"}
    assert refused(graph, "turned", *roots).reason == "turned is also read by wrong"


def test_a_match_that_something_outside_leaves_and_enters_is_refused() -> None:
    norm = p.rms_norm("norm", x="x", weight="w")
    roots = p.hadamard("turn", x=norm), p.add("sum", x=norm, y="y")
    miss = refused(pair(across=True), "first", *roots)
    assert miss == Miss("first", "between lies between nodes that would become one", "between", 3)


def test_a_long_way_around_is_found_too() -> None:
    """Through an op with several results, and past nodes that have nothing to do with it."""
    net = Net()
    x, other = net.inputs(X, "x", "other")
    first = net.hadamard("first", x)
    aside = net.hadamard("aside", other)
    codes, scale = net.quantize("q", first, **E4M3)
    back = net.dequantize("back", codes, scale, block=64, out="bf16")
    second = net.add("second", x, back)
    graph = net.graph(first=first, second=second, aside=aside)
    roots = p.hadamard("turn", x="x"), p.add("sum", x="x", y="y")
    assert refused(graph, "first", *roots).reason == "q lies between nodes that would become one"


def test_nodes_between_that_only_read_or_only_feed_are_no_obstacle() -> None:
    net = Net()
    x, other = net.inputs(X, "x", "other")
    first = net.hadamard("first", x)
    reader = net.hadamard("reader", first)
    feeder = net.hadamard("feeder", other)
    graph = net.graph(first=first, reader=reader, second=net.add("second", x, feeder))
    found(graph, "first", p.hadamard("turn", x="x"), p.add("sum", x="x", y="y"))


def test_the_deepest_attempt_is_told() -> None:
    """Of several alternatives the one that got furthest, with the node it failed at."""
    net = Net()
    (x,) = net.inputs(X, "x")
    w = net.weight("w", "bf16[64]")
    total = net.add("total", net.rms_norm("norm", x, w, **EPS), x)
    graph = net.graph(y=net.hadamard("y", total))
    deep = p.add("sum", x=p.rms_norm("norm", x=p.hadamard("inner", x="x"), weight="w"), y="x")
    pattern = p.hadamard("turn", x=either(p.swiglu("act", gate="x", up="x"), deep))
    assert refused(graph, "y", pattern) == Miss("y", "x of norm is the input x", "norm", 3)


def test_a_whole_match_got_further_than_a_part_of_another() -> None:
    """Both alternatives end after two nodes; that the second fitted but for its readers says more."""
    net = Net()
    gate, up, weights = (*net.inputs(X, "gate", "up"), net.input("weights", "f32[1,2]"))
    turned = net.hadamard("turned", gate)
    graph = net.graph(turned=turned, y=net.swiglu("y", turned, up, weights, limit=10.0))
    turn = p.hadamard("turn", x="x")
    wrong = p.swiglu("act", gate=turn, up="x", weights="w")
    right = p.swiglu("act", gate=turn, up="up", weights="w")
    outer = p.hadamard("outer", x=either(wrong, right))
    graph = outer_of(graph)
    assert refused(graph, "outer", outer).reason == "turned is a result of the graph"


def outer_of(graph: Graph) -> Graph:
    """The graph with one op more, on its result y."""
    text = print_graph(graph).replace("return y = %y", "return outer = %outer")
    line = "  %outer : bf16[1,2,64] = hadamard(%y)"
    return parse(insert_lines(text, "%y : ", [line]))


def test_leaves_are_no_ops() -> None:
    net = Net()
    state = net.state("ring", "bf16[1,8,64]")
    w = net.weight("w", "bf16[64]")
    graph = net.graph(s=net.hadamard("s", state), w=net.hadamard("t", w))
    pattern = p.hadamard("outer", x=p.hadamard("inner", x="x"))
    assert refused(graph, "s", pattern).reason == "x of s is the state ring"
    assert refused(graph, "t", pattern).reason == "x of t is the weight w"


def test_matches_may_overlap_and_come_in_the_order_of_nodes() -> None:
    """Three equal ops in a row are two overlapping pairs: each is offered, in graph order."""
    net = Net()
    (x,) = net.inputs(X, "x")
    a = net.hadamard("a", x)
    b = net.hadamard("b", a)
    graph = net.graph(c=net.hadamard("c", b))
    pattern = p.hadamard("outer", x=p.hadamard("inner", x="x"))
    matcher = Matcher(graph, (pattern,))
    nodes: list[Node] = anchors(graph, "hadamard")
    assert [name_of(n) for n in nodes] == ["a", "b", "c"]
    outcomes = [matcher.at(node) for node in nodes]
    assert isinstance(outcomes[0], Miss)
    pairs = [sorted(labels(m).values()) for m in outcomes[1:] if isinstance(m, Match)]
    assert pairs == [["a", "b"], ["b", "c"]]


def test_the_same_graph_gives_the_same_matches() -> None:
    """Of several readers that fit, the first in the graph is taken, every time."""
    net = Net()
    x, y = net.inputs(X, "x", "y")
    turned = net.hadamard("turned", x)
    sums = {name: net.add(name, turned, y) for name in ("s2", "s0", "s1")}
    graph = net.graph(**sums)
    roots = p.hadamard("turn", x="x"), p.add("sum", x=p.hadamard("turn", x="x"), y="y")
    for copy in (graph, graph.copy(), graph.copy()):
        assert labels(found(copy, "turned", *roots, yields=("turn",)))["sum"] == "s2"


def test_a_pattern_that_makes_no_sense_is_a_bug() -> None:
    graph = sum_of("h", "g")
    with pytest.raises(CompilerBug, match="pattern of add names \\['z'\\], which it does not have"):
        at(graph, "sum", p.add("sum", x="x", y="y", z="z"))
    with pytest.raises(CompilerBug, match="there is no op subtract"):
        anchors(graph, "subtract")
