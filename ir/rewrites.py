"""Which nodes of one graph a rewrite made of which nodes of another, found from the two graphs alone.

A rewritten node gives values under the names that they had before. So the nodes it swallowed are
found by walking back in the first graph from those names, through values that the second graph does
not have any more. The first node in the order of execution claims what it reaches; a walk ends at
what is claimed already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from rewright.ir.graph import Graph, kind_of, name_of, operands_of, producer_of
from rewright.ir.graph_index import GraphIndex, key_of, readers_of

How = Literal["applied", "undone", "differs"]


@dataclass(frozen=True)
class Rewrite:
    """Op nodes of two graphs that stand for each other.

    Attributes:
        rule: the rule that made the new nodes, or, where it was undone, the old one.
        how: applied: the second graph has nodes of the rule where the first had none.
            undone: the first has the rule's node, the second what it is made of.
            differs: both have a node of the rule, with other results or attributes.
        removed: nodes of the first graph, in its order. A node that stays in another form is in both.
        added: nodes of the second graph, in its order.
        main: the node that the rule made.
    """

    rule: str
    how: How
    removed: tuple[Node, ...]
    added: tuple[Node, ...]
    main: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of both graphs."""
        return self.removed + self.added

    @property
    def module(self) -> str:
        """Where the node stands that the rule made; what it swallowed may have stood elsewhere."""
        return self.main.meta["module"]


def find_rewrites(before: Graph, after: Graph) -> tuple[Rewrite, ...]:
    """The rewrites that lead from one graph to the other, in the order of the second graph."""
    return _Finder(before, after).run()


@dataclass(eq=False)
class _Group:
    rule: str
    main: Node
    removed: list[Node]
    added: list[Node]
    undone: bool = False

    @property
    def how(self) -> How:
        if self.undone:
            return "undone"
        return "differs" if any(n.meta["rule"] == self.rule for n in self.removed) else "applied"

    @property
    def swallowed(self) -> list[Node]:
        """What stands on the other side than the node that the rule made."""
        return self.added if self.undone else self.removed

    @property
    def is_plain(self) -> bool:
        """Whether it is one node of one rule before and after: a change like any other."""
        if len(self.removed) != 1 or len(self.added) != 1:
            return False
        old, new = self.removed[0], self.added[0]
        return key_of(old) == key_of(new) and old.meta["rule"] == new.meta["rule"]


