"""A text as what differs from another one: an ed script of lines, as `diff -e` writes it.

`patch -e -o NEW OLD SCRIPT` makes the text as well. Commands are `Na` (lines behind line N), `N,Mc` (lines
in place of N to M) and `N,Md` (N to M are gone), the last lines first, so that numbers are those of the old
text; lines end with `.` on a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

SUFFIX = ".ed"
"""Behind the name of a file that is such a script."""

_COMMAND = re.compile(r"(\d{1,9})(?:,(\d{1,9}))?([acd])")
_END = "."


def edit_script(old: str, new: str) -> str:
    """The script that makes `new` of `old`.

    Raises:
        ValueError: a text without a line feed at its end, or with a line of one dot.
    """
    before, after = _lines(old), _lines(new)
    if _END in after:
        raise ValueError("a line of one dot cannot be written into an ed script")
    found = []
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for tag, begin, end, first, last in reversed(matcher.get_opcodes()):
        place = str(begin + 1) if end == begin + 1 else f"{begin + 1},{end}"
        if tag == "delete":
            found.append(f"{place}d")
        elif tag != "equal":
            command = f"{begin}a" if tag == "insert" else f"{place}c"
            found += [command, *after[first:last], _END]
    return "".join(f"{line}\n" for line in found)


def apply_edits(old: str, script: str) -> str:
    """The text that a script makes of `old`.

    Raises:
        ValueError: no script, or not one of this text.
    """
    lines, rest = _lines(old), iter(_lines(script))
    limit = len(lines)
    for command in rest:
        match = _COMMAND.fullmatch(command)
        if match is None:
            raise ValueError(f"{command!r} is no command")
        first, kind = int(match[1]), match[3]
        last = int(match[2] or first)
        begin = first if kind == "a" else first - 1
        if not 0 <= begin <= last <= limit or (kind == "a") != (begin == last):
            raise ValueError(f"{command!r} is not within the text, or not above the command before it")
        lines[begin:last] = [] if kind == "d" else _given(rest, command)
        limit = begin
    return "".join(f"{line}\n" for line in lines)


def _given(lines: Iterator[str], command: str) -> list[str]:
    found = []
    for line in lines:
        if line == _END:
            return found
        found.append(line)
    raise ValueError(f"the lines of {command!r} do not end")


def _lines(text: str) -> list[str]:
    """Lines end at line feeds only, as ed has it."""
    *lines, rest = text.split("\n")
    if rest:
        raise ValueError("the text does not end with a line feed")
    return lines
