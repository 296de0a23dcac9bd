"""A rewrite rule: pattern, check, rewrite.

A rule replaces the ops that its pattern matches by new ones. It states what the new nodes are and
which old results they give; the rest follows: result types are inferred again, a new node stands
under the module of the node that the pattern begins with, results keep their names, and the node
remembers the rule. Attributes are read from the matched nodes, never written into the rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.fx import Node

from rewright.ir.derived import DerivedWeight
from rewright.ir.errors import CompilerBug
from rewright.ir.graph import Graph, kind_of, name_of, producer_of
from rewright.ir.names import join
from rewright.ir.op import Op
from rewright.passes.facts import Facts
from rewright.passes.match import Match, Matcher, Miss, Result, anchors
from rewright.passes.pattern import OpPattern


@dataclass(frozen=True)
class Ok:
    """The match may be rewritten."""


@dataclass(frozen=True)
class No:
    """The match must stay as it is.

    Attributes:
        reason: why, one sentence without a trailing full stop.
        node: the node that it is about.
    """

    reason: str
    node: Node


Verdict = Ok | No


@dataclass
class Log:
    """What a transform did to a graph.

    Attributes:
        matches: places rewritten.
        misses: places that nearly fitted, with the reason.
        derived: weights that the compiler has to compute, by name.
        watch: called with every match before it is rewritten; what it returns is called with the
            nodes that took its place.
    """

    matches: int = 0
    misses: list[Miss] = field(default_factory=list)
    derived: dict[str, DerivedWeight] = field(default_factory=dict)
    watch: Callable[[Transform, Match], Callable[[list[Node]], None] | None] | None = None


class Transform(ABC):
    """Something that changes a graph in place.

    Attributes:
        name: its name, recorded on the nodes that it makes.
        keeps_numerics: whether every value that survives stays the same number.
    """

    name: str
    keeps_numerics: bool = True

    @abstractmethod
    def apply(self, graph: Graph, facts: Facts, log: Log) -> bool:
        """Change the graph wherever possible; whether anything was changed."""


class Rule(Transform):
    """One rewrite of the places that a pattern describes.

    Attributes:
        yields: labels whose results may have readers outside the match, beside the roots: the
            rewrite gives them too.
        keeps: labels of nodes that the pattern looks at and the rewrite leaves alone.
        home: label of the node under whose module new nodes stand; the first root's by default.
    """

    home: ClassVar[str | None] = None
    yields: ClassVar[Collection[str]] = ()
    keeps: ClassVar[Collection[str]] = ()

    def find(self, graph: Graph) -> Iterator[Match | Miss]:
        """Matches and near misses, looked for anew after each rewrite."""
        pattern = self.pattern()
        roots = (pattern,) if isinstance(pattern, OpPattern) else pattern
        matcher = Matcher(graph, roots, self.yields, self.keeps)
        for node in anchors(graph, roots[0].op):
            if kind_of(node) == "op":  # and not erased by a rewrite in between
                yield matcher.at(node)

    def apply(self, graph: Graph, facts: Facts, log: Log) -> bool:
        changed = False
        for found in self.find(graph):
            if isinstance(found, Miss):
                log.misses.append(found)
                continue
            verdict = self.check(found, facts)
            if isinstance(verdict, No):
                anchor = name_of(next(iter(found.nodes.values())))
                about = anchor if kind_of(verdict.node) == "output" else name_of(producer_of(verdict.node))
                log.misses.append(Miss(anchor, verdict.reason, about, len(found.nodes)))
                continue
            done = log.watch(self, found) if log.watch else None
            new = Rewriter(graph, found, self.name, log, self.home)
            self.rewrite(found, new)
            new.finish()
            if done is not None:
                done(new.made)
            log.matches += 1
            changed = True
        return changed

    def pattern(self) -> OpPattern | tuple[OpPattern, ...]:
        """What to look for. The first op pattern is tried at every node of its kind.

        Every rule states it that does not look for its places itself (`find`).
        """
        raise CompilerBug(f"rule {self.name} states no pattern")

    def check(self, m: Match, facts: Facts) -> Verdict:
        """Whether a match may be rewritten."""
        return Ok()

    @abstractmethod
    def rewrite(self, m: Match, new: Rewriter) -> None:
        """Make the nodes that replace the match."""


@dataclass
class Rewriter:
    """Makes the replacement of one match.

    `new(op, operands, attrs, gives=[...])` makes a node; `gives` holds, for each of its results, the
    old result that it replaces, or None for a value that is new. `forward` lets a value that exists
    stand for an old result. When the rule is done the matched nodes are erased.
    """

    graph: Graph
    match: Match
    rule: str
    log: Log
    home: str | None = None
    made: list[Node] = field(default_factory=list)
    _at: Node = field(init=False)
    _module: str = field(init=False)
    _given: dict[Result, tuple[Node, int] | Node] = field(default_factory=dict)
    _names: dict[Node, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._at = self.match.replaced[-1]
        home = self.home or next(iter(self.match.nodes))
        self._module = self.match.nodes[home].meta["module"]

    def __call__(
        self,
        op: Op,
        operands: Mapping[str, Node | None],
        attrs: Mapping[str, Any],
        *,
        gives: Sequence[Result | None],
        names: Sequence[str | None] = (),
    ) -> list[Node]:
        """Make a node.

        Args:
            op: the op it calls.
            operands: values by operand name; what is not named is absent.
            attrs: attributes.
            gives: old result that each result replaces.
            names: names of new values, at their places; by default the first old result's name and
                the role.

        Returns:
            The values of its results.
        """
        if unknown := operands.keys() - set(op.operands):
            raise CompilerBug(f"rule {self.rule}: {op.name} has no operand {sorted(unknown)}")
        flat = [operands.get(name) for name in op.operands]
        where = next((g.name for g in gives if g is not None), self.rule)
        node = self.graph.insert(self._at, op, flat, attrs, module=self._module, rule=self.rule, where=where)
        count = len(node.meta["types"])
        if len(gives) != count:
            raise CompilerBug(f"rule {self.rule}: {op.name} has {count} results, {len(gives)} are given")
        for index, old in enumerate(gives):
            if old is not None:
                self._take(old, (node, index))
        given = list(names) or [None] * count
        roles = op.roles(dict(attrs))
        self._names[node] = [
            old.name if old is not None else given[i] or join(where, roles[i]) for i, old in enumerate(gives)
        ]
        self.made.append(node)
        return [self.graph.result(node, i) if count > 1 else node for i in range(count)]

    def weight(self, derived: DerivedWeight) -> Node:
        """A weight that the compiler computes; the name stands for it everywhere."""
        self.log.derived[derived.name] = derived
        if derived.name in self.graph:
            leaf = self.graph.value(derived.name)
            if self._at < leaf:
                self._at.prepend(leaf)
            return leaf
        return self.graph.insert_leaf(self._at, "weight", derived.name, derived.type, self._module)

    def forward(self, old: Result, value: Node) -> None:
        """Let an existing value stand for an old result."""
        self._take(old, value)

    def _take(self, old: Result, by: tuple[Node, int] | Node) -> None:
        if old in self._given:
            raise CompilerBug(f"rule {self.rule} replaces {old.name} twice")
        self._given[old] = by

    def finish(self) -> None:
        """Put the new nodes in the place of the matched ones."""
        old_nodes = self.match.replaced[::-1]
        for old, by in self._given.items():
            self._redirect(old, self.graph.result(*by) if isinstance(by, tuple) else by)
        for node in old_nodes:
            self.graph.erase(node)
        for node, names in self._names.items():
            for item in [u for u in node.users if kind_of(u) == "item" and not u.users]:
                self.graph.fx.erase_node(item)
            self.graph.name_results(node, names)
        if self.made:
            self._settle()

    def _redirect(self, old: Result, new: Node) -> None:
        if len(old.node.meta["names"]) == 1:
            self.graph.redirect(old.node, new)
            return
        for user in list(old.node.users):
            if kind_of(user) == "item" and user.args[1] == old.index:
                self.graph.redirect(user, new)

    def _settle(self) -> None:
        """Sort what the replacement reads, itself, and readers that stood before it."""
        values = [u for node in self.made for u in node.users if kind_of(u) == "item"] + self.made
        around = values + [r for v in values for r in v.users]
        for node in self.made:
            leaves = [v for v in node.all_input_nodes if kind_of(v) in ("weight", "constant")]
            around += [leaf for leaf in leaves if min(leaf.users) is node]
        self.graph.settle(min(around), max(values))
