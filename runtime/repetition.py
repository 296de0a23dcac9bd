"""Finds where a sequence of tokens has fallen into a loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rewright.ir.errors import UsageError


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """What counts as a loop: the last tokens are one unit over and over.

    Attributes:
        longest_unit: tokens of the longest unit that is looked for.
        repeats: how often the unit must stand there, at least 2.
        least_tokens: how many tokens the loop must have in all, so that a ruled line, an indentation or four
            equal digits are none.
    """

    longest_unit: int = 64
    repeats: int = 4
    least_tokens: int = 32

    def __post_init__(self) -> None:
        if self.longest_unit < 1 or self.repeats < 2:
            raise UsageError(
                f"a unit of up to {self.longest_unit} tokens, {self.repeats} times, is no repetition",
                where="repetition",
                fix="a unit has at least 1 token and stands there at least twice",
            )


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop at the moment at which it was long enough to be called one.

    Attributes:
        begin: place of its first token, counted from 0.
        end: place behind its last token so far.
        unit: tokens after which it repeats.
    """

    begin: int
    end: int
    unit: int


DEFAULT_RULE = RepetitionRule()


class LoopWatch:
    """Is shown tokens one by one, and says when they have become a loop.

    For every length of unit it keeps how many of the last tokens equal the one that stands a unit before
    them, so a token costs one comparison for each length, whatever the length of the sequence.
    """

    def __init__(self, rule: RepetitionRule = DEFAULT_RULE):
        self._rule = rule
        self._last: list[int] = []  # at most `longest_unit` tokens, the newest first
        self._equal = [0] * rule.longest_unit  # by length of unit, less one
        self._count = 0

    def push(self, token: int) -> Loop | None:
        """The loop that ends with this token, that of the shortest unit if several do."""
        rule, equal = self._rule, self._equal
        self._count += 1
        found = None
        for at, other in enumerate(self._last):
            if other != token:
                equal[at] = 0
                continue
            equal[at] += 1
            unit = at + 1
            length = equal[at] + unit
            if found is None and length >= max(unit * rule.repeats, rule.least_tokens):
                found = Loop(self._count - length, self._count, unit)
        self._last.insert(0, token)
        del self._last[rule.longest_unit :]
        return found


def find_loop(tokens: Iterable[int], rule: RepetitionRule = DEFAULT_RULE) -> Loop | None:
    """The first loop in a sequence of tokens: the one that is long enough first."""
    watch = LoopWatch(rule)
    for token in tokens:
        if (loop := watch.push(token)) is not None:
            return loop
    return None


def find_own_loop(
    predicted: Sequence[int], text: Sequence[int], rule: RepetitionRule = DEFAULT_RULE
) -> Loop | None:
    """The first loop in what a model predicted for `text` (equally many tokens) that is not the text's own:
    a model that predicts a refrain because it is there repeats nothing."""
    start = 0
    while (loop := find_loop(predicted[start:], rule)) is not None:
        begin, end = start + loop.begin, start + loop.end
        if list(predicted[begin:end]) != list(text[begin:end]):
            return Loop(begin, end, loop.unit)
        start = end
    return None
