"""A pass: a named, ordered list of transforms with a contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rewright.ir.graph import Graph
from rewright.passes.rule import Transform


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline.

    Attributes:
        name: verb and noun; the file of the pass is called the same.
        stage: stage of the graph when it runs.
        summary: one sentence for lists and help.
        rules: transforms in order; together they run until none finds anything.
        requires: passes that must have run for its matches to be expected; without them it still
            keeps the graph right and may find less.
        ensures: what holds for the graph afterwards, as one line for each place where it does not.
        refuses: when it leaves a place alone, for `rewright passes show`.
        idempotent: whether a second run changes nothing.
    """

    name: str
    stage: str
    summary: str
    rules: tuple[Transform, ...]
    requires: tuple[str, ...] = ()
    ensures: Callable[[Graph], Iterable[str]] | None = None
    refuses: str = ""
    idempotent: bool = True
