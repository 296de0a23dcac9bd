"""What the parts of a graph diff do to the bytes of one step. All parts together are the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from rewright.ir.diff import Change, GraphDiff
from rewright.ir.moved import NOTHING, Meter, Moved
from rewright.ir.rewrites import Rewrite


@dataclass(frozen=True)
class Balance:
    """Op nodes of two graphs and what they move.

    Attributes:
        nodes_before, nodes_after: how many nodes.
        before, after: what they move in one step.
    """

    nodes_before: int = 0
    nodes_after: int = 0
    before: Moved = NOTHING
    after: Moved = NOTHING

    def __add__(self, other: Balance) -> Balance:
        return Balance(
            self.nodes_before + other.nodes_before,
            self.nodes_after + other.nodes_after,
            self.before + other.before,
            self.after + other.after,
        )

    @property
    def saved(self) -> Moved:
        """What the second graph moves less; negative where it moves more."""
        return self.before - self.after


class Ledger:
    """Balances of a diff.

    Args:
        diff: the diff.
        context: tokens of the sequence after the step; by default each variant's capacity.
    """

    def __init__(self, diff: GraphDiff, context: int | None = None):
        self.diff = diff
        self.before, self.after = Meter(diff.before, context), Meter(diff.after, context)

    def of(self, *parts: Rewrite | Change) -> Balance:
        """Some rewrites and changes together."""
        removed: list[Node] = []
        added: list[Node] = []
        for part in parts:
            if isinstance(part, Rewrite):
                removed += part.removed
                added += part.added
            else:
                removed += [part.before] if part.before is not None else []
                added += [part.after] if part.after is not None else []
        return self._balance(removed, added)

    def total(self) -> Balance:
        """All op nodes that the diff is about."""
        return self._balance(self.diff.ops(self.diff.before), self.diff.ops(self.diff.after))

    def unchanged(self) -> Balance:
        """The nodes that both graphs have alike. They may move other bytes where the type of an operand
        or the context differs."""
        changed = {n for part in (*self.diff.rewrites, *self.diff.rest) for n in part.nodes}
        before, after = (
            [n for n in self.diff.ops(graph) if n not in changed]
            for graph in (self.diff.before, self.diff.after)
        )
        return self._balance(before, after)

    def modules(self) -> dict[str, Balance]:
        """Rewrites and other changes by the module they stand under, in the order of the first."""
        parts: dict[str, list[Rewrite | Change]] = {}
        for part in (*self.diff.rewrites, *self.diff.rest):
            parts.setdefault(part.module, []).append(part)
        return {module: self.of(*some) for module, some in parts.items()}

    def _balance(self, before: Iterable[Node], after: Iterable[Node]) -> Balance:
        old, new = list(before), list(after)
        return Balance(len(old), len(new), self.before.total(old), self.after.total(new))
