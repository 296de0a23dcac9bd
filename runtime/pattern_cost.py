"""How many ways a regular expression can try to match at one place: what keeps its time bounded.

Python's `re` goes back and tries again. Some patterns, like `(a+)+b`, try a number of ways that grows
exponentially with the text. Here that number is bounded from above by reading the pattern, and a pattern for
which there is no good bound is refused.
"""

from __future__ import annotations

import re

MOST_CHOICES = 4096
"""Ways that a pattern of rules may try at one place."""

_GROUP = re.compile(r"\?(?::|[aims]{1,4}:|[aims]{1,4}\)|P<\w{1,40}>|=|!|<=|<!)")
_BOUNDS = re.compile(r"\{(\d{0,6})(?:(,)(\d{0,6}))?\}")


def choices(pattern: str, length: int) -> int:
    """A bound of the ways that a pattern can try at one place of a text of so many characters.

    It is the product over the parts of a pattern: `*`, `+` and `{m,}` count as `length` or less, `{m,n}` as
    n - m + 1, `?` as 2, alternatives as the sum of theirs.

    Raises:
        ValueError: a repeated group, or a construct for which there is no bound.
    """
    return _Reader(pattern, length).read()


class _Reader:
    def __init__(self, pattern: str, length: int):
        self._pattern, self._length, self._at = pattern, length, 0

    def read(self) -> int:
        total = self._alternatives()
        if self._at < len(self._pattern):
            raise ValueError("a bracket is closed that was not opened")
        return total

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _alternatives(self) -> int:
        """Up to the end of a group, or of the pattern."""
        total, product = 0, 1
        while (c := self._peek()) and c != ")":
            if c == "|":
                self._at += 1
                total, product = total + product, 1
            else:
                product *= self._part()
        return total + product

    def _part(self) -> int:
        """One character, class or group, with its repeat."""
        c, ways, group = self._peek(), 1, False
        self._at += 1
        if c == "\\":
            if self._peek().isdigit() and self._peek() != "0":
                raise ValueError("it refers back to a group")
            self._at += 1
        elif c == "[":
            self._skip_class()
        elif c == "(":
            group = True
            ways = self._group()
        return ways * self._repeat(group)

    def _group(self) -> int:
        if self._peek() == "?":
            match = _GROUP.match(self._pattern, self._at)
            if match is None:
                raise ValueError(f"no bound is known for ({self._pattern[self._at : self._at + 3]}")
            self._at = match.end()
            if match[0].endswith(")"):
                return 1
        ways = self._alternatives()
        self._at += 1
        return ways

    def _skip_class(self) -> None:
        self._at += self._peek() == "^"
        self._at += self._peek() == "]"
        while (c := self._peek()) and c != "]":
            self._at += 2 if c == "\\" else 1
        self._at += 1

    def _repeat(self, group: bool) -> int:
        c, bounds = self._peek(), _BOUNDS.match(self._pattern, self._at)
        if c in ("*", "+"):
            self._at += 1
            count = self._length
        elif c == "?":
            self._at += 1
            count, group = 2, False
        elif bounds is not None and bounds[0] != "{}":
            self._at = bounds.end()
            least = int(bounds[1] or 0)
            most = least if bounds[2] is None else int(bounds[3] or self._length)
            count = max(1, min(most, self._length) - least + 1)
        else:
            return 1
        if group:
            raise ValueError("it repeats a group")
        self._at += self._peek() in ("?", "+")
        return count
