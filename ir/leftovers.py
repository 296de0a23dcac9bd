"""Why an op is gone that no rewrite swallowed: another value is read instead, or nobody read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch.fx import Node

from rewright.ir.diff import Change, GraphDiff
from rewright.ir.graph import kind_of, name_of, operands_of
from rewright.ir.graph_index import GraphIndex, key_of, readers_of

Why = Literal["replaced", "unread"]


class Leftovers:
    """Explanations of the removed op nodes in a diff's `rest`.

    Attributes:
        instead: of a value that is gone, the value that its readers read now.
    """

    def __init__(self, diff: GraphDiff):
        self.instead: dict[str, str] = {}
        self._unread: set[Node] = set()
        self._heads: dict[Node, Node] = {}
        gone = [c.before for c in diff.rest if c.after is None and c.before is not None]
        if not gone:
            return
        self._old, self._new = GraphIndex(diff.before), GraphIndex(diff.after)
        for node in sorted(gone, reverse=True):  # readers first
            users = list(_users(node))
            heads = {self._heads.get(user) for user in users}
            if all(user in self._unread for user in users):
                self._unread.add(node)
            elif replaced := dict(self._replacements(node)):
                self.instead |= replaced
                self._heads[node] = node
            elif len(heads) == 1 and (head := heads.pop()) is not None:
                self._heads[node] = head

    def why(self, change: Change) -> Why | None:
        """replaced: its readers read another value. unread: no result and no state depended on it.
        None where nothing is known beyond the change."""
        if change.after is not None or change.before is None:
            return None
        if change.before in self._unread:
            return "unread"
        return "replaced" if change.before in self._heads else None

    def head(self, change: Change) -> Node:
        """Of a replaced op, the op whose readers read another value: itself, or the one that it only fed."""
        assert change.before is not None
        return self._heads[change.before]

    def _replacements(self, node: Node) -> Iterator[tuple[str, str]]:
        for name in node.meta["names"]:
            equal = [n for n in self._old.equals[name] if n in self._new.makers]
            found = set(equal[:1]) or set(self._read_now(node, name))
            if len(found) == 1 and name not in self._new.makers:
                yield name, found.pop()

    def _read_now(self, node: Node, name: str) -> Iterator[str]:
        """What readers that are in both graphs read now in the place of a value."""
        for value, reader in readers_of(node):
            still = self._new.nodes.get(key_of(reader))
            if name_of(value) != name or still is None:
                continue
            for once, now in zip(operands_of(reader), operands_of(still), strict=True):
                if once is value and now is not None:
                    yield name_of(now)


def _users(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield from user.users if kind_of(user) == "item" else [user]
