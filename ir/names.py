"""Stable names: a value is called after the module path that makes it and its role there.

Names never come from a counter, so they survive rewrites and mean the same in two compilations.
Graph text prints a name relative to the heading (the module path) it stands under; an absolute one
has a leading dot.
"""

from __future__ import annotations


def join(path: str, role: str) -> str:
    """`path.role`; either part may be empty."""
    return f"{path}.{role}" if path and role else path or role


def relative(name: str, heading: str) -> str:
    """How `name` is printed under `heading`."""
    if not heading:
        return name
    if name.startswith(heading + "."):
        return name[len(heading) + 1 :]
    return "." + name


def absolute(text: str, heading: str) -> str:
    """The name that `relative` printed as `text` under `heading`."""
    return text[1:] if text.startswith(".") else join(heading, text)


def within(name: str, module: str) -> bool:
    """Whether a name or module path lies in the subtree of `module` ("" holds everything)."""
    return not module or name == module or name.startswith(module + ".")
