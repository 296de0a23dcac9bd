"""Colours of a graph diff on a terminal; on a pipe or in a file text stays text."""

from __future__ import annotations

import os
import re
import sys

_REMOVED, _ADDED, _CHANGED, _HEADING, _RESET = "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[0m"
_STYLE = {"-": _REMOVED, "+": _ADDED, "~": _CHANGED}


def wanted() -> bool:
    """Whether stdout is a terminal and nobody asked for none (https://no-color.org), or they are forced."""
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str) -> str:
    """The text of a diff with the colours of its signs, where they are wanted."""
    return paint(text) if wanted() else text


def paint(text: str) -> str:
    """Colour every line by its sign; headings are bold, and the rows of a table by their last number."""
    return "".join(_line(line) for line in text.splitlines(keepends=True))


def _line(line: str) -> str:
    body, end = (line[:-1], "\n") if line.endswith("\n") else (line, "")
    sign = body.lstrip()[:2]
    if len(sign) == 2 and sign[1] == " " and sign[0] in _STYLE:
        return f"{_STYLE[sign[0]]}{body}{_RESET}{end}"
    if body and not body.startswith(" ") and re.match(r"[\w.]+( \(alike in [^)]*\))?:", body):
        return f"{_HEADING}{body}{_RESET}{end}"
    if delta := re.search(r"  (?P<sign>[+-])[\d,]+$", body):
        at = delta.start("sign")
        return f"{body[:at]}{_ADDED if delta['sign'] == '-' else _REMOVED}{body[at:]}{_RESET}{end}"
    return line
