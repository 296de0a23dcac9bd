"""Which requests are sensitive to rounding: what `generate --precision auto` asks. docs/variants.md.

Rules are data (`sensitivity_rules.toml`, or a file of the user's); this only counts. How long that takes does
not depend on what a prompt says: a part of bounded size is looked at, in pieces of bounded length, and
`pattern_cost.py` bounds what a pattern can try at one place.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewright.ir.errors import BadInput
from rewright.runtime.pattern_cost import MOST_CHOICES, choices

RULES = Path(__file__).with_name("sensitivity_rules.toml")
"""The rules that apply if no others are given."""

FORMAT = 1
LOOKED_AT = 16_384
"""Characters of a prompt that patterns see: half of them its first, half its last."""
PIECE = 256
"""Characters of a line that patterns see at once; a longer line counts as several."""

_CONTROL = re.compile(r"<｜[^<>｜\n]{1,64}｜>|</?think>")
_FIX = "see docs/variants.md for the format of rules"
_KEYS = {"name", "description", "lines", "share", "patterns", "tokens"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of sensitive request. It counts tokens, or lines that have a pattern.

    Attributes:
        name: what a decision calls it.
        description: for people.
        tokens: of a prompt, from which on it applies; None where it counts lines.
        lines: with one of the patterns, from which on it applies.
        share: least share of such lines in those that are not blank.
        patterns: looked for in each line.
    """

    name: str
    description: str
    tokens: int | None = None
    lines: int = 1
    share: float = 0.0
    patterns: tuple[re.Pattern[str], ...] = ()

    def reason(self, lines: Sequence[str], tokens: int) -> str | None:
        """Why it applies to a prompt; None if it does not."""
        if self.tokens is not None:
            return f"{self.name}: {tokens:,} tokens" if tokens >= self.tokens else None
        found = sum(any(p.search(line) for p in self.patterns) for line in lines)
        if found < self.lines or found < self.share * len(lines):
            return None
        return f"{self.name}: {found} of {len(lines)} line{'s' if len(lines) > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided of a request.

    Attributes:
        precision: `high` for a sensitive one, else `low`.
        reasons: of each rule that applies.
    """

    precision: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.precision} ({'; '.join(self.reasons) or 'no rule applies'})"


@dataclass(frozen=True, slots=True)
class RequestDetector:
    """Rules in their order."""

    rules: tuple[Rule, ...]

    @classmethod
    def open(cls, path: Path = RULES) -> RequestDetector:
        """Read a file of rules; `BadInput` says what is wrong with it, and where."""
        try:
            value = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise BadInput(f"cannot be read ({e.strerror})", where=str(path), fix="check the path") from e
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as e:
            raise BadInput(f"not valid TOML ({e})", where=str(path), fix=_FIX) from e
        if value.get("format") != FORMAT:
            raise BadInput(
                f"format {value.get('format')!r}, this Rewright reads {FORMAT}", where=str(path), fix=_FIX
            )
        given = value.get("rule")
        if unknown := value.keys() - {"format", "rule"}:
            raise BadInput(f"unknown keys: {', '.join(sorted(unknown))}", where=str(path), fix=_FIX)
        if not isinstance(given, list) or not given or not all(isinstance(r, dict) for r in given):
            raise BadInput("has no [[rule]]", where=str(path), fix=_FIX)
        rules = tuple(_rule(r, f"{path}, rule {number}") for number, r in enumerate(given, start=1))
        names = [rule.name for rule in rules]
        if again := [name for name in names if names.count(name) > 1]:
            raise BadInput(f"two rules are called {again[0]!r}", where=str(path), fix="rename one")
        return cls(rules)

    def decide(self, text: str, tokens: int) -> Decision:
        """Decide about a request.

        Args:
            text: the prompt, with or without control tokens.
            tokens: its tokens.
        """
        lines = list(_lines(text))
        reasons = tuple(reason for rule in self.rules if (reason := rule.reason(lines, tokens)))
        return Decision("high" if reasons else "low", reasons)


def _lines(text: str) -> Iterator[str]:
    """The lines that patterns see; a control token ends a line."""
    if len(text) > LOOKED_AT:
        text = f"{text[: LOOKED_AT // 2]}\n{text[-LOOKED_AT // 2 :]}"
    for line in _CONTROL.sub("\n", text).splitlines():
        line = line.strip()
        for begin in range(0, len(line), PIECE):
            yield line[begin : begin + PIECE]


def _rule(value: Mapping[str, Any], where: str) -> Rule:
    name = value.get("name")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise BadInput("has no name", where=where, fix=_FIX)
    where = f"{where} ({name})"
    description = value.get("description", "")
    if not isinstance(description, str):
        raise BadInput("description is not a string", where=where, fix=_FIX)
    if unknown := value.keys() - _KEYS:
        raise BadInput(f"unknown keys: {', '.join(sorted(unknown))}", where=where, fix=_FIX)
    if ("tokens" in value) == ("patterns" in value):
        raise BadInput("counts either tokens or lines with patterns", where=where, fix=_FIX)
    if "tokens" in value:
        if extra := sorted({"lines", "share"} & value.keys()):
            raise BadInput(f"{' and '.join(extra)} do not go with tokens", where=where, fix=_FIX)
        return Rule(name, description, _count(value, "tokens", where))
    share = value.get("share", 0.0)
    if type(share) not in (int, float) or not 0 <= share <= 1:
        raise BadInput(f"share cannot be {share!r}, it is from 0 to 1", where=where, fix=_FIX)
    lines = _count(value, "lines", where) if "lines" in value else 1
    return Rule(name, description, None, lines, float(share), _patterns(value["patterns"], where))


def _count(value: Mapping[str, Any], key: str, where: str) -> int:
    count = value[key]
    if type(count) is not int or count < 1:
        raise BadInput(f"{key} cannot be {count!r}, it is an integer from 1 on", where=where, fix=_FIX)
    return count


def _patterns(given: object, where: str) -> tuple[re.Pattern[str], ...]:
    if not isinstance(given, list) or not given or not all(isinstance(p, str) for p in given):
        raise BadInput("patterns is not a list of strings", where=where, fix=_FIX)
    found = []
    for pattern in given:
        try:
            compiled = re.compile(pattern)
            count = choices(pattern, PIECE)
        except (re.error, ValueError, OverflowError, RecursionError) as e:
            raise BadInput(f"pattern {pattern!r} cannot be used: {e}", where=where, fix=_FIX) from e
        if count > MOST_CHOICES:
            raise BadInput(
                f"pattern {pattern!r} may try {count:,} ways at one place, {MOST_CHOICES:,} are allowed",
                where=where,
                fix="bound its repeats ({0,40} in place of *), or split it into several patterns",
            )
        if compiled.search("") is not None:
            raise BadInput(
                f"pattern {pattern!r} is found in every line", where=where, fix="let it need a sign"
            )
        found.append(compiled)
    return tuple(found)