class _Finder:
    def __init__(self, before: Graph, after: Graph):
        self.before, self.after = before, after
        self.old, self.new = GraphIndex(before), GraphIndex(after)
        self.groups: dict[Node, _Group] = {}  # of the nodes of either graph

    def run(self) -> tuple[Rewrite, ...]:
        for node in self.after.ops:
            if node.meta["rule"] and not _same_rewrite(self.old.nodes.get(key_of(node)), node):
                swallowed = self._swallowed(node, self.new, self.old)
                self._claim(_Group(node.meta["rule"], node, swallowed, [node]))
        for group in self._distinct():
            self._join_neighbour(group, self.old)
        for node in self.before.ops:
            if node.meta["rule"] and not _same_rewrite(self.new.nodes.get(key_of(node)), node):
                self._undo(node)
        for group in self._distinct():
            if group.undone:
                self._join_neighbour(group, self.new)
        place = {n: i for i, n in enumerate(self.after.ops)}
        groups = [g for g in self._distinct() if not g.is_plain]
        groups.sort(key=lambda g: min((place[n] for n in g.added), default=len(place)))
        return tuple(
            Rewrite(g.rule, g.how, tuple(sorted(g.removed)), tuple(sorted(g.added)), g.main) for g in groups
        )

    def _distinct(self) -> list[_Group]:
        return list(dict.fromkeys(self.groups.values()))

    def _claim(self, group: _Group) -> None:
        self.groups |= dict.fromkeys((*group.removed, *group.added), group)

    def _undo(self, node: Node) -> None:
        """Let a node of the first graph claim nodes of the second that it is made of."""
        swallowed = self._swallowed(node, self.old, self.new)
        if node in self.groups:
            self.groups[node].added += swallowed
            self.groups |= dict.fromkeys(swallowed, self.groups[node])
        else:
            self._claim(_Group(node.meta["rule"], node, [node], swallowed, undone=True))

    def _swallowed(self, node: Node, mine: GraphIndex, other: GraphIndex) -> list[Node]:
        """Nodes of the other graph that compute what `node` of mine gives, and that mine has no more."""
        names = set(node.meta["names"])
        for value, reader in readers_of(node):
            names |= {once for now, once in self._renamed(reader, mine, other) if now is value}
        border = {other.makers[once] for _, once in self._renamed(node, mine, other)}
        return self._behind(node, names, border, mine, other)

    def _behind(
        self,
        node: Node,
        names: Collection[str],
        border: Collection[Node],
        mine: GraphIndex,
        other: GraphIndex,
    ) -> list[Node]:
        """Nodes of the other graph behind these values, up to what mine has too and without `border`."""
        found: set[Node] = set()
        waiting = [other.makers[name] for name in names if name in other.makers]
        while waiting:
            reached = waiting.pop()
            stays = key_of(reached) in mine.nodes and key_of(reached) != key_of(node)
            if stays or reached in found or reached in border or reached in self.groups:
                continue
            found.add(reached)
            for value in operands_of(reached):
                name = _made(value)
                # A value that was merged into an equal one is none that this node computes.
                if name is not None and (name in names or not mine.has_equal(other.equals[name])):
                    waiting.append(other.makers[name])
        return sorted(found)

    def _renamed(self, node: Node, mine: GraphIndex, other: GraphIndex) -> Iterator[tuple[Node, str]]:
        """Operands of `node` that the other graph knows by another name, and that name.

        A rule that moves an op (a reshape to the front of a product) or leaves one out (a
        quantisation) lets the reader read another value. Where neither graph knows the other's
        value, the two stand for each other.
        """
        twin = other.nodes.get(key_of(node))
        if twin is None:
            behind = self._behind(node, node.meta["names"], (), mine, other)
            alike = [n for n in behind if n.target is node.target]
            if len(alike) != 1:
                return
            twin = alike[0]
        for now, once in zip(operands_of(node), operands_of(twin), strict=True):
            new, old = _made(now), _made(once)
            if new is None or old is None or other.has_equal(mine.equals[new]):
                continue
            if not mine.has_equal(other.equals[old]):
                assert now is not None
                yield now, old

    def _join_neighbour(self, group: _Group, other: GraphIndex) -> None:
        """Give a node that swallowed nothing to one of the same rule beside it.

        A rule may make several nodes at a place: some are new, some only read what the others give.
        And where one graph has one node of the rule, the other may have two.
        """
        if any(key_of(n) != key_of(group.main) or n.meta["rule"] == group.rule for n in group.swallowed):
            return
        former = [other.makers[name] for name in group.main.meta["names"] if name in other.makers]
        readers = [reader for _, reader in readers_of(group.main)]
        operands = [producer_of(v) for v in operands_of(group.main) if v is not None]
        for neighbour in (*former, *readers, *operands):
            joined = self.groups.get(neighbour)
            if joined is not None and joined is not group and joined.rule == group.rule:
                joined.removed += group.removed
                joined.added += group.added
                self.groups |= dict.fromkeys((*group.removed, *group.added), joined)
                return


def _made(value: Node | None) -> str | None:
    """Name of a value that an op makes, None for leaves and absent operands."""
    return None if value is None or kind_of(producer_of(value)) != "op" else name_of(value)


def _same_rewrite(old: Node | None, new: Node) -> bool:
    """Whether a node is in the other graph too, as far as its rule decides: operands may have other names."""
    if old is None:
        return False
    alike = all(old.meta[key] == new.meta[key] for key in ("rule", "names"))
    return alike and dict(old.kwargs) == dict(new.kwargs)
