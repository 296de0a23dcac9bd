"""Runs the passes over a graph: in order, verified, counted, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from rewright.ir.derived import DerivedWeight
from rewright.ir.errors import BadInput, CompilerBug, Refused, RewrightError, UsageError, VerifyError
from rewright.ir.graph import STAGES, Graph, kind_of, operands_of, type_of_value, updated_state
from rewright.ir.op import op_of
from rewright.ir.traffic import node_cost
from rewright.ir.types import ValueType
from rewright.ir.verify import find_problems
from rewright.passes.base import Pass
from rewright.passes.facts import Facts
from rewright.passes.match import Miss
from rewright.passes.pipelines import LAST_STAGE, PIPELINE, REACHABLE, expected_matches, pass_names
from rewright.passes.region import RegionCheck
from rewright.passes.report import PassReport, Report, RuleReport, Size
from rewright.passes.reproducer import Reproducer
from rewright.passes.rule import Log, Transform

MOST_ROUNDS = 64
"""Rounds after which rules that still find something are taken to chase each other."""


@dataclass(frozen=True)
class PassOptions:
    """Which passes run, and how.

    Attributes:
        passes: names of the passes that run; their order is that of the pipeline.
        to: last stage that is made.
        verify: whether every rewritten region is run before and after.
        done: names of passes that the graph went through before, for a run that begins in the middle.
    """

    passes: tuple[str, ...] = field(default_factory=pass_names)
    to: str = LAST_STAGE
    verify: bool = False
    done: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        only: str | None = None,
        without: tuple[str, ...] = (),
        to: str = LAST_STAGE,
        verify: bool = False,
    ) -> PassOptions:
        """Checked options; `UsageError` names a pass or stage that does not exist.

        Args:
            only: names of the passes that run, separated by commas; all by default.
            without: names of passes that do not run.
            to: last stage that is made.
            verify: whether every rewritten region is run before and after.
        """
        chosen = pass_names() if only is None else tuple(n.strip() for n in only.split(",") if n.strip())
        for name in (*chosen, *without):
            if name not in pass_names():
                raise UsageError(f"there is no pass {name}", fix=f"passes: {', '.join(pass_names())}")
        if to not in REACHABLE:
            raise UsageError(f"passes make no stage {to}", fix=f"stages: {', '.join(REACHABLE)}")
        for p in PIPELINE:
            if only is not None and p.name in chosen and REACHABLE.index(p.stage) > REACHABLE.index(to):
                raise UsageError(f"pass {p.name} does not run before stage {p.stage}, the graph ends at {to}")
        return cls(tuple(n for n in pass_names() if n in chosen and n not in without), to, verify)


class PassFailed(Refused):
    """A pass found too little, broke the graph, or failed.

    Attributes:
        reproducer: what `rewright reproduce` runs again.
    """

    def __init__(self, error: Exception, reproducer: Reproducer):
        self.error, self.reproducer = error, reproducer
        self.exit_code = error.exit_code if isinstance(error, RewrightError) else CompilerBug.exit_code
        self.name = reproducer.passes[0]
        Exception.__init__(self, f"pass {self.name}: {error}")

    def told(self, fix: str) -> PassFailed:
        """The same error with what can be done about it."""
        told = PassFailed(self.error, self.reproducer)
        Exception.__init__(told, f"{self}\n  -> {fix}")
        return told


class MissingMatch(Refused):
    """A rule matched less often than the model says it must."""


@dataclass(frozen=True)
class Rewritten:
    """A graph that went through the passes.

    Attributes:
        graph: the graph at the last stage asked for.
        report: what each pass did.
        derived: weights that the compiler has to compute, by name.
    """

    graph: Graph
    report: Report
    derived: Mapping[str, DerivedWeight]


def run_passes(
    graph: Graph,
    facts: Facts,
    options: PassOptions | None = None,
    *,
    observe: Callable[[str, str, Graph], None] | None = None,
) -> Rewritten:
    """Rewrite a copy of a traced graph.

    Args:
        graph: the graph, at stage `traced`; at a later one it goes on with that stage's passes.
        facts: what the passes may know of the model.
        options: which passes run; all by default.
        observe: called with stage, pass and graph after each pass, and with an empty pass name when a
            stage is done.

    Raises:
        PassFailed: a pass that failed, in whatever way, with a reproducer.
    """
    options = options or PassOptions()
    run = _Run(graph, facts, options, observe or (lambda stage, name, graph: None))
    run.run()
    report = Report(graph.name, dict(graph.attrs), tuple(run.reports))
    return Rewritten(run.graph, report, run.derived)


def rerun(reproducer: Reproducer) -> Rewritten:
    """Run the passes of a reproducer over its graph; raises what they raise."""
    graph = reproducer.graph()
    unknown = [name for name in reproducer.passes if name not in pass_names()]
    if unknown or not reproducer.passes:
        raise BadInput(f"no passes of this Rewright: {unknown}", where="the reproducer")
    options = PassOptions(reproducer.passes, verify=reproducer.verify, done=reproducer.done)
    return run_passes(graph, reproducer.facts, options)


class _Run:
    def __init__(
        self, graph: Graph, facts: Facts, options: PassOptions, observe: Callable[[str, str, Graph], None]
    ):
        self._given = graph, facts
        self.graph, self.facts, self.options, self.observe = graph.copy(), facts, options, observe
        self.derived: dict[str, DerivedWeight] = {}
        self.reports: list[PassReport] = []
        self._trusted: dict[Node, object] = {}
        self._costs: dict[Node, tuple[int, int, int]] = {}
        self._size = self._measure()
        self._types = _result_types(graph)
        self._check = RegionCheck() if options.verify else None

    def run(self, until: Pass | None = None) -> None:
        """Run every stage up to the last one asked for, or up to a pass."""
        first = STAGES.index(self.graph.stage)
        for stage in STAGES[first : STAGES.index(self.options.to) + 1]:
            self.graph.stage = stage
            for pass_ in (p for p in PIPELINE if p.stage == stage):
                if pass_ is until:
                    return
                self._execute(pass_)
            self.observe(stage, "", self.graph)

    def _execute(self, pass_: Pass) -> None:
        """Run one pass, or note that it is off."""
        before = self._size
        if pass_.name not in self.options.passes:
            self.reports.append(PassReport(pass_.name, pass_.stage, False, (), before, before))
            return
        try:
            begin = time.perf_counter()
            rules = self._rewrite(pass_)
            middle = time.perf_counter()
            self._verify(pass_)
            self._size = self._measure()
            end = time.perf_counter()
            self.reports.append(
                PassReport(
                    pass_.name, pass_.stage, True, rules, before, self._size, middle - begin, end - middle
                )
            )
            self._require_matches(pass_, rules)
        except Exception as e:
            raise PassFailed(e, self._reproducer(pass_)) from e
        self.observe(pass_.stage, pass_.name, self.graph)

    def _reproducer(self, failed: Pass) -> Reproducer:
        """The graph as it was before a pass: the passes before it, once more."""
        graph, facts = self._given
        at = pass_names().index(failed.name)
        earlier = tuple(n for n in self.options.passes if pass_names().index(n) < at)
        again = _Run(graph, facts, PassOptions(earlier, failed.stage), lambda stage, name, graph: None)
        again.run(until=failed)
        remaining = self.options.passes[len(earlier) :]
        done = (*self.options.done, *earlier)
        return Reproducer.of(again.graph, again.facts, remaining, done, self.options.verify)

    def _rewrite(self, pass_: Pass) -> tuple[RuleReport, ...]:
        watch = self._check.watch if self._check else None
        logs = {rule: Log(watch=watch) for rule in pass_.rules}
        for _ in range(MOST_ROUNDS):
            changed = False
            for rule, log in logs.items():
                log.misses.clear()  # what the last round still finds is what is left
                changed |= rule.apply(self.graph, self.facts, log)
                self.derived |= log.derived
            if not changed:
                break
        else:
            raise CompilerBug(f"its rules do not come to an end after {MOST_ROUNDS} rounds")
        if self.derived and self.facts.weights:
            types = {name: d.type for name, d in self.derived.items()}
            self.facts = replace(self.facts, weights={**self.facts.weights, **types})
        return self._report_rules(pass_, logs)

    def _report_rules(self, pass_: Pass, logs: Mapping[Transform, Log]) -> tuple[RuleReport, ...]:
        enabled = (*self.options.done, *self.options.passes)
        expected = expected_matches(pass_, self.facts, self.graph.attrs, enabled) or {}
        matches: dict[str, int] = {}
        misses: dict[str, list[Miss]] = {}
        for rule, log in logs.items():  # several forms of one rule count together
            matches[rule.name] = matches.get(rule.name, 0) + log.matches
            misses.setdefault(rule.name, []).extend(log.misses)
        return tuple(
            RuleReport(name, count, expected.get(name), tuple(_deepest(misses[name])))
            for name, count in matches.items()
        )

    def _verify(self, pass_: Pass) -> None:
        # Types are inferred again where a node or what it reads is another, and of all once a stage.
        last = [p for p in PIPELINE if p.stage == pass_.stage][-1]
        trusted = {} if pass_ is last else self._trusted
        problems = list(find_problems(self.graph, self.facts.weights or None, trusted))
        types = _result_types(self.graph)
        problems += [
            f"result {name} is {types[name]}, it was {type}"
            for name, type in self._types.items()
            if types[name] != type
        ]
        if not problems and pass_.ensures is not None:
            problems = list(pass_.ensures(self.graph))
        if problems:
            raise VerifyError(self.graph.name, problems)
        self._trusted = {node: node.args for node in self.graph.ops}

    @staticmethod
    def _require_matches(pass_: Pass, rules: tuple[RuleReport, ...]) -> None:
        lines = []
        for rule in rules:
            if rule.expected is None or rule.matches >= rule.expected:
                continue
            lines.append(f"rule {rule.name} matched {rule.matches} times, {rule.expected} were expected")
            shown = sorted(rule.misses, key=lambda m: -m.depth)[:8]
            lines += [f"  at {m.anchor}: {m.reason}" for m in shown]
        if lines:
            raise MissingMatch(
                "\n  ".join(["the graph does not have the expected form", *lines]),
                fix=f"compile with --no-pass {pass_.name} (in a graph's name ?no-pass={pass_.name}) "
                "to go on without it",
            )

    def _measure(self) -> Size:
        """Bytes of one step; the costs of nodes that stayed are kept from before."""
        context = self.graph.attrs["capacity"]
        costs: dict[Node, tuple[int, int, int]] = {}
        for node in self.graph.ops:
            costs[node] = self._costs.get(node) or _activation_bytes(node, context)
        self._costs = costs
        read, written, weights = (sum(c[i] for c in costs.values()) for i in range(3))
        return Size(len(costs), read, written, weights)


def _result_types(graph: Graph) -> dict[str, ValueType]:
    return {name: type_of_value(value) for name, value in graph.results.items()}


def _activation_bytes(node: Node, context: int) -> tuple[int, int, int]:
    """(activation bytes read, activation bytes written, weight bytes read) of an op node."""
    cost = node_cost(node, context)
    read = weights = 0
    for name, value in zip(op_of(node.target).operands, operands_of(node), strict=True):
        if value is None:
            continue
        kind = kind_of(value)
        if kind in ("weight", "constant"):
            weights += cost.reads[name]
        elif kind != "state" and updated_state(value) is None:
            read += cost.reads[name]
    states = op_of(node.target).updated(dict(node.kwargs))
    pure = sum(t.nbytes for i, t in enumerate(node.meta["types"]) if i not in states)
    return read, min(pure, cost.writes), weights


def _deepest(misses: list[Miss]) -> list[Miss]:
    """The furthest attempt at each anchor, in the order of anchors."""
    best: dict[str, Miss] = {}
    for miss in misses:
        if miss.anchor not in best or miss.depth > best[miss.anchor].depth:
            best[miss.anchor] = miss
    return list(best.values())


def weight_types_of(graph: Graph) -> dict[str, ValueType]:
    """Types of the weights and constants that a graph reads, by name."""
    return {n.meta["names"][0]: n.meta["types"][0] for n in graph.of_kind("weight", "constant")}
