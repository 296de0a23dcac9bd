"""A rule that is broken on purpose is caught: by a type, by the verifier, or by running both sides.

Every rule is broken in every way that its nodes allow: two operands of one type exchanged, an
optional one dropped, an attribute changed, two results exchanged. The pass then runs with `verify`
over the smallest graph that the rule matches, and must fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from graphs import Net, Place, all_places, facts, op_names
from torch.fx import Node

from rewright.ir.errors import Refused
from rewright.ir.graph import Graph, type_of_value
from rewright.ir.op import Op
from rewright.passes import fuse_swiglu_quant, sweep, unify_layout
from rewright.passes.canonicalize import IdentityReshape
from rewright.passes.eliminate_quant import RequantizeOfDequantize
from rewright.passes.manager import PassFailed, PassOptions, run_passes
from rewright.passes.match import Result
from rewright.passes.pipelines import PIPELINE
from rewright.passes.region import RegionCheck, require_equal
from rewright.passes.rule import Log, Ok, Rewriter, Rule, Transform


@dataclass(frozen=True)
class Made:
    """One call of a rewriter."""

    op: Op
    operands: Mapping[str, Node | None]
    attrs: Mapping[str, Any]
    gives: Sequence[Result | None]


Mutation = tuple[str, Made]


def mutations(made: Made) -> Iterator[Mutation]:
    """Every way to get one thing wrong, with its name."""
    present = {n: v for n, v in made.operands.items() if v is not None}
    for (a, x), (b, y) in itertools.combinations(present.items(), 2):
        if x is not y and type_of_value(x) == type_of_value(y):
            yield f"{a} for {b}", Made(made.op, {**made.operands, a: y, b: x}, made.attrs, made.gives)
    for name in present.keys() & made.op.optional:
        yield f"no {name}", Made(made.op, {**made.operands, name: None}, made.attrs, made.gives)
    for name, value in made.attrs.items():
        for other in (o for o in others(value) if o != value):
            changed = {**made.attrs, name: other}
            yield f"{name} {value} as {other}", Made(made.op, made.operands, changed, made.gives)
    for i, j in itertools.combinations(range(len(made.gives)), 2):
        first, second = made.gives[i], made.gives[j]
        if first and second and same_type(first, second):
            gives = list(made.gives)
            gives[i], gives[j] = second, first
            yield f"result {i} for {j}", Made(made.op, made.operands, made.attrs, gives)


def same_type(a: Result, b: Result) -> bool:
    return a.node.meta["types"][a.index] == b.node.meta["types"][b.index]


def others(value: Any) -> list[Any]:
    """Wrong values of an attribute."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 10]
    if isinstance(value, int):
        return [value * 2, value + 1]
    if isinstance(value, list):
        return [[*value[:-1], value[-1] // 2], value[::-1]]
    if isinstance(value, str) and "," in value:
        return [",".join(value.split(",")[::-1])]
    swaps = ("e4m3", "e2m1"), ("bf16", "f32"), ("f32", "bf16"), ("e2m1", "e4m3")
    return [new for old, new in swaps if value == old]


NEUTRAL = {
    ("hc_head", "n"),  # read only where a row is taken from the streams
    ("pre_norm", "block"),  # where nothing is quantised
    ("hc_post_pre", "block"),
    ("norm_quant", "x for residual"),
}
"""By rule: changes that change no result. The first is the attribute, or the whole mutation."""

FORWARDING = {"identity_reshape", "requantize", "round_trip"}
"""Rules that make no node: a value that exists takes a result's place."""


def run(place: Place) -> Graph:
    pass_ = next(p for p in PIPELINE if place.rule in p.rules)
    graph = place.graph.copy()
    graph.stage = pass_.stage
    options = PassOptions((pass_.name,), to=pass_.stage, verify=True)
    return run_passes(graph, place.facts, options).graph


def recorded(place: Place, patch: pytest.MonkeyPatch) -> list[Made]:
    """What the rule makes when nothing is broken."""
    calls: list[Made] = []
    original = Rewriter.__call__

    def call(self: Rewriter, op: Op, operands: Any, attrs: Any, *, gives: Any, names: Any = ()) -> Any:
        if self.rule == place.rule.name:
            calls.append(Made(op, operands, attrs, gives))
        return original(self, op, operands, attrs, gives=gives, names=names)

    with patch.context() as patched:
        patched.setattr(Rewriter, "__call__", call)
        run(place)
    return calls


def survives(place: Place, at: int, mutation: str, patch: pytest.MonkeyPatch) -> bool:
    """Whether the pass ends well although the node that the rule makes `at` last is broken."""
    original, made = Rewriter.__call__, itertools.count()

    def call(self: Rewriter, op: Op, operands: Any, attrs: Any, *, gives: Any, names: Any = ()) -> Any:
        if self.rule == place.rule.name and next(made) == at:
            broken = dict(mutations(Made(op, operands, attrs, gives)))[mutation]
            operands, attrs, gives = broken.operands, broken.attrs, broken.gives
        return original(self, op, operands, attrs, gives=gives, names=names)

    with patch.context() as patched:
        patched.setattr(Rewriter, "__call__", call)
        try:
            run(place)
        except PassFailed:
            return False
    return True


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[Transform, list[Place]]:
    """One place of a rule for every list of ops that it matches."""
    found: dict[Transform, dict[tuple[str, ...], Place]] = {}
    for place in all_places(tmp_path_factory.mktemp("models")):
        found.setdefault(place.rule, {}).setdefault(tuple(op_names(place.graph)), place)
    return {rule: list(places.values()) for rule, places in found.items()}


MAKING = {
    f"{p.name}/{r.name}#{i}": r
    for p in PIPELINE
    if p.name != "static_scales"  # test_static_scales.py compares what readers of its codes see
    for i, r in enumerate(p.rules)
    if isinstance(r, Rule) and r.name not in FORWARDING
}


@pytest.mark.parametrize("rule", MAKING.values(), ids=MAKING)
def test_every_broken_rewrite_is_caught(
    rule: Rule, places: dict[Transform, list[Place]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, survived = 0, set()
    for place in places[rule]:
        for at, made in enumerate(recorded(place, monkeypatch)):
            for name, _ in mutations(made):
                tried += 1
                if survives(place, at, name, monkeypatch):
                    survived.add((rule.name, name))
    assert tried > 0
    wrong = {(r, m) for r, m in survived if (r, m) not in NEUTRAL and (r, m.split()[0]) not in NEUTRAL}
    assert wrong == set()


# -- what makes no node -----------------------------------------------------------------------


def failure(graph: Graph, name: str, numerics: str = "faithful") -> str:
    with pytest.raises(PassFailed) as caught:
        run_passes(graph, facts(numerics), PassOptions.of(only=name, verify=True))
    return str(caught.value.error)


def test_a_reshape_taken_for_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdentityReshape, "check", lambda self, m, known: Ok())
    net = Net()
    x = net.input("x", "bf16[1,2,64]")
    graph = net.graph(y=net.hadamard("y", net.reshape("split", x, tail=[2, 32])))
    assert "y: typed bf16[1,2,2,32], inferred bf16[1,2,64]" in failure(graph, "canonicalize")


@pytest.mark.parametrize("second", [{"fmt": "e2m1"}, {"block": 32}, {"dims": [0, 64]}])
def test_another_quantisation_taken_for_the_same(
    monkeypatch: pytest.MonkeyPatch, second: dict[str, Any]
) -> None:
    monkeypatch.setattr(RequantizeOfDequantize, "check", lambda self, m, known: Ok())
    net = Net()
    kind = {"fmt": "e4m3", "block": 64}
    codes, scale = net.quantize("q", net.input("x", "bf16[1,2,128]"), **kind)
    back = net.dequantize("back", codes, scale, block=64, out="bf16")
    codes, scale = net.quantize("again", back, **{**kind, **second})
    assert "it was" in failure(net.graph(codes=codes, scale=scale), "eliminate_quant")


def test_results_of_a_duplicate_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(graph: Graph, old: Node, new: Node, index: int) -> None:
        for item in [u for u in old.users if u.args[1] == index]:
            graph.redirect(item, graph.result(new, 1 - index))

    monkeypatch.setattr(sweep, "_redirect", exchanged)
    net = Net()
    x = net.input("x", "bf16[1,2,64]")
    backs = []
    for i in range(2):
        codes, scale = net.quantize(f"q{i}", x, fmt="e4m3", block=64)
        out = net.dequantize(f"back{i}", codes, scale, block=64, out=("bf16", "f32")[i])
        backs.append(net.hadamard(f"y{i}", out))
    message = failure(net.graph(a=backs[0], b=backs[1]), "eliminate_quant")
    assert "back1: dequantize cannot take its operands" in message


def test_a_live_node_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "all", lambda found: True, raising=False)
    net = Net()
    x = net.input("x", "bf16[1,2,64]")
    graph = net.graph(y=net.hadamard("y", x))
    assert failure(graph, "canonicalize") == "y is erased while the output reads it"


def test_a_wrong_pitch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unify_layout, "padded", lambda type: type.with_pitch(96))
    net = Net("layout")
    x = net.input("x", "bf16[1,2,32]")
    graph = net.graph(y=net.hadamard("y", net.hadamard("h", x)))
    assert "the pitch is no multiple of 128 that holds a row" in failure(graph, "unify_layout")


# -- the comparison itself --------------------------------------------------------------------


def two_activations() -> Graph:
    net = Net()
    sides = net.inputs("bf16[1,2,64]", "a", "b", "c", "d")
    results = {}
    for i in range(2):
        hidden = net.swiglu(f"hidden{i}", *sides[2 * i : 2 * i + 2], limit=2.0)
        results[f"codes{i}"], results[f"scale{i}"] = net.quantize(f"q{i}", hidden, fmt="e4m3", block=64)
    return net.graph(**results)


def test_equal_places_are_compared_once_and_a_different_rewrite_of_one_is_not_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = RegionCheck()
    log = Log(watch=check.watch)
    (swiglu_quant,) = fuse_swiglu_quant.PASS.rules
    assert swiglu_quant.apply(two_activations(), facts(), log)
    assert (log.matches, check.checked) == (2, 1)
    place = Place(swiglu_quant, two_activations(), facts())
    assert not survives(place, 1, "gate for up", monkeypatch)


def norms(*names: str, eps: float = 1e-6) -> Graph:
    net = Net()
    x, y = net.inputs("bf16[1,2,64]", "x", "y")
    w, v = net.input("w", "bf16[64]"), net.input("v", "bf16[64]")
    operands = {"x": x, "y": y, "w": w, "v": v}
    return net.graph(out=net.rms_norm("out", *(operands[n] for n in names), eps=eps))


def test_what_a_comparison_of_regions_says() -> None:
    require_equal(norms("x", "w"), norms("x", "w"), "rule")
    with pytest.raises(Refused, match="rule rule changes out: by up to"):
        require_equal(norms("x", "w"), norms("y", "w"), "rule")
    with pytest.raises(Refused, match=r"rule rule changes what is computed: .*1 x rms_norm") as caught:
        require_equal(norms("x", "w"), norms("x", "w", eps=1e-5), "rule")
    assert caught.value.exit_code == 5
    whole, less = two_activations(), two_activations()
    less.output.meta["results"] = ("codes0", "scale0", "other", "scale1")
    with pytest.raises(Refused, match="rule rule no longer gives codes1"):
        require_equal(whole, less, "rule")
    net = Net()
    normed = net.rms_norm("out", net.input("z", "bf16[1,2,64]"), net.input("w", "bf16[64]"), eps=1e-6)
    with pytest.raises(Refused, match="rule rule reads z, which it did not before"):
        require_equal(norms("x", "w"), net.graph(out=normed), "rule")
