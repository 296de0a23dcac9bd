"""Patterns over the graph: what a rule looks for.

    norm = p.rms_norm("norm", x="x", weight="weight")
    quant = p.quantize("quant", x=norm)

A pattern names an op, a label for the matched node, and a pattern for every operand that must be
there: a string binds any value to that name (the same name twice means the same value),
`maybe("x")` also takes an absent operand, another op pattern takes a result of such an op,
`either(..)` takes the first that fits. An operand that is not mentioned must be absent. Attributes
are not matched: a rule reads them from the matched node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Var:
    """Any value, bound to a name."""

    name: str
    optional: bool = False


@dataclass(frozen=True)
class OpPattern:
    """A call of the op called `op`."""

    op: str
    label: str
    operands: tuple[tuple[str, Pattern], ...]

    def __getitem__(self, index: int) -> ResultOf:
        """The op's result `index`; the pattern itself stands for result 0."""
        return ResultOf(self, index)


@dataclass(frozen=True)
class ResultOf:
    """One result of an op."""

    of: OpPattern
    index: int


@dataclass(frozen=True)
class Either:
    """The first of several patterns that fits."""

    choices: tuple[Pattern, ...]


Pattern = Var | OpPattern | ResultOf | Either


def maybe(name: str) -> Var:
    """An operand that may be absent."""
    return Var(name, optional=True)


def either(*choices: str | Pattern) -> Either:
    """Alternatives, tried in order."""
    return Either(tuple(_pattern(c) for c in choices))


def _pattern(given: str | Pattern) -> Pattern:
    return Var(given) if isinstance(given, str) else given


def labels(pattern: Pattern) -> Iterator[str]:
    """Labels of every op in a pattern."""
    if isinstance(pattern, Either):
        for choice in pattern.choices:
            yield from labels(choice)
    elif isinstance(pattern, ResultOf):
        yield from labels(pattern.of)
    elif isinstance(pattern, OpPattern):
        yield pattern.label
        for _, operand in pattern.operands:
            yield from labels(operand)


class _Ops:
    """`p.OP(label, operand=pattern, ..)` makes an `OpPattern`."""

    def __getattr__(self, op: str) -> Any:
        def make(label: str, **operands: str | Pattern) -> OpPattern:
            return OpPattern(op, label, tuple((n, _pattern(o)) for n, o in operands.items()))

        return make


p = _Ops()
