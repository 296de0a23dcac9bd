"""Every rule of the pipeline, in every form of its pattern, keeps what the graph computes bit by bit.

The places are found, not listed: the graphs of a small model in every variant and numerics, and
graphs written by hand for what such models lack. A rule or a form of one that no place shows fails.
Rules that drop a rounding run on values that the rounding leaves alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from graphs import Net, Place, all_places, differing, facts, results, traced, values

from rewright.frontend.numerics import parse_numerics
from rewright.frontend.source import ModelSource
from rewright.ir.graph import Graph, operands_of
from rewright.ir.op import op_of
from rewright.ir.parser import parse
from rewright.ir.printer import print_graph
from rewright.ir.verify import find_problems
from rewright.passes.fuse_index_query import IndexQuery
from rewright.passes.fuse_shared_input import SharedInput
from rewright.passes.match import Match, Matcher, anchors
from rewright.passes.pattern import Either, OpPattern, Pattern, ResultOf, Var
from rewright.passes.pipelines import PIPELINE
from rewright.passes.rule import Log, Rule, Transform
from rewright.rewriting import facts_of


def rule_id(rule: Transform) -> str:
    """`pass/rule`, and which of several of that name."""
    owner = next(p for p in PIPELINE if rule in p.rules)
    alike = [r for r in owner.rules if r.name == rule.name]
    return f"{owner.name}/{rule.name}" + (f"#{alike.index(rule)}" if len(alike) > 1 else "")


# Codes change with their scales: test_static_scales.py compares what their readers see.
ALL = [rule for pass_ in PIPELINE if pass_.name != "static_scales" for rule in pass_.rules]
RULES = {rule_id(rule): rule for rule in ALL}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[Transform, list[Place]]:
    grouped: dict[Transform, list[Place]] = {rule: [] for rule in ALL}
    for place in all_places(tmp_path_factory.mktemp("models")):
        grouped[place.rule].append(place)
    for rule, graph in sweeps().items():
        grouped[rule] = [Place(rule, graph, facts())]
    return grouped


def sweeps() -> dict[Transform, Graph]:
    """A graph for each transform that has no pattern."""
    made = {
        "canonicalize/dead_nodes": repeated(),
        "canonicalize/merge_duplicates": repeated(),
        "eliminate_quant/merge_quant": repeated(of_one=True),
        "eliminate_quant/dead_nodes": repeated(),
        "unify_layout/pad_rows": repeated(stage="layout"),
    }
    return {RULES[name]: graph for name, graph in made.items()}


def repeated(stage: str = "canonical", *, of_one: bool = False) -> Graph:
    """Everything twice, or only what comes after one norm; some of it read by nobody, a state among it."""
    net = Net(stage)
    x = net.input("x", "bf16[1,1,96]")
    step = net.step()
    ring = net.state("ring", "bf16[1,8,96]")
    w = net.weight("w", "bf16[96]")
    rows = []
    normed = None
    for i in range(2):
        if normed is None or not of_one:
            normed = net.rms_norm(f"norm{i}", x, w, eps=1e-6)
        codes, scale = net.quantize(f"q{i}", normed, fmt="e4m3", block=32)
        rows.append(net.dequantize(f"back{i}", codes, scale, block=32, out="bf16"))
        net.quantize(f"unread{i}", net.reshape(f"split{i}", normed, tail=[3, 32]), fmt="e2m1", block=32)
    net.ring_write("ring.next", ring, rows[0], *step)
    return net.graph(sum=net.add("sum", *rows))


def rewritten(place: Place) -> tuple[Graph, Log]:
    graph, log = place.graph.copy(), Log()
    assert place.rule.apply(graph, place.facts, log)
    assert log.matches > 0
    return graph, log


@every_rule
def test_a_rule_keeps_every_bit(rule: Transform, places: dict[Transform, list[Place]]) -> None:
    assert places[rule], "no graph shows the rule"
    for place in places[rule]:
        graph, log = rewritten(place)
        for seed in range(2):
            given = values(place.graph, seed, exact=not rule.keeps_numerics)
            derived = {n: d.compute(*(given[s] for s in d.sources)) for n, d in log.derived.items()}
            want, got = results(place.graph, given), results(graph, given | derived)
            assert differing(got, want) == [], place.graph.ops


@every_rule
def test_a_rule_leaves_a_sound_graph(rule: Transform, places: dict[Transform, list[Place]]) -> None:
    """Verified, with the same results and states, and read back from its own text."""
    for place in places[rule]:
        graph, _ = rewritten(place)
        graph.stage = "layout"  # any op and any pitch may appear
        assert list(find_problems(graph)) == []
        assert list(graph.results) == list(place.graph.results)
        assert graph.next_state.keys() == place.graph.next_state.keys()
        assert parse(print_graph(graph)) == graph


def concrete(pattern: Pattern) -> Iterator[Pattern]:
    """A pattern with every choice made, in every way."""
    if isinstance(pattern, Either):
        for choice in pattern.choices:
            yield from concrete(choice)
    elif isinstance(pattern, ResultOf):
        yield from (ResultOf(of, pattern.index) for of in concrete(pattern.of) if isinstance(of, OpPattern))
    elif isinstance(pattern, OpPattern):
        names = [name for name, _ in pattern.operands]
        for made in itertools.product(*(list(concrete(operand)) for _, operand in pattern.operands)):
            yield OpPattern(pattern.op, pattern.label, tuple(zip(names, made, strict=True)))
    else:
        yield pattern


def op_patterns(pattern: Pattern) -> Iterator[OpPattern]:
    if isinstance(pattern, ResultOf):
        yield from op_patterns(pattern.of)
    elif isinstance(pattern, OpPattern):
        yield pattern
        for _, operand in pattern.operands:
            yield from op_patterns(operand)


def forms(rule: Rule) -> Iterator[tuple[OpPattern, ...]]:
    """What a rule looks for, one tuple of roots for every way to choose; one label has one form."""
    pattern = rule.pattern()
    roots = (pattern,) if isinstance(pattern, OpPattern) else pattern
    for made in itertools.product(*(list(concrete(root)) for root in roots)):
        by_label: dict[str, OpPattern] = {}
        whole = [inner for root in made for inner in op_patterns(root)]
        if all(by_label.setdefault(o.label, o) == o for o in whole):
            yield tuple(root for root in made if isinstance(root, OpPattern))


def matches(rule: Rule, roots: tuple[OpPattern, ...], graph: Graph) -> list[Match]:
    matcher = Matcher(graph, roots, rule.yields, rule.keeps)
    return [m for n in anchors(graph, roots[0].op) if isinstance(m := matcher.at(n), Match)]


PATTERNED = {name: rule for name, rule in RULES.items() if isinstance(rule, Rule)}
PATTERNED = {name: rule for name, rule in PATTERNED.items() if not isinstance(rule, SharedInput)}


@pytest.mark.parametrize("rule", PATTERNED.values(), ids=PATTERNED)
def test_every_form_of_a_pattern_is_shown(rule: Rule, places: dict[Transform, list[Place]]) -> None:
    """Each alternative matches somewhere, each optional operand is there somewhere and absent elsewhere."""
    seen: dict[str, set[bool]] = {}
    for roots in forms(rule):
        found = [m for place in places[rule] for m in matches(rule, roots, place.graph)]
        if isinstance(rule, IndexQuery) and dims_of(roots):
            assert not found, "a part of an index query is never rounded"
            continue
        assert found, f"no graph has the form {roots}"
        for match in found:
            for pattern in (o for root in roots for o in op_patterns(root)):
                op = op_of(match.nodes[pattern.label].target)
                for name, operand in pattern.operands:
                    if isinstance(operand, Var) and operand.optional and name in op.optional:
                        value = operands_of(match.nodes[pattern.label])[op.operands.index(name)]
                        seen.setdefault(operand.name, set()).add(value is None)
    assert {name for name, kinds in seen.items() if len(kinds) < 2} == set()


def dims_of(roots: tuple[OpPattern, ...]) -> bool:
    """Whether a form rounds a part of the axis: the rest comes from a base."""
    inner = (o for root in roots for o in op_patterns(root))
    return any(o.op == "dequantize" and "base" in dict(o.operands) for o in inner)


@pytest.mark.parametrize(("numerics", "kind"), [("faithful", "decode"), ("bf16", "chunk"), ("fp32", "score")])
def test_a_second_run_changes_nothing(tiny_v4: Path, numerics: str, kind: str) -> None:
    source = ModelSource.open(tiny_v4, parse_numerics(numerics), max_context=1024)
    graph, known = traced(source, kind), facts_of(source)
    for pass_ in PIPELINE:
        graph.stage = pass_.stage
        while sum(rule.apply(graph, known, Log()) for rule in pass_.rules):
            pass
        if pass_.idempotent:
            before = print_graph(graph)
            assert not any(rule.apply(graph, known, Log()) for rule in pass_.rules), pass_.name
            assert print_graph(graph) == before, pass_.name
    assert len(graph.ops) < 100
